"""A cascade says what its drafter would say alone, token for token, in fewer of the drafter's passes."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from headstart.heads.base import Drafter
from headstart.heads.errors import UserError
from headstart.inference.decoding.context import Context
from headstart.inference.decoding.counter_rng import CounterRNG
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.propose import Drafting
from headstart.inference.decoding.sampling import SamplingParams
from headstart.inference.proposers.base import Follower
from headstart.inference.proposers.cascade import Cascade
from headstart.inference.proposers.ngram import Ngram
from headstart.inference.proposers.suffix import Suffix
from tests.drafters import HEADS, make, random_tokens
from tests.inference.decoding.test_lossless import TARGET
from tests.inference.proposers.common import FULL, Knowing, lm_of, roots_of_text

TEXT = random_tokens(60, seed=5)
CUTS = [0, 9, 10, 15, 24]  # roots arrive in pieces
DRAFTER = functools.cache(lambda architecture, noise=0.0, seed=0: lm_of(TARGET(architecture), noise, seed))


class Passes:
    """Counts the reading of a drafter."""

    def __init__(self, drafter: Drafter) -> None:
        self.count = 0
        drafter.get_submodule("lm.model").register_forward_pre_hook(self.one)

    def one(self, *args: Any) -> None:
        self.count += 1


@functools.cache
def alone(drafter: Drafter, stop: int, count: int) -> list[int]:
    """The drafter's chain behind the first roots of TEXT, in one go."""
    proposer = Drafting(drafter)
    proposer.start(None, 256)
    proposer.absorb(roots_of_text(TEXT, 0, stop))
    return proposer.propose(TreePolicy("chain", depth=count), CounterRNG.of(), SamplingParams()).tokens_BN[0].tolist()


class Wrong(Knowing):
    """Guesses the drafter's own chain with mistakes, of any length."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__()
        self.drafter, self.dice = drafter, random.Random(0)

    def follow(self, after: Sequence[int], count: int) -> list[int]:
        right = alone(self.drafter, len(self.text) - 1, 12)
        assert right[: len(after)] == list(after), "the drafter is asked to go on from what it did not say"
        guess = [token if self.dice.random() < 0.7 else self.dice.randrange(96) for token in right[len(after) : len(after) + count]]
        return guess[: self.dice.randint(0, count)]


def small_ones(drafter: Drafter) -> dict[str, Follower | None]:
    other, third = DRAFTER("llama", 0.02, 1), DRAFTER("llama", 0.3, 2)
    return {
        "none": None,
        "ngram": Ngram(),
        "suffix": Suffix(),
        "wrong": Wrong(drafter),
        "model": Cascade(other),
        "cascade": Cascade(other, Cascade(third, Knowing(alone(third, 9, 30)))),
        "itself": Cascade(drafter),
    }


@pytest.mark.parametrize("small", ["none", "ngram", "suffix", "wrong", "model", "cascade", "itself"])
def test_the_chain_is_the_drafters_own(small: str) -> None:
    drafter = DRAFTER("llama")
    context = Context(TARGET("llama"), ())
    cascade = Cascade(drafter, small_ones(drafter)[small])
    cascade.start(context, 256)
    cascade.absorb(roots_of_text(TEXT[::-1], 0, 20))
    if small != "wrong":  # which knows the answers to this text alone
        assert len(cascade.follow([], 2)) == 2  # now the roots are in its memory
    cascade.start(context, 256)  # it forgets the sequence before
    for first, stop in zip(CUTS, CUTS[1:], strict=False):
        cascade.absorb(roots_of_text(TEXT, first, stop))
        wanted = alone(drafter, stop, 8)
        for policy in (TreePolicy(depth=1), TreePolicy("chain", depth=8), TreePolicy(depth=5, nodes=3)):
            tree = cascade.propose(policy, CounterRNG.of(), SamplingParams())
            count = min(policy.depth, policy.nodes)
            assert tree.tokens_BN[0].tolist() == wanted[:count]
            assert tree.parents_BN[0].tolist() == list(range(-1, count - 1)) and tree.drawn_BN is None
        assert cascade.follow(wanted[:3], 5) == wanted[3:] and cascade.follow([], 0) == []


def test_it_can_go_on_from_what_it_did_not_say() -> None:
    drafter = DRAFTER("llama")
    cascade = Cascade(drafter, Suffix())
    cascade.start(Context(TARGET("llama"), ()), 256)
    cascade.absorb(replace(roots_of_text(TEXT, 0, 20), states={3: torch.zeros(1, 20, 32)}))  # which another part of a union reads
    assert cascade.follow([], 0) == []
    with pytest.raises(UserError, match="the rule block verifies chains"):
        cascade.propose(TreePolicy(), CounterRNG.of(), SamplingParams(1.0, rule="block"))
    assert cascade.follow(TEXT[21:25], 5) == alone(drafter, 24, 5) != cascade.follow([], 5) == alone(drafter, 20, 5)


@pytest.mark.parametrize("architecture", FULL)
def test_it_needs_fewer_passes_of_the_drafter(architecture: str) -> None:
    drafter = lm_of(TARGET(architecture), 0.0)
    chain = alone(drafter, 30, 16)
    assert len(set(chain)) > 4
    passes, context = Passes(drafter), Context(TARGET(architecture), ())

    def count(small: Follower | None) -> int:
        cascade = Cascade(drafter, small)
        cascade.start(context, 256)
        cascade.absorb(roots_of_text(TEXT, 0, 30))
        passes.count = 0
        assert cascade.follow([], 16) == chain
        return passes.count  # the first one absorbs the roots

    assert count(None) == 16
    assert count(Cascade(lm_of(TARGET(architecture), 0.0))) == 1
    assert count(Knowing(chain, least=2)) <= 3  # the first two tokens are needed to find the place
    assert count(Knowing([*chain[:6], 3, *chain[7:]], least=2)) < 10


@pytest.mark.parametrize("head", HEADS)
def test_other_drafters_are_refused(head: str) -> None:
    drafter = make(head, TARGET("llama"))
    if drafter.taps or drafter.unrolls:
        with pytest.raises(UserError, match="a language model of its own"):
            Cascade(drafter)
    else:
        Cascade(drafter)
