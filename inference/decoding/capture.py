"""Device graphs: the kernels of a round are recorded once and then replayed. Only rounds that never wait for the device can be recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from headstart.inference.decoding.info import rotations
from headstart.inference.decoding.said import Said
from headstart.inference.decoding.sampling import LogitsWarper
from headstart.inference.decoding.target import Target

MOST_GRAPHS = 512  # of one engine; then the oldest is dropped, so that the many settings and lengths of clients do not fill the device
Key = tuple[Any, tuple[int, ...]]  # the kind of a round, and the flags of its sampling (``flags_of``)


def can_capture(target: Target) -> bool:
    """Whether rounds with this target may become graphs. A graph spans one device, and nothing in it may wait for that device, as the plans
    of recurrent layers do, and rotations that depend on the longest position of a pass.
    """
    turns = any(rope.get("rope_type") in ("dynamic", "longrope") for rope in rotations(target.config))
    return target.device.type == "cuda" and not (target.spread or target.reader.mixers or turns)


class Captured(NamedTuple):
    """A round as graphs: two functions that replay its parts, and its result, in tensors that every replay overwrites."""

    draft: Callable[[], Any]
    verify: Callable[[], Any]
    result: Said


class Graphs:
    """The graphs of one engine. One stream records them. They share one memory pool, because they run one after the other.

    ``complete``: no more graphs are recorded, because sequences would have to wait for that.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.complete, self.kept = device, False, dict[Key, Captured]()
        self.stream, self.pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()

    def find(self, kind: Any, warp: LogitsWarper) -> Captured | None:
        """The graphs of a round, or None. Once ``complete``, graphs whose sampling can do more serve too: the results are the same."""
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
        self, draft: Callable[[], Any] | None, verify: Callable[[Any], Any], put_back: Callable[[], None], nothing: Callable[[], Any]
    ) -> Captured:
        """Capture a round. ``verify`` takes the tree that ``draft`` returns, or where ``draft`` is None the tree that ``nothing`` returns.
        Every run makes a new tree: a tree caches tensors, and a graph must not read what an earlier run cached, which is freed when the
        capture ends. ``put_back`` restores the state that a run changes. Raises RuntimeError where the round cannot be captured.
        """
        self.rehearse(lambda: verify(nothing() if draft is None else draft()), put_back)
        replay, drafted = (lambda: None, None) if draft is None else self.record(draft)
        return Captured(replay, *self.record(lambda: verify(nothing() if draft is None else drafted)))

    def rehearse(self, run: Callable[[], Any], put_back: Callable[[], None]) -> None:
        """Run a round twice without recording. The first run lets libraries choose kernels, allocate memory and make constants. In the
        second, any operation that waits for the device raises RuntimeError (experts that are picked on the host do so). This must be found
        before recording, because a recording that fails leaves the allocator and the random number generators in disorder.
        """
        here = torch.cuda.current_stream(self.device)  # self.device need not be the current device
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
        """Record ``call``. Returns a function that replays it, and the result, in tensors that every replay overwrites."""
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads of this process may use the device meanwhile without failing the recording
        how: Any = {"pool": self.pool, "stream": self.stream, "capture_error_mode": "thread_local"}
        # the outer context restores the current stream if a recording fails, which torch.cuda.graph does not
        with torch.cuda.stream(self.stream), torch.cuda.graph(graph, **how):
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
    """The properties of the sampling that a round's operations depend on. A larger flag changes nothing for a sequence that needs less."""
    return (warp.sampled, warp.greedy, warp.top_k, warp.top_p, warp.min_p, warp.penalty)
