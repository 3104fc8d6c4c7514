"""The target in the same process: tokens in, what it said out. As batches at once, or captured to disk.

Shape suffixes: B batch, T tokens, D target hidden.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from rich.progress import track
from torch import Tensor

from headstart.data.batch import TargetBatch, TokenBatch
from headstart.data.lock import locked
from headstart.data.pack import Packed
from headstart.heads.base import TargetShape

if TYPE_CHECKING:
    from headstart.data.shards import Shards


class Reader(Protocol):
    """What is needed of a target (``inference.target.Target``)."""

    @property
    def shape(self) -> TargetShape: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def card(self) -> dict[str, Any]: ...
    @property
    def fingerprint(self) -> dict[str, Any]: ...
    def read(self, tokens_BT: Tensor, positions_BT: Tensor, taps: Collection[int]) -> tuple[dict[int, Tensor], Tensor]: ...


@torch.no_grad()
def look(batch: TokenBatch, target: Reader, taps: Collection[int]) -> TargetBatch:
    """One pass of the target over packed rows; only the states of ``taps`` are kept."""
    tokens, mask, positions, documents = (getattr(batch, f.name).to(target.device) for f in dataclasses.fields(TokenBatch))
    states, final_BTD = target.read(tokens, positions, taps)
    return TargetBatch(tokens, mask, positions, documents, states, final_BTD)


def capture(
    packed: Packed, target: Reader, taps: Collection[int], folder: str | Path, batch_size: int = 8, rows_per_shard: int = 64
) -> Shards:
    """Write what the target says of every row, with a progress bar; goes on where an earlier run stopped.

    On disk a token takes 2 * hidden bytes per tap and for the final state.
    Raises ``UserError`` where the folder holds something else or another process writes it, or the disk is full.
    """
    from headstart.data.shards import Shards, Writer  # a source of data, made of what is above

    rows, length = packed.tokens_RT.shape
    layers, hidden = target.shape.layers, target.shape.hidden_size
    whose = target.fingerprint
    with locked(Path(folder)):
        writer = Writer(folder, whose, taps, layers, hidden, rows, length, packed.digest(), rows_per_shard)
        shards = range(writer.done, rows, rows_per_shard)
        for start in track(shards, description="capture", total=len(shards), disable=not shards):
            end = min(start + rows_per_shard, rows)
            parts = [_on_cpu(look(packed.batch(slice(i, min(i + batch_size, end))), target, taps)) for i in range(start, end, batch_size)]
            writer.add(_joined(parts))
        return Shards(folder, whose, taps)


def _on_cpu(batch: TargetBatch) -> TargetBatch:
    """As it is stored, so that a shard of a large target does not fill the device."""
    fields = {f.name: getattr(batch, f.name).cpu() for f in dataclasses.fields(TokenBatch)}
    states = {tap: state.to(torch.bfloat16).cpu() for tap, state in batch.states.items()}
    return TargetBatch(**fields, states=states, final_BTD=batch.final_BTD.to(torch.bfloat16).cpu())


def _joined(parts: list[TargetBatch]) -> TargetBatch:
    fields = {f.name: torch.cat([getattr(part, f.name) for part in parts]) for f in dataclasses.fields(TokenBatch)}
    states = {tap: torch.cat([part.states[tap] for part in parts]) for tap in parts[0].states}
    return TargetBatch(**fields, states=states, final_BTD=torch.cat([part.final_BTD for part in parts]))
