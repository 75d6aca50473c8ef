"""
A stand-in for an I/O worker: speaks its protocol, has no ring, no files and no slots.

What a rank says steers it: `Store` makes its keys stored, `Load` is answered with one Ready that
lists the segments it holds (as index: the slot size in KiB). Keys that begin with `disk` are found
by probes. Preloads are reserved unless a key begins with `full`, and land as soon as they are committed; the facts
say which admissions it has. Environment: FAKE_SCAN=never leaves scans open; FAKE_RING=held leaves the write end of
the ring pipe with a further process when it ends; FAKE_BOOT=<exit code> ends it before it is ready,
for devices whose name begins with `bad`.
"""

import argparse
import os
import select
import subprocess
import sys

import msgspec

from kvpool.errors import Exit, PeerGone, invariant
from kvpool.io import channel, process
from kvpool.io.channel import Channel
from kvpool.wire import messages as m
from kvpool.wire.codec import split


class FakeWorker:
    """One run of it; see the module."""

    def __init__(self, control: Channel) -> None:
        self.control = control
        self.ranks: dict[int, tuple[m.ClientJoined, Channel]] = {}
        self.segments: dict[int, int] = {}
        self.batch = 0
        self.facts: dict[str, str | int | float | bool] = {"role": "io_worker", "pid": os.getpid()}
        self.device = -1
        #: admission -> namespace and keys, until withdrawn.
        self.admissions: dict[int, tuple[int, list[bytes]]] = {}
        self.epoll = select.epoll()
        self.epoll.register(control.fileno())

    def run(self) -> int:
        """Serve until told to drain, or the coordinator is gone."""
        while True:
            for fd, _ in self.epoll.poll():
                if fd == self.control.fileno():
                    for message, fds in self.control.receive():
                        if isinstance(message, m.Drain):
                            return Exit.OK
                        self.from_coordinator(message, fds)
                else:
                    self.from_rank(fd)

    def count(self, name: str) -> None:
        """Count a fact."""
        self.facts[name] = int(self.facts.get(name, 0)) + 1

    def from_coordinator(self, message: m.Message, fds: list[int]) -> None:
        """Answer the coordinator."""
        match message:
            case m.WorkerSetup():
                self.begin(message)
            case m.NamespaceOpened():
                self.count("namespaces")
                if os.environ.get("FAKE_SCAN") != "never":
                    self.control.send(m.ScanEnded(namespace=message.namespace, objects=0))
            case m.ClientJoined():
                rank = Channel(channel.adopt(fds[0]), m.RankToWorker)
                self.ranks[rank.fileno()] = (message, rank)
                self.epoll.register(rank.fileno())
            case m.ClientProven():
                self.count("clients_proven")
            case m.SegmentGranted():
                invariant(os.fstat(fds[0]).st_blocks * 512 >= message.segment_bytes, "a segment has its pages")
                os.close(fds[0])
                self.segments[message.segment] = message.slot_bytes
                self.batch += 1
            case m.SegmentsGranted():
                invariant(self.batch == message.count, "a batch is counted", batch=self.batch, told=message.count)
                self.batch = 0
                self.count("batches")
            case m.SegmentRecalled():
                del self.segments[message.segment]
                self.control.send(m.SegmentReturned(segment=message.segment))
            case m.KeysProbe():
                found = [m.KeyState(key, m.STORED, self.device) for key in message.keys if key.startswith(b"disk")]
                self.control.send(m.KeysTold(namespace=message.namespace, entries=found))
                self.control.send(m.KeysProbed(probe=message.probe))
            case m.PreloadReserve() | m.PreloadCommit() | m.PreloadWithdraw():
                self.preload(message)
            case m.ReportWanted():
                told_now = {"held": len(self.segments), "admitted": sum(len(k) for _, k in self.admissions.values())}
                self.control.send(m.Report(report=message.report, facts={**self.facts, **told_now}))

    def preload(self, message: m.Message) -> None:
        """Reserve, read at once, or give back."""
        match message:
            case m.PreloadReserve(admission=admission, namespace=namespace):
                keys = [*self.admissions.pop(admission, (namespace, []))[1], *message.keys]
                reserved = not any(key.startswith(b"full") for key in keys)
                if message.more or reserved:
                    self.admissions[admission] = (namespace, keys)
                if not message.more:
                    self.control.send(m.PreloadAnswer(admission=admission, reserved=reserved))
            case m.PreloadCommit(admission=admission):
                namespace, keys = self.admissions[admission]
                for _, part in split(keys):
                    told = [m.KeyState(key, m.STORED | m.RESIDENT, self.device) for key in part]
                    self.control.send(m.KeysTold(namespace=namespace, entries=told))
                self.control.send(m.PreloadLanded(admission=admission))
            case m.PreloadWithdraw(admission=admission):
                self.admissions.pop(admission, None)

    def begin(self, setup: m.WorkerSetup) -> None:
        """Say WorkerReady, or end as the environment wants."""
        self.device = setup.device
        name = msgspec.json.decode(setup.config_json)["device"][setup.device]["name"]
        if name.startswith("bad"):
            sys.exit(int(os.environ["FAKE_BOOT"]))
        read_end, self.write_end = os.pipe()
        if os.environ.get("FAKE_RING") == "held":
            holder = subprocess.Popen(["sleep", "60"], pass_fds=[self.write_end])
            self.facts["ring_holder"] = holder.pid
        ready = m.WorkerReady(worker_generation=setup.worker_generation, io_mode="fake", pid=os.getpid())
        self.control.send(ready, [read_end])
        os.close(read_end)

    def from_rank(self, fd: int) -> None:
        """Answer a rank."""
        joined, rank = self.ranks[fd]
        try:
            received = rank.receive()
        except PeerGone:
            self.epoll.unregister(fd)
            rank.close()
            del self.ranks[fd]
            return
        for message, _ in received:
            if isinstance(message, m.Store):
                told = [m.KeyState(key, m.STORED, self.device) for key in message.keys]
                self.control.send(m.KeysTold(namespace=joined.namespace, entries=told))
                self.control.send(m.WorkerStoresEnded(engine=joined.engine, kept=message.keys, dropped=[]))
                rank.send(m.StoreAnswer(job=message.job, exist=list(range(len(message.keys)))))
            elif isinstance(message, m.Load):
                slots = [m.SlotGrant(size // 1024, number, 0) for number, size in sorted(self.segments.items())]
                rank.send(m.Ready(job=message.job, slots=slots))


def main() -> int:
    """Serve the coordinator behind --control-fd."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--control-fd", type=int, required=True)
    control_fd = parser.parse_args().control_fd
    process.set_parent_death_signal()
    try:
        return FakeWorker(Channel(channel.adopt(control_fd), m.CoordinatorToWorker)).run()
    except PeerGone:
        return Exit.COORDINATOR_GONE


if __name__ == "__main__":
    sys.exit(main())
