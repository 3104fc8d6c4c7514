"""Stand-ins for device graphs on a CPU: a recorded function runs again at every replay and writes into the tensors of its first run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from headstart.inference.decoding import capture, rounds
from headstart.inference.decoding.tree import Tree
from tests.inference.decoding.waiting import waits


def tensors(x: Any) -> Iterator[Tensor]:
    """The tensors of a named tuple or of a tree. The tree drops what it has computed from them, as a replay changes them."""
    if isinstance(x, Tree):
        x._rows_BRR = None
    for value in x if isinstance(x, tuple) else vars(x).values():
        if isinstance(value, Tensor):
            yield value


class Replays(capture.Graphs):
    """``recorded`` counts the functions of all engines. A function that would wait for the device is refused, as on a GPU."""

    recorded = 0

    def __init__(self, device: torch.device) -> None:
        self.device, self.complete, self.kept = device, False, {}

    def rehearse(self, run: Callable[[], Any], put_back: Callable[[], None]) -> None:
        self.put_back = put_back
        try:
            run()
            put_back()
            with waits() as found:
                run()
        finally:
            put_back()
        if found:
            raise RuntimeError(f"called a synchronizing operation: {found[0]}\nand where")

    def record(self, call: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        Replays.recorded += 1
        result = call()
        self.put_back()  # a GPU computes nothing while it records

        def replay() -> None:
            for old, new in zip(tensors(result), tensors(call()), strict=True):
                old.copy_(new)

        return replay, result

    def wait(self) -> None:
        pass


@contextmanager
def replaying() -> Iterator[type[Replays]]:
    """Inside, engines with ``graphs=True`` record on the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds, "Graphs", Replays)
        patch.setattr(Replays, "recorded", 0)
        yield Replays
