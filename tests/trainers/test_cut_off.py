"""An interrupt while a step is judged: what it cuts off is made up first, and the curve is that of a run that nothing disturbed."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headstart.data.live import look
from headstart.trainers import trainer
from headstart.trainers.arm import Arm
from headstart.trainers.metrics import read_metrics
from headstart.trainers.patience import DECODED
from tests.tiny_targets import tiny_target
from tests.trainers.small import quiet, repetitive, train

TARGET = tiny_target()
JUDGED: dict[str, Any] = dict(steps=5, save_every=9, eval_every=2, decode_every=2, decode_last=True, log_every=1, patience=3)
Seen = tuple[list[dict[str, float]], list[int], dict[str, Any]]  # the curve without times, the steps that were decoded, the patience


def run(place: Path, **changes: Any) -> Seen:
    """Once and again until the training is complete."""
    drafter, arms, steps = quiet("eagle", TARGET), list[Arm](), list[int]()
    held_out = [look(repetitive(seed=1, documents=4).batch(slice(0, 2)), TARGET, drafter.taps)]

    def decoded(arm: Arm) -> dict[str, float]:
        steps.append(arm.fitted.steps)
        return {DECODED: 1 + arm.fitted.steps / 10, "decode/T1/accepted_length": 1.0}

    for _ in range(3):
        train(drafter, TARGET, place, held_out=held_out, arms=arms, decoded=decoded, **JUDGED | changes)
    curve = [{k: v for k, v in line.items() if not k.startswith(("speed", "system"))} for line in read_metrics(place)]
    return curve, steps, arms[-1].patience.state()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    found = run(tmp_path_factory.mktemp("whole"))
    assert found[1] == [2, 4, 5], "the last step too, and once"
    assert [line["step"] for line in found[0] if "heldout/loss" in line] == [2, 4, 5]
    return found


def at_call(number: int, real: Callable[..., Any]) -> Callable[..., Any]:
    """``real``, but during its call ``number`` the process is asked to end."""
    calls = iter(range(1, 99))

    def call(*a: Any, **k: Any) -> Any:
        if next(calls) == number:
            signal.raise_signal(signal.SIGTERM)
        return real(*a, **k)

    return call


@pytest.mark.parametrize(("place", "name", "number"), [(Arm, "step", 4), (Arm, "step", 5), (trainer, "evaluate", 2),
                                                       (trainer, "evaluate", 3), (trainer._Loop, "_decode", 2)])  # fmt: skip
def test_what_an_interrupt_cuts_off_is_made_up(
    place: Any, name: str, number: int, whole: Seen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, name, at_call(number, getattr(place, name)))
    assert run(tmp_path) == whole


def test_an_interrupt_while_it_is_made_up_leaves_the_rest_due(whole: Seen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Arm, "step", at_call(4, Arm.step))
    monkeypatch.setattr(trainer, "evaluate", at_call(2, trainer.evaluate))
    assert run(tmp_path) == whole
