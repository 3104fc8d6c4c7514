"""The loss of the guesses before their correction, beside that of the corrected ones: written out, one guess at a time, in float64."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from headstart.data.live import look
from headstart.heads.errors import UserError
from headstart.heads.unroll import unroll
from headstart.trainers.learner import Learner
from tests.drafters import make
from tests.tiny_targets import tiny_target
from tests.trainers.small import repetitive

TARGET = tiny_target()


def learner(name: str, terms: dict[str, float], **changes: Any) -> Learner:
    return Learner(make(name, TARGET).double().train(), depth=3, terms=terms, decay=0.8, chunk=16, **changes)


@pytest.mark.parametrize("name", ["xpress", "domino"])
def test_base_repeats_the_divergences_without_the_correction(name: str) -> None:
    mine = learner(name, {"ce": 0.1, "tv": 0.9, "base": 0.6})
    drafter, batch = mine.drafter, look(repetitive().batch(slice(0, 2)), TARGET, mine.drafter.taps)
    states = {tap: x.double() for tap, x in batch.states.items()}
    batch = replace(batch, states=states, final_BTD=batch.final_BTD.double())
    head_VD, expected = TARGET.ends.head_VD.double(), torch.zeros((), dtype=torch.float64)
    for d, draft in enumerate(unroll(drafter, batch.roots(), batch.documents_BT, mine.depth), start=1):
        for b, t in batch.supervised(d).nonzero().tolist():
            p_V, vector_H = (head_VD @ batch.final_BTD[b, t + d]).softmax(0), draft.hidden_BNH[b, t]
            correction_VR, D = drafter.unembedding(d).correction_VR, head_VD.shape[1]
            assert correction_VR is not None
            plain_V = head_VD @ vector_H[:D]
            for weight, logits_V in ((1.0, plain_V + correction_VR @ vector_H[D:]), (0.6, plain_V)):
                q_V = logits_V.softmax(0)
                loss = 0.1 * -q_V[p_V.argmax()].log() + 0.9 * (1 - torch.minimum(p_V, q_V).sum())
                expected = expected + weight * 0.8 ** (d - 1) * loss
    out = mine(batch)
    torch.testing.assert_close(out.loss_sum, expected)
    trained = [p for p in drafter.parameters() if p.requires_grad]
    for a, b in zip(torch.autograd.grad(out.loss_sum, trained), torch.autograd.grad(expected, trained), strict=True):
        torch.testing.assert_close(a, b)
    assert math.isclose(mine.eval()(batch).loss_sum.item(), expected.item(), rel_tol=1e-9), "what is held out is judged alike"


def test_base_where_it_cannot_be_is_refused() -> None:
    with pytest.raises(UserError, match=r"loss\.terms\.base repeats the divergences: name a divergence too, such as kl"):
        learner("xpress", {"base": 1.0})
    with pytest.raises(UserError, match=r"loss\.terms\.base is for drafters that correct the guesses of a backbone"):
        plain = learner("dflash", {"kl": 1.0, "base": 1.0}).float()
        plain(look(repetitive().batch(slice(0, 2)), TARGET, plain.drafter.taps))
