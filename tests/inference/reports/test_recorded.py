"""Over a text that is known, the rounds are those of decoding: to the round at temperature 0, in distribution above."""

from __future__ import annotations

import functools
from statistics import mean, stdev

import pytest
import torch

from headstart.heads.base import Drafter
from headstart.inference.decoding.decode import Generation, generate
from headstart.inference.decoding.policy import TreePolicy, caterpillar, fit_depth
from headstart.inference.decoding.propose import Drafting
from headstart.inference.decoding.sampling import SamplingParams
from headstart.inference.reports.expected import expected_walk, greedy_walk
from headstart.inference.reports.recorded import Recorded, replay
from headstart.inference.reports.walk import Walk
from tests.drafters import FEW_HEADS, learn_by_heart, make, random_tokens
from tests.tiny_targets import tiny_target

NEW = 32
PROMPTS = [random_tokens(9, i) for i in range(2)]
TARGET = functools.cache(tiny_target)
PATHS = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1))
TREES = [
    TreePolicy("chain", depth=4),
    TreePolicy(depth=4, nodes=8, branch=3),
    TreePolicy(depth=5, nodes=12, branch=4, expand=2, least=0.05),
    TreePolicy("best_first", depth=4, nodes=7, branch=2),
    TreePolicy("fixed", paths=PATHS),
]


@functools.cache
def learnt(head: str, steps: int = 12) -> Drafter:
    texts = [(p + generate(TARGET(), None, p, new_tokens=NEW).tokens)[: 9 + NEW] for p in PROMPTS]
    return learn_by_heart(make(head, TARGET()), TARGET(), texts, depth=3, steps=steps)


def told(made: Generation) -> tuple[list[int], list[int], list[int]]:
    return made.tokens, made.emitted, made.asked


@pytest.mark.parametrize("head", FEW_HEADS)
def test_at_temperature_0_the_rounds_are_those_of_decoding(head: str) -> None:
    drafter, lengths = learnt(head), set()
    for tree in (fit_depth(tree, drafter) for tree in TREES):
        for prompt in PROMPTS:
            made = generate(TARGET(), Drafting(drafter), prompt, new_tokens=NEW, policy=tree)
            recorded = Recorded.by(TARGET(), drafter.taps, prompt, made.tokens)
            recorded.final_1TD = recorded.final_1TD * torch.nan  # nothing hangs on it
            assert told(replay(recorded, drafter, tree, SamplingParams())) == told(made)
            lengths.add(made.accepted_length)
    assert max(lengths) > 1.4, "a drafter that is never right tests nothing"


SMALL = functools.cache(lambda: tiny_target(vocab_size=12, bos_token_id=None, eos_token_id=None, pad_token_id=None))
RULES = [
    ("token", TREES[0]),
    ("block", TREES[0]),
    ("auto", TREES[1]),
    ("auto", TreePolicy(depth=3, nodes=3, branch=2)),
    ("auto", TREES[4]),
    ("auto", caterpillar(4, 8, 3)),
    ("multi_round", TREES[4]),
    ("without_replacement", TREES[4]),
]


@functools.cache
def small_drafter() -> Drafter:
    """Right now and then, and as unsure as the target."""
    texts = [random_tokens(9, i, 12) for i in range(8)]
    texts = [t + generate(SMALL(), None, t, new_tokens=16, sampling=SamplingParams(1.0, seed=i)).tokens for i, t in enumerate(texts)]
    return learn_by_heart(make("eagle", SMALL()), SMALL(), texts, depth=3, steps=6)


@functools.cache
def said_alone(seed: int) -> list[int]:
    return generate(SMALL(), None, random_tokens(5, seed, 12), new_tokens=16, sampling=SamplingParams(1.0, seed=seed + 1000)).tokens


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "tree"), RULES)
def test_above_it_as_many_rounds_are_expected_as_decoding_takes(rule: str, tree: TreePolicy) -> None:
    """Of texts that this very decoding said the difference has mean 0, text by text; of texts that the target said alone, too."""
    target, drafter, rounds = SMALL(), small_drafter(), 0
    off: dict[bool, list[int]] = {True: [], False: []}  # drafted -> of each text
    for seed in range(40):
        how, prompt = SamplingParams(1.0, rule=rule, seed=seed), random_tokens(5, seed, 12)
        made = generate(target, Drafting(drafter), prompt, new_tokens=16, policy=tree, sampling=how)
        for drafted, said in ((True, made.tokens), (False, said_alone(seed))):
            again = replay(Recorded.by(target, drafter.taps, prompt, said), drafter, tree, how)
            assert again.tokens == said and sum(again.emitted) == sum(made.emitted) == 15
            off[drafted].append(len(again.emitted) - len(made.emitted))
        rounds += len(made.emitted)
    for each in off.values():
        assert abs(mean(each)) < 3.5 * stdev(each) / len(each) ** 0.5, (mean(each), rounds / len(each))
    assert rounds / 40 < 12, "hardly anything was accepted"


@pytest.mark.slow
def test_the_chain_is_expected_as_its_closed_form_says() -> None:
    """By both rules: the mean over many replays is the sum over all of them (expected_walk)."""
    target, drafter, prompt = SMALL(), small_drafter(), random_tokens(5, 3, 12)
    text = generate(target, None, prompt, new_tokens=12, sampling=SamplingParams(1.0, seed=4)).tokens
    recorded = Recorded.by(target, drafter.taps, prompt, text)
    for rule in ("token", "block"):
        rounds = [len(replay(recorded, drafter, TREES[0], SamplingParams(1.0, rule=rule, seed=s)).emitted) for s in range(120)]
        expected = expected_walk(target, drafter, prompt, text, 4, SamplingParams(1.0, rule=rule)).rounds
        assert abs(mean(rounds) - expected) < 3.5 * stdev(rounds) / len(rounds) ** 0.5


def test_over_text_of_others_it_is_too_low_at_temperature_0_and_too_high_above() -> None:
    """Summed exactly. Random tokens are as far from the target's own text as can be."""
    target, drafter, how = SMALL(), small_drafter(), SamplingParams(1.0, rule="token")
    own, others = (Walk(), Walk()), (Walk(), Walk())
    for seed in range(6):
        prompt, greedy = random_tokens(5, seed, 12), generate(SMALL(), None, random_tokens(5, seed, 12), new_tokens=16).tokens
        for sums, texts in ((own, (greedy, said_alone(seed))), (others, [random_tokens(16, 99 + seed, 12)] * 2)):
            sums[0].add(greedy_walk(drafter, Recorded.by(target, drafter.taps, prompt, texts[0]), 4))
            sums[1].add(expected_walk(target, drafter, prompt, texts[1], 4, how))
    assert others[0].expected_length < own[0].expected_length and others[1].expected_length > 1.3 * own[1].expected_length
