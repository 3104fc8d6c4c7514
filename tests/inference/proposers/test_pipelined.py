"""A bet decides when a chain is drafted, never which one: the output is that of drafting in turn."""

from __future__ import annotations

import pytest
import torch

from headstart.heads import hub
from headstart.heads.errors import UserError
from headstart.inference.decoding.decode import generate
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.propose import Drafting
from headstart.inference.decoding.sampling import SamplingParams
from headstart.inference.decoding.target import Target
from headstart.inference.proposers.pipelined import Pipelined
from tests.drafters import make, random_tokens
from tests.inference.decoding.test_placement import run
from tests.tiny_targets import tiny_target

PROMPTS = [random_tokens(n, seed=n) for n in (9, 1)]


def copy_of(target: Target, noise: float) -> Pipelined:
    """The target itself as draft model, a little off: most bets are won, some are lost."""
    config = {**target.config.to_diff_dict(), "model_type": "llama"}
    drafter = hub.build("draft_lm", target.shape, config=config)
    drafter.lm.load_state_dict(target.model.state_dict())
    with torch.no_grad():
        for i, p in enumerate(drafter.lm.parameters()):
            p += noise * p.std() * torch.randn(p.shape, generator=torch.Generator().manual_seed(i))
    drafter.attach(target.ends)
    return Pipelined(drafter.eval())


@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_it_says_what_drafting_in_turn_says(noise: float) -> None:
    target = tiny_target("llama")
    proposer = copy_of(target, noise)
    greedy, token, block = SamplingParams(), SamplingParams(1.0, rule="token", seed=3), SamplingParams(0.7, rule="block", top_k=20, seed=4)
    one, other = PROMPTS
    for prompt, depth, sampling in ((one, 3, greedy), (other, 1, greedy), (other, 3, token), (one, 3, block)):  # the same proposer again
        how = {"new_tokens": 24, "policy": TreePolicy("chain", depth=depth), "sampling": sampling}
        pipelined, turns = (generate(target, p, prompt, **how) for p in (proposer, Drafting(proposer.inner.drafter)))
        assert (pipelined.tokens, pipelined.emitted, pipelined.asked) == (turns.tokens, turns.emitted, turns.asked)
        if sampling.temperature == 0:
            assert pipelined.tokens == generate(target, None, prompt, new_tokens=24).tokens
    assert 0 < proposer.won <= proposer.bets
    assert noise or proposer.won > 0.3 * proposer.bets
    assert not noise or proposer.won < proposer.bets, "no bet was lost: this tested nothing"


def test_a_bet_that_fails_does_not_haunt_the_next_sequence() -> None:
    target = tiny_target("llama")
    proposer = copy_of(target, 0.0)
    how = {"new_tokens": 12, "policy": TreePolicy("chain", depth=3)}
    works, proposer._draft_on = proposer._draft_on, lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        generate(target, proposer, PROMPTS[0], **how)
    proposer._draft_on = works
    assert generate(target, proposer, PROMPTS[0], **how).tokens == generate(target, None, PROMPTS[0], new_tokens=12).tokens


def test_what_cannot_be_pipelined_is_refused() -> None:
    target = tiny_target("llama")
    with pytest.raises(UserError, match="states of the target"):
        Pipelined(make("eagle", target))
    with pytest.raises(UserError, match="chain"):
        generate(target, copy_of(target, 0.0), PROMPTS[0], new_tokens=4, policy=TreePolicy())


@pytest.mark.slow
def test_bets_on_a_second_device() -> None:
    done = run("tests.inference.proposers.two_devices")
    said, _ = done.communicate(timeout=200)
    assert done.returncode == 0, said
