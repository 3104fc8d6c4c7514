"""benchmarks/in_vllm.py without vLLM: what it asks of an interpreter that stands in for it, and what it makes of the answers."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import in_vllm
from headstart.heads import hub
from headstart.heads.base import TargetShape
from headstart.heads.serving import serving
from headstart.inference.decoding.decode import generate
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.propose import Drafting
from headstart.inference.reports.figures import rounds_of
from headstart.inference.settings import open_target
from headstart.inference.speculator import open_speculator
from tests.drafters import make
from tests.trainers.conftest import ROOT, small_run
from tests.trainers.conftest import composed as composed
from tests.trainers.conftest import conversations as conversations
from tests.trainers.conftest import target_folder as target_folder

RUNS: dict[str, dict[str, Any]] = {
    "medusa": dict(guesses=3), "peagle": dict(layers=1, depth=4, mask_token=5), "eagle": dict(draft_vocab=list(range(40)), taps=[1, 2, 3]),
    "hydra": {},
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(composed: Any, target_folder: Path, conversations: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Finished runs, but for the training."""
    folder = tmp_path_factory.mktemp("runs")
    settings = composed(*small_run(target_folder, conversations, folder), "decode.prompts=2")
    target = open_target(settings["target"])
    for head, changes in RUNS.items():
        hub.save(make(head, target, **changes), folder / head / "speculator", target.card, torch.float32)
        (folder / head / "config.json").write_text(json.dumps(settings))
    return {head: folder / head for head in RUNS}


def answer(request: dict[str, Any], wrong: bool) -> dict[str, Any]:
    """What a vLLM would say that is right; or that drafts once more than needed, with another last guess in the first round."""
    target = open_target({"name": "x", "path": request["target"], "dtype": "float32", "device": "cpu", "attention": "sdpa", "config": None})
    asked = request["speculative"]
    drafter, chain = open_speculator(asked["model"], target), TreePolicy("chain", depth=asked["num_speculative_tokens"])
    made = [generate(target, Drafting(drafter), p, new_tokens=request["new_tokens"], policy=chain) for p in request["prompts"]]
    rounds = [n for g in made for n in g.emitted]
    guesses = [[list(r.guesses) for r in rounds_of(g)] for g in made]
    guesses[0][0][-1] += wrong
    return {"tokens": [g.tokens for g in made], "guesses": guesses, "drafts": len(rounds) + wrong, "accepted": sum(rounds) - len(rounds),
            "accepted_by_depth": [0] * chain.depth, "version": "0.0"}  # fmt: skip


@pytest.mark.slow
def test_each_head_is_asked_as_its_card_says(runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    requests: list[dict[str, Any]] = []

    def ask(vllm: str, request: dict[str, Any]) -> dict[str, Any]:
        assert vllm == "PYTHON"
        requests.append(json.loads(json.dumps(request)))
        return answer(request, wrong="peagle" in request["speculative"]["model"])

    monkeypatch.setattr(in_vllm, "ask", ask)
    out = tmp_path / "in_vllm.json"
    out.write_text('{"mtp": {"kept": 1}}')
    monkeypatch.setattr(sys, "argv", ["in_vllm.py", *map(str, runs.values()), "--vllm", "PYTHON", "--out", str(out), "--new-tokens", "12"])
    with pytest.raises(SystemExit, match=r"^failed, or other tokens, passes or guesses: peagle, hydra$"):
        in_vllm.main()
    assert "vLLM does not load this folder: none has this kind of drafter" in " ".join(capsys.readouterr().out.split())
    asked = [{k: v for k, v in r["speculative"].items() if k != "model"} for r in requests]
    assert asked == [
        {"method": "medusa", "num_speculative_tokens": 3},
        {"method": "eagle3", "num_speculative_tokens": 2, "parallel_drafting": True},
        {"method": "eagle3", "num_speculative_tokens": 2},
    ]
    assert all(len(r["prompts"]) == 2 and r["new_tokens"] == 12 for r in requests)
    found = json.loads(out.read_text())
    assert found.keys() == {"mtp", "medusa", "peagle", "eagle_vocabulary_40"}
    for name, entry in found.items():
        if name != "mtp":
            assert entry["prompts_with_the_same_tokens"] == 2 and entry["commit"]
            assert (entry["target_passes_in_vllm"] == entry["target_passes_here"]) == (name != "peagle")
            assert entry["guesses_that_differ"] == (name == "peagle") and entry["guesses_compared"] > 12


def test_vllm_sees_no_name_by_which_it_would_choose_another_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Engine(contextlib.nullcontext[Any]):
        version = "0.0"

        def __init__(self, vllm: str, settings: dict[str, Any]) -> None:
            super().__init__(self)
            said = settings["speculative_config"]
            assert said["method"] == "draft_model" and "eagle" not in said["model"] and Path(said["model"]).resolve() == folder

        def ask(self, request: dict[str, Any]) -> dict[str, Any]:
            return {"drafts": 1}

    folder = tmp_path / "draft_lm+eagle-tiny"
    folder.mkdir()
    monkeypatch.setattr(in_vllm, "Vllm", Engine)
    asked = {"target": "x", "longest": 64, "speculative": {"method": "draft_model", "model": str(folder)}}
    assert in_vllm.ask("PYTHON", asked) == {"drafts": 1, "version": "0.0"}


def test_what_an_interpreter_without_vllm_says_is_told() -> None:
    asked = {"target": "x", "longest": 64, "speculative": {"model": "x"}, "prompts": [[1]], "new_tokens": 1, "stop": []}
    with pytest.raises(RuntimeError, match=r"(?s)vLLM gave no result \(exit status 1\).*No module named 'vllm'"):
        in_vllm.ask(sys.executable, asked)


def test_the_experiment_is_of_drafters_that_vllm_loads(composed: Any) -> None:
    """And the token of its masks is one that no text has."""
    from transformers import AutoConfig, AutoTokenizer

    shape = TargetShape.of(AutoConfig.from_pretrained(ROOT / "assets" / "tiny"))
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "assets" / "tiny")
    arms = composed("experiment=in_vllm")["arms"]
    methods = {}
    for name, words in arms.items():
        head = composed("experiment=in_vllm", *words.split())["head"]
        if isinstance(head.get("draft_vocab"), int):  # the data say which
            head["draft_vocab"] = list(range(head["draft_vocab"]))
        with torch.device("meta"):
            drafter = hub.build(head.pop("name"), shape, **head)
        asked = [c.speculative for c in serving(drafter, "TARGET", "DIR", 6).commands if c.speculative]
        methods[name] = asked[0]["method"]
        if head.get("mask_token") is not None:  # bytes from 161 on stand for themselves in a byte-level vocabulary; UTF-8 has no 0xC0
            assert tokenizer.convert_ids_to_tokens(head["mask_token"]) == chr(0xC0)
    assert set(methods.values()) == {"eagle3", "eagle", "draft_model", "medusa", "dflash"} and len(methods) == 10
