"""MLP speculator (Wertheimer et al., 2404.19124): a recurrent MLP with embeddings and output heads of its own.

state_0 = h_t, state_k = GELU(LN_k(a P_k state_{k-1} + b E_k[x[t+k]])), logits H_k state_k (section 3), with n heads of width W,
a = 0.5^(0.5 / n) and b = sqrt((1 - a^2) W / 2): as a^(2 n) = 1/2, h_t accounts for half of the last state's squared magnitude. LN divides
by the root mean square, then scales and shifts. As in engines, LN reads P state + (b / a) E, which differs only by the epsilon of 1e-6.
``tie_weights``: one E, H and LN for all depths, and one P after the first. ``scale_input``: h_t is first divided by its root mean square
and by sqrt(2).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headstart.heads.base import Draft, Drafter, Roots, TargetEnds, TargetShape, rows_of
from headstart.heads.errors import UserError
from headstart.heads.layers import RMSNorm
from headstart.heads.medusa import of_depth
from headstart.heads.memory import Memory
from headstart.heads.unembedding import Unembedding
from headstart.heads.visibility import Sees
from headstart.heads.vocab import OutputHead

EPS = 1e-6  # the constant of all engines, whatever the target's epsilon


class Norm(RMSNorm):
    """An RMSNorm with a shift."""

    def __init__(self, size: int) -> None:
        super().__init__(size, EPS)
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize over the last dimension, scale and shift."""
        return super().forward(x) + self.bias.to(x.dtype)


class MlpSpeculator(Drafter):
    """``guesses``: number of depths; ``inner_dim``: W, by default the target's hidden size; ``draft_vocab``: target ids that its heads can
    guess. Raises UserError for tied weights with a single head.
    """

    format = "mlp_speculator"

    def __init__(
        self,
        shape: TargetShape,
        *,
        guesses: int = 5,
        inner_dim: int | None = None,
        tie_weights: bool = True,
        scale_input: bool = False,
        draft_vocab: list[int] | None = None,
    ) -> None:
        super().__init__(shape)
        if tie_weights and guesses == 1:
            raise UserError("head.tie_weights=true needs head.guesses of at least 2: with one head there is nothing to tie")
        D, V, W = shape.hidden_size, shape.vocab_size, inner_dim or shape.hidden_size
        own = 1 if tie_weights else guesses
        self.taps = (shape.layers,)
        self.max_depth = guesses
        self.scale_input = scale_input
        a = 0.5 ** (0.5 / guesses)
        self.token_weight = math.sqrt((1 - a**2) * W / 2) / a
        self.emb = nn.ModuleList(nn.Embedding(V, W) for _ in range(own))
        self.proj = nn.ModuleList(nn.Linear(W if i else D, W, bias=False) for i in range(2 if tie_weights else guesses))
        self.head = nn.ModuleList(OutputHead(W, V, draft_vocab) for _ in range(own))
        self.ln = nn.ModuleList(Norm(W) for _ in range(own))
        if of_depth(self, self.head, 1).ids is not None:
            self.format = "native"  # the engines' format has no trimmed vocabulary
        for module in [*self.emb, *self.proj, *self.head]:  # the authors' initialization, which b assumes
            nn.init.normal_(module.get_parameter("weight"), std=W**-0.5)

    def start_from(self, ends: TargetEnds) -> None:
        """If W is the target's hidden size: copy its embedding (rescaled to the magnitude of a fresh one) and output head, and make P_1 the
        identity.
        """
        W = of_depth(self, self.ln, 1).normalized_shape[0]
        if self.shape.hidden_size != W:
            return
        super().start_from(ends)
        embed_VW = ends.embed(torch.arange(self.shape.vocab_size, device=ends.head_VD.device)).float()
        embed_VW = embed_VW * (W**-0.5 / embed_VW.pow(2).mean().sqrt())
        nn.init.eye_(of_depth(self, self.proj, 1).weight)
        for module in self.emb:
            module.get_parameter("weight").data.copy_(embed_VW)

    def begin(self, roots: Roots, memory: Memory, sees: Sees, ask: Tensor | None = None) -> Draft:
        """State 1, from the target's final state and the chosen token."""
        h, tokens_BN = rows_of(roots.states[self.taps[0]], ask), rows_of(roots.chosen_BT, ask)
        if self.scale_input:
            h = F.rms_norm(h, h.shape[-1:], eps=EPS) / math.sqrt(2)
        return self._guess(1, h, tokens_BN)

    def step(self, depth: int, tokens_BN: Tensor, parent: Draft, positions_BN: Tensor, memory: Memory, sees: Sees) -> Draft:
        """The next state, from the parent's state and the drafted token."""
        return self._guess(depth, parent.state, tokens_BN)

    def _guess(self, depth: int, state: Tensor, tokens_BN: Tensor) -> Draft:
        token = of_depth(self, self.emb, depth)(tokens_BN).to(state.dtype)
        mixed = of_depth(self, self.proj, depth)(state) + self.token_weight * token
        state = F.gelu(of_depth(self, self.ln, depth)(mixed)).to(state.dtype)
        return Draft(state, state)

    def unembedding(self, depth: int) -> Unembedding:
        """The output head of this depth."""
        return of_depth(self, self.head, depth).unembedding()
