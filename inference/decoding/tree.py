"""Trees of draft tokens, one per sequence, and the result of their verification.

Row 0 is the root row: the target's own last token, which the target has not read yet. Row i+1 is node i. Nodes
stand after their parents. One target pass reads all rows at once, each seeing only itself, its ancestors and the text
before the tree. A sequence with fewer than N nodes has empty places, whose parent is ``NO_NODE``.

Shape suffixes: B sequences, N nodes, R = N + 1 rows, A = depth + 1 rows of a path, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

NO_NODE = -2  # as a parent: this place is empty


def depths_of(parents: Sequence[int]) -> list[int]:
    """The depth of each node of one sequence's tree: 1 for children of the root row; 0 for an empty place."""
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent == NO_NODE else 1 if parent < 0 else depths[parent] + 1)
    return depths


@dataclass
class Tree:
    """The draft tokens of B sequences. Children of one row stand in the order in which they were chosen or drawn."""

    tokens_BN: Tensor  # int64
    parents_BN: Tensor  # int64, index of the parent node; -1: the root row; NO_NODE: the place is empty
    depths_BN: Tensor  # int64, 1 for children of the root row
    depth: int  # no node is deeper than this; known without asking the device
    drawn_BN: Tensor | None = None  # bool: the node was sampled from q (else it is a deterministic top child); None: nothing was sampled
    q_BRV: Tensor | None = None  # the distribution that each row's drawn children were drawn from; zeros for a row without any
    draws: int = 1  # the most drawn children that one row has
    by_value: bool = False  # nodes were selected by value: a tree with as many nodes as levels need not be a chain
    planned: bool = False  # its shape was fixed before anything was drawn
    _rows_BRR: Tensor | None = field(default=None, init=False, repr=False)

    @classmethod
    def empty(cls, device: torch.device | str = "cpu", batch: int = 1) -> Tree:
        """Trees without nodes: the target then reads the root rows alone."""
        none = torch.empty(batch, 0, dtype=torch.int64, device=device)
        return cls(none, none, none, 0)

    @classmethod
    def of(cls, tokens: Sequence[int], parents: Sequence[int], device: torch.device | str = "cpu") -> Tree:
        """The tree of one sequence from lists of tokens and parents; no node counts as drawn."""
        depths = depths_of(parents)
        x = torch.tensor([list(tokens), list(parents), depths], dtype=torch.int64, device=device)[:, None]
        return cls(x[0], x[1], x[2], max(depths, default=0))

    @property
    def is_chain(self) -> bool:
        """Whether the tree is a chain, as far as that is known without asking the device."""
        return self.depth == len(self) and not (self.by_value and len(self) > 1)

    @property
    def deepest(self) -> int:
        """The depth of the deepest node of one sequence (waits for the device unless it is a chain)."""
        return self.depth if self.is_chain else int(self.depths_BN.max())

    def __len__(self) -> int:
        """The number of nodes N of each sequence, empty places counted."""
        return self.tokens_BN.shape[1]

    def rows(self) -> Tensor:
        """The attention mask inside the tree, bool [B, R, R]: each row sees itself, its ancestors and the root row. Computed once.

        Pointer jumping: after i iterations a row sees its 2^i nearest ancestors (itself counted), and points 2^i levels up.
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
    """The result of verification: for each tree the accepted path and the target's own next token."""

    rows_BA: Tensor  # the root row, then the rows of the accepted nodes from root to leaf, then zeros
    count_B: Tensor  # number of accepted nodes
    token_B: Tensor  # the target's own token after them

    def path(self, b: int = 0) -> list[int]:
        """Accepted nodes of sequence b (waits for the device)."""
        return (self.rows_BA[b, 1 : 1 + int(self.count_B[b])] - 1).tolist()
