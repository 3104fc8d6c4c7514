"""Keys and values of many sequences in buffers of fixed shape, which device graphs can replay over.

Every sequence has ``scratch`` slots for the rows of the pass under way, followed by ``capacity`` slots for the kept rows: row t of
the sequence lies in slot scratch + t. A tree of a given size is therefore always written to the same slots, the last ones of scratch,
and read together with the kept rows as one slice, however long the sequences are. The accepted rows are then moved to the end of the
kept rows, in all layers at once.

Shape suffixes: B sequences, n sequences of a pass, h heads, S slots, d head size, R rows of prompts, A rows that may be kept, E nodes
read next, X nodes read so far.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from headstart.heads.memory import Memory, Room, Segment
from headstart.heads.visibility import CausalSees, LaterSees, MaskSees, Sees


class FixedMemory(Memory):
    """The key-value cache of the target, or the memory of a drafter, for ``batch`` sequences.

    ``layers``: for the target, how many layers write on each device; their buffers form one stack there, so that ``keep`` moves the rows
    of all layers at once. None, for a drafter: each layer has buffers of its own.
    """

    def __init__(
        self, batch: int, capacity: int, scratch: int, device: torch.device, layers: Mapping[torch.device, int] | None = None
    ) -> None:
        super().__init__()
        self.batch, self.capacity, self.scratch, self.alike = batch, capacity, scratch, layers or {}
        self.kept_B = torch.zeros(batch, dtype=torch.int64, device=device)  # rows kept
        self.sequence_B1 = torch.arange(batch, device=device)[:, None]
        self.slot_S = torch.arange(capacity, device=device)
        self.blank_11S = torch.zeros(1, 1, scratch, dtype=torch.bool, device=device)
        self.stacks: list[Tensor] = []  # [buffers, B, h, S, d] each: the same storage as the layers
        self.spare: dict[tuple[object, ...], list[Tensor]] = {}  # buffers of the stacks that no layer has taken yet
        self.loading: Tensor | None = None  # the sequences whose prompts are being read, [n, 1]; None in a round
        self.active_B: Tensor | None = None  # 1 where a sequence decodes; None: all do
        self.written = 0  # rows that a layer wrote in the current pass over prompts
        self.use(batch, capacity, 0)

    def use(self, sequences: int, padded_length: int, nodes: int) -> None:
        """Set what the next passes see: the first ``sequences`` sequences, ``padded_length`` kept rows, and scratch for ``nodes`` rows."""
        self.sequences, self.padded_length, self.nodes, self.node_slot = sequences, padded_length, nodes, -1

    def known(self, rows: int) -> list[tuple[int, int | None, int | None]]:
        """Of a prompt's piece all real rows are kept. In a round, the root row is kept whatever the target says of the nodes; sequences
        that do not decode have no real rows in it, and may have more kept rows than ``padded_length``.
        """
        if self.loading is not None:
            return [(place, real, real) for place, real in zip(self.loading[:, 0].tolist(), self.real, strict=True)]
        decode = [1] * rows if self.active_B is None else self.active_B[:rows].tolist()
        return [(b, None if active else 0, 1) for b, active in enumerate(decode)]

    def load(self, places: Sequence[int], kept: Sequence[int], rows: int, real: Sequence[int] = ()) -> Sees:
        """Prepare for reading ``rows`` rows of prompt in each of these sequences, after the ``kept`` rows of each. Returns the rule of
        visibility. Either all of the sequences begin (kept is 0), or none does. Padding stands after the real rows, which do not see it.
        ``real``: the number of real rows of each; empty: all are.
        """
        device = self.kept_B.device
        self.loading, self.written, self.fresh = torch.tensor(places, device=device)[:, None], 0, not any(kept)
        self.real = real or [rows] * len(places)
        self.upto = min(max(kept) + rows, self.capacity)  # rows beyond the capacity are padding
        self.before = self.upto - rows  # above 0 where prompts go on: ``rows`` is below the capacity
        self.kept_B[self.loading[:, 0]] = torch.tensor(kept, device=device)
        if self.fresh:
            return CausalSees(rows, rows)
        return LaterSees(kept, rows)

    def copy(self, source: int, goal: int, rows: int) -> None:
        """Copy the first ``rows`` kept rows of sequence ``source`` to ``goal``, which keeps these alone."""
        for pairs in self.layers.values():
            for buffer in pairs[0]:
                buffer[goal, :, self.scratch : self.scratch + rows] = buffer[source, :, self.scratch : self.scratch + rows]
        self.kept_B[goal] = rows
        self.states.pop(goal, None)  # what recurrent layers saved of it is of another text

    def _new_buffers(self, layer: int, k: Tensor, v: Tensor) -> Segment:
        """Buffers for keys and values like these of one layer, out of their device's stack. (A layer below 0 is none of the model's.)"""
        layers = self.alike.get(k.device, 1) if layer >= 0 and v.shape[3] else 1  # rows of recurrent layers have no values
        count = 2 * layers if (k.shape[1], k.shape[3]) == (v.shape[1], v.shape[3]) else layers
        return self._new_buffer(k, count), self._new_buffer(v, count)

    def _new_buffer(self, x: Tensor, count: int) -> Tensor:
        """A buffer [B, h, S, d] for rows like ``x``, out of a stack of ``count`` buffers."""
        spare = self.spare.setdefault((x.shape[1], x.shape[3], x.dtype, x.device), [])
        if not spare:
            # zeros: slots not written yet are masked, but a NaN in them would survive the mask (0 times NaN is NaN)
            shape = (count, self.batch, x.shape[1], self.scratch + self.capacity, x.shape[3])
            self.stacks.append(x.new_zeros(shape))
            spare += self.stacks[-1].unbind()
        return spare.pop(0)

    def write(self, layer: int, k: Tensor, v: Tensor) -> list[Segment]:
        """Write rows of a layer: rows of prompts (after ``load``), nodes (after ``sees_nodes``), or new roots after the kept rows."""
        if layer not in self.layers:
            self.layers[layer] = [self._new_buffers(layer, k, v)]
        buffers, rows, first = self.layers[layer][0], k.shape[2], self.scratch
        if self.loading is not None:
            return self._load(buffers, k, v)
        n = self.sequences
        if self.node_slot >= 0:
            first -= self.nodes
            for buffer, x in zip(buffers, (k, v), strict=True):
                buffer[:n, :, self.node_slot : self.node_slot + rows] = x
        else:
            self._put(buffers, self.sequence_B1[:n], self.kept_B[:n, None] + self.slot_S[:rows], (k, v))
        keys, values = (buffer[:n, :, first : self.scratch + self.padded_length] for buffer in buffers)
        return [(keys, values)]

    def room(self, layer: int, rows: int) -> Room | None:
        """As ``Memory.room``, for rounds (not prompts), and where the layer has its buffers."""
        if self.loading is not None or layer not in self.layers:
            return None
        keys, values = self.layers[layer][0]
        if self.node_slot >= 0:
            return Room(keys, values, self.node_slot, self.scratch - self.nodes, self.scratch + self.padded_length)
        starts_B = self.kept_B[: self.sequences] + self.scratch
        return Room(keys, values, starts_B, self.scratch, self.scratch + self.padded_length)

    def _load(self, buffers: Segment, k: Tensor, v: Tensor) -> list[Segment]:
        places_n1, self.written = self.loading, k.shape[2]
        assert places_n1 is not None
        slots_nR = (self.kept_B[places_n1] + torch.arange(k.shape[2], device=places_n1.device)).clamp_(max=self.capacity - 1)
        self._put(buffers, places_n1, slots_nR, (k, v))
        if self.fresh:
            return [(k, v)]
        keys, values = (buffer[places_n1[:, 0], :, self.scratch : self.scratch + self.upto] for buffer in buffers)
        return [(keys, values)]

    def _put(self, buffers: Segment, places_n1: Tensor, slots_nR: Tensor, rows: Segment) -> None:
        for buffer, x in zip(buffers, rows, strict=True):
            at = (y.to(buffer.device) for y in (places_n1, self.scratch + slots_nR))
            buffer[next(at), :, next(at)] = x.transpose(1, 2)

    def rows(self, layer: int = 0) -> int:
        """How many rows a pass sees besides its own. (The rows in scratch are the own rows of a tree's pass.)"""
        if self.loading is None:
            return self.padded_length
        return 0 if self.fresh else self.before

    def sees_roots(self, rows: int) -> MaskSees:
        """The visibility of ``rows`` new roots after the kept rows: each sees all earlier rows and itself."""
        last_BA = self.kept_B[: self.sequences, None] + self.slot_S[:rows]
        return MaskSees(self.slot_S[: self.padded_length] <= last_BA[..., None])

    def sees_nodes(self, own_BEX: Tensor, chain: bool = False) -> MaskSees:
        """The visibility of a round's nodes: each sees the kept rows of its sequence, and the nodes that ``own_BEX`` names. The last E of
        the X nodes are read next.
        """
        B, E, X = own_BEX.shape
        self.node_slot = self.scratch - self.nodes + X - E
        kept_BES = (self.slot_S[: self.padded_length] < self.kept_B[: self.sequences, None])[:, None].expand(-1, E, -1)
        unread_BES = self.blank_11S[..., : self.nodes - X].expand(B, E, -1)
        return MaskSees(torch.cat([own_BEX, unread_BES, kept_BES], dim=2), slice(self.nodes))

    def keep(self, rows_BA: Tensor, count_B: Tensor) -> None:
        """Move rows ``rows_BA`` of the last pass to the end of the kept rows. Only the first ``count_B`` [B] of them count as kept; the
        others will be overwritten.
        """
        n = self.sequences
        from_BA = self.scratch - self.nodes + rows_BA
        to_BA = self.scratch + self.kept_B[:n, None] + self.slot_S[: rows_BA.shape[1]]
        for stack in self.stacks:
            b_B1, source, goal = (x.to(stack.device) for x in (self.sequence_B1[:n], from_BA, to_BA))
            stack[:, b_B1, :, goal] = stack[:, b_B1, :, source]  # the right side is a copy
        self.kept_B[:n] += count_B
