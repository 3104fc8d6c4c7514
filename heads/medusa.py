"""Medusa (Cai et al., 2401.10774): one small head per depth, all reading the target's final state of the root.

Head d computes h + SiLU(W1 h + b), with W1 zero at the start, then applies its own matrix W2, which starts as a copy of the target's
head (section 2.1.1). A guess does not depend on the guesses of other depths.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from headstart.heads.base import Draft, Drafter, Roots, TargetShape, rows_of
from headstart.heads.memory import Memory
from headstart.heads.unembedding import Unembedding
from headstart.heads.visibility import Sees
from headstart.heads.vocab import OutputHead


class ResBlock(nn.Module):
    """x + SiLU(W x + b), with W and b zero at the start."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[.., size] to [.., size]."""
        return x + F.silu(self.linear(x))


def of_depth(drafter: Drafter, modules: nn.ModuleList, depth: int) -> Any:
    """The module of this depth, or the last one, which deeper depths share. Raises UserError beyond the drafter's last depth."""
    drafter.check_depth(depth, "has {} heads", f"with head.guesses={depth}")
    return modules[min(depth, len(modules)) - 1]


class Medusa(Drafter):
    """``guesses``: number of depths; ``layers``: residual blocks per head; ``draft_vocab``: target ids that its heads can guess."""

    format = "medusa"

    def __init__(self, shape: TargetShape, *, guesses: int = 5, layers: int = 1, draft_vocab: list[int] | None = None) -> None:
        super().__init__(shape)
        D = shape.hidden_size
        self.taps = (shape.layers,)
        self.max_depth = guesses
        self.blocks = nn.ModuleList(nn.Sequential(*(ResBlock(D) for _ in range(layers))) for _ in range(guesses))
        self.lm_heads = nn.ModuleList(OutputHead(D, shape.vocab_size, draft_vocab) for _ in range(guesses))
        if of_depth(self, self.lm_heads, 1).ids is not None:
            self.format = "native"  # engines support a trimmed vocabulary only with one head for all depths

    def begin(self, roots: Roots, memory: Memory, sees: Sees, ask: Tensor | None = None) -> Draft:
        """Head 1 on the target's final state."""
        h = rows_of(roots.states[self.taps[0]], ask)
        return Draft(self.blocks[0](h), h)

    def step(self, depth: int, tokens_BN: Tensor, parent: Draft, positions_BN: Tensor, memory: Memory, sees: Sees) -> Draft:
        """Head ``depth`` on the same state; the drafted tokens change nothing."""
        return Draft(of_depth(self, self.blocks, depth)(parent.state), parent.state)

    def unembedding(self, depth: int) -> Unembedding:
        """The matrix of this depth's own head."""
        return of_depth(self, self.lm_heads, depth).unembedding()
