"""ReDrafter (Zhang et al., 2403.09919): a small recurrent network over the guessed tokens, joined with the root's final target state.

s_0 = 0, s_k = SiLU(U s_{k-1} + W emb(x[t+k]) + b). The guess of depth k is an MLP of [h_t; s_k] (section 3.1): residual blocks
x + SiLU(W1 x + b1) and an output head. All have width 2 D and serve every depth, as in the authors' training. The head starts as a copy of
the target's for h_t and as zero for s_k. The authors draft by beam search; here it grows the requested tree, as any drafter does.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headstart.heads.base import Draft, Drafter, Roots, TargetShape, rows_of
from headstart.heads.medusa import ResBlock
from headstart.heads.memory import Memory
from headstart.heads.visibility import Sees
from headstart.heads.vocab import OutputHead


class ReDrafter(Drafter):
    """``layers``: residual blocks before the output head; ``draft_vocab``: target ids that the head can guess."""

    def __init__(self, shape: TargetShape, *, layers: int = 1, draft_vocab: list[int] | None = None) -> None:
        super().__init__(shape)
        D = shape.hidden_size
        self.taps = (shape.layers,)
        self.rnn_u = nn.Linear(D, D)
        self.rnn_w = nn.Linear(D, D, bias=False)
        self.blocks = nn.Sequential(*(ResBlock(2 * D) for _ in range(layers)))
        self.lm_head = OutputHead(2 * D, shape.vocab_size, draft_vocab)

    def begin(self, roots: Roots, memory: Memory, sees: Sees, ask: Tensor | None = None) -> Draft:
        """The first recurrent state, from the chosen token."""
        h, tokens_BN = rows_of(roots.states[self.taps[0]], ask), rows_of(roots.chosen_BT, ask)
        return self._guess(h, torch.zeros_like(h), tokens_BN)

    def step(self, depth: int, tokens_BN: Tensor, parent: Draft, positions_BN: Tensor, memory: Memory, sees: Sees) -> Draft:
        """The next recurrent state, from the drafted token."""
        h, s = parent.state.chunk(2, dim=-1)
        return self._guess(h, s, tokens_BN)

    def _guess(self, h: Tensor, s: Tensor, tokens_BN: Tensor) -> Draft:
        s = F.silu(self.rnn_u(s) + self.rnn_w(self.ends.embed(tokens_BN).to(h.dtype)))
        both = torch.cat([h, s.to(h.dtype)], dim=-1)
        return Draft(self.blocks(both), both)
