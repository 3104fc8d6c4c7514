"""Sliding windows: of the roots that a rule shows it, a row sees only the nearest ones.

Shape suffixes: B batch, h attention heads, N rows of any kind, M rows in memory or within reach, d head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headstart.heads.visibility import KEPT, CausalSees, ChainSees, LaterSees, Sees, additive, grouped

Segments = Sequence[tuple[Tensor, Tensor]]
STRIP = (128, 512)  # fewest and most queries that are computed at once


@dataclass
class WindowSees(Sees):
    """``rule`` with a window: a row sees only the last ``roots`` of the roots that the rule shows it. Nodes are never hidden.

    Many rows (texts in training, prompts) are computed in strips, without a mask of all rows by all rows. Where no row could see more roots
    than these, ``rule`` computes everything, as without a window.
    """

    rule: Sees
    roots: int

    def attend(self, q: Tensor, segments: Segments, scale: float | None = None) -> Tensor:
        rule = self.rule
        if self._idle(q.shape[2], sum(k.shape[2] for k, _ in segments)):
            return rule.attend(q, segments, scale)
        if isinstance(rule, ChainSees) and rule.closed_form:
            rule.check(segments)
            return strips(q, segments, self.roots, scale, rule.documents_BT)
        return super().attend(q, segments, scale)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        if q.shape[2] > KEPT and isinstance(self.rule, CausalSees):
            return strips(q, [(k, v)], self.roots, scale)
        if q.shape[2] > KEPT and isinstance(self.rule, LaterSees):
            return self.rule.by_sequence(q, k, v, lambda q, k, v: strips(q, [(k, v)], self.roots, scale))
        return super()._attend(q, k, v, scale)

    def bias(self, rows: int, memory: int, group: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        return (self.rule.bias if self._idle(rows, memory) else super().bias)(rows, memory, group, dtype, device)

    def dense(self, rows: int, memory: int, device: torch.device | str) -> Tensor | None:
        seen = self.rule.dense(rows, memory, device)
        if self._idle(rows, memory):
            return seen
        seen = torch.ones(1, 1, rows, memory, dtype=torch.bool, device=device) if seen is None else seen
        roots = seen.clone()
        roots[..., self.rule.nodes(rows)] = False
        from_here = roots.flip(-1).cumsum(-1, dtype=torch.int32).flip(-1)  # 1: the last root that the row sees
        return seen & ~(roots & (from_here > self.roots))

    def _idle(self, rows: int, memory: int) -> bool:
        """Whether no row can see more than ``roots`` roots."""
        return (self.rule.longest(rows) if isinstance(self.rule, ChainSees) else memory) <= self.roots


def strips(q: Tensor, segments: Segments, roots: int, scale: float | None = None, documents_BN: Tensor | None = None) -> Tensor:
    """Attention [B, h, N, d] of roots, or of one depth of the chains on them, in strips of queries, each over the keys that it can reach.

    The queries belong to the last N rows of the first segment. Each sees the last ``roots`` of that segment's rows up to its own, and its
    own row in every later segment. ``documents_BN``: number of each row's document; documents are contiguous, and the first segment then
    holds only N rows.
    """
    dtype, out_dtype = segments[0][0].dtype, q.dtype
    (k, v), *later = [(a.to(dtype), b.to(dtype)) for a, b in segments]
    rows, group, roots, q = q.shape[2], q.shape[1] // k.shape[1], max(roots, 0), q.to(dtype)
    behind, strip = k.shape[2] - rows, STRIP[0] if later else min(max(roots, STRIP[0]), STRIP[1])
    place_M, found = torch.arange(k.shape[2], device=q.device) - behind, []
    for start in range(0, rows, strip):
        own, stop = slice(start, start + strip), behind + min(start + strip, rows)
        reach = slice(max(0, behind + start + 1 - roots), stop)
        back_NM = place_M[behind:][own, None] - place_M[reach]
        seen_BNM = ((back_NM >= 0) & (back_NM < roots))[None]
        if documents_BN is not None:
            seen_BNM = seen_BNM & (documents_BN[:, own, None] == documents_BN[:, None, reach])
        keys, values = k[:, :, reach], v[:, :, reach]
        if later:
            diagonal = torch.eye(seen_BNM.shape[1], dtype=torch.bool, device=q.device).expand(len(seen_BNM), -1, -1)
            seen_BNM = torch.cat([seen_BNM, *[diagonal] * len(later)], dim=2)
            keys = torch.cat([keys, *(x[:, :, own] for x, _ in later)], dim=2)
            values = torch.cat([values, *(x[:, :, own] for _, x in later)], dim=2)
        found.append(grouped(q[:, :, own], keys, values, additive(seen_BNM[:, None], group, dtype), scale))
    return torch.cat(found, dim=2).to(out_dtype)
