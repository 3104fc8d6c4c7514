"""Cross-entropy to the target's most likely token."""

from __future__ import annotations

from torch import Tensor

from headstart.trainers.divergences.teacher import Teacher, nll


def ce(log_q_RV: Tensor, teacher: Teacher) -> Tensor:
    """-log q of the target's most likely token, [R]; 0 where the drafter's vocabulary lacks it."""
    return nll(log_q_RV, teacher.best_C)
