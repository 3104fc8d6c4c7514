"""The table of settings that shape a tree, against the trees: changing a setting changes nothing exactly if it is called idle."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch

from headstart.door.groups import Decode
from headstart.inference.decoding.counter_rng import CounterRNG
from headstart.inference.decoding.policy import KINDS, TreePolicy
from headstart.inference.decoding.sampling import SamplingParams
from headstart.inference.decoding.used import SHAPE, UNREAD, USED, idle
from headstart.inference.proposers.cascade import Cascade
from headstart.inference.proposers.ngram import Ngram
from headstart.inference.proposers.suffix import Suffix

DRAFTER = {"kind": "drafter"}
USUAL: dict[str, Any] = {"depth": 6, "nodes": 15, "branch": 4, "expand": 2, "least": 0.1}
OTHER: dict[str, Any] = {"depth": 5, "nodes": 9, "branch": 3, "expand": 3, "least": 0.3}


def test_the_table_has_all_kinds() -> None:
    assert set(USED) == {*KINDS, "tuned"} == set(get_args(Decode.model_fields["kind"].annotation))
    assert set(SHAPE) == {*USUAL} and {*SHAPE, "kind", "paths"} == set(TreePolicy.__dataclass_fields__)


@pytest.mark.parametrize("key", SHAPE)
@pytest.mark.parametrize("kind", KINDS)
def test_a_setting_that_is_not_used_makes_the_same_tree(kind: str, key: str) -> None:
    paths: Any = ((0,), (1,), (0, 0)) if kind == "fixed" else ()
    same = TreePolicy(kind, **USUAL, paths=paths) == TreePolicy(kind, **USUAL | {key: OTHER[key]}, paths=paths)
    assert same == (key in idle({"kind": kind, "proposer": DRAFTER}))


def test_a_chain_is_the_same_however_it_is_asked_for() -> None:
    assert TreePolicy("chain", **USUAL) == TreePolicy("chain", depth=6)
    assert TreePolicy("fixed", **USUAL, paths=((0,), (1,))) == TreePolicy("fixed", paths=((0,), (1,)))


def lookup(made: Any, text: list[int]) -> Any:
    made.clear()
    made.device = torch.device("cpu")
    made.extend(text)
    return made.propose


def cascade(policy: TreePolicy, rng: CounterRNG, sampling: SamplingParams) -> Any:
    head = SimpleNamespace(ends=SimpleNamespace(head_VD=torch.zeros(1)))
    return Cascade.propose(SimpleNamespace(drafter=head, follow=lambda _, n: list(range(n))), policy, rng, sampling)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", UNREAD)
def test_a_proposer_does_not_read_a_setting_that_is_called_idle(kind: str) -> None:
    text = torch.randint(3, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    propose = {"ngram": lookup(Ngram(matches=20), text), "suffix": lookup(Suffix(), text), "cascade": cascade}[kind]
    policy = TreePolicy("dynamic", depth=3, nodes=30, branch=3, expand=2, least=0.0)

    def tree(policy: TreePolicy) -> tuple[Any, Any]:
        found = propose(policy, CounterRNG.of(), SamplingParams())
        return found.tokens_BN.tolist(), found.parents_BN.tolist()

    changes: dict[str, Any] = {"depth": 2, "nodes": 2, "branch": 1, "expand": 1, "least": 0.3}
    unread = [key for key in SHAPE if tree(replace(policy, **{key: changes[key]})) == tree(policy)]
    assert unread == idle({"kind": "dynamic", "proposer": {"kind": kind}}) == list(UNREAD[kind])
