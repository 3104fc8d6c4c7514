"""The target in the same process: tokens in, what it said out.

Shape suffixes: B batch, T tokens, D target hidden.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from headstart.data.batch import TargetBatch, TokenBatch
from headstart.heads.base import TargetShape

B = TypeVar("B", bound=TokenBatch)


class Reader(Protocol):
    """What is needed of a target (``inference.target.Target``), to be trained on at once or captured."""

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
    """One pass of the target over packed rows; only the states of ``taps`` are kept."""
    tokens, mask, positions, documents = (getattr(batch, f.name).to(target.device) for f in dataclasses.fields(TokenBatch))
    states, final_BTD = target.read(tokens, positions, taps)
    return TargetBatch(tokens, mask, positions, documents, states, final_BTD)


def announced(batches: Iterable[B], target: Reader) -> Iterator[B]:
    """The same batches; the target is told of each one batch before, so that passes that happen elsewhere have begun when it reads."""
    before: B | None = None
    for batch in batches:
        target.begin(batch.tokens_BT, batch.positions_BT)
        if before is not None:
            yield before
        before = batch
    if before is not None:
        yield before
