"""Minus the logarithm of the acceptance probability."""

from __future__ import annotations

from torch import Tensor

from headstart.trainers.divergences.teacher import Teacher, overlap


def lk_alpha(log_q_RV: Tensor, teacher: Teacher) -> Tensor:
    """-log alpha, [R], in nats (LK, 2602.23881). The clamp only keeps the logarithm finite: the gradient is at most of
    order 1 without it, too.
    """
    return -overlap(log_q_RV, teacher).clamp(min=1e-12).log()
