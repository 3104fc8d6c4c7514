"""Trees of guesses, one per sequence, and what the target says of them.

Row 0 is the root row: the target's own last token, which the target has not read yet. Row i+1 is node i. Nodes
stand after their parents. One target pass reads all rows at once, each seeing only itself, its ancestors and what
came before the tree. Sequences that have fewer nodes than there are places hold places without a node.

Shape suffixes: B sequences, N nodes, R = N + 1 rows, A = depth + 1 rows of a path, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

NO_NODE = -2  # as a parent: there is no node here


@dataclass
class Tree:
    """Guessed tokens. Children of one row stand in the order in which they were chosen or drawn."""

    tokens_BN: Tensor  # int64
    parents_BN: Tensor  # int64, index of the parent node; -1: the root row; NO_NODE: there is none here
    depths_BN: Tensor  # int64, 1 for children of the root row
    depth: int  # of the deepest node that may be there: known without asking the device
    drawn_BN: Tensor | None = None  # bool: sampled from q, not a deterministic top child; None: nothing was sampled
    q_BRV: Tensor | None = None  # what the drawn children of each row were drawn from; zero rows where nothing was
    draws: int = 1  # drawn children of one row, at most
    all_drawn: bool = False  # every node was drawn: known without asking the device
    _rows_BRR: Tensor | None = field(default=None, init=False, repr=False)

    @classmethod
    def empty(cls, device: torch.device | str = "cpu", batch: int = 1) -> Tree:
        """No guesses: the pass then reads the root rows alone."""
        none = torch.empty(batch, 0, dtype=torch.int64, device=device)
        return cls(none, none, none, 0)

    @classmethod
    def of(cls, tokens: Sequence[int], parents: Sequence[int], device: torch.device | str = "cpu") -> Tree:
        """The tree of one sequence from lists, nothing of it sampled."""
        depths: list[int] = []
        for parent in parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        x = torch.tensor([list(tokens), list(parents), depths], dtype=torch.int64, device=device)[:, None]
        return cls(x[0], x[1], x[2], max(depths, default=0))

    @property
    def is_chain(self) -> bool:
        """One guess after the other, as far as that is known without asking the device."""
        return self.depth == len(self)

    @property
    def deepest(self) -> int:
        """The depth of the deepest node of one sequence (waits for the device unless it is a chain)."""
        return self.depth if self.is_chain else int(self.depths_BN.max())

    def __len__(self) -> int:
        """Nodes of each sequence, places without a node counted."""
        return self.tokens_BN.shape[1]

    def rows(self) -> Tensor:
        """Who sees whom inside the tree, bool [B, R, R]: itself, its ancestors and the root row. Computed once.

        By pointer jumping: after i rounds a row knows its 2^i nearest (itself counted), and points 2^i rows up.
        """
        if self._rows_BRR is None:
            R, B = len(self) + 1, self.tokens_BN.shape[0]
            up_BR = F.pad(self.parents_BN + 1, (1, 0)).clamp_(min=0)
            sees_BRR = torch.eye(R, dtype=torch.bool, device=up_BR.device).expand(B, R, R)
            for _ in range(self.depth.bit_length()):
                sees_BRR = sees_BRR | sees_BRR.gather(1, up_BR[..., None].expand(B, R, R))
                up_BR = up_BR.gather(1, up_BR)
            self._rows_BRR = sees_BRR
        return self._rows_BRR


@dataclass
class Acceptance:
    """What the target says of each tree."""

    rows_BA: Tensor  # the root row, then the rows of the accepted nodes, root to leaf; 0 behind them
    count_B: Tensor  # accepted nodes
    token_B: Tensor  # the target's own token after them

    def path(self, b: int = 0) -> list[int]:
        """Accepted nodes of sequence b (waits for the device)."""
        return (self.rows_BA[b, 1 : 1 + int(self.count_B[b])] - 1).tolist()
