"""KL(drafter, target)."""

from __future__ import annotations

from torch import Tensor

from headstart.trainers.divergences.teacher import Teacher


def reverse_kl(log_q_RV: Tensor, teacher: Teacher) -> Tensor:
    """sum q (log q - log p) over the drafter's vocabulary, [R], in nats."""
    return (log_q_RV.exp() * (log_q_RV - teacher.log_p_CV)).sum(-1)
