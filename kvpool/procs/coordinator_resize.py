"""
Changes of the staging's size while the pool runs: asked for by an admin, who is told how it goes on.

Theory. `Staging` makes and takes segments; this only speaks. An admin that asked is told the state at the end of each
turn in which it moved, until it is done; who asks later changes the goal for all. What cannot be is refused with the
limit and the numbers, and changes nothing.
"""

from kvpool.config import STAGING_BYTES_MIN
from kvpool.errors import HostError, PeerGone, PoolUnavailable
from kvpool.procs.coordinator_loop import Loop
from kvpool.procs.coordinator_peer import Peer
from kvpool.procs.coordinator_segments import Staging
from kvpool.wire.messages import Refused, ResizeState


class Resizes:
    """See the module."""

    def __init__(self, loop: Loop, staging: Staging, *, device_count: int) -> None:
        self._staging = staging
        self._needed_bytes = STAGING_BYTES_MIN * device_count
        #: Who waits, and what it was told last.
        self._waiting: dict[Peer, ResizeState | None] = {}
        loop.at_turn_end(self._tell)

    def asked(self, admin: Peer, staging_bytes: int, *, draining: bool) -> None:
        """An admin wants another size."""
        try:
            if draining:
                raise PoolUnavailable("the pool is ending")
            if staging_bytes < self._needed_bytes:
                raise HostError(
                    "staging is too small for the devices", staging_bytes=staging_bytes, needed_bytes=self._needed_bytes
                )
            self._staging.resize(staging_bytes)
        except (HostError, PoolUnavailable) as error:
            admin.send(Refused(code=error.code, message=error.message, context=error.context))
            admin.hang_up(PeerGone("refused"))
            return
        self._waiting[admin] = None

    def _tell(self) -> None:
        if not self._waiting:
            return
        state = self._staging.resize_state()
        for admin, told in list(self._waiting.items()):
            if admin.gone or state.done:
                del self._waiting[admin]
            if state != told and not admin.gone and (state.done or admin.queued == 0):
                admin.send(state)
                if not state.done:
                    self._waiting[admin] = state
