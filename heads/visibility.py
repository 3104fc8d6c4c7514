"""Who sees whom: the one visibility rule, and the attention that follows it. The rule becomes a mask or a closed form only here and, for
layers with windows or chunks, in heads/windows.py and heads/kinds.py.

A node sees the roots up to its own root, and its own ancestors, nothing else. The rule has one class for each situation:

- ``ChainSees``: training grows a chain from every root at once: a causal block over the roots plus one diagonal per earlier depth.
- ``MaskSees``: decoding grows a small tree from the last root: a dense boolean mask.
- ``CausalSees``: new roots at the end of memory see all rows before them; ``LaterSees`` is the same for several sequences.
- ``BlockSees``: a drafter that guesses all depths at once adds a block of rows to a root: the block sees what the root sees, and itself.

Shape suffixes: B batch, h attention heads, T roots, N rows of any kind, M rows in memory, d head size, A asked roots.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from headstart.heads.chain_attention import ChainAttention
from headstart.heads.flash import Cuts, cuts_of, flash_behind, has_flash

KEPT = 64  # most rows of a short pass, as in decoding: on a CPU its masks are cached for the next pass


class Sees(ABC):
    """The visibility rule of one call of a drafter, or of a target."""

    def attend(self, q: Tensor, segments: Sequence[tuple[Tensor, Tensor]], scale: float | None = None) -> Tensor:
        """Attention of queries [B, h, N, d] over all rows in memory, the call's own rows last: [B, h, N, d]. Computed in the dtype of
        memory, returned in that of ``q``. ``scale``: factor on the scores; None: 1 / sqrt(d).
        """
        dtype, out_dtype = segments[0][0].dtype, q.dtype
        k, v = (x[0] if len(x) == 1 else torch.cat([y.to(dtype) for y in x], dim=2) for x in zip(*segments, strict=True))
        if q.dtype != dtype:
            q = q.to(dtype)
        out = self._attend(q, k, v, scale)
        return out if out.dtype == out_dtype else out.to(out_dtype)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        return grouped(q, k, v, self.bias(q.shape[2], k.shape[2], q.shape[1] // k.shape[1], q.dtype, q.device), scale)

    def bias(self, rows: int, memory: int, group: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """The additive mask of the scores, [B or 1, 1, group * rows, memory]: 0 where a row sees, else -inf. None: all is visible."""
        made = self.__dict__.setdefault("_biases", {})  # cached: the same in every layer on one device
        if (key := (rows, memory, group, dtype, device)) not in made:
            seen = self.dense(rows, memory, device)
            made[key] = None if seen is None else additive(seen.to(device), group, dtype)
        found: Tensor | None = made[key]
        return found

    @abstractmethod
    def dense(self, rows: int, memory: int, device: torch.device | str) -> Tensor | None:
        """The rule as a boolean mask [B or 1, 1, rows, memory]; None where everything is visible."""

    def nodes(self, rows: int) -> slice:
        """Which rows of memory are nodes; the others are roots. ``rows``: those of this call."""
        return slice(0)

    def seen_by(self, ask_BA: Tensor, memory: int) -> Tensor | None:
        """The rows ``ask_BA`` of the boolean mask, [B, A, memory]; None where everything is visible. Raises TypeError for rules whose rows
        are not roots.
        """
        raise TypeError(f"{type(self).__name__}: its rows are no roots, nothing hangs on them")


def grouped(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float | None = None) -> Tensor:
    """Attention in which the queries of heads that share keys are stacked as rows of one head, so that no key is copied. ``bias``: see
    ``Sees.bias``.
    """
    group = q.size(1) // k.size(1)
    if group == 1:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
    rows = q.reshape(q.size(0), k.size(1), -1, q.size(3))
    return F.scaled_dot_product_attention(rows, k, v, attn_mask=bias, scale=scale).reshape(q.size(0), q.size(1), q.size(2), -1)


def additive(seen: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """The additive mask of ``seen`` [B, 1, rows, memory]: [B, 1, group * rows, memory], repeated for each head of a group."""
    bias = zeros((*seen.shape[:2], group, *seen.shape[2:]), dtype, seen.device)
    return bias.masked_fill_(~seen[:, :, None], -torch.inf).flatten(2, 3)


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros for a mask. On a GPU its rows start at multiples of eight numbers, as the attention kernels require. Otherwise each layer would
    copy the mask, and a slice of a wider mask would raise an error (some kernels even break the CUDA context).
    """
    more = 0 if device.type == "cpu" else -shape[-1] % 8
    return torch.zeros(*shape[:-1], shape[-1] + more, dtype=dtype, device=device)[..., : shape[-1]]


@dataclass
class MaskSees(Sees):
    """Decoding: the rule as a dense mask. ``mask_BNM[b, i, j]`` (B may be 1): row i of this call sees row j of memory. None: all.
    ``among``: the rows of memory that are nodes; None: none is.
    """

    mask_BNM: Tensor | None = None
    among: slice | None = None

    def nodes(self, rows: int) -> slice:
        return self.among or slice(0)

    def dense(self, rows: int, memory: int, device: torch.device | str) -> Tensor | None:
        return None if self.mask_BNM is None else self.mask_BNM[:, None]

    def seen_by(self, ask_BA: Tensor, memory: int) -> Tensor | None:
        if self.mask_BNM is None:
            return None
        mask_BNM = self.mask_BNM.expand(ask_BA.shape[0], -1, -1)
        return mask_BNM.gather(1, ask_BA[..., None].expand(-1, -1, memory))


@dataclass
class CausalSees(Sees):
    """``rows`` new roots (or a chain of nodes) at the end of a memory of ``memory`` rows, which includes them. Each row sees itself and all
    earlier rows. Many rows are computed in closed form, without a mask.
    """

    rows: int
    memory: int

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        if 1 < q.shape[2] == k.shape[2]:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] > k.shape[1])
        return flash_behind(q, k, v, scale) if _many(q, k, v) else super()._attend(q, k, v, scale)

    def bias(self, rows: int, memory: int, group: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        if rows == 1 or rows > KEPT or device.type != "cpu":  # on a GPU a slice is not aligned (see ``zeros``)
            return super().bias(rows, memory, group, dtype, device)
        columns = 1 << (memory - 1).bit_length()
        return _stairs(rows, columns, group, dtype, device)[..., columns - memory :]

    def dense(self, rows: int, memory: int, device: torch.device | str) -> Tensor | None:
        if rows == 1:
            return None
        return torch.ones(1, 1, rows, memory, dtype=torch.bool, device=device).tril(memory - rows)

    def seen_by(self, ask_BA: Tensor, memory: int) -> Tensor | None:
        if self.rows == 1:
            return None
        return torch.arange(memory, device=ask_BA.device) <= self.memory - self.rows + ask_BA[..., None]


@functools.lru_cache(maxsize=64)
def _stairs(rows: int, columns: int, group: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A mask whose last M columns are the mask of ``rows`` rows at the end of a memory of M rows, for any M up to ``columns``."""
    with torch.inference_mode(False):  # it is cached beyond this pass
        return additive(torch.ones(1, 1, rows, columns, dtype=torch.bool, device=device).tril(columns - rows), group, dtype)


@dataclass
class LaterSees(Sees):
    """``rows`` new roots of each of several sequences, behind the ``kept[b]`` rows that sequence b already has. Shorter sequences have
    unused rows of memory behind their own, which nobody sees.
    """

    kept: Sequence[int]
    rows: int

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        if not _many(q, k, v):
            return super()._attend(q, k, v, scale)
        return self.by_sequence(q, k, v, lambda q, k, v: flash_behind(q, k, v, scale))

    def by_sequence(self, q: Tensor, k: Tensor, v: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        """The attention [B, h, N, d] that ``attend`` computes for one sequence after the other, without their unused rows of memory."""
        out = torch.zeros_like(q)
        for b, kept in enumerate(self.kept):
            rows = min(self.rows, k.shape[2] - kept)  # rows beyond memory are padding
            own = slice(b, b + 1), slice(None)
            out[b, :, :rows] = attend(q[*own, :rows], k[*own, : kept + rows], v[*own, : kept + rows])[0]
        return out

    def dense(self, rows: int, memory: int, device: torch.device | str) -> Tensor:
        return self.seen_by(torch.arange(rows, device=device)[None], memory)[:, None]

    def seen_by(self, ask_BA: Tensor, memory: int) -> Tensor:
        kept_B1 = torch.tensor(self.kept, device=ask_BA.device)[:, None]
        return torch.arange(memory, device=ask_BA.device) <= (kept_B1 + ask_BA)[..., None]


def _many(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether there are enough new rows for the closed form to pay, and no gradient is needed: it has no backward pass."""
    return q.shape[2] > KEPT and has_flash(q, k, v) and not (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad))


@dataclass
class ChainSees(Sees):
    """Training: a chain from each of T roots. At depth d, memory holds d segments of T rows: the roots, then one segment per depth.

    Row t sees the roots up to t of its own document (segment 0), and row t of every later segment.
    """

    documents_BT: Tensor | None = None  # number of each root's document; documents are contiguous. None: each batch row is one
    depth: int = 1
    closed_form: bool = True  # False: the dense mask, the reference in tests
    cuts: Cuts | None = None  # borders of the documents (heads/flash.py)

    def __post_init__(self) -> None:
        if self.closed_form and self.cuts is None and self.documents_BT is not None:
            self.cuts = cuts_of(self.documents_BT)

    def deeper(self) -> ChainSees:
        """The rule of the next depth."""
        return replace(self, depth=self.depth + 1)

    def longest(self, rows: int) -> int:
        """Number of rows of the longest document; ``rows`` where each row of the batch is one document."""
        return rows if self.cuts is None else max(j - i for i, j in zip(self.cuts, self.cuts[1:], strict=False))

    def attend(self, q: Tensor, segments: Sequence[tuple[Tensor, Tensor]], scale: float | None = None) -> Tensor:
        """As ``Sees.attend``. Raises RuntimeError unless memory holds one segment per depth."""
        self.check(segments)
        if not self.closed_form or not has_flash(q, *segments[0]):
            return super().attend(q, segments, scale)
        return ChainAttention.apply(q, self.cuts, scale, *(x for pair in segments for x in pair))

    def check(self, segments: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Raises RuntimeError unless memory holds one segment per depth."""
        if len(segments) != self.depth:
            raise RuntimeError(f"depth {self.depth} needs {self.depth} segments in memory, found {len(segments)}")

    def nodes(self, rows: int) -> slice:
        return slice(rows, None)

    def dense(self, rows: int, memory: int, device: torch.device | str) -> Tensor:
        roots = torch.ones(rows, rows, dtype=torch.bool, device=device).tril()[None]
        if self.documents_BT is not None:
            roots = roots & (self.documents_BT[:, :, None] == self.documents_BT[:, None, :])
        own = torch.eye(rows, dtype=torch.bool, device=device)[None].expand_as(roots)
        return torch.cat([roots] + [own] * (self.depth - 1), dim=-1)[:, None]

    def seen_by(self, ask_BA: Tensor, memory: int) -> Tensor:
        seen_BAM = torch.arange(memory, device=ask_BA.device) <= ask_BA[..., None]
        if self.documents_BT is not None:
            seen_BAM = seen_BAM & (self.documents_BT.gather(1, ask_BA)[..., None] == self.documents_BT[:, None])
        return seen_BAM


@dataclass
class BlockSees(Sees):
    """A block of ``slots`` rows on each of the roots ``ask_BA``; the rows of a block lie side by side.

    A row sees what its root sees (``roots``: the rule of the call that read the roots) and its own block: up to itself
    (``causal``) or all of it. Blocks do not see each other. Their rows are the last in memory.

    ``window``: a row sees only the roots that lie less than ``window`` positions before the row (``slides``), or at most ``window``
    positions before its block (not ``slides``). The window never hides rows of the block. None: no window.
    """

    roots: Sees
    ask_BA: Tensor
    slots: int
    causal: bool = False
    window: int | None = None
    slides: bool = True

    def dense(self, rows: int, memory: int, device: torch.device | str) -> Tensor | None:
        B, A = self.ask_BA.shape
        seen_BAM = self.roots.seen_by(self.ask_BA, memory - rows)
        near = self.window is None or memory - rows <= self.window - self.slides * self.slots  # no root lies outside the window
        if seen_BAM is None:
            if A == 1 and not self.causal and near:
                return None
            seen_BAM = torch.ones(B, A, memory - rows, dtype=torch.bool, device=device)
        seen_BASM = seen_BAM[:, :, None].expand(-1, -1, self.slots, -1)
        if not near:
            seen_BASM = seen_BASM & self._within(seen_BAM)
        block = torch.arange(rows, device=device) // self.slots
        own = block[:, None] == block
        if self.causal:
            own = own.tril()
        return torch.cat([seen_BASM.flatten(1, 2), own.expand(B, -1, -1)], dim=2)[:, None]

    def _within(self, seen_BAM: Tensor) -> Tensor:
        """The window as a mask, [B, A, slots or 1, M]. A root's distance to the block is the number of seen roots from that root on."""
        assert self.window is not None
        before_BAM = seen_BAM.flip(-1).cumsum(-1).flip(-1)  # 1: the root that the block hangs on
        if not self.slides:
            return (before_BAM <= self.window)[:, :, None]
        return before_BAM[:, :, None] + torch.arange(self.slots, device=seen_BAM.device)[:, None] < self.window


def blocks_of(ask_BA: Tensor) -> tuple[Tensor, ...]:
    """The asked roots [B, A] in groups of 32. By a dense mask, attention computes scores between all blocks of a call, although blocks do
    not see each other: so a call has few blocks.
    """
    return ask_BA.split(32, dim=1)
