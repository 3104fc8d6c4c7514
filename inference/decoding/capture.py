"""Device graphs: what is launched kernel by kernel is recorded once and replayed, where nothing in it waits for the device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from headstart.inference.decoding.sampling import LogitsWarper

log = logging.getLogger(__name__)

MOST_GRAPHS = 512  # the oldest goes: what clients ask for (top-k, penalties, lengths) must not fill the device
Key = tuple[Any, tuple[int, ...]]  # what a round is, and what its sampling does


class Captured(NamedTuple):
    """A round as graphs: what replays its parts, and what it returns, in tensors that every replay fills anew."""

    draft: Callable[[], Any]
    verify: Callable[[], Any]
    result: Any


class Graphs:
    """Those of one engine: one stream records them, and one pool holds the memory of all, for they run one after the other.

    ``complete``: no more are recorded, for sequences wait.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.complete, self.kept = device, False, dict[Key, Captured]()
        self.stream, self.pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()

    def find(self, kind: Any, warp: LogitsWarper) -> Captured | None:
        """The graphs of such a round; where no more are recorded, those of one whose sampling does more are as good."""
        flags = flags_of(warp)
        if (kind, flags) in self.kept or not self.complete:
            return self.kept.get((kind, flags))
        more = [f for k, f in self.kept if k == kind and all(a >= b for a, b in zip(f, flags, strict=True))]
        return self.kept[kind, min(more)] if more else None

    def keep(self, kind: Any, warp: LogitsWarper, made: Captured) -> None:
        if len(self.kept) >= MOST_GRAPHS:
            self.wait()
            self.kept.pop(next(iter(self.kept)))
        self.kept[kind, flags_of(warp)] = made

    def capture(
        self, draft: Callable[[], Any] | None, verify: Callable[[Any], Any], put_back: Callable[[], None], nothing: Any
    ) -> Captured:
        """A round, whose second part takes what the first returns (``nothing``, where there is no first). What it changes is put back.

        Raises RuntimeError where it cannot be captured.
        """
        self.rehearse(lambda: verify(nothing if draft is None else draft()), put_back)
        replay, drafted = (lambda: None, nothing) if draft is None else self.record(draft)
        return Captured(replay, *self.record(lambda: verify(drafted)))

    def rehearse(self, run: Callable[[], Any], put_back: Callable[[], None]) -> None:
        """Twice as it is: kernels are chosen, memory is found, constants are made; and then nothing may wait for the device, as experts do
        that are picked on the host. It is seen here, for a recording that fails leaves allocator and random numbers in disorder.

        Raises RuntimeError.
        """
        here = torch.cuda.current_stream(self.device)  # which need not be that of the current device
        self.stream.wait_stream(here)
        try:
            with torch.cuda.stream(self.stream):
                run()
                put_back()
                with _waiting_fails():
                    run()
        finally:
            with torch.cuda.stream(self.stream):
                put_back()
            here.wait_stream(self.stream)

    def record(self, call: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """What replays it, and what it returns: tensors that every replay fills anew."""
        graph = torch.cuda.CUDAGraph()
        # thread_local: what another thread of this process does with the device meanwhile is no fault of the recording
        how: Any = {"pool": self.pool, "stream": self.stream, "capture_error_mode": "thread_local"}
        with torch.cuda.stream(self.stream), torch.cuda.graph(graph, **how):  # the first, for a recording that fails stays on its stream
            result = call()
        return graph.replay, result

    def wait(self) -> None:
        torch.cuda.synchronize(self.device)


@contextmanager
def _waiting_fails() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def flags_of(warp: LogitsWarper) -> tuple[int, ...]:
    """What of it the operations of a round depend on. More of it changes nothing for a sequence that does not ask for it."""
    return (warp.sampled, warp.greedy, warp.top_k, warp.top_p, warp.min_p, warp.penalty)


@lru_cache
def say_eager(name: str, why: str) -> None:
    """Once for each target."""
    log.warning("%s: its rounds cannot be device graphs (%s): they are launched kernel by kernel, which is slower", name, why)
