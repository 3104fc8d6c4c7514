"""EAGLE-1 (Li et al., 2401.15077); EAGLE-2 (2406.16858) is the same drafter with a dynamic tree.

Root t reads fc([embedding of x[t+1]; the target's final state h_t]). One decoder layer without its first norm predicts the target's next
final state, from which the target's own frozen head makes the guess. The predicted state is fed back. It is trained with
``loss.feature`` (SmoothL1 to the target's states) beside the token loss.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from headstart.heads.base import Draft, Drafter, Roots, TargetShape, layer_sizes
from headstart.heads.layers import DecoderLayer, Rope
from headstart.heads.memory import Memory
from headstart.heads.visibility import Sees


class Eagle1(Drafter):
    """``noise``: U(-noise, noise) is added to the target's states while training (section 4.1 of the paper)."""

    format = "eagle1"
    only_trained = ("noise",)

    def __init__(
        self,
        shape: TargetShape,
        *,
        heads: int | None = None,
        kv_heads: int | None = None,
        intermediate_size: int | None = None,
        noise: float = 0.1,
    ) -> None:
        super().__init__(shape)
        D = shape.hidden_size
        self.taps = (shape.layers,)
        self.noise = noise
        self.fc = nn.Linear(2 * D, D, bias=False)
        heads, kv_heads, width = layer_sizes(shape, heads, kv_heads, intermediate_size)
        self.layers = nn.ModuleList([DecoderLayer(shape, heads, kv_heads, width, input_norm=False)])
        self.rope = Rope(shape.rope, shape.head_dim, shape.max_positions)

    def begin(self, roots: Roots, memory: Memory, sees: Sees, ask: Tensor | None = None) -> Draft:
        """Read the chosen token beside the target's final state, with noise while training."""
        state = roots.states[self.taps[0]]
        if self.training and self.noise:
            state = state + (2 * torch.rand_like(state) - 1) * self.noise
        return self._read(roots.chosen_BT, state, roots.positions_BT, memory, sees).at(ask)

    def step(self, depth: int, tokens_BN: Tensor, parent: Draft, positions_BN: Tensor, memory: Memory, sees: Sees) -> Draft:
        """Read the drafted token beside the state that was predicted for its parent."""
        return self._read(tokens_BN, parent.state, positions_BN, memory, sees)

    def _read(self, tokens_BN: Tensor, state: Tensor, positions_BN: Tensor, memory: Memory, sees: Sees) -> Draft:
        x = self.fc(torch.cat([self.ends.embed(tokens_BN).to(state.dtype), state], dim=-1))
        x = self.layers[0](x, self.rope(positions_BN), memory, 0, sees)
        return Draft(x, x)
