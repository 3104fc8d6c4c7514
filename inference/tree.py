"""A tree of guesses, and what the target says of it.

Row 0 is the root row: the target's own last token, which the target has not read yet. Row i+1 is node i. Nodes
stand after their parents. One target pass reads all rows at once, each seeing only itself, its ancestors and what
came before the tree.

Shape suffixes: N nodes, R = N + 1 rows, V target vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from heads.errors import UserError


@dataclass
class Tree:
    """Guessed tokens. Children of one row stand in the order in which they were chosen or drawn."""

    tokens_N: Tensor  # int64
    parents_N: Tensor  # int64, index of the parent node; -1: the root row
    depths_N: Tensor  # int64, 1 for children of the root row
    drawn_N: Tensor | None = None  # bool: sampled from q, not a deterministic top child; None: nothing was sampled
    q_RV: Tensor | None = None  # what the drawn children of each row were drawn from; zero rows where nothing was
    _rows_RR: Tensor | None = field(default=None, init=False, repr=False)

    @classmethod
    def empty(cls, device: torch.device | str = "cpu") -> Tree:
        """No guesses: the pass then reads the root row alone."""
        none = torch.empty(0, dtype=torch.int64, device=device)
        return cls(none, none, none)

    def __len__(self) -> int:
        return self.tokens_N.shape[0]

    def rows(self) -> Tensor:
        """Who sees whom inside the tree, bool [R, R]: itself, its ancestors and the root row. Computed once.

        By pointer jumping: after i rounds a row knows its 2^i nearest (itself counted), and points 2^i rows up.
        """
        if self._rows_RR is None:
            up_R = F.pad(self.parents_N + 1, (1, 0))
            sees_RR = torch.eye(len(self) + 1, dtype=torch.bool, device=up_R.device)
            depth = int(self.depths_N.max()) if len(self) else 0
            for _ in range(depth.bit_length()):
                sees_RR = sees_RR | sees_RR[up_R]
                up_R = up_R[up_R]
            self._rows_RR = sees_RR
        return self._rows_RR

    def children(self, row: int) -> list[int]:
        """Nodes whose parent is this row, in order."""
        return (self.parents_N == row - 1).nonzero()[:, 0].tolist()

    def validate(self, vocab_size: int) -> None:
        """For trees that come from files. Raises UserError naming what is wrong."""
        n = len(self)
        for name, x in (("tokens", self.tokens_N), ("parents", self.parents_N), ("depths", self.depths_N)):
            if x.dtype != torch.int64 or x.shape != (n,):
                raise UserError(f"tree: {name} must be {n} int64 values, found {x.dtype} {tuple(x.shape)}")
        if n and not 0 <= int(self.tokens_N.min()) <= int(self.tokens_N.max()) < vocab_size:
            raise UserError(f"tree: a token lies outside the vocabulary of {vocab_size}")
        if bool((self.parents_N < -1).any()) or bool((self.parents_N >= torch.arange(n, device=self.parents_N.device)).any()):
            raise UserError("tree: every parent must be -1 or the index of an earlier node")
        if not torch.equal(self.depths_N, F.pad(self.depths_N, (1, 0))[self.parents_N + 1] + 1):
            raise UserError("tree: the depth of a node must be its parent's plus 1")
        if (self.drawn_N is None) != (self.q_RV is None):
            raise UserError("tree: drawn and q go together")
        if self.drawn_N is None or self.q_RV is None:
            return
        if self.drawn_N.dtype != torch.bool or self.drawn_N.shape != (n,) or self.q_RV.shape != (n + 1, vocab_size):
            raise UserError(f"tree: drawn must be {n} booleans and q [{n + 1}, {vocab_size}]")
        rows = self.parents_N[self.drawn_N] + 1
        sums = self.q_RV[rows].sum(-1)
        if not bool((self.q_RV >= 0).all()) or not torch.allclose(sums, torch.ones_like(sums), atol=1e-4):
            raise UserError("tree: q must be a probability distribution in every row with a drawn child")
        if not bool((self.q_RV[rows, self.tokens_N[self.drawn_N]] > 0).all()):
            raise UserError("tree: a drawn token has probability 0 under q")


@dataclass
class Verdict:
    """What the target says of a tree."""

    path: Tensor  # accepted nodes, root to leaf
    token: int  # the target's own token after them
