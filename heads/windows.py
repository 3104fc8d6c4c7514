"""Sliding-window attention over packed documents, without a mask of all rows by all rows.

Shape suffixes: B batch, h attention heads, N rows, M rows within reach, d head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headstart.heads.visibility import Sees, additive, grouped


@dataclass
class WindowSees(Sees):
    """Each row sees the last ``window`` rows of its document, itself included. ``documents_BN``: number of each row's document; documents
    are contiguous.
    """

    documents_BN: Tensor | None
    window: int

    def attend(self, q: Tensor, segments: Sequence[tuple[Tensor, Tensor]], scale: float | None = None) -> Tensor:
        """Attention [B, h, N, d] in strips of queries, each over the keys that it can reach. Memory holds only the rows of this call."""
        (k, v), rows = segments[0], q.shape[2]
        group, strip, found = q.shape[1] // k.shape[1], min(max(self.window, 128), 512), []
        for start in range(0, rows, strip):
            own, reached = slice(start, start + strip), slice(max(0, start + 1 - self.window), start + strip)
            bias = additive(self._seen(own, reached, rows, q.device), group, q.dtype)
            found.append(grouped(q[:, :, own], k[:, :, reached], v[:, :, reached], bias, scale))
        return torch.cat(found, dim=2)

    def _seen(self, own: slice, reached: slice, rows: int, device: torch.device | str) -> Tensor:
        """The boolean mask [B or 1, 1, N, M] of the query rows ``own`` and the key rows ``reached``."""
        place_N = torch.arange(rows, device=device)
        back_NM = place_N[own, None] - place_N[reached]
        seen_BNM = ((back_NM >= 0) & (back_NM < self.window))[None]
        if self.documents_BN is not None:
            seen_BNM = seen_BNM & (self.documents_BN[:, own, None] == self.documents_BN[:, None, reached])
        return seen_BNM[:, None]

    def dense(self, rows: int, memory: int, device: torch.device | str) -> Tensor:
        everything = slice(None)
        return self._seen(everything, everything, rows, device)
