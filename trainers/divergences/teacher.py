"""The target's distribution over the drafter's vocabulary, and quantities that several divergences share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Teacher:
    """The target's distribution p at C positions over the drafter's vocabulary. Not renormalized: a trimmed p sums to less than 1."""

    p_CV: Tensor
    log_p_CV: Tensor  # finite, so that 0 log 0 is 0
    entropy_C: Tensor  # -sum p log p
    best_C: Tensor  # the target's most likely token as an index into V, -1 where the drafter lacks it
    data_C: Tensor  # the token in the data as an index into V, -1 where the drafter lacks it

    @classmethod
    def of(cls, log_p_CV: Tensor, data_C: Tensor, ids_V: Tensor | None) -> Teacher:
        """Make a teacher from log-probabilities over the target's whole vocabulary (they may be overwritten) and the tokens of the data
        ``data_C``. ``ids_V``: the target's ids of the drafter's tokens; None: the vocabularies are the same.
        """
        best_C = log_p_CV.argmax(-1)
        if ids_V is not None:
            row_W = row_of(ids_V, log_p_CV.shape[1])
            log_p_CV, best_C, data_C = log_p_CV[:, ids_V], row_W[best_C], row_W[data_C]
        p_CV = log_p_CV.exp()
        log_p_CV = log_p_CV.clamp_(min=torch.finfo(log_p_CV.dtype).min)
        return cls(p_CV, log_p_CV, -torch.linalg.vecdot(p_CV, log_p_CV), best_C, data_C)

    def at(self, rows_R: Tensor) -> Teacher:
        """The teacher of R draft rows: row r is judged at position ``rows_R[r]`` of C."""
        return Teacher(*(x[rows_R] for x in vars(self).values()))


def row_of(ids_V: Tensor, size: int) -> Tensor:
    """For each of the target's ``size`` tokens its index into the drafter's vocabulary; -1 if the drafter lacks it. [size], int64."""
    row_W = torch.full((size,), -1, device=ids_V.device)
    row_W[ids_V] = torch.arange(len(ids_V), device=ids_V.device)
    return row_W


def overlap(log_q_RV: Tensor, teacher: Teacher) -> Tensor:
    """alpha = sum min(p, q), [R]: the probability that a sampled guess is accepted (2211.17192, theorem 3.5)."""
    return torch.minimum(log_q_RV.exp(), teacher.p_CV).sum(-1)


def nll(log_q_RV: Tensor, rows_R: Tensor) -> Tensor:
    """-log q of the token ``rows_R`` (an index into V) in each row; 0 where it is -1, a token that the drafter lacks."""
    return -log_q_RV.gather(-1, rows_R.clamp(min=0)[:, None])[:, 0] * (rows_R >= 0)
