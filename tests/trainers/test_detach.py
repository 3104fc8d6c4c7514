"""``loss.detach``: a depth learns nothing through the states of the depths before it (HASS, 2408.15766)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from headstart.data.live import look
from headstart.heads.base import Draft
from headstart.heads.errors import UserError
from headstart.heads.unroll import unroll
from headstart.trainers.learner import Learner
from tests.drafters import make
from tests.tiny_targets import tiny_target
from tests.trainers.small import LOSS, repetitive

TARGET, DEPTH = tiny_target(), 3


@pytest.mark.parametrize("again", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("name", ["eagle", "eagle1", "mtp"])
def test_gradients_are_those_of_depths_fed_with_constants(name: str, again: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The states of a pass without gradients, fed back as numbers."""
    drafter = make(name, TARGET)
    roots = look(repetitive().batch(slice(0, 2)), TARGET, drafter.taps).roots()

    def gradients(drafts: list[Draft]) -> list[Tensor]:
        weights = [p for p in drafter.parameters() if p.requires_grad]
        loss = sum((d * draft.hidden_BNH.square().sum() for d, draft in enumerate(drafts, start=1)), torch.zeros(()))
        found = torch.autograd.grad(loss, weights, allow_unused=True)
        return [torch.zeros_like(p) if g is None else g for p, g in zip(weights, found, strict=True)]

    found = gradients(unroll(drafter, roots, None, DEPTH, checkpointing=again, detach=True))
    through = gradients(unroll(drafter, roots, None, DEPTH))
    with torch.no_grad():
        constants = unroll(drafter, roots, None, DEPTH)
    step = drafter.step
    monkeypatch.setattr(drafter, "step", lambda d, tokens_BN, parent, *more, **rest: step(d, tokens_BN, constants[d - 2], *more, **rest))
    wanted = gradients(unroll(drafter, roots, None, DEPTH))
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)
    assert not all(torch.allclose(x, y) for x, y in zip(found, through, strict=True)), "nothing flows through the states of this drafter"


def test_the_setting_reaches_the_unroll_and_is_refused_where_all_depths_are_one_pass() -> None:
    batch = look(repetitive().batch(slice(0, 2)), TARGET, (drafter := make("eagle1", TARGET).eval()).taps)
    found = []
    for detach in (False, True):
        drafter.zero_grad()
        Learner(drafter, **LOSS, detach=detach)(batch).loss_sum.backward()
        found.append(torch.cat([p.grad.flatten() for p in drafter.parameters() if p.grad is not None]))
    assert not torch.allclose(*found)
    with pytest.raises(UserError, match=r"loss\.detach"):
        Learner(make("dflash", TARGET), **LOSS, detach=True)


@pytest.mark.parametrize(
    ("more", "key"),
    [({"detach": True}, "detach=false"), ({"weighting": "chain"}, "weighting=decay"), ({"weighting": "dpace"}, "weighting=decay")],
)
def test_a_drafter_trained_on_single_guesses_has_no_chains_to_weigh(more: dict[str, Any], key: str) -> None:
    """Its depths are one: total variation end to end was plain total variation, and detached was nothing."""
    with pytest.raises(UserError, match=rf"^loss\..* is of chains of guesses, draft_lm is trained on single ones: take loss\.{key}$"):
        Learner(make("draft_lm", TARGET), **LOSS, **more)
