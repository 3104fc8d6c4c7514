"""What drafters share that are a whole language model, or the first layers of one.

Such a drafter reads no state of the target: root t feeds it the token x[t+1]. It must also read x[0], which no root chose, so its memory
holds one row more than there are roots. With true tokens, its guess of depth d from root t equals its guess of depth 1 from root t+d-1.
So training depth 1 trains every depth.

Shape suffixes: B batch, T roots, N rows of any kind, D hidden.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from headstart.heads.base import Draft, Roots, rows_of
from headstart.heads.memory import Memory
from headstart.heads.visibility import CausalSees, ChainSees, Sees


class ReadsTokens:
    """``begin`` and ``step`` of a drafter that reads only tokens. A subclass implements ``states``."""

    unrolls = False

    @abstractmethod
    def states(self, tokens_BN: Tensor, positions_BN: Tensor, memory: Memory, sees: Sees) -> Tensor:
        """The states [B, N, D] for the unembedding. ``positions_BN``: of the tokens themselves, not of their roots."""

    def begin(self, roots: Roots, memory: Memory, sees: Sees, ask: Tensor | None = None) -> Draft:
        """Read the chosen tokens; in the first call of a sequence, x[0] in front of them."""
        return Draft(rows_of(self.read_roots(roots, memory, sees)[0], ask))

    def read_roots(self, roots: Roots, memory: Memory, sees: Sees) -> tuple[Tensor, Sees, int]:
        """Returns the states after the roots' chosen tokens [B, T, D], the rule by which all rows were read, and how many of these rows are
        in front of the roots' own: 1 in the first call of a sequence, else 0.
        """
        tokens, positions, first = roots.chosen_BT, roots.positions_BT + 1, int(memory.rows() == 0)
        if first:  # x[0] goes in front; positions are those of the tokens, which restart at each document
            tokens = torch.cat([roots.read_BT[:, :1], tokens], dim=1)
            positions = torch.cat([roots.positions_BT, positions[:, -1:]], dim=1)
            n = tokens.shape[1]
            sees = _of_tokens(sees) if isinstance(sees, ChainSees) else CausalSees(n, n)
        return self.states(tokens, positions, memory, sees)[:, first:], sees, first

    def step(self, depth: int, tokens_BN: Tensor, parent: Draft, positions_BN: Tensor, memory: Memory, sees: Sees) -> Draft:
        """Read the drafted tokens, at the positions of the tokens themselves."""
        if isinstance(sees, ChainSees):  # here too one row in front, so that row i continues row i of ``begin``
            padded = [torch.cat([x[:, :1], x], dim=1) for x in (tokens_BN, positions_BN + 1)]
            return Draft(self.states(padded[0], padded[1], memory, _of_tokens(sees))[:, 1:])
        return Draft(self.states(tokens_BN, positions_BN + 1, memory, sees))


def _of_tokens(sees: ChainSees) -> ChainSees:
    """The rule over tokens x[0..T] instead of roots: row i is x[i]. The last row belongs to no document."""
    documents = sees.documents_BT
    if documents is not None:
        documents = torch.cat([documents, torch.full_like(documents[:, :1], -1)], dim=1)
    return ChainSees(documents, sees.depth, sees.closed_form)
