"""`python -m inference evaluate` as a user calls it: a file of one's own, others beside it, resumed, and other settings refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.doors import ROOT, call

EAGLE = ROOT / "assets" / "tiny_eagle"
ROWS = [
    {"question_id": 1, "category": "code", "turns": ["def add(a, b):\n", "def sub(a, b):\n"]},
    {"question_id": 2, "category": "words", "turns": ["import os\n"]},
    {"question_id": 3, "category": "words", "turns": ["import sys\n"]},
]


Evaluate = Callable[..., Any]


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A drafter to compare with."""
    folder = tmp_path / "runs" / "elsewhere" / "speculator"
    shutil.copytree(EAGLE, folder)
    return folder


@pytest.fixture
def evaluate(tmp_path: Path, other: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Evaluate:
    """``evaluate(*more)``: the exit code, and what was said."""

    def run(*more: str) -> Any:
        given = [f"target.path={ROOT}/assets/tiny", f"speculator={EAGLE}", "suite=mine.jsonl", "new_tokens=6", "temperatures=[0.0]",
                 f"against=[ngram,assisted,{other}]", "sequences=[1,2]", "decode=chain"]  # fmt: skip
        code = call("inference evaluate", [*given, *more], tmp_path, monkeypatch)
        return code, capsys.readouterr()

    (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    return run


def test_a_file_is_evaluated_and_goes_on(evaluate: Evaluate, tmp_path: Path) -> None:
    code, said = evaluate("out=done")
    assert code == 0, said.err
    made = json.loads((tmp_path / "done" / "evaluate.json").read_text())
    assert made["passes"].startswith(("C++", "torch"))
    assert made["suite"] == "mine" and (made["prompts"], made["turns"]) == (3, 4) and not made["raw"]
    found = {(row["sequences"], row["category"], row["name"]) for row in made["rows"]}
    groups = [(1, "overall"), (1, "code"), (1, "words"), (2, "overall"), (2, "words")]  # of code there are no two
    both = {(n, group, name) for n, group in groups for name in ("plain", "eagle", "elsewhere")}
    assert found == both | {(1, group, name) for group in ("overall", "code", "words") for name in ("ngram", "prompt_lookup")}
    assert all(each["differing"] == 0 for each in made["lossless"].values()) and "lossless" in said.out
    assert "1 prompt not measured 2 at once: a category has fewer left over" in said.out
    assert {p.name for p in (tmp_path / "done").iterdir()} == {"evaluate.json", "evaluate.html", "results.jsonl", "spec_bench"}

    results = (tmp_path / "done" / "results.jsonl").read_bytes()
    (tmp_path / "done" / "results.jsonl").write_bytes(b"".join(results.splitlines(keepends=True)[:3]))  # two of four are left
    code, said = evaluate("out=done")
    assert code == 0 and "has 2 lines of results already" in said.out
    again = [json.loads(line) for line in (tmp_path / "done" / "results.jsonl").read_bytes().splitlines()]
    texts = [[(name, each["talks"]) for name, each in line["made"].items()] for line in again[1:]]
    assert texts == [[(name, each["talks"]) for name, each in json.loads(line)["made"].items()] for line in results.splitlines()[1:]]

    code, said = evaluate("out=done", "new_tokens=7")
    assert code == 2 and said.err.count("\n") == 1 and "new_tokens is 6 there and 7 here" in said.err and "another out=DIR" in said.err


def test_answers_too_short_for_decode_auto_say_nothing_about_the_drafter(evaluate: Evaluate, tmp_path: Path) -> None:
    code, said = evaluate("out=short", "decode=auto", "against=[ngram]", "sequences=[1]")
    assert code == 0, said.err
    made = json.loads((tmp_path / "short" / "evaluate.json").read_text())
    assert {row["name"] for row in made["rows"]} == {"plain", "ngram"}
    for text in (said.out, (tmp_path / "short" / "evaluate.html").read_text()):
        text = " ".join(text.split())
        assert "decode=auto was not tried: texts below 24 tokens are not worth measuring" in text and "drafts where that pays" not in text


def test_a_folder_is_called_by_the_last_part_of_its_path(evaluate: Evaluate, tmp_path: Path) -> None:
    code, said = evaluate("out=named", "target=folder", "against=[]", "sequences=[1]", "count=1", "new_tokens=2")
    assert code == 0, said.err
    made = json.loads((tmp_path / "named" / "evaluate.json").read_text())
    assert made["target"] == "tiny" and "loading tiny (" in said.out and "mine for tiny" in (tmp_path / "named/evaluate.html").read_text()


@pytest.mark.slow
def test_what_is_not_the_same_evaluation_is_refused(evaluate: Evaluate, other: Path, tmp_path: Path) -> None:
    assert evaluate("out=done", "against=[ngram]")[0] == 0
    for more, says in (
        ("against=[suffix]", "against"),
        ("new_tokens=7", "new_tokens is 6 there and 7 here"),
        ("raw=true", "raw is false there"),
        ("decode.depth=3", "decode"),
        ("target.attention=eager", 'attention is "sdpa" there and "eager" here'),
    ):
        code, said = evaluate("out=done", more)
        assert code == 2 and said.err.count("\n") == 1 and says in said.err and "another out=DIR" in said.err

    shutil.copytree(ROOT / "assets" / "tiny", tmp_path / "tiny")
    weights = load_file(tmp_path / "tiny" / "model.safetensors")
    weights["model.layers.3.mlp.down_proj.weight"] *= 1.3  # another model of the same shape, under the same name
    save_file(weights, tmp_path / "tiny" / "model.safetensors", metadata={"format": "pt"})
    code, said = evaluate("out=done", f"target.path={tmp_path}/tiny")
    assert code == 2 and "target_is is" in said.err and "another out=DIR" in said.err

    (other / "decode.json").write_text("{}")  # as `tune` writes it: other trees
    code, said = evaluate("out=done")
    assert code == 2 and "drafters is" in said.err
    code, said = evaluate("out=other", "sequences=[3]")
    assert code == 2 and "sequences=3: no category has as many prompts" in said.err and not (tmp_path / "other").exists()
    code, said = evaluate("out=other", "against=[ngram]", f"assistant={ROOT}/assets/tiny")
    assert code == 2 and "it is not used: add against=[assisted]" in said.err
    code, said = evaluate("out=other", "decode.new_tokens=7")
    assert code == 2 and "decode.new_tokens=7 is for a report: an evaluation takes new_tokens=" in said.err
    code, said = evaluate("out=other", "decode.sequences=[2]")
    assert code == 2 and "decode.sequences=[2] is for a report: an evaluation takes sequences=" in said.err
