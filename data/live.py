"""Passes of the target during training or capture: from batches of tokens to batches with its states.

Shape suffixes: B batch, T tokens, D target hidden.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from headstart.data.batch import TargetBatch, TokenBatch
from headstart.heads.base import TargetShape

B = TypeVar("B", bound=TokenBatch)


class Reader(Protocol):
    """The interface that a target (``inference.decoding.target.Target``) needs for live training or capture."""

    @property
    def shape(self) -> TargetShape: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def fingerprint(self) -> dict[str, Any]: ...
    def begin(self, tokens_BT: Tensor, positions_BT: Tensor) -> None: ...
    def read(self, tokens_BT: Tensor, positions_BT: Tensor, taps: Collection[int]) -> tuple[dict[int, Tensor], Tensor]: ...


@torch.no_grad()
def look(batch: TokenBatch, target: Reader, taps: Collection[int]) -> TargetBatch:
    """Run the target once over packed rows. Only the states of ``taps`` and the final state are kept, on the target's device."""
    here = TokenBatch(**batch.each(lambda x: x.to(target.device)))
    states, final_BTD = target.read(here.tokens_BT, here.positions_BT, taps)
    return TargetBatch(**vars(here), states=states, final_BTD=final_BTD)


def announced(batches: Iterable[B], target: Reader) -> Iterator[B]:
    """Yield the same batches, but announce each to the target one batch ahead (``target.begin``). So a remote pass has begun by the time
    the batch is read.
    """
    before: B | None = None
    for batch in batches:
        target.begin(batch.tokens_BT, batch.positions_BT)
        if before is not None:
            yield before
        before = batch
    if before is not None:
        yield before
