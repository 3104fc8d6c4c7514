"""KL(target, drafter)."""

from __future__ import annotations

import torch
from torch import Tensor

from headstart.trainers.divergences.teacher import Teacher


def kl(log_q_RV: Tensor, teacher: Teacher) -> Tensor:
    """sum p (log p - log q) over the drafter's vocabulary, [R], in nats."""
    # a dot product instead of a sum of products halves the passes over [R, V]: a fifth of a step on a CPU
    return -teacher.entropy_C - torch.linalg.vecdot(teacher.p_CV, log_q_RV)
