"""Hydra (Ankner et al., 2402.05109): Medusa's heads, each of which also reads the tokens guessed before it.

Head k reads z = [h_t; emb(x[t+1]); ..; emb(x[t+k])] (section 3). It computes A z + SiLU(W1 z + b), then ordinary residual blocks, then
applies an output matrix of its own, as in the paper. At the start W1 and b are zero and A = [I 0 .. 0], so that a fresh Hydra is a fresh
Medusa. The state for the next depth is z, which grows by one embedding per depth.

Hydra++ (``prefix_attention``, section 4) adds a decoder layer over the roots, whose output replaces h_t. It starts as the identity, so
it has no norm at its end.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headstart.heads.base import Draft, Roots, TargetShape, rows_of
from headstart.heads.layers import DecoderLayer, Rope
from headstart.heads.medusa import Medusa, of_depth
from headstart.heads.memory import Memory
from headstart.heads.visibility import Sees


class Grounded(nn.Module):
    """The first block of a head: from the target's state and the embeddings of ``tokens`` tokens, all of width ``size``, to one state."""

    def __init__(self, size: int, tokens: int) -> None:
        super().__init__()
        self.linear = nn.Linear((1 + tokens) * size, size)
        self.skip = nn.Linear((1 + tokens) * size, size, bias=False)
        for zero in (self.linear.weight, self.linear.bias, self.skip.weight):
            nn.init.zeros_(zero)
        nn.init.eye_(self.skip.weight[:, :size])

    def forward(self, z: Tensor) -> Tensor:
        """``z`` [B, N, (1 + tokens) * size] to [B, N, size]."""
        return self.skip(z) + F.silu(self.linear(z))


class Hydra(Medusa):
    """``prefix_attention``: Hydra++. As in Medusa, ``guesses``: number of depths; ``layers``: blocks per head; ``draft_vocab``: target ids
    that its heads can guess.
    """

    format = "native"

    def __init__(self, shape: TargetShape, *, prefix_attention: bool = True, **more: Any) -> None:
        super().__init__(shape, **more)
        D = shape.hidden_size
        for depth in range(1, len(self.blocks) + 1):
            of_depth(self, self.blocks, depth)[0] = Grounded(D, tokens=depth)
        self.prefix: DecoderLayer | None = None
        if prefix_attention:
            self.prefix = DecoderLayer(shape, shape.heads, shape.kv_heads, shape.intermediate_size)
            nn.init.zeros_(self.prefix.self_attn.o_proj.weight)
            nn.init.zeros_(self.prefix.mlp.down_proj.weight)
            self.rope = Rope(shape.rope, shape.head_dim, shape.max_positions)

    def begin(self, roots: Roots, memory: Memory, sees: Sees, ask: Tensor | None = None) -> Draft:
        """Head 1, from the target's state (after the prefix attention, if any) and the chosen token."""
        h = roots.states[self.taps[0]]
        if self.prefix is not None:
            h = self.prefix(h, self.rope(roots.positions_BT), memory, 0, sees)
        return self._guess(1, rows_of(h, ask), rows_of(roots.chosen_BT, ask))

    def step(self, depth: int, tokens_BN: Tensor, parent: Draft, positions_BN: Tensor, memory: Memory, sees: Sees) -> Draft:
        """Head ``depth``, from the parent's state and one more token."""
        return self._guess(depth, parent.state, tokens_BN)

    def _guess(self, depth: int, state_BNH: Tensor, tokens_BN: Tensor) -> Draft:
        z = torch.cat([state_BNH, self.ends.embed(tokens_BN).to(state_BNH.dtype)], dim=-1)
        return Draft(of_depth(self, self.blocks, depth)(z), z)
