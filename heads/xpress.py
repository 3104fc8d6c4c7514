"""XPress (2026, as vLLM 0.33 and speculators 0.9 have it): DFlash followed by a refiner, which knows the earlier guesses.

The refiner works with r numbers per slot. For slot k, with h_k its state after the last norm and m the mean of all h of the block
(including the anchor's slot),

    a_k = W [H h_k; M m; E[prev_k]]          prev_k: the token at the position before, x[a] for slot 1
    u_k = a_k + sum_{j<=k} L[:, k, j] * a_j   a number for each channel and pair of slots: the mixer, causal
    logits_k += W_out (u_k + MLP(u_k))

The anchor's slot 0 is mixed in as well. Its prev would be x[a-1], which speculators uses in training; vLLM takes x[a] instead, and so do
we. W_out and L are zero at the start.

Engines guess all slots at once and refine them in passes, each with the guesses of the pass before. Every pass settles one more slot at
least, so after as many passes as slots their guesses are those of this drafter, which goes from left to right. It is trained with the true
tokens before each slot. speculators also trains single passes over guesses that are not settled yet (weight 0.3), which is left out here.

Shape suffixes: B batch, A asked roots, S slots, N nodes, D hidden.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headstart.heads.base import Draft, TargetShape
from headstart.heads.dflash import Dflash
from headstart.heads.errors import UserError
from headstart.heads.layers import MLP
from headstart.heads.unembedding import Unembedding


class Xpress(Dflash, without=("draft_vocab",)):
    """``rank``: the refiner's numbers per slot (r). ``mlp_hidden``: width of its MLP. The state of a draft: the slots, then a_k of every
    slot, to which the part of E[prev_k] is added once prev_k is known. With ``mask_token``, raises UserError for sizes that the kernels of
    engines do not support.
    """

    def __init__(self, shape: TargetShape, *, block: int = 16, rank: int = 256, mlp_hidden: int = 512, **more: Any) -> None:
        super().__init__(shape, block=block, **more)
        if self.mask_token is not None and (rank < 16 or rank & (rank - 1)):
            raise UserError(f"head.rank={rank}: engines take powers of two from 16 on, with head.mask_token")
        if self.mask_token is not None and mlp_hidden % 64:
            raise UserError(f"head.mlp_hidden={mlp_hidden}: engines take multiples of 64, with head.mask_token")
        D, self.rank = shape.hidden_size, rank
        self.token_latent = nn.Embedding(shape.vocab_size, rank)
        nn.init.normal_(self.token_latent.weight, std=0.02)
        self.slot_latent = nn.Linear(D, rank, bias=False)
        self.mean_latent = nn.Linear(D, rank, bias=False)
        self.fuse = nn.Linear(3 * rank, rank, bias=False)
        self.mixer = nn.Parameter(torch.zeros(rank, block, block))  # above the diagonal it is never read
        self.mlp = MLP(rank, mlp_hidden)
        self.readout = nn.Parameter(torch.zeros(shape.vocab_size, rank))

    def _state(self, slots_BASD: Tensor) -> Tensor:
        mean_BASR = self.mean_latent(slots_BASD.mean(2, keepdim=True)).expand(-1, -1, self.block, -1)
        known = torch.cat([self.slot_latent(slots_BASD), mean_BASR], dim=-1)
        return torch.cat([super()._state(slots_BASD), self.fuse(F.pad(known, (0, self.rank))).flatten(2)], dim=-1)

    def _first(self, state: Tensor, tokens_BA: Tensor) -> Draft:
        return self._after(1, tokens_BA, self._read(0, tokens_BA, state))

    def _after(self, depth: int, tokens_BN: Tensor, state: Tensor) -> Draft:
        slot, state = self.slot(depth, state), self._read(depth, tokens_BN, state)
        latents_BNSR = state[..., self._start(0) : self._start(depth + 1)].unflatten(-1, (depth + 1, self.rank))
        weights_SR = self.mixer[:, depth, : depth + 1].T.to(state.dtype)
        u = latents_BNSR[..., depth, :] + (weights_SR * latents_BNSR).sum(-2, dtype=state.dtype)
        return Draft(torch.cat([slot, self.mlp(u, u)], dim=-1), state)

    def _read(self, slot: int, tokens_BN: Tensor, state: Tensor) -> Tensor:
        """The state after the part of E[prev] has been added to the a of ``slot``. ``tokens_BN``: prev, the tokens before the slot."""
        part = self.fuse(F.pad(self.token_latent(tokens_BN), (2 * self.rank, 0)))
        before, own, behind = state.tensor_split([self._start(slot), self._start(slot + 1)], dim=-1)
        return torch.cat([before, own + part, behind], dim=-1)

    def _start(self, slot: int) -> int:
        """The index in the state at which the a of ``slot`` starts."""
        return (self.block - self.first_slot) * self.shape.hidden_size + slot * self.rank

    def unembedding(self, depth: int) -> Unembedding:
        """The target's own head, and the refiner's matrix W_out."""
        return Unembedding(self.ends.head_VD, correction_VR=self.readout)
