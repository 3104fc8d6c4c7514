"""Keys and values of many sequences in buffers of fixed shape: what a device graph can replay.

Every sequence has ``scratch`` slots for the rows of the pass under way, then ``capacity`` slots for the rows that are
kept: row t of the sequence in slot scratch + t. So a tree is always written in the same place and read as one slice with
what is kept, however long the sequences are; the accepted rows are then moved behind the others, all layers at once.

Shape suffixes: B sequences, h heads, S slots, d head size, A rows that may be kept, E nodes read next, X nodes read so far.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from heads.memory import Memory, Segment
from heads.visibility import MaskSees


class FixedMemory(Memory):
    """For a drafter as its memory, for the target as its cache (through ``heads.layers.AsCache``)."""

    def __init__(self, batch: int, capacity: int, scratch: int, device: torch.device, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.dtype = dtype
        self.batch, self.capacity, self.scratch = batch, capacity, scratch
        self.kept_B = torch.zeros(batch, dtype=torch.int64, device=device)  # rows kept
        self.sequence_B1 = torch.arange(batch, device=device)[:, None]
        self.slot_S = torch.arange(capacity, device=device)
        self.stacks: list[Tensor] = []  # [layers, B, h, S, d] each: the same storage as the layers
        self.loading: int | None = None  # the sequence that is being read for the first time
        self.written = 0  # rows that its reading wrote
        self.use(batch, capacity, 0)

    def use(self, sequences: int, bucket: int, nodes: int) -> None:
        """What the next passes see: the first so many sequences, kept rows up to ``bucket``, scratch for so many nodes."""
        self.sequences, self.bucket, self.nodes, self.node_slot = sequences, bucket, nodes, -1

    def load(self, sequence: int) -> None:
        """The next write is the whole prompt of this sequence."""
        self.loading, self.written = sequence, 0
        self.kept_B[sequence] = 0

    def allocate(self, segments: Sequence[Segment]) -> None:
        """Buffers for layers like these ([1, h, .., d] each), those of equal shape in one stack."""
        kinds: dict[tuple[object, ...], list[tuple[int, int]]] = {}
        for layer, pair in enumerate(segments):
            for i, x in enumerate(pair):
                kinds.setdefault((x.shape[1], x.shape[3], x.dtype, x.device), []).append((layer, i))
        found: dict[tuple[int, int], Tensor] = {}
        for places in kinds.values():
            x = segments[places[0][0]][places[0][1]]
            # zeros: a slot that nobody has written yet is masked, but 0 times NaN would be NaN
            shape = (len(places), self.batch, x.shape[1], self.scratch + self.capacity, x.shape[3])
            self.stacks.append(x.new_zeros(shape, dtype=self.dtype or x.dtype))
            found |= dict(zip(places, self.stacks[-1].unbind(), strict=True))
        self.layers = {layer: [(found[layer, 0], found[layer, 1])] for layer in range(len(segments))}

    def write(self, layer: int, k: Tensor, v: Tensor) -> list[Segment]:
        """Rows of the prompt that is loaded, nodes (after ``sees_nodes``), or roots behind those that are kept."""
        if layer not in self.layers:
            shapes = [(self.batch, x.shape[1], self.scratch + self.capacity, x.shape[3]) for x in (k, v)]
            dtype = self.dtype or k.dtype
            self.layers[layer] = [(k.new_zeros(shapes[0], dtype=dtype), v.new_zeros(shapes[1], dtype=dtype))]
        buffers, rows = self.layers[layer][0], k.shape[2]
        if self.loading is not None:
            self.written = rows
            for buffer, x in zip(buffers, (k, v), strict=True):
                buffer[self.loading, :, self.scratch : self.scratch + rows] = x[0]
            return [(k, v)]
        n, first = self.sequences, self.scratch
        if self.node_slot >= 0:
            first -= self.nodes
            for buffer, x in zip(buffers, (k, v), strict=True):
                buffer[:n, :, self.node_slot : self.node_slot + rows] = x
        else:
            slots_BA = self.scratch + self.kept_B[:n, None] + self.slot_S[:rows]
            for buffer, x in zip(buffers, (k, v), strict=True):
                buffer[self.sequence_B1[:n], :, slots_BA] = x.transpose(1, 2).to(buffer.dtype)
        keys, values = (buffer[:n, :, first : self.scratch + self.bucket] for buffer in buffers)
        return [(keys, values)]

    def rows(self, layer: int = 0) -> int:
        """Rows that a pass sees beside its own (for the target's tree those are in scratch)."""
        return 0 if self.loading is not None else self.bucket

    def sees_roots(self, rows: int) -> MaskSees:
        """The rule of new roots behind those that are kept: each sees all earlier ones and itself."""
        last_BA = self.kept_B[: self.sequences, None] + self.slot_S[:rows]
        return MaskSees(self.slot_S[: self.bucket] <= last_BA[..., None])

    def sees_nodes(self, own_BEX: Tensor, chain: bool = False) -> MaskSees:
        B, E, X = own_BEX.shape
        self.node_slot = self.scratch - self.nodes + X - E
        kept_BES = (self.slot_S[: self.bucket] < self.kept_B[: self.sequences, None])[:, None].expand(-1, E, -1)
        return MaskSees(torch.cat([F.pad(own_BEX, (0, self.nodes - X)), kept_BES], dim=2))

    def keep(self, rows_BA: Tensor, count_B: Tensor) -> None:
        """Move these nodes of the last pass behind the kept rows; ``count_B`` of them are to stay."""
        n = self.sequences
        from_BA = self.scratch - self.nodes + rows_BA
        to_BA = self.scratch + self.kept_B[:n, None] + self.slot_S[: rows_BA.shape[1]]
        for stack in self.stacks:
            b_B1, source, goal = (x.to(stack.device) for x in (self.sequence_B1[:n], from_BA, to_BA))
            stack[:, b_B1, :, goal] = stack[:, b_B1, :, source]  # the right side is a copy
        self.kept_B[:n] += count_B
