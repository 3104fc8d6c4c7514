"""EAGLE-3 (Li et al., 2503.01840) with the switches of EAGLE-3.1 (2605.09992).

Root t reads the token x[t+1] and three tapped states of the target, which ``fc`` fuses into one feature. One decoder layer, whose attention
reads token and feature side by side, guesses x[t+2]. Deeper guesses read the drafted token and the drafter's own feature in place of the
target's. EAGLE-3.1 adds an RMSNorm on each tapped state (``fc_norm``), and feeds back the feature after the final norm (``norm_output``).
The speculators library has two more switches, which its training turns on: one RMSNorm over all tapped states side by side
(``norm_before_fc``), and the normed feature in the residual (``norm_before_residual``). Its layers may also be Qwen3's, with norms of each
head's queries and keys (``qk_norm``), and have a sliding window by default.

With ``window``, a row sees only the nearest roots. Engines count the window from the row: depth d of root t, at position t+d-1, sees the
roots at positions above t+d-1-window. The speculators library trains this drafter with a window that is counted from the root
(``window_slides=false``): every depth sees the roots above t-window. Ancestors are always seen.

Shape suffixes: B batch, T roots, N nodes, V draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headstart.heads.base import Draft, Drafter, Roots, TargetShape, ascending_taps, layer_sizes
from headstart.heads.errors import UserError
from headstart.heads.layers import MLP, Attention, DecoderLayer, RMSNorm, Rope
from headstart.heads.memory import Memory
from headstart.heads.visibility import Sees
from headstart.heads.vocab import OutputHead
from headstart.heads.windows import WindowSees


def default_taps(layers: int) -> list[int]:
    """The layers that all engines tap by default. For targets of up to 6 layers, some of the three may coincide."""
    return sorted({min(2, layers - 1), layers // 2, max(layers - 3, 0)})


class Layer(nn.Module):
    """EAGLE-3's first layer. Queries, keys and values read [norm(token); norm(feature)]. The residual is the feature; with
    ``norm_before_residual`` it is the normed feature. ``head_norm``: as in ``heads.layers.DecoderLayer``.
    """

    frozen: Any = None  # its faster form: see ``heads.layers.freeze``

    def __init__(
        self, shape: TargetShape, heads: int, kv_heads: int, intermediate_size: int, norm_before_residual: bool, head_norm: bool
    ) -> None:
        super().__init__()
        D, eps = shape.hidden_size, shape.norm_eps
        self.norm_before_residual = norm_before_residual
        self.reads = ("input_layernorm", None if norm_before_residual else "hidden_norm")
        self.input_layernorm = RMSNorm(D, eps)
        self.hidden_norm = RMSNorm(D, eps)
        self.self_attn = Attention(2 * D, D, heads, kv_heads, shape.head_dim, eps if head_norm else None)
        self.post_attention_layernorm = RMSNorm(D, eps)
        self.mlp = MLP(D, intermediate_size)

    def forward(self, token: Tensor, x: Tensor, cos_sin: tuple[Tensor, Tensor], memory: Memory, layer: int, sees: Sees) -> Tensor:
        """``token`` and feature ``x``, [B, N, D] each, to the layer's output [B, N, D]."""
        if self.norm_before_residual:
            x = self.hidden_norm(x)
        if self.frozen is not None:
            return self.frozen([token, x], cos_sin, memory, layer, sees, x)
        both = torch.cat([self.input_layernorm(token), x if self.norm_before_residual else self.hidden_norm(x)], dim=-1)
        x = self.self_attn(both, cos_sin, memory, layer, sees, x)
        return self.mlp(self.post_attention_layernorm(x), x)


class Eagle(Drafter):
    """``taps``: layers of the target, by default (2, N//2, N-3); ``draft_vocab`` (target ids) trims the output head. The norms are
    described in the module's docstring, and so is the window (in positions; None: none). Raises UserError for settings that contradict
    each other or the target.
    """

    format = "eagle3"

    def __init__(
        self,
        shape: TargetShape,
        *,
        layers: int = 1,
        heads: int | None = None,
        kv_heads: int | None = None,
        intermediate_size: int | None = None,
        taps: list[int] | None = None,
        draft_vocab: list[int] | None = None,
        fc_norm: bool = True,
        norm_output: bool = True,
        norm_before_fc: bool = False,
        norm_before_residual: bool = False,
        qk_norm: bool = False,
        window: int | None = None,
        window_slides: bool = True,
    ) -> None:
        super().__init__(shape)
        N, D = shape.layers, shape.hidden_size
        if fc_norm and norm_before_fc:
            raise UserError("head.norm_before_fc is one norm over all tapped states, in the place of one on each: add head.fc_norm=false")
        self.taps = ascending_taps(default_taps(N) if taps is None else taps, shape)
        if self.taps[-1] == N:
            self.format = "native"  # engines count layer N before the final norm, we count it after
        heads, kv_heads, width = layer_sizes(shape, heads, kv_heads, intermediate_size)
        self.norm_output, self.qk_norm, self.window, self.window_slides = norm_output, qk_norm, window, window_slides
        self.fc_norm = nn.ModuleList(RMSNorm(D, shape.norm_eps) for _ in self.taps) if fc_norm else None
        self.input_norm = RMSNorm(len(self.taps) * D, shape.norm_eps) if norm_before_fc else None
        self.fc = nn.Linear(len(self.taps) * D, D, bias=False)
        self.midlayer = Layer(shape, heads, kv_heads, width, norm_before_residual, qk_norm)
        self.layers = nn.ModuleList(DecoderLayer(shape, heads, kv_heads, width, head_norm=qk_norm) for _ in range(layers - 1))
        self.norm = RMSNorm(D, shape.norm_eps)
        self.lm_head = OutputHead(D, shape.vocab_size, draft_vocab)
        self.rope = Rope(shape.rope, shape.head_dim, shape.max_positions)

    def begin(self, roots: Roots, memory: Memory, sees: Sees, ask: Tensor | None = None) -> Draft:
        """Fuse the tapped states to a feature and read it beside the chosen token."""
        feature = self._feature([roots.states[tap] for tap in self.taps])
        return self._read(roots.chosen_BT, feature, roots.positions_BT, memory, self._near(sees, 1)).at(ask)

    def step(self, depth: int, tokens_BN: Tensor, parent: Draft, positions_BN: Tensor, memory: Memory, sees: Sees) -> Draft:
        """Read the drafted token beside the drafter's own feature of the parent."""
        return self._read(tokens_BN, parent.state, positions_BN, memory, self._near(sees, depth))

    def _near(self, sees: Sees, depth: int) -> Sees:
        """The rule with the window."""
        return sees if self.window is None else WindowSees(sees, self.window - (depth - 1) * self.window_slides)

    def _feature(self, states: Sequence[Tensor]) -> Tensor:
        if self.fc_norm is not None:
            states = [norm(s) for norm, s in zip(self.fc_norm, states, strict=True)]
        side_by_side = torch.cat(list(states), dim=-1)
        return self.fc(side_by_side if self.input_norm is None else self.input_norm(side_by_side))

    def _embed(self, tokens: Tensor) -> Tensor:
        return self.ends.embed(tokens)

    def _read(self, tokens_BN: Tensor, feature: Tensor, positions_BN: Tensor, memory: Memory, sees: Sees) -> Draft:
        return self._through(self._embed(tokens_BN).to(feature.dtype), feature, positions_BN, memory, sees)

    def _through(self, token: Tensor, feature: Tensor, positions_BN: Tensor, memory: Memory, sees: Sees) -> Draft:
        """``token`` and ``feature``, [B, N, D] each, through all layers: the draft and the state for the next depth."""
        cos_sin = self.rope(positions_BN)
        x = self.midlayer(token, feature, cos_sin, memory, 0, sees)
        for i, layer in enumerate(self.layers, start=1):
            x = layer(x, cos_sin, memory, i, sees)
        hidden = self.norm(x)
        return Draft(hidden, hidden if self.norm_output else x)
