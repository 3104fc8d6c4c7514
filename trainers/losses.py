"""Losses of a drafter, computed from its vectors in chunks: no [tokens, vocabulary] tensor of the whole batch exists.

The teacher at position p judges the guess of depth d of root p - d, for all depths at once. So positions go through
in chunks; a chunk's teacher logits are computed once, its drafts of all depths meet the unembedding as one product,
and what is kept of the logits is their gradient times the two factors of that product. Logits and softmax are fp32.

Shape suffixes: B batch, T positions, K depths, H drafter hidden, D target hidden, C positions of a chunk, R draft
rows of a chunk, V vocabulary of the drafter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from heads.base import TargetEnds, Unembedding
from heads.errors import UserError


@dataclass
class Teacher:
    """What the target says at C positions about the drafter's tokens. Never renormalised: a trimmed p sums to less than 1."""

    p_CV: Tensor
    log_p_CV: Tensor  # finite, so that 0 log 0 is 0
    best_C: Tensor  # the drafter's row for the target's most likely token, -1 where it has none
    data_C: Tensor  # the drafter's row for the token of the data, -1 where it has none

    @classmethod
    def of(cls, log_p_CV: Tensor, data_C: Tensor, ids_V: Tensor | None) -> Teacher:
        """From log-probabilities over the target's whole vocabulary, and target token ids."""
        best_C = log_p_CV.argmax(-1)
        if ids_V is not None:
            row_V = torch.full_like(log_p_CV[0], -1, dtype=torch.int64)  # of every target token
            row_V[ids_V] = torch.arange(len(ids_V), device=ids_V.device)
            log_p_CV, best_C, data_C = log_p_CV[:, ids_V], row_V[best_C], row_V[data_C]
        return cls(log_p_CV.exp(), log_p_CV.clamp(min=torch.finfo(log_p_CV.dtype).min), best_C, data_C)

    def at(self, rows_R: Tensor) -> Teacher:
        return Teacher(self.p_CV[rows_R], self.log_p_CV[rows_R], self.best_C[rows_R], self.data_C[rows_R])


def kl(log_q_RV: Tensor, teacher: Teacher) -> Tensor:
    """sum p (log p - log q)."""
    # two dot products, not the sum of products: half the passes over [R, V], a fifth of a step on a CPU
    return torch.linalg.vecdot(teacher.p_CV, teacher.log_p_CV) - torch.linalg.vecdot(teacher.p_CV, log_q_RV)


def reverse_kl(log_q_RV: Tensor, teacher: Teacher) -> Tensor:
    """sum q (log q - log p)."""
    return (log_q_RV.exp() * (log_q_RV - teacher.log_p_CV)).sum(-1)


def _nll(log_q_RV: Tensor, rows_R: Tensor) -> Tensor:
    return -log_q_RV.gather(-1, rows_R.clamp(min=0)[:, None])[:, 0] * (rows_R >= 0)


def ce(log_q_RV: Tensor, teacher: Teacher) -> Tensor:
    """-log q of the target's most likely token; 0 where the drafter does not have it."""
    return _nll(log_q_RV, teacher.best_C)


def data_ce(log_q_RV: Tensor, teacher: Teacher) -> Tensor:
    """-log q of the token of the data; 0 where the drafter does not have it."""
    return _nll(log_q_RV, teacher.data_C)


def overlap(log_q_RV: Tensor, teacher: Teacher) -> Tensor:
    """alpha = sum min(p, q): the probability that a sampled guess is accepted (2211.17192, theorem 3.5)."""
    return torch.minimum(log_q_RV.exp(), teacher.p_CV).sum(-1)


def tv(log_q_RV: Tensor, teacher: Teacher) -> Tensor:
    """Total variation over the target's vocabulary, 1 - alpha (q is 0 on tokens the drafter does not have)."""
    return 1 - overlap(log_q_RV, teacher)


def lk_alpha(log_q_RV: Tensor, teacher: Teacher) -> Tensor:
    """-log alpha (LK, 2602.23881). The bound only keeps the logarithm finite: the gradient is at most of order 1."""
    return -overlap(log_q_RV, teacher).clamp(min=1e-12).log()


def lk_hybrid(log_q_RV: Tensor, teacher: Teacher) -> Tensor:
    """l KL + (1 - l) TV with l = exp(-3 alpha) of this row, held constant (2602.23881)."""
    alpha_R = overlap(log_q_RV, teacher)
    l_R = torch.exp(-3 * alpha_R.detach())
    return l_R * kl(log_q_RV, teacher) + (1 - l_R) * (1 - alpha_R)


Loss = Callable[[Tensor, Teacher], Tensor]  # per row, not reduced
LOSSES: dict[str, Loss] = {f.__name__: f for f in (kl, reverse_kl, ce, data_ce, tv, lk_alpha, lk_hybrid)}


@dataclass
class LossOut:
    """Sums over supervised (root, depth) pairs, undivided. Only ``loss_sum`` has a gradient.

    A target token outside a trimmed draft vocabulary is a rejection.
    """

    loss_sum: Tensor  # weighted by decay^(depth-1)
    weight_sum: Tensor  # sum of these weights: divide by it, summed over whatever is accumulated
    match_KBT: Tensor  # bool: root t's most likely guess of depth k+1 is the target's; False where unsupervised
    count_K: Tensor  # supervised roots per depth
    alpha_sum_K: Tensor  # sum of acceptance probabilities (temperature 1) per depth


def fused_loss(
    hidden: list[Tensor],
    unembeddings: list[Unembedding],
    final_BTD: Tensor,
    ends: TargetEnds,
    tokens_BT: Tensor,
    supervised: list[Tensor],
    terms: dict[str, float],
    decay: float,
    chunk: int,
    figures: bool = True,
) -> LossOut:
    """Weighted sum of ``terms`` (names of ``LOSSES``) over depths 1..K; one entry per depth in each list.

    ``hidden`` [B, T, H] are the drafts of every root, ``supervised`` [B, T] the roots that count. At most ``chunk``
    rows of draft logits exist at a time (K at least). Gradients are computed on the way and kept until ``backward``,
    which can run once; weights that do not require one (the target's head) get none. ``figures=False`` leaves out what is
    only looked at (matches, acceptance), a tenth of a step. Raises UserError for an unknown term.
    """
    for name in terms:
        if name not in LOSSES:
            raise UserError(f"loss.terms has no {name!r}: there are {', '.join(sorted(LOSSES))}")
    sums = _Sums(hidden, unembeddings, supervised, terms, decay, figures)
    with torch.no_grad(), torch.autocast(final_BTD.device.type, enabled=False):
        ends = replace(ends, head_VD=ends.head_VD.to(final_BTD.dtype))  # once, not in every chunk
        # x[p+1], what the data say where the teacher at p speaks
        data_P = F.pad(tokens_BT[:, 1:], (0, 1)).flatten()
        for positions_C in sums.positions(max(1, chunk // len(hidden))):
            log_p_CV = F.log_softmax(_wide(ends.logits(final_BTD.flatten(0, 1)[positions_C])), dim=-1)
            sums.judge(positions_C, log_p_CV, data_P[positions_C])
    return sums.out()


def feature_loss(states: list[Tensor], final_BTD: Tensor, supervised: list[Tensor], decay: float) -> Tensor:
    """SmoothL1 between the draft's state at (root t, depth d) and the target's final state at t + d (2401.15077, section 4.1).

    Mean over D, sum over supervised rows weighted by decay^(d-1).
    """
    total = final_BTD.new_zeros((), dtype=_wide(final_BTD).dtype)
    for d, (state_BTD, mask_BT) in enumerate(zip(states, supervised, strict=True), start=1):
        b, t = mask_BT.nonzero(as_tuple=True)
        errors_RD = F.smooth_l1_loss(_wide(state_BTD[b, t]), _wide(final_BTD[b, t + d]), reduction="none")
        total = total + decay ** (d - 1) * errors_RD.mean(-1).sum()
    return total


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


class _Sums:
    """What one call of ``fused_loss`` adds up: sums, and the gradients of its inputs."""

    def __init__(
        self,
        hidden: list[Tensor],
        unembeddings: list[Unembedding],
        supervised: list[Tensor],
        terms: dict[str, float],
        decay: float,
        figures: bool,
    ) -> None:
        self.hidden, self.terms, self.decay, self.figures = hidden, terms, decay, figures
        self.B, self.T = supervised[0].shape
        device = hidden[0].device
        self.dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else hidden[0].dtype
        # the roots of depth d, where their teacher is: at_KP[d-1, p] says that root p-d is supervised
        self.at_KP = torch.stack([F.pad(m, (d, 0))[:, : self.T] for d, m in enumerate(supervised, start=1)]).flatten(1)
        self.weights = list({id(u.weight_VH): u.weight_VH for u in unembeddings}.values())
        self.grad = bool(terms) and torch.is_grad_enabled() and any(x.requires_grad for x in [*hidden, *self.weights])
        self.cast = {id(w): w.detach().to(self.dtype) for w in self.weights}
        self.grads_BTH = [torch.zeros(h.shape, dtype=h.dtype, device=device) if self.grad and h.requires_grad else None for h in hidden]
        self.grads_VH = {id(w): torch.zeros_like(w, dtype=_wide(w).dtype) for w in self.weights if self.grad and w.requires_grad}
        # depths that share a matrix and a vocabulary are one product
        self.groups: dict[tuple[int, int], tuple[Unembedding, list[int]]] = {}
        for k, u in enumerate(unembeddings):
            self.groups.setdefault((id(u.weight_VH), id(u.ids_V)), (u, []))[1].append(k)
        self.loss = torch.zeros((), dtype=_wide(hidden[0]).dtype, device=device)
        self.match_KP = torch.zeros_like(self.at_KP)
        self.alpha_K = torch.zeros(len(hidden), dtype=self.loss.dtype, device=device)

    def positions(self, size: int) -> Iterator[Tensor]:
        """Chunks of the positions where some depth is judged."""
        yield from self.at_KP.any(0).nonzero()[:, 0].split(size)

    def judge(self, positions_C: Tensor, log_p_CV: Tensor, data_C: Tensor) -> None:
        vocabularies = {id(u.ids_V): u.ids_V for u, _ in self.groups.values()}
        teachers = {key: Teacher.of(log_p_CV, data_C, ids_V) for key, ids_V in vocabularies.items()}
        for unembedding, depths in self.groups.values():
            teacher = teachers[id(unembedding.ids_V)]
            judged = [self.at_KP[k, positions_C].nonzero()[:, 0] for k in depths]
            roots = [positions_C[rows] - (k + 1) for k, rows in zip(depths, judged, strict=True)]
            hidden_RH = torch.cat([self.hidden[k].flatten(0, 1)[r].to(self.dtype) for k, r in zip(depths, roots, strict=True)])
            logits_RV = _wide(hidden_RH @ self.cast[id(unembedding.weight_VH)].T)
            start = 0
            for k, rows, root in zip(depths, judged, roots, strict=True):
                logits_kV = logits_RV[start : start + len(rows)]
                said = teacher if len(rows) == len(positions_C) else teacher.at(rows)
                if self.figures:
                    self.match_KP[k, root] = logits_kV.argmax(-1) == said.best_C
                self._loss(k, logits_kV, said)
                start += len(rows)
            if self.grad:  # logits_RV are their gradient now
                self._products(unembedding.weight_VH, depths, roots, hidden_RH, logits_RV.to(self.dtype))

    def _loss(self, k: int, logits_RV: Tensor, said: Teacher) -> None:
        """Adds up depth k+1; puts the gradient in the place of the logits."""
        leaf_RV = logits_RV.detach().requires_grad_(self.grad)
        with torch.set_grad_enabled(self.grad):
            log_q_RV = F.log_softmax(leaf_RV, dim=-1)
            zero = leaf_RV.new_zeros(())
            loss = self.decay**k * sum((weight * LOSSES[name](log_q_RV, said).sum() for name, weight in self.terms.items()), zero)
        self.loss += loss.detach()
        if self.figures:
            self.alpha_K[k] += overlap(log_q_RV.detach(), said).sum()
        if self.grad:
            logits_RV.copy_(torch.autograd.grad(loss, leaf_RV)[0])

    def _products(self, weight: Tensor, depths: list[int], roots: list[Tensor], hidden_RH: Tensor, grad_RV: Tensor) -> None:
        """From the gradient of the logits to those of their two factors."""
        grad_VH = self.grads_VH.get(id(weight))
        if grad_VH is not None and grad_VH.dtype == self.dtype:
            grad_VH.addmm_(grad_RV.T, hidden_RH)
        elif grad_VH is not None:
            grad_VH += grad_RV.T @ hidden_RH
        if any(self.grads_BTH[k] is not None for k in depths):
            parts = (grad_RV @ self.cast[id(weight)]).split([len(root) for root in roots])
            for k, root, part in zip(depths, roots, parts, strict=True):
                grad_BTH = self.grads_BTH[k]
                if grad_BTH is not None:
                    grad_BTH.flatten(0, 1)[root] = part.to(grad_BTH.dtype)

    def out(self) -> LossOut:
        count_K = self.at_KP.sum(1)
        weight_K = self.decay ** torch.arange(len(self.hidden), device=count_K.device)
        loss = self.loss
        if self.grad:
            inputs = [*self.hidden, *self.weights]
            grads = [*self.grads_BTH, *(g if (g := self.grads_VH.get(id(w))) is None else g.to(w.dtype) for w in self.weights)]
            loss = _Known.apply(loss, grads, *inputs)
        return LossOut(loss, (weight_K * count_K).sum(), self.match_KP.view(-1, self.B, self.T), count_K, self.alpha_K)


class _Known(torch.autograd.Function):
    """A number whose gradients are known already. They are scaled in place and handed over: no second copy of a head."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, grads: list[Tensor | None], *inputs: Tensor) -> Tensor:
        ctx.grads = grads
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.grads is None:
            raise RuntimeError("backward ran twice through fused_loss: its gradients were handed over the first time")
        grads, ctx.grads = ctx.grads, None
        return None, None, *(g if g is None else g.mul_(grad) for g in grads)
