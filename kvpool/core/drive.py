"""
How many operations a device has in flight, and which may start next.

Theory. Reads and writes share one depth. Reads go first: while any load waits or runs, writes get
at most a few places; otherwise the whole depth. Reads leave one place for a waiting write, so that
stores are delayed by loads but never stopped (with a depth of one, writes use the pauses of reads).
Preloads' reads leave to waiting
writes all the places that writes have beside loads. Opens are metadata operations and bounded apart (`loads.py`).

Every operation has a number and, while it is with the kernel, a deadline. The end of an operation
that nobody started is a bug of the shell.
"""

from dataclasses import dataclass, field
from typing import TypeVar

from kvpool.core.deadlines import Deadlines
from kvpool.errors import invariant

OpT = TypeVar("OpT", bound="Operation")


@dataclass(slots=True, eq=False, kw_only=True)
class Operation:
    """
    Something the shell was asked to do and has not ended.

    Attributes:
        op: Its number; 0 before it starts and after it ended.
        due_ns: Its deadline while it is with the kernel; 0 otherwise, and once it is late.
    """

    op: int = 0
    due_ns: int = 0


@dataclass(slots=True, eq=False)
class Drive:
    """
    Operations of one device.

    Attributes:
        reads, writes: In flight now.
        loads: Objects that loads wait for, in any stage.
        writes_queued: Writes that could start but for the depth.
    """

    iodepth: int
    writes_beside_loads: int
    op_deadline_ns: int
    reads: int = 0
    writes: int = 0
    loads: int = 0
    writes_queued: int = 0
    ops: dict[int, Operation] = field(default_factory=dict)
    deadlines: Deadlines[Operation] = field(init=False)
    _op_last: int = 0

    def __post_init__(self) -> None:
        self.deadlines = Deadlines(self.op_deadline_ns, lambda operation, due_ns: operation.due_ns == due_ns)

    def may_read(self) -> bool:
        """Return whether a read may start now."""
        spare = 1 if self.iodepth > 1 and self.writes == 0 and self.writes_queued else 0
        return self.reads + self.writes + spare < self.iodepth

    def may_preload(self) -> bool:
        """Return whether a read of a preload may start now."""
        spare = max(0, min(self.writes_queued, self.writes_beside_loads - self.writes, self.iodepth - 1))
        return self.loads == 0 and self.reads + self.writes + spare < self.iodepth

    def may_write(self) -> bool:
        """Return whether a write may start now."""
        limit = self.writes_beside_loads if self.loads else self.iodepth
        return self.writes < limit and self.reads + self.writes < self.iodepth

    def begin(self, operation: Operation, now_ns: int) -> int:
        """Number *operation*, start its clock and return the number."""
        self._op_last += 1
        operation.op = self._op_last
        self.ops[operation.op] = operation
        self.resume(operation, now_ns)
        return operation.op

    def resume(self, operation: Operation, now_ns: int) -> None:
        """The operation is with the kernel (again): start its clock."""
        operation.due_ns = self.deadlines.start(operation, now_ns)

    def pause(self, operation: Operation) -> None:
        """The operation waits for us, not for the kernel."""
        operation.due_ns = 0

    def find(self, op: int, kind: type[OpT]) -> OpT:
        """Return the operation of that number."""
        operation = self.ops.get(op)
        if not isinstance(operation, kind):
            invariant(False, "the end of an operation that was not started", op=op, kind=kind.__name__)
        return operation  # type: ignore[return-value]  # invariant(False) does not return

    def end(self, operation: Operation) -> None:
        """The operation is over."""
        del self.ops[operation.op]
        operation.op = operation.due_ns = 0

    def late(self, now_ns: int) -> list[Operation]:
        """Return the operations that are past their deadline since the last call; they stay in flight."""
        late = self.deadlines.expired(now_ns)
        for operation in late:
            operation.due_ns = 0
        return late

    def validate(self) -> None:
        """Check the bounds."""
        invariant(self.reads >= 0, "reads in flight below zero", reads=self.reads)
        invariant(self.writes >= 0, "writes in flight below zero", writes=self.writes)
        invariant(self.reads + self.writes <= self.iodepth, "more in flight than iodepth", reads=self.reads)
