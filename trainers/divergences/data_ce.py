"""Cross-entropy to the token in the data."""

from __future__ import annotations

from torch import Tensor

from headstart.trainers.divergences.teacher import Teacher, nll


def data_ce(log_q_RV: Tensor, teacher: Teacher) -> Tensor:
    """-log q of the token in the data, [R]; 0 where the drafter's vocabulary lacks it."""
    return nll(log_q_RV, teacher.data_C)
