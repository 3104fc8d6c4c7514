"""Every cause that is known is named where it is planted, with its evidence and its cure; a healthy drafter raises no alarm."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import causes
from headstart.inference.decoding.target import Target
from headstart.inference.speculator import load_attached
from headstart.trainers import diagnosis
from headstart.trainers.diagnosis import CURES, Case, diagnose, lines, serving, text
from tests.doors import call

ASSETS = Path(__file__).parents[2] / "assets"


@functools.cache
def target() -> Target:
    return Target.load(str(ASSETS / "tiny"), dtype="float32", device="cpu")


@functools.cache
def healthy() -> Case:
    drafter, prompts = load_attached(ASSETS / "tiny_eagle", target()), causes.prompts_of(target(), causes.ASKED[:6])
    known = {"weights": target().fingerprint["weights"], "dtype": "float32", "step": 7}
    return Case(target(), drafter, prompts, causes.rows_of(target(), prompts), drafter.state_dict(), known, new_tokens=32)


@functools.cache
def without_norms() -> Case:
    """Of a drafter that reads the embedding as it is: what its layer reads of the other one is normed, whatever its scale."""
    prompts = causes.prompts_of(target(), causes.ASKED[:6])
    return replace(healthy(), drafter=causes.taught(causes.UNNORMED, target(), prompts), live=None)


@pytest.mark.parametrize("case", [healthy, pytest.param(without_norms, marks=pytest.mark.slow)])
def test_a_healthy_drafter_raises_no_alarm(case: Callable[[], Case]) -> None:
    assert diagnose(case()) == []
    assert lines([])[0].startswith("none of the known causes")


@pytest.mark.parametrize("key", [pytest.param(key, marks=() if key == "mask" else pytest.mark.slow) for key in causes.PLANTS])
def test_what_is_planted_is_named(key: str) -> None:
    case = without_norms() if key in causes.ON_ANOTHER else healthy()
    planted = causes.PLANTS[key](case)
    if planted.target is case.target and planted.prompts is case.prompts:
        vars(planted)["said"] = case.said  # by the same target to the same prompts
    found = diagnose(planted)
    assert {each.cause for each in found} == {CURES[key][0]} and all(each.evidence and each.cure == CURES[key][1] for each in found)
    assert any(CURES[key][0] in line for line in lines(found))


def test_weights_that_are_no_numbers_are_a_stale_export() -> None:
    """Whichever tensor it is: a comparison with NaN says nothing."""
    names = list(healthy().drafter.state_dict())
    for name in (names[0], names[-1]):
        weights = {k: torch.full_like(x, torch.nan) if k == name else x for k, x in healthy().drafter.state_dict().items()}
        drafter: Any = SimpleNamespace(state_dict=lambda weights=weights: weights)
        (found,) = serving.stale(replace(healthy(), drafter=drafter))
        assert found.cause == CURES["export"][0] and f"1 of {len(names)} tensors" in found.evidence
        assert found.evidence.endswith(f"{name} holds values that are not finite")


def test_logits_of_a_row_are_made_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of thousands of tokens would take gigabytes, beside a training."""
    made, logits = list[int](), Target.logits
    monkeypatch.setattr(Target, "logits", lambda self, final_ND: made.append(len(final_ND)) or logits(self, final_ND))
    monkeypatch.setattr(text, "NATS", -inf)
    monkeypatch.setattr(text, "SIGMAS", -inf)
    found = []
    for rows in (3, 10**9):
        monkeypatch.setattr(text, "ROWS", rows)
        found.append(text.policy(healthy())[0].evidence)
        made.append(-1)
    assert max(made[: made.index(-1)]) == 3 < max(made) and found[0] == found[1] and "nats" in found[0]


def test_rows_without_prompts_are_looked_at_alone() -> None:
    assert diagnose(replace(healthy(), prompts=[])) == []


@pytest.mark.slow
def test_a_batch_that_mixes_its_sequences_up_is_named() -> None:
    with causes.mixed_up(healthy()) as case:
        assert [each.cause for each in diagnose(case)] == [CURES["cache"][0]]


def test_all_causes_are_planted() -> None:
    assert {*causes.PLANTS, "cache"} == set(CURES)


def test_one_prompt_has_no_standard_error_and_is_told_to_be_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "one.jsonl").write_text(json.dumps({"text": "def read(path):\n"}))
    monkeypatch.setattr(diagnosis, "LOOKS", diagnosis.LOOKS[-2:-1])  # one that is quick
    words = [f"speculator={ASSETS}/tiny_eagle", f"target.path={ASSETS}/tiny", "prompts=one.jsonl", "new_tokens=8"]
    assert call("inference", ["diagnose", *words], tmp_path, monkeypatch) == 0
    said = capsys.readouterr().out
    assert "temperature 1: expected" in said and "(of one text: no standard error)" in said
    assert "one prompt: chance is not told from a wrong connection" in said and "vocabulary were looked at" in said


def test_the_folder_of_a_drafter_is_not_that_of_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has a config.json too, which says nothing of the training. This is found before a target is loaded."""
    monkeypatch.setattr(Target, "load", None)
    words = [f"speculator={ASSETS}/tiny_eagle", f"target.path={ASSETS}/tiny", f"run={ASSETS}/tiny_eagle"]
    assert call("inference", ["diagnose", *words], tmp_path, monkeypatch) == 2
    said = capsys.readouterr().err
    assert said == f"error: run={ASSETS}/tiny_eagle is not the folder of a run: give the folder that holds speculator/\n"
