"""Expected beside decoded: which texts count, how many rounds each expects, and where nothing is left to chance."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headstart.inference.decoding.decode import Generation
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.sampling import SamplingParams
from headstart.inference.reports import truth as module
from headstart.inference.reports.truth import Truth
from headstart.inference.reports.walk import Walk

TREE, CHAIN = TreePolicy(depth=3, nodes=6, branch=2), TreePolicy("chain", depth=3)


def text(*emitted: int) -> Generation:
    return Generation([0] * (1 + sum(emitted)), [*emitted], asked=[3] * len(emitted))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is replayed; one after the other it takes 5 and 8 rounds. A chain is expected to take 4.5."""
    asked = list[Any]()

    def replay(recorded: Any, drafter: Any, shape: TreePolicy, sampling: SamplingParams, *, new_tokens: int) -> Generation:
        asked.append((shape, sampling, new_tokens))
        return text(*[1] * (8 if len(asked) % 2 == 0 else 5))

    monkeypatch.setattr(module, "replay", replay)
    monkeypatch.setattr(module.Recorded, "by", lambda *_: None)
    monkeypatch.setattr(module, "expected_walk", lambda *_: Walk(4.5, 9.0, [2.0], [3.0]))
    return asked


def truth_of(dtype: torch.dtype = torch.float32) -> Truth:
    return Truth(SimpleNamespace(dtype=dtype), SimpleNamespace(taps=()))  # type: ignore[arg-type]


def test_above_temperature_0_a_tree_is_expected_as_the_mean_of_its_replays(asked: list[Any]) -> None:
    """Each draws anew, by the decoding's own rule and filters and up to its limit; at temperature 0 there is one."""
    truth, warm = truth_of(), SamplingParams(1.0, top_p=0.9, seed=7)
    truth.add("tree", TREE, [1], text(4, 5), warm, 64)
    assert len({how.seed for _, how, _ in asked}) == len(asked) == 2
    assert all((shape, how.temperature, how.top_p, new) == (TREE, 1.0, 0.9, 64) for shape, how, new in asked)
    truth.add("tree", TREE, [1], text(4, 5), SamplingParams(), 64)
    assert len(asked) == 3
    found = truth.table()
    assert found["temperature_1"]["tree"]["expected"] == pytest.approx(9 / 6.5) and found["temperature_1"]["tree"]["decoded"] == 4.5
    assert found["temperature_0"]["tree"]["expected"] == pytest.approx(9 / 5) and found["temperature_0"]["tree"]["decoded"] == 4.5


def test_a_chain_is_expected_as_its_walk_says(asked: list[Any]) -> None:
    truth = truth_of()
    for _ in range(2):
        truth.add("chain", CHAIN, [1], text(4, 5), SamplingParams(1.0), 64)
    row = truth.table()["temperature_1"]["chain"]
    assert not asked and (row["expected"], row["decoded"]) == (2.0, 4.5)
    assert truth.walks[True] == Walk(9.0, 18.0, [4.0], [6.0]) and truth.walks[False] == Walk()


def test_texts_of_which_nothing_can_be_expected_are_left_out(asked: list[Any]) -> None:
    truth = truth_of()
    truth.add("tree", TREE, [1], text(), SamplingParams(), 64)
    for kind, shape, temperature in (("chain", CHAIN, 0.0), ("chain", CHAIN, 1.0), ("tree", TREE, 1.0)):
        truth.add(kind, shape, [1], text(4, 5), SamplingParams(temperature, repetition_penalty=1.3), 64)
    assert truth.table() == {} and not asked
    truth.add("tree", TREE, [1], text(4, 5), SamplingParams(repetition_penalty=1.3), 64)
    assert [*truth.table()] == ["temperature_0"]


@pytest.mark.parametrize(
    ("dtype", "sampled", "certain"), [(torch.float32, False, True), (torch.float32, True, False), (torch.bfloat16, False, False)]
)
def test_in_half_precision_or_where_tokens_are_drawn_chance_has_its_part(dtype: torch.dtype, sampled: bool, certain: bool) -> None:
    """Lengths of 3 and 2.7 of two texts: certainly apart, or well within chance."""
    truth = truth_of(dtype)
    for rounds in (9.0, 11.0):
        for lengths, more in zip(truth.found["chain", sampled], (0.0, 1.0), strict=True):
            lengths.add(rounds + more, 30.0)
    row = truth.table()[f"temperature_{int(sampled)}"]["chain"]
    assert row["expected"] == 3.0 and row["decoded"] == pytest.approx(60 / 22)
    assert row["apart"] == (row["standard_error"] == 0) == certain
