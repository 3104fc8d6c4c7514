"""Total variation."""

from __future__ import annotations

from torch import Tensor

from headstart.trainers.divergences.teacher import Teacher, overlap


def tv(log_q_RV: Tensor, teacher: Teacher) -> Tensor:
    """1 - alpha, [R]: the total variation over the target's vocabulary. (q is 0 for tokens that the drafter's vocabulary lacks.)"""
    return 1 - overlap(log_q_RV, teacher)
