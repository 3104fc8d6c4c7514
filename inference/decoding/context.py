"""One sequence being decoded: the target reads its prompt and its trees, and keeps the accepted rows in the key-value cache.

Shape suffixes: T tokens, R rows of one pass (root row and nodes), P rows in the cache, D hidden.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from headstart.heads.visibility import CausalSees, MaskSees, Sees
from headstart.inference.decoding.target import Target
from headstart.inference.decoding.tree import Tree

CHUNK = 1024  # tokens of a prompt that are read in one pass, at most


class Context:
    """One sequence being decoded: the target, its tapped layers, and its key-value cache of the sequence."""

    def __init__(self, target: Target, taps: Collection[int], rows: int = 0) -> None:
        """``rows``: rows to allocate in the cache, enough for the longest that the sequence may become; 0: the cache grows."""
        self.target, self.taps = target, tuple(taps)
        self.memory = target.new_memory(rows)
        self.length = 0  # tokens that were read and kept

    def read(self, tokens_R: Tensor, tree: Tree | None = None) -> tuple[dict[int, Tensor], Tensor]:
        """Read rows after the kept ones: a plain continuation, or the root row and the nodes of ``tree``.

        Returns the tapped states and the final state, [1, R, D] each. Call ``keep`` before reading on.
        """
        R, P, device = len(tokens_R), self.length, self.target.device
        sees: Sees = CausalSees(R, P + R)
        positions_R = torch.arange(P, P + R, device=device)
        if tree is not None and not tree.is_chain:
            positions_R = F.pad(tree.depths_BN[0], (1, 0)) + P
            sees = MaskSees(torch.cat([tree.rows().new_ones(1, R, P), tree.rows()], dim=2))
        self.memory.sure = None if tree is None else 1
        return self.target.read_rows(tokens_R[None], positions_R[None], self.memory, sees, self.taps)

    def read_prompt(self, tokens_T: Tensor) -> tuple[dict[int, Tensor], Tensor]:
        """Read a prompt of any length in chunks, so that no mask of all tokens by all tokens is made. A prompt longer than the target's
        ``rope_switch`` is read in one pass, because chunks before it would be read with other rotations. Call ``keep`` before reading on.

        Returns the tapped states of all tokens, [1, T, D], and the final state of the last chunk alone.
        """
        turned = self.target.rope_switch is not None and len(tokens_T) > self.target.rope_switch
        read = []
        for part in tokens_T.split(len(tokens_T) if turned else CHUNK):
            read.append(self.read(part))
            self.length += len(part)
        self.length = 0
        if len(read) == 1:
            return read[0]
        states = {tap: torch.cat([part[0][tap] for part in read], dim=1) for tap in self.taps}
        return states, read[-1][1]

    def keep(self, rows: Sequence[int] | int) -> None:
        """Keep these rows of the last pass (ascending; an int n stands for the first n) and forget its other rows."""
        rows = range(rows) if isinstance(rows, int) else rows
        self.memory.keep(self.length, rows)
        self.length += len(rows)
