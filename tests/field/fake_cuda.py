"""
What `kvpool_vllm.copies_cuda` calls of CUDA, without a GPU: streams and events that write down their order.

The driver's `cudaHostRegister` behaves as the real one is known to: a call that fails leaves an error behind, which
whoever looks next finds.
"""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvpool_vllm import copies_cuda
from kvpool_vllm.copies_cuda import CudaCopier


class Event:
    """A CUDA event; a real one calls CUDA when it is collected."""

    def __init__(self, cuda: "FakeCuda") -> None:
        self.cuda = cuda
        self.number = cuda.events = cuda.events + 1

    def record(self, stream: "Stream | None" = None) -> None:
        stream = stream or self.cuda.current
        self.cuda.log.append((stream.name, "record", self.number))

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def __del__(self) -> None:
        self.cuda.collected.append(self.number)


class Stream:
    """A CUDA stream; *name*: the model's is `compute`."""

    def __init__(self, cuda: "FakeCuda", name: str) -> None:
        self.cuda, self.name = cuda, name

    def wait_event(self, event: Event) -> None:
        self.cuda.log.append((self.name, "wait", event.number))

    def synchronize(self) -> None:
        pass


class FakeCuda:
    """
    Stands in for CUDA in the copier.

    Attributes:
        log: What streams were given, in order: (stream, what, number of the event or of pieces).
        registered: Pinned ranges now: address -> bytes.
        registrations: Bytes of each call that pins, in order.
        register_fails_at: The call that fails, from 0 on; None: none does.
        error: What the driver has to report to whoever asks next; 0: nothing.
        collected: Events that were collected.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[tuple[str, str, int]] = []
        self.registered: dict[int, int] = {}
        self.registrations: list[int] = []
        self.register_fails_at: int | None = None
        self.error = 0
        self.collected: list[int] = []
        self.events = self._streams = 0
        self.current = Stream(self, "compute")
        cuda = SimpleNamespace(
            current_device=lambda: 0,
            set_device=lambda device: None,
            Stream=self._stream,
            Event=lambda: Event(self),
            stream=self._on,
        )
        monkeypatch.setattr(copies_cuda, "torch", SimpleNamespace(cuda=cuda, from_numpy=torch.from_numpy))
        monkeypatch.setattr(copies_cuda, "CudaRTLibrary", lambda: self)
        monkeypatch.setattr(copies_cuda, "ops", SimpleNamespace(swap_blocks_batch=self._swap))
        monkeypatch.setattr(copies_cuda, "_KEPT", [])

    def copier(self) -> CudaCopier:
        """Return a copier over this."""
        return CudaCopier()

    def _stream(self, _device: int) -> Stream:
        self._streams += 1
        return Stream(self, ("load", "store")[self._streams - 1])

    @contextlib.contextmanager
    def _on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def _swap(self, _sources: Any, _targets: Any, sizes: Any, *, is_src_access_order_any: bool) -> None:
        what = "copy, sources read at any time" if is_src_access_order_any else "copy"
        self.log.append((self.current.name, what, len(sizes)))

    def cudaHostRegister(self, start: int, size: int, flags: int) -> int:  # noqa: N802 - CUDA's name
        self.registrations.append(size)
        if self.register_fails_at == len(self.registrations) - 1:
            self.error = 2
            return 2
        self.registered[start] = size
        return 0

    def cudaHostUnregister(self, start: int) -> int:  # noqa: N802 - CUDA's name
        del self.registered[start]
        return 0

    def cudaGetLastError(self) -> int:  # noqa: N802 - CUDA's name
        error, self.error = self.error, 0
        return error
