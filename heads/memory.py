"""The KV cache of a drafter or a target: keys and values of the rows that it has read, per layer.

``Memory`` grows and serves training, ``Slots`` is preallocated for decoding, and ``AsCache`` is what transformers expects. Layers use
them all alike. (For many sequences at once: inference/decoding/fixed.py.)

Shape suffixes: B batch, h attention heads, N rows of any kind, d head size, E nodes read next, X nodes read so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headstart.heads.visibility import MaskSees

Segment = tuple[Tensor, Tensor]  # keys and values of the rows written by one call, [B, h, N, d] each
BESIDE = -2  # less a layer's number: where it keeps what it has beside keys and values (recurrent layers as in Falcon-H1, indexers)
GRAIN = 256  # rows: a memory of unknown length grows by at least this number


class Room(NamedTuple):
    """Where a call writes the keys and values of its rows, and which slots the rows see."""

    keys: Tensor  # [B or more, h, S, d], S slots
    values: Tensor
    start: int | Tensor  # the slot of the first row; int64 [B] where sequences differ
    first: int  # the rows see the slots from first on,
    stop: int  # up to here


class Memory:
    """Keys and values per layer, in the order in which they were written: roots first, then nodes."""

    single = False  # True: it holds one sequence, in buffers whose rows start at slot 0

    def __init__(self) -> None:
        self.layers: dict[int, list[Segment]] = {}
        self.states: dict[int, list[Any]] = {}  # saved by recurrent layers (heads/recurrent.py): sequence -> the last one or two
        self.sure: int | None = None  # how many of the next pass's first rows will surely be kept; None: all. It spares them work

    def known(self, rows: int) -> list[tuple[int, int | None, int | None]]:
        """For each of the ``rows`` sequences of a pass: its number here; how many of its rows are real, the first ones (None: all); how
        many of these will surely be kept (None: all).
        """
        return [(b, None, self.sure) for b in range(rows)]

    def write(self, layer: int, k: Tensor, v: Tensor) -> list[Segment]:
        """Append rows, [B, h, N, d] each. Returns all segments of the layer, oldest first."""
        self.layers.setdefault(layer, []).append((k, v))
        return self.layers[layer]

    def room(self, layer: int, rows: int) -> Room | None:
        """Reserve ``rows`` more rows of a layer, which the caller then writes itself. None: call ``write`` instead."""
        return None

    def rooms(self, layers: int, rows: int) -> list[Room] | None:
        """``room`` in each of the first ``layers`` layers; None where there is none."""
        first = self.room(0, rows)
        if first is None:
            return None
        found = [first, *(self.room(i, rows) for i in range(1, layers))]
        assert None not in found  # all layers hold the same rows
        return found  # type: ignore[return-value]

    def rows(self, layer: int = 0) -> int:
        """Number of rows of a layer."""
        return sum(k.shape[2] for k, _ in self.layers.get(layer, []))

    def rewind(self, rows: int) -> None:
        """Forget all rows but the first ``rows``: the nodes of a finished round."""
        for layer, segments in self.layers.items():
            k, v = (torch.cat(x, dim=2)[:, :, :rows] for x in zip(*segments, strict=True))
            self.layers[layer] = [(k, v)]

    def sees_nodes(self, own_BEX: Tensor, chain: bool) -> MaskSees:
        """Decoding: the rule for E nodes that are read next. They see all roots in memory. Of the X nodes of this round, whose last E are
        these nodes themselves, they see those that ``own_BEX`` marks. ``chain``: it marks all of them.
        """
        B, E, X = own_BEX.shape  # below, max(.., 0) is for a drafter without attention, whose memory has no rows
        if chain:
            return MaskSees(among=slice(-X, None))
        return MaskSees(torch.cat([own_BEX.new_ones(B, E, max(self.rows() + E - X, 0)), own_BEX], dim=2), slice(-X, None))


class Passing(Memory):
    """A memory for a single call, which keeps nothing: each layer's rows are freed as soon as they are attended to."""

    def write(self, layer: int, k: Tensor, v: Tensor) -> list[Segment]:
        return [(k, v)]


class Slots(Memory):
    """A memory with preallocated buffers, for decoding one sequence: appending would copy the prefix at every step."""

    single = True

    def __init__(self, capacity: int = 0) -> None:
        super().__init__()
        self.capacity = capacity
        self.used: dict[int, int] = {}

    def reserve(self, rows: int) -> None:
        """Allocate buffers for at least ``rows`` rows from now on. Until they are full they do not grow, which would move them."""
        self.capacity = max(self.capacity, rows)

    def write(self, layer: int, k: Tensor, v: Tensor) -> list[Segment]:
        start = self.used.get(layer, 0)
        stop = start + k.shape[2]
        if layer not in self.layers or stop > self.layers[layer][0][0].shape[2]:
            self._grow(layer, k, v, stop)
        keys, values = self.layers[layer][0]
        keys[:, :, start:stop], values[:, :, start:stop] = k, v
        self.used[layer] = stop
        return [(keys[:, :, :stop], values[:, :, :stop])]

    def room(self, layer: int, rows: int) -> Room | None:
        """As ``Memory.room``. None where the layer holds no rows yet, or has too few free slots."""
        start = self.used.get(layer, 0)
        if not start:
            return None
        keys, values = self.layers[layer][0]
        if start + rows > keys.shape[2]:
            return None
        self.used[layer] = start + rows
        return Room(keys, values, start, 0, start + rows)

    def _grow(self, layer: int, k: Tensor, v: Tensor, rows: int) -> None:
        """Allocate larger buffers for a layer, with room for at least ``rows`` rows, and copy what it holds."""
        if rows > self.capacity:
            self.capacity = max(rows + GRAIN, 2 * self.capacity)
        buffers = [x.new_empty((*x.shape[:2], self.capacity, x.shape[3])) for x in (k, v)]
        if layer in self.layers:  # buffers are copied apart: in latent attention, keys and values differ in size
            for buffer, old in zip(buffers, self.layers[layer][0], strict=True):
                buffer[:, :, : self.used[layer]] = old[:, :, : self.used[layer]]
        self.layers[layer] = [(buffers[0], buffers[1])]

    def rows(self, layer: int = 0) -> int:
        return self.used.get(layer, 0)

    def rewind(self, rows: int) -> None:
        self.used = {layer: min(used, rows) for layer, used in self.used.items()}

    def keep(self, first: int, rows: Sequence[int]) -> None:
        """Keep the first ``first`` rows and, of the rows behind them, ``rows`` (ascending, counted from there). Forget all others."""
        if list(rows) != list(range(len(rows))):
            same = first + next(i for i, row in enumerate(rows) if i != row)
            self.states = {b: [state for state in saved if state.rows <= same] for b, saved in self.states.items()}
            index = torch.tensor([first + row for row in rows])
            for (keys, values), *_ in self.layers.values():
                for x in (keys, values):
                    x[:, :, first : first + len(rows)] = x[:, :, index.to(x.device)]  # the right side is a copy: overlap is safe
        self.rewind(first + len(rows))


class Beside(Memory):
    """A memory for one call that reads twice: first roots, which ``memory`` keeps, then rows that are forgotten with this object."""

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self.memory, self.single = memory, memory.single

    def write(self, layer: int, k: Tensor, v: Tensor) -> list[Segment]:
        """The first rows of a layer go to ``memory``. Later rows are stored nowhere, only returned behind those of memory."""
        if layer not in self.layers:
            self.layers[layer] = list(self.memory.write(layer, k, v))
            return self.layers[layer]
        return [*self.layers[layer], (k, v)]

    def rows(self, layer: int = 0) -> int:
        return super().rows(layer) if layer in self.layers else self.memory.rows(layer)

    def room(self, layer: int, rows: int) -> Room | None:
        """As ``Memory.room``, where ``memory`` holds one sequence. Later rows use slots that stay free: the next rows overwrite them."""
        found = self.memory.room(layer, rows) if self.single else None
        if found is not None and layer in self.layers:
            self.memory.rewind(found.stop - rows)  # keeps exactly the roots, in every layer
        elif found is not None:
            self.layers[layer] = [(found.keys[:, :, : found.stop], found.values[:, :, : found.stop])]
        return found


@dataclass
class AsCache:
    """A memory in the form of a transformers cache."""

    memory: Memory
    is_compileable = False

    def update(self, k: Tensor, v: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Segment:
        return joined(self.memory.write(layer_idx, k, v))

    def update_indexer(self, k_BNd: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor:
        """Append the keys by which an indexer chooses. Returns those of all rows."""
        return joined(self.memory.write(BESIDE - layer_idx, k_BNd[:, None], k_BNd[:, None, :, :0]))[0][:, 0]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.memory.rows(layer_idx)


def joined(segments: Sequence[Segment]) -> Segment:
    """All rows of a layer as one pair of keys and values, in the dtype of the first segment."""
    if len(segments) == 1:
        return segments[0]
    dtype = segments[0][0].dtype
    keys, values = (torch.cat([x.to(dtype) for x in some], dim=2) for some in zip(*segments, strict=True))
    return keys, values
