"""P-EAGLE (2602.01469): EAGLE-3's module that guesses all depths in one pass.

Depth 1 of root t is EAGLE's own: a row that reads x[t+1] and the tapped states, and that stays in memory. Depths 2..K are rows without a
known token or state. Instead they read a learned token vector (or the embedding of ``mask_token``: only then vLLM loads the folder) and
learned states (before ``fc``), at positions t+1..t+K-1. They see the rows of the roots up to t and the earlier rows of their own root, and
are forgotten afterwards. ``step`` reads the row of its depth. A window (``window``) is counted from each row, here also in the speculators
library.

The paper trains depth 1 at every position, and each further depth at a smaller random share of the positions (section 3). Here too, depth 1
is trained at every position, because its rows are computed anyway. The deeper depths are trained together, at roots that are drawn at
random (``anchors``): chains stay whole, so what is trained is what is decoded.

Shape suffixes: B batch, T roots, A asked roots, N nodes, D hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from headstart.heads.base import Draft, Roots, TargetEnds, TargetShape
from headstart.heads.dflash import asked, check_mask_token, mask_of, read_row
from headstart.heads.eagle import Eagle
from headstart.heads.errors import UserError
from headstart.heads.memory import Beside, Memory
from headstart.heads.visibility import BlockSees, Sees, blocks_of


class Peagle(Eagle, without=("norm_output", "window_slides")):
    """``depth``: guesses per root. ``mask_token``: the token whose embedding is the mask; None: a learned vector. ``own_embedding``: it
    trains a token embedding of its own, which starts as the target's. ``anchors``: roots that a training step draws from each batch row.
    Raises UserError for settings that do not fit the target or, with ``mask_token``, the engines.
    """

    format = "native"
    only_trained = ("anchors",)
    first_everywhere = True

    def __init__(
        self, shape: TargetShape, *, layers: int = 4, depth: int = 8, mask_token: int | None = None, own_embedding: bool = False,
        anchors: int = 64, **more: Any,
    ) -> None:  # fmt: skip
        super().__init__(shape, layers=layers, norm_output=False, **more)
        if self.window is not None and self.window < depth:
            raise UserError(f"head.window={self.window} must be at least head.depth={depth}: the rows of a root lie within it")
        if mask_token is not None:
            self.format = "peagle"
            check_mask_token(mask_token, shape)
            if self.taps[-1] == shape.layers:
                raise UserError(f"head.taps {self.taps}: with head.mask_token they end before layer {shape.layers}, which engines read "
                                "without its norm")  # fmt: skip
        self.mask_token, self.anchors, self.max_depth = mask_token, anchors, depth
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, len(self.taps) * shape.hidden_size))  # replaces the tapped states, side by side
        self.mask_embedding = nn.Parameter(torch.randn(shape.hidden_size) * 0.02) if mask_token is None else None
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size) if own_embedding else None

    def start_from(self, ends: TargetEnds) -> None:
        super().start_from(ends)
        if self.embed_tokens is not None:
            with torch.no_grad():
                self.embed_tokens.weight.copy_(ends.embed(torch.arange(self.shape.vocab_size, device=ends.head_VD.device)))

    def _embed(self, tokens: Tensor) -> Tensor:
        return super()._embed(tokens) if self.embed_tokens is None else self.embed_tokens(tokens)

    def begin(self, roots: Roots, memory: Memory, sees: Sees, ask: Tensor | None = None) -> Draft:
        """Depth 1 as in EAGLE. Then one pass for the rows of all deeper depths of the asked roots, some roots at a time."""
        rows, ask_BA = Beside(memory), asked(ask, roots)
        feature = self._feature([roots.states[tap] for tap in self.taps])
        everywhere = self._read(roots.chosen_BT, feature, roots.positions_BT, rows, self._near(sees, 1))
        first = everywhere.at(ask_BA).hidden_BNH
        depths = torch.arange(1, self.max_depth or 1, device=ask_BA.device)  # depths 2..K less one: offsets to the root's position
        if not len(depths):
            return Draft(first, first, first_BTH=everywhere.hidden_BNH)
        positions_BA = roots.positions_BT.gather(1, ask_BA)
        unknown = self._feature(self.mask_hidden[0, 0].chunk(len(self.taps)))  # in the place of a future root's tapped states
        state = []
        for ask_Ba, positions_Ba in zip(blocks_of(ask_BA), blocks_of(positions_BA), strict=True):
            positions_BN = (positions_Ba[..., None] + depths).flatten(1)
            token, hidden = (x.to(feature.dtype).expand(*positions_BN.shape, -1) for x in (mask_of(self, self._embed), unknown))
            own = BlockSees(sees, ask_Ba, len(depths), causal=True, window=self.window)
            block = self._through(token, hidden, positions_BN, rows, own)
            state.append(block.hidden_BNH.unflatten(1, (-1, len(depths))).flatten(2))
        return Draft(first, torch.cat([first, torch.cat(state, dim=1)], dim=-1), first_BTH=everywhere.hidden_BNH)

    step = read_row
