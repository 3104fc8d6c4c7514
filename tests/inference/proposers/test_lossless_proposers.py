"""With every proposer, greedy decoding says exactly what the target says alone, some guesses are accepted, and its cache is left alone."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from headstart.inference.decoding.decode import generate
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.propose import Drafting, Proposer
from headstart.inference.decoding.sampling import SamplingParams
from headstart.inference.decoding.target import Target
from headstart.inference.proposers.cascade import Cascade
from headstart.inference.proposers.early_exit import EarlyExit
from headstart.inference.proposers.hybrid import Hybrid
from headstart.inference.proposers.suffix import Suffix
from headstart.inference.proposers.swift import Swift
from headstart.inference.proposers.union import Union
from tests.inference.decoding.test_lossless import PROMPTS, TARGET, check_rounds, plain
from tests.inference.proposers.common import FULL, Knowing, Watched, lm_of
from tests.tiny_targets import ARCHITECTURES

NEW = 24
LM = functools.cache(lambda architecture: lm_of(TARGET(architecture), 0.05))


def heard(architecture: str) -> list[list[int]]:
    """What the target will say, with mistakes: some tokens left out, some others said."""
    texts = [[*PROMPTS[i], *plain(architecture, i)] for i in range(2)]
    return [[*t[:22], *t[23:]] for t in texts] + [[*t[:18], 90, *t[19:]] for t in texts]


class KnowingSuffix(Suffix):
    known: list[list[int]] = []

    def clear(self) -> None:
        super().clear()
        for text in self.known:
            self.extend([0, *text])


def knowing_suffix(architecture: str) -> Suffix:
    suffix = KnowingSuffix()
    suffix.known = heard(architecture)
    return suffix


PROPOSERS: dict[str, Callable[[Target, str], Proposer]] = {
    "ngram": lambda target, a: Knowing(*heard(a), most=3, matches=3),
    "suffix": lambda target, a: knowing_suffix(a),
    "early_exit": lambda target, a: EarlyExit(target, layers=5),
    "swift": lambda target, a: Swift(target, skip=0.1, search=4, window=8),
    "hybrid": lambda target, a: Hybrid(Knowing(*heard(a)), EarlyExit(target, layers=5), match=4),
    "union": lambda target, a: Union([Knowing(*heard(a)), EarlyExit(target, layers=5), knowing_suffix(a)]),
    "cascade of a model": lambda target, a: Cascade(LM(a), Knowing(*heard(a))),
    "union of a model": lambda target, a: Union([Knowing(*heard(a)), Drafting(LM(a))]),
    "hybrid of a model": lambda target, a: Hybrid(Knowing(*heard(a)), Drafting(LM(a)), match=4),
}
POLICIES = [TreePolicy("chain", depth=4), TreePolicy(depth=4, nodes=9, branch=3)]


OWN = ("early_exit", "swift", "cascade of a model")  # they hang on what the target is made of
KINDS = [
    pytest.param(kind, architecture, marks=() if architecture == "llama" or kind in OWN else pytest.mark.slow)
    for kind in PROPOSERS
    for architecture in (FULL if "model" in kind else ARCHITECTURES)
]


@pytest.mark.parametrize(("kind", "architecture"), KINDS)
def test_proposers_are_lossless_and_accepted(kind: str, architecture: str) -> None:
    target = TARGET(architecture)
    proposer, lengths = Watched(PROPOSERS[kind](target, architecture)), []
    for i, policy in enumerate(POLICIES):  # the same proposer again: it forgets the sequence before
        result = generate(target, proposer, PROMPTS[i], new_tokens=NEW, policy=policy)
        assert result.tokens == list(plain(architecture, i)[:NEW])
        check_rounds(result)
        lengths.append(result.accepted_length)
    assert max(lengths) > 1.15, "nothing was accepted: this tested nothing"


@pytest.mark.parametrize("kind", PROPOSERS)
def test_sampling_repeats_with_its_seed(kind: str) -> None:
    """With the proposer that has served other sequences too."""
    target = TARGET("llama")
    proposer = PROPOSERS[kind](target, "llama")

    def sample(seed: int, policy: TreePolicy, rule: str) -> list[int]:
        how = SamplingParams(0.9, top_k=40, rule=rule, seed=seed)
        return generate(target, proposer, PROMPTS[0], new_tokens=10, policy=policy, sampling=how).tokens

    for policy, rule in zip(POLICIES, ("block", "top_plus_one"), strict=True):
        first = sample(1, policy, rule)
        assert sample(1, policy, rule) == first and any(sample(other, policy, rule) != first for other in (0, 2))
