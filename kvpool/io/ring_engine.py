"""
The storage engine over rings: opens, reads and publications as chains of requests.

Theory. A chain is a generator. It yields one request, `(method, *arguments)`, and is sent what came of it; the token
under which a ring, the checksum threads or the clock return the result finds the chain again. So each chain reads
from top to bottom like blocking code, while hundreds of them are under way.

    open      open
    read      read the whole slot, continue short ones · close · trailer and checksum
    publish   checksum · padding and trailer into the slot · mkdir · create · write · [fsync] · link · [fsync of the
              folder] · close

Requests on names, and reads and writes of the first batch of segments, are made on the first ring; each further batch
of segments has a ring of its own, since buffers cannot be added to a ring's. Registered pages stay the process's even
when the segment is gone: so some time after one was dropped, the buffers of its ring are registered anew, with a page
of no use at its number, and the others keep theirs. All rings hold the write end of one
pipe. All is watched by one epoll descriptor, so that a caller's set of descriptors never changes.

Does not cover: which objects to read or write, and how many at a time (`kvpool.core.objects`).
"""

import errno
import heapq
import logging
import mmap
import os
import select
import stat
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

from kvpool.core import layout, trailer
from kvpool.core.object_events import SlotRef
from kvpool.core.trailer import ALIGNMENT_BYTES, TRAILER_BYTES, Expected
from kvpool.errors import Code, IntegrityError, invariant
from kvpool.io import errnos, syscall_ring
from kvpool.io.checksum import INLINE_BYTES_MAX, ChecksumPool, payload_checksum
from kvpool.io.engine import Ended, Kind, SegmentMemory
from kvpool.io.errnos import Meaning
from kvpool.io.faults import Faults
from kvpool.io.files import WRITER, DeviceFiles, Naming
from kvpool.io.ring_interface import Ring
from kvpool.io.thread_ring import ThreadRing

log = logging.getLogger("kvpool.engine")

RING_ENTRIES = 512
#: Times one request is repeated after EINTR or EAGAIN, and a publication after its folder vanished.
RETRIES_MAX = 8
#: Threads beside iodepth that a ring of threads needs, for opens and links.
NAME_THREADS = 8

#: So long after the last segment was dropped, rings that lost some register anew.
RENEW_NS = 500_000_000
#: When that cannot be done at once, it is tried again after this time.
RENEW_AGAIN_NS = 10_000_000

_IGNORED = 0  # token of requests whose result nobody looks at
_FULL_MEANS = {Meaning.FULL: Code.DEVICE_FULL}

Request = tuple[Any, ...]
Chain = Generator[Request, int, None]
Step = Generator[Request, int, int]


class _Segment:
    """A segment and, per slot, what the ring takes for it; made once, since the binding never frees one."""

    __slots__ = ("buffer", "ring", "slot_bytes", "vectors", "view")

    def __init__(self, ring: Ring, buffer: int, view: memoryview, slot_bytes: int) -> None:
        self.ring = ring
        self.buffer = buffer
        self.view = view
        self.slot_bytes = slot_bytes
        self.vectors: dict[tuple[int, int, int], Any] = {}

    def vector(self, index: int, start: int, stop: int) -> Any:
        """Return the vector of bytes *start* to *stop* of slot *index*."""
        found = self.vectors.get((index, start, stop))
        if found is None:
            base = index * self.slot_bytes
            invariant(base + stop <= len(self.view), "slot lies in its segment", index=index)
            found = self.vectors[index, start, stop] = self.ring.vector(self.view[base + start : base + stop])
        return found

    def slot(self, index: int) -> memoryview:
        return self.view[index * self.slot_bytes : (index + 1) * self.slot_bytes]


class _Depth:
    """How many reads or writes are in flight, and their mean over the time that any was."""

    __slots__ = ("area_ns", "busy_ns", "changed_ns", "now")

    def __init__(self) -> None:
        self.now = 0
        self.changed_ns = 0
        self.area_ns = 0
        self.busy_ns = 0

    def change(self, by: int, now_ns: int) -> None:
        if self.now:
            self.area_ns += self.now * (now_ns - self.changed_ns)
            self.busy_ns += now_ns - self.changed_ns
        self.now += by
        self.changed_ns = now_ns

    def mean(self) -> float:
        return self.area_ns / self.busy_ns if self.busy_ns else 0.0


class _Failed(Exception):  # noqa: N818 - ends a chain; not an error of the program
    def __init__(self, operation: str, number: int) -> None:
        self.meaning = errnos.meaning(operation, number)
        self.detail = errnos.text(operation, number)


class RingEngine:
    """
    The storage engine of one device (the interface is `kvpool.io.engine.Engine`).

    Attributes:
        mode: How bytes travel, for health: ring or threads, registered or plain buffers, direct or buffered.
    """

    def __init__(
        self,
        files: DeviceFiles,
        make_ring: Callable[[int], Ring],
        *,
        sync_on_store: bool = False,
        verify: bool = True,
        checksum_threads: int = 2,
        faults: Faults | None = None,
    ) -> None:
        """
        Make the first ring and the checksum threads, in the thread that will use the engine.

        Args:
            files: The device's directory, and what its filesystem can do.
            make_ring: Makes a ring that holds the given descriptor for as long as its requests may land.
            sync_on_store: fsync the file before its link and the folder after it.
            verify: Check payloads against their checksum when they are read; trailers always are.
        """
        self._files = files
        self._features = files.features
        self._sync = sync_on_store
        self._verify = verify
        self._faults = faults
        self._make_ring = make_ring
        self._pipe_read, self._pipe_write = os.pipe2(os.O_CLOEXEC)
        self._epoll = select.epoll()
        self._names = make_ring(self._pipe_write)
        self._rings: list[Ring] = []
        self._add_ring(self._names)
        self._kick_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # readable: something ended inside submit
        self._kicked = False
        self._epoll.register(self._kick_fd, select.EPOLLIN)
        self._checksums = ChecksumPool(threads=checksum_threads)
        self._epoll.register(self._checksums.fd, select.EPOLLIN)
        self._names_taken = False  # the first ring has its segments
        self._page = mmap.mmap(-1, ALIGNMENT_BYTES)  # for trials of the device; registered beside the first segments
        self._page_buffer, self._page_vector = 0, self._names.vector(memoryview(self._page))
        self._segments: dict[int, _Segment] = {}
        self._views: dict[Ring, list[memoryview]] = {}  # what each ring has registered, by buffer number
        self._stale: set[Ring] = set()  # rings that have dropped segments' pages registered
        self._renew_ns = 0
        self._chains: dict[int, Chain] = {}
        self._token = _IGNORED
        self._due: list[tuple[int, int]] = []  # heap of (time, token): requests that wait on purpose
        self._opened: dict[int, int] = {}  # op -> descriptor
        self._ended: list[Ended] = []
        self._temporary_number = 0
        self._direct_flag = os.O_DIRECT if self._features.direct else 0
        self._reads, self._writes, self._both = _Depth(), _Depth(), _Depth()
        self._counts = dict.fromkeys(
            ("opens", "reads", "writes", "read_bytes", "written_bytes", "missing", "corrupt", "errors"), 0
        )
        self._is_closed = False
        self.mode = self._describe_mode()

    # ------------------------------------------------------------ set-up

    def fds(self) -> list[int]:
        """Return the one descriptor that polls readable when there is something to reap."""
        return [self._epoll.fileno()]

    def take_ring_pipe(self) -> int:
        """Return the read end of the ring pipe, once; the caller closes it."""
        fd, self._pipe_read = self._pipe_read, -1
        invariant(fd >= 0, "the ring pipe is taken once")
        return fd

    def add_segments(self, batch: Sequence[SegmentMemory]) -> None:
        """Use these segments; they are registered together, where kernel and locked-memory limit allow."""
        if not batch:
            return
        ring = self._names
        first = not self._names_taken
        if self._names_taken and ring.kind != ThreadRing.kind:
            ring = self._make_ring(self._pipe_write)
            self._add_ring(ring)
        self._names_taken = True
        views = [memoryview(item.memory) for item in batch]
        self._views[ring] = [*views, memoryview(self._page)] if first else list(views)
        ring.register(self._views[ring])
        if first:
            self._page_buffer = len(views)
        for buffer, (item, view) in enumerate(zip(batch, views, strict=True)):
            invariant(item.segment not in self._segments, "segment is new", segment=item.segment)
            self._segments[item.segment] = _Segment(ring, buffer, view, item.slot_bytes)
        self.mode = self._describe_mode()

    def drop_segment(self, segment: int) -> None:
        """Forget a segment that no operation uses; the last one of a ring ends that ring."""
        gone = self._segments.pop(segment)
        ring = gone.ring
        if ring is self._names or any(other.ring is ring for other in self._segments.values()):
            self._views[ring][gone.buffer] = memoryview(self._page)
            if ring.registered:
                self._stale.add(ring)
                self._renew_ns = time.monotonic_ns() + RENEW_NS
            return
        self._rings.remove(ring)
        self._stale.discard(ring)
        del self._views[ring]
        self._epoll.unregister(ring.fd)
        ring.close()

    def _renew(self, now_ns: int) -> None:
        """Give the pages of dropped segments back, where rings still have them registered."""
        for ring in list(self._stale):
            ring.submit()
            if ring.unregister():
                ring.register(self._views[ring])
                self._stale.discard(ring)
        self._renew_ns = now_ns + RENEW_AGAIN_NS
        self.mode = self._describe_mode()

    def _add_ring(self, ring: Ring) -> None:
        self._rings.append(ring)
        self._epoll.register(ring.fd, select.EPOLLIN)

    def _describe_mode(self) -> str:
        words = [self._names.kind]
        if self._names.kind != ThreadRing.kind and self._segments:
            registered = all(segment.ring.registered for segment in self._segments.values())
            words.append("registered buffers" if registered else "plain buffers")
        words.append("direct" if self._features.direct else "buffered")
        return ", ".join(words)

    # ------------------------------------------------------------ operations

    def open_file(self, op: int, path: str) -> None:
        """Open *path* for reading. Ends OPENED; the file then waits for read_file or close_file."""
        self._start(self._open_chain(op, path))

    def read_file(self, op: int, slot: SlotRef, expect: Expected) -> None:
        """Read the whole file opened under *op* into *slot*, close it, verify. Ends READ."""
        self._start(self._read_chain(op, self._take_opened(op), slot, expect))

    def close_file(self, op: int) -> None:
        """Close the file opened under *op*. Has no end."""
        self._names.close_file(_IGNORED, self._take_opened(op))

    def publish_object(self, op: int, directory: str, name: str, slot: SlotRef, expect: Expected) -> None:
        """Seal *slot* (padding, trailer), write it as *directory*/*name*. Ends PUBLISHED."""
        self._start(self._publish_chain(op, directory, name, slot, expect))

    def set_aside(self, path: str) -> None:
        """Move a file that does not hold what was published out of the way, now."""
        self._files.set_aside(path)

    def probe(self, token: int, paths: Sequence[str]) -> None:
        """Look which of *paths* exist. Ends PROBED."""
        found: list[int] = []
        left = len(paths)
        started_ns = time.monotonic_ns()

        def look(index: int, path: str) -> Chain:
            nonlocal left
            if (yield self._names.stat, path) == 0:
                found.append(index)
            left -= 1
            if not left:
                self._end(Ended(token, Kind.PROBED, ns=_since(started_ns), found=tuple(sorted(found))))

        if not paths:
            self._end(Ended(token, Kind.PROBED))
        for index, path in enumerate(paths):
            self._start(look(index, path))

    def try_device(self, token: int) -> None:
        """Write a page to the device and read it back. Ends TRIED; a device without space did well."""
        self._start(self._trial_chain(token))

    def submit(self) -> None:
        """Give what was started to the kernel."""
        self._flush()
        if self._ended and not self._kicked:
            self._kicked = True
            os.eventfd_write(self._kick_fd, 1)

    def reap(self) -> list[Ended]:
        """Return what has ended, and start what follows from it."""
        if self._kicked:
            self._kicked = False
            os.eventfd_read(self._kick_fd)
        for ring in self._rings:
            self._advance_all(ring.reap())
        self._advance_all(self._checksums.reap())
        if self._due:
            now_ns = time.monotonic_ns()
            while self._due and self._due[0][0] <= now_ns:
                self._advance(heapq.heappop(self._due)[1], 0)
        self._flush()
        if self._stale and (now_ns := time.monotonic_ns()) >= self._renew_ns:
            self._renew(now_ns)
        ended, self._ended = self._ended, []
        return ended

    def _flush(self) -> None:
        """
        Submit, and go on with what has ended at once, until the kernel keeps all it was given.

        What ends on one ring may make a request on another (a write, then a link): so until a whole round is quiet.
        """
        quiet = False
        while not quiet:
            quiet = True
            for ring in self._rings:
                ring.submit()
                if ring.ready():
                    quiet = False
                    self._advance_all(ring.reap())

    def _advance_all(self, results: list[tuple[int, int]]) -> None:
        for token, result in results:
            if token != _IGNORED:
                self._advance(token, result)

    def next_due_ns(self) -> int | None:
        """Return when reap has to be called at the latest (monotonic clock); 0 is now, None no such time."""
        if self._ended:
            return 0
        due = [self._due[0][0]] if self._due else []
        return min([*due, self._renew_ns] if self._stale else due, default=None)

    def in_flight(self) -> int:
        """Return the number of operations that have not ended."""
        return len(self._chains) + len(self._ended)

    def statistics(self) -> dict[str, int | float | str]:
        """Return counts, bytes and achieved depth since the start."""
        return {
            **self._counts,
            "mode": self.mode,
            "files_open": len(self._opened),
            "reads_in_flight": self._reads.now,
            "writes_in_flight": self._writes.now,
            "read_depth_mean": round(self._reads.mean(), 2),
            "write_depth_mean": round(self._writes.mean(), 2),
            "depth_mean": round(self._both.mean(), 2),
        }

    def close(self) -> None:
        """End it all; what has not ended never will."""
        if self._is_closed:
            return
        self._is_closed = True
        for fd in self._opened.values():
            os.close(fd)
        self._opened.clear()
        for chain in self._chains.values():
            chain.close()  # asks for the closing of what it has open
        self._chains.clear()
        for ring in self._rings:
            ring.submit()
        self._epoll.close()
        os.close(self._kick_fd)
        for ring in self._rings:
            ring.close()
        self._checksums.close()
        os.close(self._pipe_write)
        if self._pipe_read >= 0:
            os.close(self._pipe_read)
        self._files.close()

    # ------------------------------------------------------------ chains

    def _start(self, chain: Chain) -> None:
        self._token += 1
        token = self._token
        try:
            request = next(chain)
        except StopIteration:
            return
        self._chains[token] = chain
        request[0](token, *request[1:])

    def _advance(self, token: int, result: int) -> None:
        chain = self._chains[token]
        try:
            request = chain.send(result)
        except StopIteration:
            del self._chains[token]
            return
        request[0](token, *request[1:])

    def _wait_until(self, token: int, due_ns: int) -> None:
        heapq.heappush(self._due, (due_ns, token))

    def _end(self, ended: Ended) -> None:
        self._ended.append(ended)

    def _take_opened(self, op: int) -> int:
        fd = self._opened.pop(op, -1)
        invariant(fd >= 0, "a file is open under that op", op=op)
        return fd

    def _tried(self, operation: str, *request: Any) -> Step:
        """Make *request*, again while it says so; return its result. Raises _Failed."""
        for _ in range(RETRIES_MAX):
            result = yield request
            if result >= 0:
                return result
            if errnos.meaning(operation, -result) is not Meaning.RETRY:
                break
        raise _Failed(operation, -result)

    def _open_chain(self, op: int, path: str) -> Chain:
        started_ns = time.monotonic_ns()
        try:
            if self._faults and (number := self._faults.open_errno()):
                raise _Failed("open", number)
            fd = yield from self._tried("open", self._names.open, path, os.O_RDONLY | self._direct_flag, 0)
        except _Failed as failed:
            missing = failed.meaning is Meaning.MISSING
            self._counts["missing" if missing else "errors"] += 1
            code = Code.MISSING if missing else Code.READ_ERROR
            self._end(Ended(op, Kind.OPENED, code, failed.detail, ns=_since(started_ns), device_trouble=not missing))
            return
        self._counts["opens"] += 1
        self._opened[op] = fd
        self._end(Ended(op, Kind.OPENED, ns=_since(started_ns)))

    def _read_chain(self, op: int, fd: int, slot: SlotRef, expect: Expected) -> Chain:
        segment = self._segments[slot.segment]
        invariant(
            trailer.slot_bytes(expect.payload_bytes) == segment.slot_bytes,
            "object fills its slot",
            payload_bytes=expect.payload_bytes,
            slot_bytes=segment.slot_bytes,
        )
        started_ns = time.monotonic_ns()
        self._reads.change(1, started_ns)
        self._both.change(1, started_ns)
        done, code, detail = 0, None, ""
        try:
            done = yield from self._read_whole(segment, fd, slot.index)
        except _Failed as failed:
            code, detail = Code.READ_ERROR, failed.detail
        ended_ns = time.monotonic_ns()
        self._reads.change(-1, ended_ns)
        self._both.change(-1, ended_ns)
        if code is None:
            self._counts["reads"] += 1
            self._counts["read_bytes"] += done
            try:
                yield from self._verify_slot(segment.slot(slot.index), done, expect)
            except IntegrityError as error:
                code, detail = Code.CORRUPT, str(error)
        if code is not None:
            self._counts["corrupt" if code is Code.CORRUPT else "errors"] += 1
        self._end(
            Ended(op, Kind.READ, code, detail, done, ended_ns - started_ns, device_trouble=code is Code.READ_ERROR)
        )

    def _read_whole(self, segment: _Segment, fd: int, index: int) -> Step:
        """Read until the slot is full or the file ends, close; return the bytes read. Raises _Failed."""
        ring, total = segment.ring, segment.slot_bytes
        done = 0
        try:
            while done < total:
                stop = total
                if self._faults:
                    stop = done + (yield from self._delayed_read(self._faults, total - done))
                vector = segment.vector(index, done, stop)
                got = yield from self._tried("read", ring.read, fd, vector, segment.buffer, done)
                done += got
                if not got or (self._direct_flag and done % ALIGNMENT_BYTES):
                    break  # the file's end
        finally:
            ring.close_file(_IGNORED, fd)
        return done

    def _verify_slot(self, slot: memoryview, done: int, expect: Expected) -> Generator[Request, int, None]:
        """Check what was read. Raises IntegrityError."""
        if done != len(slot):
            raise IntegrityError("file is too short", file_bytes=done, expected=len(slot))
        wanted = trailer.check(bytes(slot[-TRAILER_BYTES:]), expect)
        if not self._verify:
            return
        if wanted == trailer.NO_CHECKSUM:
            raise IntegrityError("published without a checksum, by a pool with verify = false")
        payload = slot[: expect.payload_bytes]
        if len(payload) <= INLINE_BYTES_MAX:
            found = payload_checksum(payload)
        else:
            found = yield self._checksums.checksum, payload
        if found != wanted:
            raise IntegrityError("payload's checksum", expected=f"{wanted:016x}", found=f"{found:016x}")

    def _publish_chain(self, op: int, directory: str, name: str, slot: SlotRef, expect: Expected) -> Chain:
        segment = self._segments[slot.segment]
        yield from self._seal(segment.slot(slot.index), expect)
        started_ns = time.monotonic_ns()
        self._writes.change(1, started_ns)
        self._both.change(1, started_ns)
        code, detail, trouble, existed, folders = None, "", False, False, 0
        try:
            folders = yield from self._make_directory(directory)
            existed = bool((yield from self._write_named(segment, slot.index, directory, name)))
            self._counts["writes"] += 1
            self._counts["written_bytes"] += segment.slot_bytes
        except _Failed as failed:
            code = _FULL_MEANS.get(failed.meaning, Code.WRITE_ERROR)
            detail, trouble = failed.detail, code is Code.WRITE_ERROR
            self._counts["errors"] += 1
        took_ns = time.monotonic_ns() - started_ns
        self._writes.change(-1, started_ns + took_ns)
        self._both.change(-1, started_ns + took_ns)
        written = 0 if code else segment.slot_bytes
        self._end(
            Ended(
                op, Kind.PUBLISHED, code, detail, written, took_ns,
                device_trouble=trouble, existed=existed, folders=folders,
            )
        )  # fmt: skip

    def _trial_chain(self, token: int) -> Chain:
        started_ns = time.monotonic_ns()
        detail, trouble = "", False
        try:
            yield from self._write_and_read_page(token)
        except _Failed as failed:
            detail, trouble = failed.detail, failed.meaning is not Meaning.FULL
        code = Code.READ_ERROR if trouble else None
        self._end(Ended(token, Kind.TRIED, code, detail, ns=_since(started_ns), device_trouble=trouble))

    def _write_and_read_page(self, token: int) -> Generator[Request, int, None]:
        """Raises _Failed."""
        names, page, faults = self._names, self._page, self._faults
        path = f"{self._files.private}/{self._next_temporary()}"
        flags = os.O_RDWR | self._direct_flag | os.O_CREAT | os.O_EXCL
        fd = yield from self._created(names.open, path, flags)
        try:
            written = page[:] = token.to_bytes(8, "little") * (len(page) // 8)
            if faults:
                yield from self._delayed_write(faults, len(page))
            put = yield from self._tried("write", names.write, fd, self._page_vector, self._page_buffer, 0)
            if put != len(page):
                raise _Failed("write", errno.ENOSPC)
            page[:] = bytes(len(page))
            if faults:
                yield from self._delayed_read(faults, len(page))
            yield from self._tried("read", names.read, fd, self._page_vector, self._page_buffer, 0)
            if page[:] != written:
                raise _Failed("read", errno.EIO)
        finally:
            names.close_file(_IGNORED, fd)
            names.unlink(_IGNORED, path)

    def _seal(self, slot: memoryview, expect: Expected) -> Generator[Request, int, None]:
        """Write padding and trailer behind the payload in *slot*."""
        invariant(
            trailer.slot_bytes(expect.payload_bytes) == len(slot),
            "object fills its slot",
            payload_bytes=expect.payload_bytes,
            slot_bytes=len(slot),
        )
        payload = slot[: expect.payload_bytes]
        if not self._verify:
            checksum = trailer.NO_CHECKSUM
        elif len(payload) <= INLINE_BYTES_MAX:
            checksum = payload_checksum(payload)
        else:
            checksum = yield self._checksums.checksum, payload
        padding = len(slot) - TRAILER_BYTES - len(payload)
        slot[len(payload) :] = bytes(padding) + trailer.pack(expect, checksum)

    def _write_named(self, segment: _Segment, index: int, directory: str, name: str) -> Step:
        """Write the slot under its final name; return 1 if the name existed already. Raises _Failed."""
        names = self._names
        fd, temporary = -1, ""
        flags = os.O_WRONLY | self._direct_flag
        try:
            if self._features.unnamed:
                fd = yield from self._created(names.open, directory, flags | os.O_TMPFILE)
            else:
                temporary = f"{directory}/{self._next_temporary()}"
                fd = yield from self._created(names.open, temporary, flags | os.O_CREAT | os.O_EXCL)
            yield from self._write_whole(segment, fd, index)
            if self._sync:
                yield from self._tried("fsync", names.fsync, fd)
            existed = yield from self._name_file(fd, temporary, f"{directory}/{name}")
            if self._sync:
                yield from self._sync_directory(directory)
            return existed
        finally:
            if fd >= 0:
                names.close_file(_IGNORED, fd)
            if temporary:  # after a rename there is none; the result does not matter
                names.unlink(_IGNORED, temporary)

    def _created(self, *request: Any) -> Step:
        return (yield from self._tried("create", *request, stat.S_IRUSR | stat.S_IWUSR))

    def _next_temporary(self) -> str:
        self._temporary_number += 1
        return layout.temporary_name(WRITER, self._temporary_number)

    def _make_directory(self, directory: str) -> Step:
        """Make *directory* and what lacks above it, up to the device's own; return how many. Raises _Failed."""
        lacking, made = [directory], 0
        for _ in range(64):
            result = yield self._names.mkdir, lacking[-1], 0o700
            if result in (0, -errno.EEXIST):
                lacking.pop()
                made += result == 0
                if not lacking:
                    return made
            elif result == -errno.ENOENT and lacking[-1] != self._files.root:
                lacking.append(os.path.dirname(lacking[-1]))
            elif errnos.meaning("mkdir", -result) is not Meaning.RETRY:
                break
        raise _Failed("mkdir", -result)

    def _write_whole(self, segment: _Segment, fd: int, index: int) -> Generator[Request, int, None]:
        ring, total = segment.ring, segment.slot_bytes
        if self._faults:
            yield from self._delayed_write(self._faults, total)
        done = 0
        while done < total:
            vector = segment.vector(index, done, total)
            got = yield from self._tried("write", ring.write, fd, vector, segment.buffer, done)
            done += got
            if not got or (self._direct_flag and done % ALIGNMENT_BYTES):
                raise _Failed("write", errno.ENOSPC)  # a disk that is nearly full writes a part

    def _name_file(self, fd: int, temporary: str, path: str) -> Step:
        """Give the written file its final name; return 1 if the name existed, with the same bytes under it."""
        names = self._names
        if not temporary:
            request: Request = (names.link_fd, fd, path)
        elif self._features.naming is Naming.LINK:
            request = (names.link, temporary, path)
        else:
            can_refuse = self._features.naming is Naming.RENAME_NOREPLACE
            request = (names.rename_noreplace if can_refuse else names.rename, temporary, path)
        try:
            yield from self._tried("link", *request)
        except _Failed as failed:
            if failed.meaning is Meaning.EXISTS:
                return 1
            raise
        return 0

    def _sync_directory(self, directory: str) -> Generator[Request, int, None]:
        fd = yield from self._tried("open", self._names.open, directory, os.O_RDONLY | os.O_DIRECTORY, 0)
        try:
            yield from self._tried("fsync", self._names.fsync, fd)
        finally:
            self._names.close_file(_IGNORED, fd)

    # ------------------------------------------------------------ faults

    def _delayed_read(self, faults: Faults, wanted: int) -> Step:
        """Wait until this read is due; return how many bytes it may bring. Raises _Failed."""
        now_ns = time.monotonic_ns()
        due_ns = faults.due_ns("read", wanted, now_ns)
        if due_ns > now_ns:
            yield self._wait_until, due_ns
        if number := faults.read_errno():
            raise _Failed("read", number)
        return faults.read_bytes(wanted)

    def _delayed_write(self, faults: Faults, wanted: int) -> Generator[Request, int, None]:
        """Wait until this write is due. Raises _Failed."""
        now_ns = time.monotonic_ns()
        due_ns = faults.due_ns("write", wanted, now_ns)
        if due_ns > now_ns:
            yield self._wait_until, due_ns
        if number := faults.write_errno():
            raise _Failed("write", number)


def _since(started_ns: int) -> int:
    return time.monotonic_ns() - started_ns


def open_engine(
    files: DeviceFiles,
    *,
    iodepth: int = 16,
    sync_on_store: bool = False,
    verify: bool = True,
    checksum_threads: int = 2,
    io_uring: bool = True,
    faults: Faults | None = None,
) -> tuple[RingEngine, str | None]:
    """
    Return the best engine this host allows, and why it is not io_uring if it is not.

    Call it in the thread that will use the engine. *io_uring* False keeps to threads.
    """

    def make_threads(_pipe_fd: int) -> Ring:
        return ThreadRing(threads=iodepth + NAME_THREADS)

    made = maybe_uring() if io_uring else "switched off"
    engine = RingEngine(
        files,
        make_threads if isinstance(made, str) else made,
        sync_on_store=sync_on_store,
        verify=verify,
        checksum_threads=checksum_threads,
        faults=faults,
    )
    return engine, made if isinstance(made, str) else None


def maybe_uring() -> Callable[[int], Ring] | str:
    """
    Return what makes a ring of io_uring, or why there can be none.

    The binding makes it where it runs; where its wheel does not suit the CPU, the system calls do.
    """
    reason = syscall_ring.why_not()
    if reason is not None:
        return reason
    try:
        from kvpool.io import ring  # noqa: PLC0415 - the binding may be missing, or not fit this machine
    except ImportError as error:
        binding_reason: str | None = f"no liburing binding: {error}"
    else:
        binding_reason = ring.why_not()
        if binding_reason is None:
            return lambda pipe_fd: ring.UringRing(entries=RING_ENTRIES, pipe_fd=pipe_fd)
    log.info("io_uring by system calls: %s", binding_reason)
    return lambda pipe_fd: syscall_ring.SyscallRing(entries=RING_ENTRIES, pipe_fd=pipe_fd)
