"""Held-out evaluation: the figures of all roots from few at a time, one batch on the device at a time, and an arm that fails in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor

from headstart.data.batch import TargetBatch, TokenBatch
from headstart.data.live import look
from headstart.inference.decoding.target import Target
from headstart.trainers import trainer
from headstart.trainers.learner import Learner, evaluate
from tests.drafters import HEADS, arguments, make
from tests.tiny_targets import tiny_target
from tests.trainers.small import COMMON, LOOP, LOSS, open_arm, repetitive

TARGET = tiny_target()
NOISY = next(name for name in HEADS if "noise" in arguments(name))
ANCHORED = [name for name in HEADS if make(name, TARGET).anchors]


@pytest.fixture(scope="module")
def target() -> Target:
    return TARGET


def held_out(target: Target, taps: Any) -> list[TargetBatch]:
    packed, made = repetitive(seed=7, documents=12), []
    for place in (slice(0, 2), slice(2, 4)):
        batch = look(packed.batch(place), target, taps)
        batch.loss_mask_BT[0, ::5] = False  # rows with different numbers of roots,
        batch.loss_mask_BT[1, ::9] = False  # some of which are supervised at the deeper depths alone
        made.append(batch)
    return made


@pytest.mark.parametrize("name", ANCHORED)
def test_few_roots_at_a_time_are_all_roots(name: str, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = make(name, target)
    learner, batches = Learner(drafter, **LOSS), held_out(target, drafter.taps)
    asked: list[int] = []
    begin = drafter.begin

    def counted(roots: Any, memory: Any, sees: Any, ask: Tensor | None = None) -> Any:
        asked.append(roots.read_BT.shape[1] if ask is None else ask.shape[1])
        return begin(roots, memory, sees, ask)

    monkeypatch.setattr(drafter, "begin", counted)
    found = {}
    for anchors in (5, None):
        drafter.anchors = anchors
        found[anchors] = evaluate(learner, batches)
        assert (max(asked) <= 5) == (anchors == 5)
        asked.clear()
    assert found[5] == pytest.approx(found[None], rel=1e-5) and found[None]["heldout_expected_length"] >= 1
    assert {k: v for k, v in found[5].items() if "loss" not in k} == {k: v for k, v in found[None].items() if "loss" not in k}


def test_it_is_without_noise_and_leaves_the_training_as_it_was(target: Target) -> None:
    drafter = make(NOISY, target)
    drafter.noise = 1.0  # type: ignore[assignment]
    learner, batches, found = Learner(drafter, **LOSS), held_out(target, drafter.taps), []
    for training in (False, True):
        learner.train(training)
        found.append(evaluate(learner, batches))
        assert learner.training == drafter.training == training
    assert found[0] == found[1]


def test_the_expected_length_is_that_of_chains_as_long_as_asked(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, forward = make("eagle", target), Learner.forward  # of any number of guesses

    def right(self: Learner, *how: Any, **more: Any) -> Any:
        out = forward(self, *how, **more)
        out.match_KBT = torch.ones_like(out.match_KBT)
        return out

    monkeypatch.setattr(Learner, "forward", right)
    batches, found = held_out(target, drafter.taps), {}
    for built, asked in ((1, None), (2, None), (3, None), (3, 1), (3, 2)):
        found[built, asked] = evaluate(Learner(drafter, **LOSS | {"depth": built}), batches, asked)["heldout_expected_length"]
    assert found[3, 1] == found[1, None] < found[3, 2] == found[2, None] < found[3, None]


def test_anchors_are_supervised_roots_first_and_each_process_draws_its_own(target: Target) -> None:
    drafter = make(ANCHORED[0], target).train()
    drafter.anchors = 6
    learner, batch = Learner(drafter, **LOSS), repetitive().batch(slice(0, 3))
    batch.loss_mask_BT[0] = torch.arange(batch.tokens_BT.shape[1]) % 9 == 4  # fewer than six
    drawn = {}
    for rank, world in ((0, 1), (0, 2), (1, 2)):
        learner.share = (rank, world)
        torch.manual_seed(3)
        ask_BA = drawn[rank, world] = learner.anchors(batch)
        assert ask_BA is not None and ask_BA.shape == (3, 6)
        for ask, roots in zip(ask_BA.tolist(), (row.nonzero()[:, 0].tolist() for row in batch.supervised(1)), strict=True):
            assert len({*ask} & {*roots}) == min(6, len(roots)) and ask == sorted({*ask})
    assert not drawn[0, 2].equal(drawn[1, 2]) and batch.supervised(1)[0].sum() < 6 < batch.supervised(1)[1].sum()
    learner.eval()
    assert learner.anchors(batch) is None


def test_batches_come_to_the_device_one_at_a_time(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, order = make(HEADS[0], target), []
    move, forward = TargetBatch.to, Learner.forward
    monkeypatch.setattr(TargetBatch, "to", lambda self, device, *dtype: order.append(f"to {device}") or move(self, device, *dtype))
    monkeypatch.setattr(Learner, "forward", lambda self, *a, **k: order.append("forward") or forward(self, *a, **k))
    evaluate(Learner(drafter, **LOSS), held_out(target, drafter.taps))
    assert [*dict.fromkeys(order)] == ["to cpu", "forward"] and order[0] == "to cpu" == order[len(order) // 2]


def test_an_arm_that_fails_in_its_evaluation_stops_alone(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arms, loop = [], LOOP | {"eval_every": 3}
    for i in range(2):
        torch.manual_seed(5)
        (tmp_path / str(i)).mkdir()
        arms.append(open_arm(str(i), make(HEADS[i], target), tmp_path / str(i), loop))
    whole = trainer.evaluate

    def full(learner: Learner, batches: list[TargetBatch]) -> dict[str, float]:
        if learner is arms[0].learner:
            raise torch.OutOfMemoryError("no memory is left")
        return whole(learner, batches)

    monkeypatch.setattr(trainer, "evaluate", full)

    def stream(start: int, rank: int, world: int) -> Iterator[TokenBatch]:
        return repetitive().stream(4, 0, start, rank, world)

    taps = sorted({tap for arm in arms for tap in arm.drafter.taps})
    settings = {k: loop[k] for k in COMMON}
    trainer.fit(arms, stream, lambda batch, taps: look(batch, target, taps), held_out(target, taps), Accelerator(cpu=True), **settings)
    assert arms[0].failed == "no memory is left" and arms[0].fitted.steps == 3
    assert not arms[1].failed and arms[1].fitted.steps == 6
