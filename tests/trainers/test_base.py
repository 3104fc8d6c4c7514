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
    """And a quarter of the way to ``base_until``, three quarters of the loss itself are without it."""
    mine = learner(name, {"ce": 0.1, "tv": 0.9, "base": 0.6}, base_until=0.5)
    drafter, batch = mine.drafter, look(repetitive().batch(slice(0, 2)), TARGET, mine.drafter.taps)
    states = {tap: x.double() for tap, x in batch.states.items()}
    batch = replace(batch, states=states, final_BTD=batch.final_BTD.double())
    head_VD, sums = TARGET.ends.head_VD.double(), [torch.zeros((), dtype=torch.float64)] * 2
    for d, draft in enumerate(unroll(drafter, batch.roots(), batch.documents_BT, mine.depth), start=1):
        for b, t in batch.supervised(d).nonzero().tolist():
            p_V, vector_H = (head_VD @ batch.final_BTD[b, t + d]).softmax(0), draft.hidden_BNH[b, t]
            correction_VR, D = drafter.unembedding(d).correction_VR, head_VD.shape[1]
            assert correction_VR is not None
            plain_V = head_VD @ vector_H[:D]
            for i, logits_V in enumerate((plain_V + correction_VR @ vector_H[D:], plain_V)):
                q_V = logits_V.softmax(0)
                loss = 0.1 * -q_V[p_V.argmax()].log() + 0.9 * (1 - torch.minimum(p_V, q_V).sum())
                sums[i] = sums[i] + 0.8 ** (d - 1) * loss
    trained = [p for p in drafter.parameters() if p.requires_grad]
    for done, full, plain in ((0.125, 0.25, 0.75 + 0.6), (1.0, 1.0, 0.6)):
        expected, out = full * sums[0] + plain * sums[1], mine(batch, done=done)
        torch.testing.assert_close(out.loss_sum, expected)
        gradients = (torch.autograd.grad(loss, trained, retain_graph=True) for loss in (out.loss_sum, expected))
        for a, b in zip(*gradients, strict=True):
            torch.testing.assert_close(a, b)
    held_out = mine.eval()(batch, done=0.125).loss_sum.item()
    assert math.isclose(held_out, expected.item(), rel_tol=1e-9), "what is held out is judged alike, at any time"


def test_base_where_it_cannot_be_is_refused() -> None:
    with pytest.raises(UserError, match=r"loss\.terms\.base repeats the divergences: name a divergence too, such as kl"):
        learner("xpress", {"base": 1.0})
    with pytest.raises(UserError, match=r"loss\.terms\.base is for drafters that correct the guesses of a backbone"):
        plain = learner("dflash", {"kl": 1.0, "base": 1.0}).float()
        plain(look(repetitive().batch(slice(0, 2)), TARGET, plain.drafter.taps))
