"""A drafter whose depth 1 costs no row of its own is trained there at every root, deeper at the anchors (2602.01469, section 3)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from headstart.data.batch import TargetBatch
from headstart.data.live import look
from headstart.heads.base import Drafter
from headstart.heads.unroll import unroll
from headstart.trainers.learner import Learner, Wanted
from tests.drafters import HEADS, make
from tests.tiny_targets import tiny_target
from tests.trainers.small import LOSS, repetitive

TARGET = tiny_target()
FIRST = [name for name in HEADS if make(name, TARGET).first_everywhere]
assert "peagle" in FIRST, "without any, the tests here test nothing"


def case(name: str) -> tuple[Learner, TargetBatch]:
    drafter = make(name, TARGET).double().train()
    drafter.anchors = 5
    batch = look(repetitive().batch(slice(0, 3)), TARGET, drafter.taps)
    states = {tap: x.double() for tap, x in batch.states.items()}
    return Learner(drafter, **LOSS), replace(batch, states=states, final_BTD=batch.final_BTD.double())


def by_hand(drafter: Drafter, batch: TargetBatch, masks: list[Tensor]) -> Tensor:
    """The KL of every supervised pair, from the drafts of every root and full logits."""
    total = torch.zeros((), dtype=torch.float64)
    log_p_BTV = (batch.final_BTD @ drafter.ends.head_VD.double().T).log_softmax(-1)
    for d, draft in enumerate(unroll(drafter, batch.roots(), batch.documents_BT, len(masks)), start=1):
        b, t = masks[d - 1].nonzero(as_tuple=True)
        log_q_RV = drafter.unembedding(d).logits(draft.hidden_BNH[b, t][None])[0].log_softmax(-1)
        log_p_RV = log_p_BTV[b, t + d]
        total = total + LOSS["decay"] ** (d - 1) * (log_p_RV.exp() * (log_p_RV - log_q_RV)).sum()
    return total


@pytest.mark.parametrize("name", FIRST)
def test_depth_1_is_trained_at_every_root_and_the_others_at_the_anchors(name: str) -> None:
    learner, batch = case(name)
    wanted = learner.wanted(batch)
    assert wanted.ask_BA is not None and wanted.ask_BA.shape[1] == 5
    anchored_BT = torch.zeros(batch.tokens_BT.shape, dtype=torch.bool).scatter(1, wanted.ask_BA, True)
    masks = [batch.supervised(1), *(batch.supervised(d) & anchored_BT for d in range(2, learner.depth + 1))]
    out = learner(batch, wanted=wanted)
    weight = sum(LOSS["decay"] ** k * int(mask.sum()) for k, mask in enumerate(masks))
    assert learner.count(wanted) == pytest.approx(weight) == float(out.weight_sum)
    trained = [p for p in learner.drafter.parameters() if p.requires_grad]
    found = torch.autograd.grad(out.loss_sum, trained, allow_unused=True)
    loss = by_hand(learner.drafter, batch, masks)
    torch.testing.assert_close(out.loss_sum, loss, rtol=1e-9, atol=0)
    for x, y in zip(found, torch.autograd.grad(loss, trained, allow_unused=True), strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            torch.testing.assert_close(x, y, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", FIRST)
def test_rows_of_depth_1_that_are_no_anchors_have_a_gradient(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    learner, batch = case(name)
    made: list[Tensor] = []
    begin = learner.drafter.begin
    monkeypatch.setattr(learner.drafter, "begin", lambda *args, **more: (draft := begin(*args, **more), made.append(draft.first_BTH))[0])
    wanted = learner.wanted(batch)
    out = learner(batch, wanted=wanted)
    (grad_BTH,) = torch.autograd.grad(out.loss_sum, made)
    has_BT = (grad_BTH != 0).any(-1)
    assert torch.equal(has_BT, batch.supervised(1)) and int(has_BT.sum()) > wanted.ask_BA.numel()


@pytest.mark.parametrize("name", FIRST)
def test_figures_stay_means_over_the_anchors(name: str) -> None:
    """Only they have a whole chain. And every held-out root counts once, whatever is trained."""
    learner, batch = case(name)
    wanted = learner.wanted(batch)
    found = learner.figures(out := learner(batch, wanted=wanted), wanted)
    roots = [(b, t) for b, row in enumerate(wanted.ask_BA.tolist()) for t in row if batch.supervised(1)[b, t]]
    right = [bool(out.match_KBT[0, b, t]) for b, t in roots]
    assert found["train/depth/1/acceptance"] == pytest.approx(sum(right) / len(right))
    ask_BA = torch.tensor([[1, 4], [2, 3], [5, 6]])
    some = Wanted(ask_BA, learner.supervised(batch, ask_BA))
    assert int(learner(batch, wanted=some).count_K[0]) == int(batch.supervised(1).gather(1, ask_BA).sum())
