"""A trained early exit: the target's own first layers, frozen and shared, and one small layer that learns to guess from them.

Early exit is LayerSkip's self-speculation (2404.16710, section 4.3). A trained attention layer behind the exit of a frozen target is
Kangaroo's adapter (2404.18911, section 3.1). Here the adapter is one ordinary decoder layer whose two output projections start at zero,
a final norm that starts as the target's, and the target's frozen head. Untrained, it is the plain early exit.

The shared layers keep keys and values of their own, because using the target's would take two calls instead of one. So they read
verified tokens once more, at ``layers`` / N of the target's cost.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from headstart.heads.base import Drafter, TargetEnds, TargetShape, layer_sizes
from headstart.heads.errors import UserError
from headstart.heads.kinds import check_kinds
from headstart.heads.layers import DecoderLayer, RMSNorm, Rope
from headstart.heads.lm import Backbone, first_layers, scale_of
from headstart.heads.memory import Memory
from headstart.heads.reads_tokens import ReadsTokens
from headstart.heads.visibility import Sees


class ExitHead(ReadsTokens, Drafter):
    """``layers``: number of the target's layers before the exit; None: a third of them. Raises UserError unless fewer than the
    target has.
    """

    def __init__(
        self,
        shape: TargetShape,
        *,
        layers: int | None = None,
        heads: int | None = None,
        kv_heads: int | None = None,
        intermediate_size: int | None = None,
    ) -> None:
        super().__init__(shape)
        D = shape.hidden_size
        self.layers = layers or max(shape.layers // 3, 1)
        if self.layers >= shape.layers:
            raise UserError(f"head.layers={self.layers} must be fewer than the {shape.layers} of the target")
        heads, kv_heads, width = layer_sizes(shape, heads, kv_heads, intermediate_size)
        self.layer = DecoderLayer(shape, heads, kv_heads, width)
        for out in (self.layer.self_attn.o_proj, self.layer.mlp.down_proj):
            nn.init.zeros_(out.weight)
        self.norm = RMSNorm(D, shape.norm_eps)
        self.rope = Rope(shape.rope, shape.head_dim, shape.max_positions)
        self._shared: list[Backbone] = []  # a list, so that torch does not register the target's layers as our parameters

    def attach(self, ends: TargetEnds) -> None:
        """Raises UserError also where the target's layers are not at hand, or are of a kind that cannot drop rejected rows."""
        super().attach(ends)
        if ends.model is None:
            raise UserError("this drafter shares the target's first layers, but only its embedding and head are at hand here: "
                            "keep it on the target's device")  # fmt: skip
        check_kinds(ends.model.config.get_text_config(), "the target", drafts=True)
        self._shared = [Backbone(first_layers(ends.model, self.layers)[0])]

    @torch.no_grad()
    def start_from(self, ends: TargetEnds) -> None:
        """The final norm starts as a copy of the target's."""
        self.norm.weight.copy_(scale_of(first_layers(ends.model, self.layers)[1]))

    def states(self, tokens_BN: Tensor, positions_BN: Tensor, memory: Memory, sees: Sees) -> Tensor:
        """The target's first layers, frozen, then the trained layer and the final norm: [B, N, D]."""
        with torch.no_grad():
            h = self._shared[0].read(tokens_BN, positions_BN, memory, sees)[1]
        x = self.layer(h.to(self.norm.weight.dtype), self.rope(positions_BN), memory, self.layers, sees)
        return self.norm(x)

    def prepack(self) -> Drafter:
        """Also speeds up the shared layers, without changing the target's weights."""
        super().prepack()
        self._shared[0].quicken(own=False)
        return self
