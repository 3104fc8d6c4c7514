"""The tuner without the target: trees over recorded texts are worth what decoding makes of them; costs come from a file."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headstart.data.capture import capture
from headstart.data.pack import pack
from headstart.data.packed import Document
from headstart.data.stdlib import asked
from headstart.heads.errors import UserError
from headstart.inference.decoding.decode import generate
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.propose import Drafting
from headstart.inference.decoding.target import Target
from headstart.inference.reports import tune
from headstart.inference.reports.tune_recorded import Cost, read_costs
from headstart.inference.speculator import open_speculator
from tests.doors import ROOT, call

TREES = [TreePolicy("chain", depth=5), TreePolicy(depth=4, nodes=15, branch=4, expand=2), TreePolicy("best_first", depth=7, nodes=8)]
EAGLE, NEW = ROOT / "assets" / "tiny_eagle", 40
SURFACE = {"sequences": 1, "verify_over_plain_by_nodes": {"1": 1.1, "15": 2.5, "60": 4.0}, "chain_level_over_plain": 0.05,
           "rest_over_plain": 0.1}  # fmt: skip


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Target, list[list[int]], list[list[int]]]:
    """What the shipped target says itself, captured: where, the target, prompts, answers."""
    folder, target = tmp_path_factory.mktemp("captured"), Target.load(str(ROOT / "assets" / "tiny"), device="cpu", dtype="float32")
    prompts = asked(target, 8, 0)
    said = [generate(target, None, prompt, new_tokens=NEW, stop_ids=()).tokens for prompt in prompts]
    both = list(zip(prompts, said, strict=True))
    documents = [Document(np.array(p + s, dtype=np.int32), np.arange(len(p + s)) >= len(p)) for p, s in both]
    assert len({len(p + s) for p, s in both}) == 1, "else they are cut where they are packed"
    taps = open_speculator(EAGLE, target).taps
    capture(pack(documents, max(len(p + s) for p, s in both) + 8), target, taps, folder / "shards")
    return folder / "shards", target, prompts, said


@pytest.mark.slow
def test_it_is_what_decoding_makes(recorded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """For every tree, though no layer of the target is loaded; and the trees chosen by the costs of another machine are read again."""
    shards, target, prompts, _ = recorded
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps({"device": "a GPU", "dtype": "bfloat16", "surface": [SURFACE, SURFACE | {"sequences": 2}]}))
    with monkeypatch.context() as patched:
        patched.setattr(tune, "candidates", lambda drafter: TREES)
        patched.setattr(Target, "load", lambda *_, **__: pytest.fail("the target was loaded"))
        words = [
            f"speculator={EAGLE}",
            f"shards={shards}",
            f"costs={costs}",
            f"out={tmp_path / 'made'}",
            "target.device=cpu",
            "target.dtype=float32",
        ]
        assert call("inference tune", words, ROOT, monkeypatch) == 0
    printed = capsys.readouterr().out
    drafter = open_speculator(EAGLE, target)
    for tree in TREES:
        rounds = [generate(target, Drafting(drafter), p, new_tokens=NEW, policy=tree, stop_ids=()).emitted for p in prompts]
        decoded = sum(map(sum, rounds)) / sum(map(len, rounds))
        found = re.search(rf"^([\d.]+) \(standard error [\d.]+\)  {re.escape(str(tree))}, {tree.reads} read", printed, re.MULTILINE)
        assert found is not None and float(found[1]) == pytest.approx(decoded, rel=0.005)
    made = json.loads((tmp_path / "made" / "decode.json").read_text())
    assert (made["device"], made["dtype"], made["recorded_texts"]) == ("a GPU", "bfloat16", 8) and {*made["plans"]} == {"alone", "1", "2"}
    best = made["plans"]["1"]
    tree = TreePolicy(**best["tree"] | {"paths": tuple(map(tuple, best["tree"]["paths"]))})
    wanted = np.interp(tree.nodes, [0, 1, 15, 60], [1, 1.1, 2.5, 4]) + 0.05 * tree.depth + 0.1
    assert best["round_over_plain"] == pytest.approx(wanted)
    assert best["predicted_speedup"] == pytest.approx(best["accepted_length"] / wanted) and best["predicted_speedup"] > 1


@pytest.mark.slow
def test_expect_says_of_which_text_its_figures_hold(recorded: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    words = [f"speculator={EAGLE}", f"path={recorded[0]}", "decode=chain", "decode.depth=2", "count=1", "target.dtype=float32"]
    assert call("inference expect", words, ROOT, monkeypatch) == 0
    printed = capsys.readouterr().out
    assert "over 1 recorded text (as in decoding where the target said them itself, at this temperature; " in printed
    assert "over other text mostly too low at temperature 0, and too high at 1)" in printed


def test_what_a_round_costs() -> None:
    cost = Cost({1: 1.1, 15: 2.5}, 0.05, 0.1)
    assert cost.of(TreePolicy("chain", depth=1)) == pytest.approx(1.1 + 0.05 + 0.1)
    assert cost.of(TreePolicy(depth=3, nodes=8)) == pytest.approx(1.8 + 0.15 + 0.1)
    assert cost.of(TreePolicy(depth=3, nodes=16)) is None


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({}, r"is not what `python -m inference tune` writes \(decode\.json\): 'surface' is missing"),
        ({"surface": [], "device": "", "dtype": ""}, "surface is empty"),
        ({"surface": [{"sequences": "many"}]}, "is not what"),
        ({"surface": [SURFACE | {"sequences": math.inf}]}, "is not what"),
        *(
            ({"surface": [SURFACE | {key: value}], "device": "", "dtype": ""}, f"{key} of 1 sequences is not finite")
            for value in (math.nan, math.inf, -math.inf)
            for key in ("chain_level_over_plain", "rest_over_plain")
        ),
        (
            {"surface": [SURFACE | {"verify_over_plain_by_nodes": {"1": math.inf}}]},
            "verify_over_plain_by_nodes of 1 sequences is not finite",
        ),
        ({"surface": [SURFACE | {"rest_over_plain": -0.06}]}, "rest_over_plain of 1 sequences are less than no time"),
    ],
)
def test_costs_that_are_none(content: Any, says: str, tmp_path: Path) -> None:
    (tmp_path / "costs.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=says):
        read_costs(str(tmp_path / "costs.json"))


@pytest.mark.parametrize(("words", "says"), [([], "give prompts=FILE"), (["prompts=LICENSE", "shards=conf"], "not both"),
                                             (["prompts=LICENSE", "costs=LICENSE"], "costs=FILE goes with shards=DIR")])  # fmt: skip
def test_one_of_two_texts(words: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert call("inference tune", [f"speculator={EAGLE}", *words], ROOT, monkeypatch) == 2
    assert says in capsys.readouterr().err
