"""What the target says about the drafter's tokens, and what several divergences need of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Teacher:
    """What the target says at C positions about the drafter's tokens. Never renormalised: a trimmed p sums to less than 1."""

    p_CV: Tensor
    log_p_CV: Tensor  # finite, so that 0 log 0 is 0
    entropy_C: Tensor  # -sum p log p
    best_C: Tensor  # the drafter's row for the target's most likely token, -1 where it has none
    data_C: Tensor  # the drafter's row for the token of the data, -1 where it has none

    @classmethod
    def of(cls, log_p_CV: Tensor, data_C: Tensor, ids_V: Tensor | None) -> Teacher:
        """From log-probabilities over the target's whole vocabulary, which may be overwritten, and target token ids."""
        best_C = log_p_CV.argmax(-1)
        if ids_V is not None:
            row_V = torch.full_like(log_p_CV[0], -1, dtype=torch.int64)  # of every target token
            row_V[ids_V] = torch.arange(len(ids_V), device=ids_V.device)
            log_p_CV, best_C, data_C = log_p_CV[:, ids_V], row_V[best_C], row_V[data_C]
        p_CV = log_p_CV.exp()
        log_p_CV = log_p_CV.clamp_(min=torch.finfo(log_p_CV.dtype).min)
        return cls(p_CV, log_p_CV, -torch.linalg.vecdot(p_CV, log_p_CV), best_C, data_C)

    def at(self, rows_R: Tensor) -> Teacher:
        return Teacher(*(x[rows_R] for x in vars(self).values()))


def overlap(log_q_RV: Tensor, teacher: Teacher) -> Tensor:
    """alpha = sum min(p, q): the probability that a sampled guess is accepted (2211.17192, theorem 3.5)."""
    return torch.minimum(log_q_RV.exp(), teacher.p_CV).sum(-1)


def nll(log_q_RV: Tensor, rows_R: Tensor) -> Tensor:
    """-log q of one of the drafter's tokens in each row; 0 where that is -1, one that the drafter does not have."""
    return -log_q_RV.gather(-1, rows_R.clamp(min=0)[:, None])[:, 0] * (rows_R >= 0)
