"""Losses besides the divergences. They compare the drafter's confidence, or the state that it feeds to its next depth, with the target.

Shape suffixes: B batch, T positions, A roots with drafts (all T, or the anchors), K depths, D target hidden, R supervised roots.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from headstart.inference.decoding.sampling import wide


def confidence_loss(logits: list[Tensor], alpha_KBT: Tensor, supervised: list[Tensor], decay: float, ask_BA: Tensor | None) -> Tensor:
    """Binary cross-entropy between the drafter's confidence in each guess (``logits`` [B, A] per depth) and the acceptance probability
    alpha, which gets no gradient (2607.05147, section 3). Sum over supervised pairs, weighted by decay^(d-1). ``ask_BA``: the roots with
    drafts; None: all T.
    """
    total = torch.zeros((), dtype=torch.float32, device=alpha_KBT.device)
    for k, (logit_BA, mask_BT) in enumerate(zip(logits, supervised, strict=True)):
        alpha_BA, mask_BA = (x if ask_BA is None else x.gather(1, ask_BA) for x in (alpha_KBT[k], mask_BT))
        each_BA = F.binary_cross_entropy_with_logits(wide(logit_BA), alpha_BA.float(), reduction="none")
        total = total + decay**k * (each_BA * mask_BA).sum()
    return total


def feature_loss(states: list[Tensor], final_BTD: Tensor, supervised: list[Tensor], decay: float) -> Tensor:
    """SmoothL1 between the draft's state [B, T, D] at (root t, depth d) and the target's final state at t + d (2401.15077, section 4.1).

    Mean over D, sum over supervised pairs, weighted by decay^(d-1).
    """
    total = final_BTD.new_zeros((), dtype=wide(final_BTD).dtype)
    for d, (state_BTD, mask_BT) in enumerate(zip(states, supervised, strict=True), start=1):
        b, t = mask_BT.nonzero(as_tuple=True)
        errors_RD = F.smooth_l1_loss(wide(state_BTD[b, t]), wide(final_BTD[b, t + d]), reduction="none")
        total = total + decay ** (d - 1) * errors_RD.mean(-1).sum()
    return total
