"""Multi-token prediction: one recurrently shared module of DeepSeek-V3's shape (2412.19437, section 2.2), as in FastMTP (2509.18362).

proj([norm(embedding of x[t+1]); norm(h_t)]), one full decoder layer, a final norm, the target's frozen head.
The state after the final norm is fed back, the same module serves every depth.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from heads.base import Draft, Drafter, Roots, TargetShape, Unembedding, attention_heads
from heads.layers import DecoderLayer, Memory, RMSNorm, Rope, Sees


class Mtp(Drafter):
    def __init__(
        self, shape: TargetShape, *, heads: int | None = None, kv_heads: int | None = None, intermediate_size: int | None = None
    ) -> None:
        super().__init__(shape)
        D, eps = shape.hidden_size, shape.norm_eps
        self.taps = (shape.layers,)
        self.enorm = RMSNorm(D, eps)
        self.hnorm = RMSNorm(D, eps)
        self.eh_proj = nn.Linear(2 * D, D, bias=False)
        heads, kv_heads = attention_heads(shape, heads, kv_heads)
        width = intermediate_size or shape.intermediate_size
        self.layer = DecoderLayer(D, heads, kv_heads, shape.head_dim, width, eps)
        self.norm = RMSNorm(D, eps)
        self.rope = Rope(shape.rope, shape.head_dim, shape.max_positions)

    def begin(self, roots: Roots, memory: Memory, sees: Sees, ask: Tensor | None = None) -> Draft:
        draft = self._read(roots.chosen_BT, roots.states[self.taps[0]], roots.positions_BT, memory, sees)
        return draft if ask is None else draft.at(ask)

    def step(self, depth: int, tokens_BN: Tensor, parent: Draft, positions_BN: Tensor, memory: Memory, sees: Sees) -> Draft:
        assert parent.state_BNH is not None
        return self._read(tokens_BN, parent.state_BNH, positions_BN, memory, sees)

    def _read(self, tokens_BN: Tensor, state: Tensor, positions_BN: Tensor, memory: Memory, sees: Sees) -> Draft:
        token = self.enorm(self.ends.embed(tokens_BN).to(state.dtype))
        x = self.eh_proj(torch.cat([token, self.hnorm(state)], dim=-1))
        hidden = self.norm(self.layer(x, self.rope(positions_BN), memory, 0, sees))
        return Draft(hidden, hidden)

    def unembedding(self, depth: int) -> Unembedding:
        return Unembedding(self.ends.head_VD)
