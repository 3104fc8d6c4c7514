"""LiLiCorr (2608.20530): DFlash, followed by a light head that makes the guesses of a block agree with each other.

For each slot that guesses, DFlash's likeliest tokens are its candidates. All candidates of a block together are the *lattice*. Candidate c
of slot s starts as

    P e_c + Q h_s + MLP(norm(f)) + slot_s + rank_c

with its embedding e in the target, the slot h after the last norm, and five features f: log p, p, log p minus that of the likeliest
candidate, its rank from 0 to 1, and whether it is the likeliest. p is DFlash's probability among all tokens. A few transformer layers let
all candidates attend to each other, with a learned bias for the distance of two slots and for the same slot. Of the block's root they get
r = norm(W z), where z is what DFlash's layers read of it. From each candidate's result y, [y; r; y * r] makes two vectors of length 1,
``out`` and ``in``; r alone makes an ``out``. A guess is scored by ``logit_scale`` times a cosine, and by nothing else:

    depth 1: of the root's out and the candidate's in;     depth d: of the out of the candidate before it and its own in

Only candidates can be guessed. ``begin`` computes the scores of all pairs; ``step`` reads the row of the token before. In training the true
token before may be no candidate, so that it has no row: then the mean of all rows is read, and the loss leaves out the scores of this guess
and of all behind it.

Shape suffixes: B batch, A asked roots, N blocks (B * A) or nodes, S slots that guess, C candidates, L = S * C, D hidden, W head width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from headstart.heads.base import Draft, Roots, TargetShape, rows_of
from headstart.heads.dflash import Dflash, asked
from headstart.heads.dflash2 import ConvLayer, check_conv
from headstart.heads.errors import UserError
from headstart.heads.layers import RMSNorm
from headstart.heads.memory import Memory
from headstart.heads.prepack import product
from headstart.heads.unembedding import DIGITS, Unembedding, in_digits, of_digits
from headstart.heads.visibility import Sees

FEATURES = 5  # numbers that a candidate starts with, beside its embedding and its slot
AT_ONCE = 512  # slots that are scored at the same time
WIDEST = 1024  # width of the head where none is asked for, as in the published drafters
INITIAL = 0.02  # deviation of the head's matrices


class TwoLayers(nn.Module):
    """An MLP with SiLU and biases."""

    def __init__(self, inputs: int, inner: int, outputs: int) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(inputs, inner), nn.Linear(inner, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """[.., inputs] to [.., outputs]."""
        return self.down_proj(F.silu(self.up_proj(x)))


class LatticeAttention(nn.Module):
    """Attention in which every row sees every row, with the tensors of torch's MultiheadAttention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.in_proj_weight = nn.Parameter(nn.init.xavier_uniform_(torch.empty(3 * width, width)))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * width))
        self.out_proj = nn.Linear(width, width)

    def forward(self, x_NLW: Tensor, bias_HLL: Tensor) -> Tensor:
        """``bias_HLL`` is added to the attention scores of each head."""
        joined = F.linear(x_NLW, self.in_proj_weight, self.in_proj_bias)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in joined.chunk(3, dim=-1))
        said = F.scaled_dot_product_attention(q, k, v, attn_mask=bias_HLL.to(q.dtype)[None])
        return self.out_proj(said.transpose(1, 2).flatten(2))


class LatticeLayer(nn.Module):
    """A transformer layer over the lattice."""

    def __init__(self, width: int, heads: int, inner: int, eps: float) -> None:
        super().__init__()
        self.attn_norm, self.attn = RMSNorm(width, eps), LatticeAttention(width, heads)
        self.mlp_norm, self.mlp = RMSNorm(width, eps), TwoLayers(width, inner, width)

    def forward(self, x_NLW: Tensor, bias_HLL: Tensor) -> Tensor:
        """``x_NLW`` plus its attention, plus the MLP of that sum."""
        x_NLW = x_NLW + self.attn(self.attn_norm(x_NLW), bias_HLL)
        return x_NLW + self.mlp(self.mlp_norm(x_NLW))


class Correlator(nn.Module):
    """The head: scores of a lattice. Its tensors have the engines' names and shapes."""

    scales = ("slot_embedding", "rank_embedding", "relative_slot_bias", "same_slot_bias")  # vectors for the optimizer, not matrices

    def __init__(
        self, hidden_size: int, slots: int, candidates: int, width: int, factors: int, layers: int, heads: int, mlp: float, eps: float
    ) -> None:
        super().__init__()
        self.slots, self.candidates = slots, candidates
        self.token_proj = nn.Linear(hidden_size, width) if width != hidden_size else nn.Identity()
        self.pass_hidden_proj, self.context_proj = nn.Linear(hidden_size, width), nn.Linear(hidden_size, width)
        self.feature_norm, self.feature_mlp = nn.LayerNorm(FEATURES), TwoLayers(FEATURES, width, width)
        self.slot_embedding = nn.Parameter(torch.zeros(1, 1, slots, 1, width))
        self.rank_embedding = nn.Parameter(torch.zeros(1, 1, 1, candidates, width))
        self.relative_slot_bias = nn.Parameter(torch.zeros(heads, 2 * slots + 1))  # distances of slots, from -slots to slots
        self.same_slot_bias = nn.Parameter(torch.zeros(heads))
        self.layers = nn.ModuleList(LatticeLayer(width, heads, int(width * mlp), eps) for _ in range(layers))
        self.output_norm, self.anchor_norm = RMSNorm(width, eps), RMSNorm(width, eps)
        self.factor_input_proj = nn.Linear(3 * width, width)
        self.out_head, self.in_head, self.anchor_out_head = (nn.Linear(width, factors) for _ in range(3))
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=INITIAL)
                nn.init.zeros_(module.bias)

    def forward(self, embeds_NSCD: Tensor, log_p_NSC: Tensor, slots_NSD: Tensor, z_ND: Tensor, least: float) -> tuple[Tensor, Tensor]:
        """Cosines: those of the first guess [N, C], and of all pairs of neighbours [N, S - 1, C, C]. ``least``: the smallest length by
        which a vector is divided.
        """
        x_NSCW = self.token_proj(embeds_NSCD) + self.pass_hidden_proj(slots_NSD)[:, :, None]
        x_NSCW = x_NSCW + self.feature_mlp(self.feature_norm(self._features(log_p_NSC).to(slots_NSD.dtype)))
        x_NSCW = x_NSCW + (self.slot_embedding + self.rank_embedding)[0].to(x_NSCW.dtype)
        x_NLW, bias_HLL = x_NSCW.flatten(1, 2), self._bias()
        for layer in self.layers:
            x_NLW = layer(x_NLW, bias_HLL)
        y_NSCW = self.output_norm(x_NLW).unflatten(1, log_p_NSC.shape[1:])
        root_NW = self.anchor_norm(self.context_proj(z_ND))
        root_NSCW = root_NW[:, None, None].expand_as(y_NSCW)
        joint_NSCW = F.silu(self.factor_input_proj(torch.cat([y_NSCW, root_NSCW, y_NSCW * root_NSCW], dim=-1)))
        out, into = (F.normalize(head(joint_NSCW), dim=-1, eps=least) for head in (self.out_head, self.in_head))
        first = F.normalize(self.anchor_out_head(root_NW), dim=-1, eps=least)
        return (first[:, None] * into[:, 0]).sum(-1), out[:, :-1] @ into[:, 1:].mT

    def _features(self, log_p_NSC: Tensor) -> Tensor:
        rank_C = torch.arange(self.candidates, device=log_p_NSC.device, dtype=log_p_NSC.dtype)
        ranks = [rank_C / max(self.candidates - 1, 1), (rank_C == 0).to(rank_C.dtype)]
        soft = [log_p_NSC, log_p_NSC.exp(), log_p_NSC - log_p_NSC[..., :1]]
        return torch.stack([*soft, *(x.expand_as(log_p_NSC) for x in ranks)], dim=-1)

    def _bias(self) -> Tensor:
        """[heads, L, L]."""
        slot_L = torch.arange(self.slots, device=self.same_slot_bias.device).repeat_interleave(self.candidates)
        far_LL = slot_L[:, None] - slot_L
        return self.relative_slot_bias[:, far_LL + self.slots] + self.same_slot_bias[:, None, None] * (far_LL == 0)


class Lilicorr(Dflash, without=("draft_vocab",)):
    """``candidates``: of each slot. Of the head: ``width`` (None: 1024, or the target's hidden size if that is less); ``factors``: the
    length of the compared vectors (None: ``width``); ``lattice_layers``, ``lattice_heads`` and ``lattice_mlp`` (width of the MLP divided by
    ``width``) of its layers; ``logit_scale``, ``vector_eps``: see the module's docstring and ``Correlator.forward``. ``conv_taps``,
    ``conv_group``: DFlash 2's convolutions in the layers of the backbone; None: none. Raises UserError for sizes that do not fit together
    or, with ``mask_token``, the engines.
    """

    def __init__(
        self,
        shape: TargetShape,
        *,
        block: int = 16,
        candidates: int = 8,
        width: int | None = None,
        factors: int | None = None,
        lattice_layers: int = 2,
        lattice_heads: int = 8,
        lattice_mlp: float = 2.0,
        logit_scale: float = 8.0,
        vector_eps: float = 1e-4,
        conv_taps: int | None = None,
        conv_group: int | None = None,
        **more: Any,
    ) -> None:
        D = shape.hidden_size
        width = width or min(WIDEST, D)
        factors = factors or width
        if not 1 <= candidates <= shape.vocab_size:
            raise UserError(f"head.candidates must be from 1 to the target's {shape.vocab_size} tokens, found {candidates}")
        if width % lattice_heads:
            raise UserError(f"head.width={width} must be a multiple of head.lattice_heads={lattice_heads}")
        if lattice_mlp * width < 1 or logit_scale <= 0 or not 0 < vector_eps < 0.5:
            raise UserError(f"head.lattice_mlp={lattice_mlp}, head.logit_scale={logit_scale} and head.vector_eps={vector_eps} must be "
                            "positive, vector_eps below 0.5, and the MLP at least one number wide")  # fmt: skip
        if (conv_taps is None) != (conv_group is None):
            raise UserError(f"head.conv_taps={conv_taps} and head.conv_group={conv_group}: set both or none")
        self._conv = None if conv_taps is None or conv_group is None else check_conv(D, block, conv_taps, conv_group)  # before _layer
        super().__init__(shape, block=block, **more)
        if self.mask_token is not None and (candidates > 16 or candidates & (candidates - 1)):
            raise UserError(f"head.candidates={candidates}: engines take 1, 2, 4, 8 or 16, with head.mask_token")
        self.candidates, self.width, self.factors = candidates, width, factors
        self.logit_scale, self.vector_eps = logit_scale, vector_eps
        sizes = candidates, width, factors, lattice_layers, lattice_heads, lattice_mlp, shape.norm_eps
        self.lilicorr = Correlator(D, block - self.first_slot, *sizes)

    def _layer(self, heads: int, kv_heads: int, width: int) -> nn.Module:
        sizes = heads, kv_heads, width
        return super()._layer(*sizes) if self._conv is None else ConvLayer(self.shape, *sizes, self._conv)

    def begin(self, roots: Roots, memory: Memory, sees: Sees, ask: Tensor | None = None) -> Draft:
        """DFlash's ``begin``, and the scores of every lattice, some blocks at a time. A draft's state: the slots, the candidates' ids, the
        scores of all pairs.
        """
        plain, ask_BA = super().begin(roots, memory, sees, ask), asked(ask, roots)
        z_BAD = self._joined([rows_of(roots.states[tap], ask_BA) for tap in self.taps])
        some, head_VD = max(1, AT_ONCE // (self.block - self.first_slot)), self.ends.head_VD.to(plain.state.dtype)
        parts = zip(plain.state.flatten(0, 1).split(some), z_BAD.flatten(0, 1).split(some), strict=True)
        hidden, state = zip(*(self._scored(*part, head_VD) for part in parts), strict=True)
        return Draft(*(torch.cat(rows).unflatten(0, ask_BA.shape) for rows in (hidden, state)))

    def _scored(self, slots_NX: Tensor, z_ND: Tensor, head_VD: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden and state of the drafts of depth 1. ``slots_NX``: the slots of a block, side by side."""
        slots_NSD = slots_NX.unflatten(-1, (self.block - self.first_slot, -1))
        # the logits are not kept, but computed again in the backward pass
        again = torch.is_grad_enabled() and slots_NSD.requires_grad
        listed = checkpoint(self._candidates, slots_NSD, head_VD, use_reentrant=False, preserve_rng_state=False) if again else None
        log_p_NSC, ids_NSC = listed or self._candidates(slots_NSD, head_VD)
        embeds_NSCD = self.ends.embed(ids_NSC).to(slots_NSD.dtype)
        cosines = self.lilicorr(embeds_NSCD, log_p_NSC, slots_NSD, z_ND, self.vector_eps)
        first_NC, pairs_NX = ((self.logit_scale * x).flatten(1).to(slots_NSD.dtype) for x in cosines)
        ids_NSX, known_N1 = in_digits(ids_NSC, slots_NSD.dtype), torch.ones_like(first_NC[:, :1])
        hidden, state = [slots_NSD[:, 0], ids_NSX[:, 0], known_N1, first_NC], [slots_NX, ids_NSX.flatten(1), pairs_NX]
        return torch.cat(hidden, dim=-1), torch.cat(state, dim=-1)

    def _candidates(self, slots_NSD: Tensor, head_VD: Tensor) -> tuple[Tensor, Tensor]:
        """The candidates of each slot, the likeliest first: (log probabilities, ids), [N, S, C] each."""
        logits_NSV = product(slots_NSD, head_VD)
        values_NSC, ids_NSC = logits_NSV.topk(self.candidates)
        wide = torch.promote_types(logits_NSV.dtype, torch.float32)
        return values_NSC.to(wide) - logits_NSV.to(wide).logsumexp(-1, keepdim=True), ids_NSC

    def step(self, depth: int, tokens_BN: Tensor, parent: Draft, positions_BN: Tensor, memory: Memory, sees: Sees) -> Draft:
        """The slot of this depth, its candidates, and their scores behind ``tokens_BN``."""
        slot, S, C = self.slot(depth, parent.state), self.block - self.first_slot, self.candidates
        _, ids, pairs = parent.state.split([S * slot.shape[-1], S * C * DIGITS, (S - 1) * C * C], dim=-1)
        before, own = (ids.unflatten(-1, (S, -1))[..., d - 1, :] for d in (depth - 1, depth))
        row_BNC = of_digits(before) == tokens_BN[..., None]
        found_BN1 = row_BNC.any(-1, keepdim=True)
        weight_BNC = torch.where(found_BN1, row_BNC.to(slot.dtype), 1 / C)
        scores = (pairs.unflatten(-1, (S - 1, C, C))[..., depth - 2, :, :] * weight_BNC[..., None]).sum(-2, dtype=slot.dtype)
        known = parent.hidden_BNH[..., -C - 1 : -C] * found_BN1
        return Draft(torch.cat([slot, own, known, scores], dim=-1), parent.state)

    def unembedding(self, depth: int) -> Unembedding:
        """The target's own head, for the backbone; a guess has its candidates' scores."""
        return Unembedding(self.ends.head_VD, candidates=self.candidates, listed=True)
