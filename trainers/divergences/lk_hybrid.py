"""KL divergence while acceptance is low, total variation once it is high."""

from __future__ import annotations

import torch
from torch import Tensor

from headstart.trainers.divergences.kl import kl
from headstart.trainers.divergences.teacher import Teacher, overlap


def lk_hybrid(log_q_RV: Tensor, teacher: Teacher, eta: float = 3.0) -> Tensor:
    """l KL + (1 - l) TV, [R], where l = exp(-eta alpha) of each row gets no gradient (2602.23881)."""
    alpha_R = overlap(log_q_RV, teacher)
    l_R = torch.exp(-eta * alpha_R.detach())
    return l_R * kl(log_q_RV, teacher) + (1 - l_R) * (1 - alpha_R)
