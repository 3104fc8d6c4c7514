"""DFlare (2606.02091): DFlash in which every layer reads its own mixture of the tapped states.

DFlash joins the tapped states once, by one matrix, for all layers. Here layer i reads z_i = norm(sum_k softmax(w_i)_k * state_k), with one
number w_ik for each pair of layer and tap, and has separate key and value matrices for the roots and for its block. At the start each layer
prefers one tap: the first layers prefer the lower ones. Everything else is DFlash's. Names and initial values are those of AngelSlim, the
authors' library.

Shape suffixes: B batch, T roots, D hidden, L layers, K taps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from headstart.heads.base import TargetShape
from headstart.heads.dflash import Dflash, spread_taps
from headstart.heads.layers import CosSin
from headstart.heads.memory import Segment

TAPS = 9  # as in the published drafters
OF_ROOTS = "_target"  # suffix in the names of the matrices for the roots' keys and values
LEANING = 2.0  # initial w_ik of the tap that a layer prefers; it is 0 for all others


class Dflare(Dflash, without=("draft_vocab", "window", "window_layers", "window_causal", "window_slides")):
    """``taps``: the target layers that are read; None: 9, spread evenly (fewer for small targets). The other settings are DFlash's, except
    that AngelSlim's folders have neither trimmed vocabularies nor sliding windows.
    """

    scales = ("layer_fusion_weights",)  # the optimizer treats it as vectors, not as a matrix: each number weighs one state
    unserved = "no released engine has DFlare; AngelSlim's benchmark reads it as trained with head.mask_token=ID"

    def __init__(self, shape: TargetShape, *, taps: list[int] | None = None, **more: Any) -> None:
        super().__init__(shape, taps=spread_taps(shape.layers, TAPS) if taps is None else taps, **more)

    def _add_fusion(self, layers: int) -> None:
        taps = len(self.taps)
        self.layer_fusion_weights = nn.Parameter(torch.zeros(layers, taps))
        for layer in range(layers):
            self.layer_fusion_weights.data[layer, layer * taps // layers] = LEANING

    def _layer(self, heads: int, kv_heads: int, width: int) -> nn.Module:
        layer = super()._layer(heads, kv_heads, width)
        for kind in "kv":
            second = nn.Linear(self.shape.hidden_size, kv_heads * self.shape.head_dim, bias=False)
            setattr(layer.self_attn, f"{kind}_proj{OF_ROOTS}", second)
        return layer

    def _context(self, states: list[Tensor], cos_sin: CosSin) -> Iterator[Segment]:
        mix_LK = self.layer_fusion_weights.softmax(-1).to(states[0].dtype)
        mixed_LBTD = (mix_LK @ torch.stack(states).flatten(1)).unflatten(1, states[0].shape)
        for layer, z_BTD in zip(self.layers, mixed_LBTD, strict=True):
            yield layer.self_attn.keys_values(self.hidden_norm(z_BTD), cos_sin, OF_ROOTS)  # type: ignore[operator, union-attr]
