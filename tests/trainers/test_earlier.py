"""What an earlier run left behind the step that a run begins at: gone once the first step is taken, and untouched by one that fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headstart.heads.errors import UserError
from headstart.trainers import diagnosis, guard
from headstart.trainers.arm import Arm
from headstart.trainers.earlier import forget
from tests.tiny_targets import tiny_target
from tests.trainers.small import quiet, train

TARGET = tiny_target()
KEPT = ("metrics.jsonl", guard.FILE, diagnosis.FILE)


def left(run: Path) -> dict[str, Any]:
    """Of each file its lines' steps."""
    return {name: [json.loads(line)["step"] for line in (run / name).read_text().splitlines()] for name in KEPT if (run / name).is_file()}


def other_branch(run: Path) -> None:
    """A run of three steps, with what one of another length said of its steps 5 and 9."""
    train(quiet("medusa", TARGET), TARGET, run, steps=3, log_every=1)
    for name in KEPT:
        with (run / name).open("a") as file:
            file.writelines(f'{{"step": {step}, "apart": []}}\n' for step in (5, 9)[name == diagnosis.FILE :])


def test_a_first_step_that_fails_leaves_everything_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise UserError("memory has ended")

    other_branch(tmp_path)
    before = left(tmp_path)
    assert before == {"metrics.jsonl": [1, 2, 3, 5, 9], guard.FILE: [5, 9], diagnosis.FILE: [9]}
    with monkeypatch.context() as patched, pytest.raises(UserError, match="memory has ended"):
        patched.setattr(Arm, "learn", refuse)
        train(quiet("medusa", TARGET), TARGET, tmp_path, steps=6, log_every=1)
    assert left(tmp_path) == before
    train(quiet("medusa", TARGET), TARGET, tmp_path, steps=6, log_every=1)
    assert left(tmp_path) == {"metrics.jsonl": [1, 2, 3, 4, 5, 6], guard.FILE: []}


def test_lines_go_with_the_first_step_though_it_logs_nothing(tmp_path: Path) -> None:
    other_branch(tmp_path)
    train(quiet("medusa", TARGET), TARGET, tmp_path, steps=5, log_every=99)
    assert left(tmp_path)["metrics.jsonl"] == [1, 2, 3, 5]


@pytest.mark.parametrize(("said", "began", "stays"), [('{"step": 4}', 4, True), ('{"step": 5}', 4, False), ('{"step": 5}', 0, False),
                                                      ("no JSON", 4, True), ("no JSON", 0, False)])  # fmt: skip
def test_a_diagnosis_is_of_the_run_that_reports_it(said: str, began: int, stays: bool, tmp_path: Path) -> None:
    (tmp_path / diagnosis.FILE).write_text(said)
    assert forget([tmp_path], began, skipped=0) == 0
    assert (tmp_path / diagnosis.FILE).is_file() == stays


def test_a_note_of_the_present_run_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first step is skipped, the second is taken."""
    other_branch(tmp_path)
    numbers, wrong = iter((4, 5, 6)), guard.Guard.wrong
    monkeypatch.setattr(guard.Guard, "wrong", lambda *how: "the loss is inf" if next(numbers) == 4 else wrong(*how))
    train(quiet("medusa", TARGET), TARGET, tmp_path, steps=6, log_every=1, skips=8)
    assert left(tmp_path) == {"metrics.jsonl": [1, 2, 3, 4, 5, 6], guard.FILE: [4]}
