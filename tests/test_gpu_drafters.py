"""Every drafter, sliding window and verification rule on a GPU: device graphs say what the same rounds say as they are launched.

    make gpu            # with tests/test_gpu.py, which says how this runs where there is no GPU

Drafters are untrained: their trees are seldom accepted, so all their numbers are in what is drafted.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from headstart.inference.decoding.engine import Engine
from headstart.inference.decoding.policy import TreePolicy, caterpillar, fit_depth
from headstart.inference.decoding.sampling import SamplingParams
from headstart.inference.decoding.target import Target
from tests.drafters import FEW, MADE, fresh, make
from tests.test_gpu import CHAIN, MIXED, NEW, TREE, device, on, pair, plain, said

__all__ = ["device"]  # the fixture
WARM = [SamplingParams(0.6, top_p=0.9, seed=i) for i in range(5)]
WINDOWS: dict[str, Mapping[str, Any]] = {
    "dflash": {"window": 6, "window_layers": [0]},
    "jetspec": {"window": 6, "window_slides": False},
    "dspark": {"window": 6, "window_causal": False, "draft_vocab": list(range(0, 96, 2))},
}
CASES = [pytest.param(head, {}, id=head, marks=() if head in FEW else pytest.mark.slow) for head in MADE]
CASES += [pytest.param(head, how, id=f"{head} with a window", marks=pytest.mark.slow) for head, how in WINDOWS.items()]


def on_both(target: Target, drafter: Any, policy: TreePolicy, rule: str = "auto") -> tuple[Engine, Engine]:
    replayed, launched = (
        Engine(target, drafter, sequences=3, max_length=100, plans=fit_depth(policy, drafter), rule=rule, graphs=graphs)
        for graphs in (True, False)
    )
    return replayed, launched


def moved(device: torch.device, head: str, how: Mapping[str, Any]) -> tuple[Target, Any]:
    pytest.importorskip("omegaconf")  # conf/head
    here = pair()[0]
    made = make(head, here, **how)
    there = Target(copy.deepcopy(here.model).to(device), name="llama")
    drafter = fresh(head, there.shape, **how)
    drafter.attach(there.ends)  # which builds the module of own_mtp
    drafter.load_state_dict(made.state_dict())
    return there, drafter.to(device).eval()


@pytest.mark.parametrize("head, how", CASES)
def test_every_drafter_in_replayed_rounds(head: str, how: Mapping[str, Any], device: torch.device) -> None:
    target, drafter = moved(device, head, how)
    for policy in (CHAIN, TREE):
        replayed, launched = on_both(target, drafter, policy)
        assert said(replayed, [SamplingParams()] * 5) == said(launched, [SamplingParams()] * 5) == plain(target)
        assert said(replayed, MIXED) == said(launched, MIXED)
        assert replayed.rounds.graphs is not None and replayed.rounds.graphs.kept


@pytest.mark.parametrize("rule", ["traversal", "top_plus_one", "multi_round", "without_replacement", "block"])
def test_every_rule_in_replayed_rounds(rule: str, device: torch.device) -> None:
    """By a drafter whose guesses are accepted, in dynamic trees and in those that are fixed for warm temperatures."""
    target, drafter = on(device)
    for policy in {"block": [CHAIN], "top_plus_one": [TREE, caterpillar(4, 10, 3)]}.get(rule, [caterpillar(4, 10, 3)]):
        replayed, launched = on_both(target, drafter, policy, rule)
        assert said(replayed, WARM) == said(launched, WARM)
        assert all(len(tokens) == NEW for tokens in said(replayed, [SamplingParams(1.0, seed=9)] * 5))
        assert replayed.rounds.graphs is not None and replayed.rounds.graphs.kept
