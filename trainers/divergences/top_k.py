"""Cross-entropy over the target's most likely tokens."""

from __future__ import annotations

from torch import Tensor

from headstart.trainers.divergences.teacher import Teacher


def top_k(log_q_RV: Tensor, teacher: Teacher, k: int = 10) -> Tensor:
    """-sum p log q over the target's ``k`` most likely tokens within the drafter's vocabulary (HASS, 2408.15766, section 3.1)."""
    p_RK, index_RK = teacher.p_CV.topk(min(k, teacher.p_CV.shape[-1]))
    return -(p_RK * log_q_RV.gather(-1, index_RK)).sum(-1)
