"""Jensen-Shannon divergence."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headstart.trainers.divergences.teacher import Teacher


def jsd(log_q_RV: Tensor, teacher: Teacher) -> Tensor:
    """KL(p, m) / 2 + KL(q, m) / 2, [R], in nats, where m = (p + q) / 2 (DistillSpec, 2310.08461). Tokens outside a trimmed vocabulary
    count too: q is 0 there, so m = p / 2.
    """
    q_RV, outside_R = log_q_RV.exp(), (1 - teacher.p_CV.sum(-1)).clamp(min=0)
    log_m_RV = torch.logaddexp(log_q_RV, teacher.log_p_CV) - math.log(2)
    both = teacher.p_CV * (teacher.log_p_CV - log_m_RV) + q_RV * (log_q_RV - log_m_RV)
    return 0.5 * (both.sum(-1) + outside_R * math.log(2))
