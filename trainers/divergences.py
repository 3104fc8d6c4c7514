"""What a drafter's distribution is compared with, and how: divergences per draft row, not reduced.

Shape suffixes: C positions of a chunk, R draft rows of a chunk, K tokens that are looked at, V vocabulary of the drafter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


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


def jsd(log_q_RV: Tensor, teacher: Teacher) -> Tensor:
    """Half KL(p, m) plus half KL(q, m), m their mean (DistillSpec, 2310.08461). What a trimmed p lacks counts: there m is p / 2."""
    q_RV, outside_R = log_q_RV.exp(), (1 - teacher.p_CV.sum(-1)).clamp(min=0)
    log_m_RV = torch.logaddexp(log_q_RV, teacher.log_p_CV) - math.log(2)
    both = teacher.p_CV * (teacher.log_p_CV - log_m_RV) + q_RV * (log_q_RV - log_m_RV)
    return 0.5 * (both.sum(-1) + outside_R * math.log(2))


def top_k(log_q_RV: Tensor, teacher: Teacher, k: int = 10) -> Tensor:
    """-sum p log q over the ``k`` tokens that the target finds likeliest, of those the drafter has (HASS, 2408.15766, section 3.1)."""
    p_RK, index_RK = teacher.p_CV.topk(min(k, teacher.p_CV.shape[-1]))
    return -(p_RK * log_q_RV.gather(-1, index_RK)).sum(-1)


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
LOSSES: dict[str, Loss] = {f.__name__: f for f in (kl, reverse_kl, jsd, top_k, ce, data_ce, tv, lk_alpha, lk_hybrid)}
