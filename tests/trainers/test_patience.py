"""Early stopping: each arm by its own number, alike on resume and in every process, and it is said what the schedule had left."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headstart.data.live import look
from headstart.heads.errors import UserError
from headstart.inference.decoding.target import Target
from headstart.trainers import checkpoint, gate, trainer
from headstart.trainers.metrics import read_metrics
from headstart.trainers.patience import DECODED, EXPECTED, Patience, too_much
from headstart.trainers.run import run
from tests.drafters import HEADS
from tests.tiny_targets import tiny_target
from tests.trainers.conftest import ROOT, TORCHRUN, equal, weights
from tests.trainers.small import quiet, repetitive, train
from tests.trainers.test_arms import side_by_side

Composed = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


def evaluations(monkeypatch: pytest.MonkeyPatch, lengths: list[float]) -> None:
    """What evaluations will find."""
    found = iter(lengths)
    monkeypatch.setattr(trainer, "evaluate", lambda *_: {"heldout_loss": 1.0, "heldout_expected_length": next(found)})


def trained(target: Target, folder: Path, **changes: Any) -> int:
    """The step at which a training that is evaluated after every step has ended."""
    drafter = quiet(HEADS[0], target)
    held_out = [look(repetitive(seed=7, documents=12).batch(slice(0, 4)), target, drafter.taps)]
    return train(drafter, target, folder, held_out=held_out, eval_every=1, **{"steps": 6, "save_every": 2} | changes).steps


def test_it_is_over_when_nothing_became_better_for_so_long() -> None:
    """Beside the definition, of every sequence."""
    for numbers, patience in itertools.product(itertools.product((1.0, 2.0, 3.0), repeat=5), (1, 2, 3)):
        mine = Patience(patience)
        ends = []
        for at, number in enumerate(numbers):
            mine.judge(EXPECTED, number, at)
            ends.append(mine.over)
            assert (mine.best, mine.step) == (max(numbers[: at + 1]), numbers.index(max(numbers[: at + 1])))
        wanted = [at >= patience and max(numbers[at - patience + 1 : at + 1]) <= max(numbers[: at - patience + 1]) for at in range(5)]
        if True in wanted:  # what comes behind its end is nobody's concern
            assert ends.index(True) == wanted.index(True)
        assert (True in ends) == (True in wanted)
    never = Patience(0)
    for at in range(9):
        never.judge(EXPECTED, 1.0, at)
    assert not never.over
    never.judge(DECODED, 0.5, 9)  # another number: nothing is known of it yet
    assert (never.best, never.since) == (0.5, 0)
    other = Patience(3)
    other.restore(never.state())
    assert other.state() == never.state() == {"by": DECODED, "best": 0.5, "step": 9, "since": 0}


def test_patience_that_cannot_stop_a_training_early_is_named() -> None:
    """As if nothing ever became better: whether it is over before the last step."""
    for steps, every, patience in itertools.product(range(1, 14), range(1, 5), range(5)):
        mine, judged = Patience(patience), [step for step in range(1, steps) if step % every == 0]
        for step in judged:
            mine.judge(EXPECTED, 1.0, step)
        for said, what, key in (
            (too_much(patience, steps, 0, every), "evaluations", "eval_every"),
            (too_much(patience, steps, every, 1), "decodings", "decode_every"),
        ):
            assert (said == "") == (mine.over or not patience)
            assert not said or f"takes {patience + 1} {what} at least, and before step {steps} there are {len(judged)}: lower" in said
            assert not said or f"trainer.{key}={every}" in said


def test_a_training_ends_with_a_checkpoint_and_goes_on_where_more_patience_is_given(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = [1.2, 1.5, 1.5, 1.4, 1.3, 1.3]
    evaluations(monkeypatch, lengths)
    assert trained(target, tmp_path / "patient", patience=2) == 4
    said = " ".join(capsys.readouterr().out.split())
    assert "stopped early at step 4: heldout/expected_length was best at step 2, 1.50, and no better in 2 evaluations" in said
    assert checkpoint.step_of(checkpoint.folders(tmp_path / "patient")[-1]) == 4
    assert trained(target, tmp_path / "patient", patience=2) == 4  # the same again: it has ended
    said = " ".join(capsys.readouterr().out.split())
    assert f"it was stopped early there; more trainer.patience, or 0, with out={tmp_path / 'patient'} goes on" in said
    evaluations(monkeypatch, lengths[4:])
    assert trained(target, tmp_path / "patient", patience=0) == 6
    evaluations(monkeypatch, lengths)
    assert trained(target, tmp_path / "never") == 6
    assert equal(weights(tmp_path / "patient"), weights(tmp_path / "never"))


def test_a_resumed_run_stops_where_it_would_have(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(batch: int) -> None:
        if batch == 2:
            raise KeyboardInterrupt

    evaluations(monkeypatch, [1.5, 1.4])
    with pytest.raises(KeyboardInterrupt):
        trained(target, tmp_path, patience=3, each=die, save_every=2)
    evaluations(monkeypatch, [1.45, 1.45, 9.0])  # after steps 3 and 4: three that are no better, with that of step 2
    assert trained(target, tmp_path, patience=3) == 4


def test_of_several_arms_each_stops_by_itself(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def numbers(falls: int) -> Iterator[float]:
        return iter(1.0 + (step if step <= falls else -step) for step in range(1, 9))

    found: dict[int, Iterator[float]] = {}

    def evaluate(learner: Any, *_: Any) -> dict[str, float]:
        mine = found.setdefault(id(learner), numbers(2 if not found else 9))
        return {"heldout_loss": 1.0, "heldout_expected_length": next(mine)}

    monkeypatch.setattr(trainer, "evaluate", evaluate)
    each = dict(eval_every=1, steps=6, held_out=True)
    arms = side_by_side(target, [HEADS[0], HEADS[2]], tmp_path / "patient", patience=2, **each)
    assert [arm.fitted.steps for arm in arms] == [4, 6] and [arm.stopped for arm in arms] == [True, False]
    found.clear()
    alone = side_by_side(target, [HEADS[0], HEADS[2]], tmp_path / "never", **each)
    assert equal(arms[1].drafter.state_dict(), alone[1].drafter.state_dict())


@pytest.mark.slow
def test_what_is_decoded_judges_and_the_best_is_exported(
    composed: Composed, overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gate, "PROMPTS", 1)
    monkeypatch.setattr(gate, "NEW_TOKENS", 8)
    lengths, figures = iter([1.5, 1.4, 1.3]), gate.figures
    monkeypatch.setattr(gate, "figures", lambda *a: figures(*a) | {DECODED: next(lengths)})
    more = ["trainer.decode_every=4", "trainer.eval_every=4", "trainer.patience=2", "trainer.keep=best", "trainer.steps=40"]
    run(**composed(*overrides, *more))
    said = capsys.readouterr().out
    assert "exported is step 4, which decoded best (1.50" in said and "stopped early at step 12: decode/T0/accepted_length was best" in said
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["train_steps"] == 12 and report["stopped_early"] == {"by": DECODED, "best": 1.5, "step": 4, "since": 2}
    assert max(line["step"] for line in read_metrics(tmp_path / "run")) == 12

    # the schedule had not fallen: what is advised goes on from there, and lets it
    advised = re.search(r"trainer\.patience=0 (trainer\.steps=\d+) out=\S+/run goes on from here", said)
    assert advised
    monkeypatch.setattr(gate, "figures", figures)
    run(**composed(*overrides, *more, "trainer.patience=0", "trainer.keep=2", advised[1], "report=none"))
    assert "resuming after step 12" in capsys.readouterr().out
    rates = {line["step"]: line["train/lr"] for line in read_metrics(tmp_path / "run") if "train/lr" in line}
    assert max(rates) == int(advised[1].partition("=")[2]) == 15 and rates[15] < 0.5 * rates[10]


def test_epochs_that_are_too_few_for_patience_are_refused(composed: Composed, overrides: list[str], tmp_path: Path) -> None:
    """Of steps the command says it before anything is loaded."""
    more = ["trainer.patience=3", "trainer.decode_every=0", "trainer.eval_every=2", "trainer.epochs=0.2"]
    with pytest.raises(UserError, match=r"patience=3 takes 4 evaluations .* before step 6 there are 2: lower trainer\.eval_every=2$"):
        run(**composed(*overrides, *more, "report=none"))
    assert not (tmp_path / "run" / "config.json").exists()


def test_patience_without_anything_to_judge_by_is_refused(
    composed: Composed, overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headstart.trainers.prepare._held_out", lambda job: [])
    with pytest.raises(UserError, match=r"trainer\.patience: there is no held-out text to judge by"):
        run(**composed(*overrides, "trainer.patience=1", "report=none", "trainer.decode_every=0"))


@pytest.mark.parametrize(
    "schedule, step, lasting, wanted",
    [
        ("constant", 50, True, None), ("linear", 100, True, None), ("linear", 50, True, "50% of its peak"),
        ("wsd", 50, True, "100% of its peak .*trainer.patience=0 trainer.steps=63 out=runs/mine goes on"),
        ("wsd", 50, False, "100% of its peak"), ("wsd", 90, True, "50% of its peak"), ("cosine", 50, True, "55% of its peak"),
    ],
)  # fmt: skip
def test_what_the_schedule_had_left_is_said(schedule: str, step: int, lasting: bool, wanted: str | None) -> None:
    said = Patience(2, EXPECTED, 2.0, 30, 2).said(step, 100, 0, schedule, lasting, 0.1, Path("runs/mine"))
    assert said.startswith(
        "heldout/expected_length was best at step 30, 2.00, and no better in 2 evaluations since then (trainer.patience=2)"
    )
    assert re.search(wanted, said) if wanted else "peak" not in said
    assert ("goes on" in said) == (wanted is not None and "goes on" in wanted)


@pytest.mark.slow
def test_all_processes_stop_at_the_same_step(tmp_path: Path) -> None:
    """By what the first one found."""
    torchrun = [*TORCHRUN, "--nproc-per-node=2"]
    subprocess.run([*torchrun, "-m", "tests.trainers.two_patient", str(tmp_path)], cwd=ROOT, check=True, timeout=200)
    assert [(tmp_path / f"ended-{rank}").read_text() for rank in (0, 1)] == ["3", "3"]
    assert torch.tensor([checkpoint.step_of(x) for x in checkpoint.folders(tmp_path / "run")]).max() == 3
