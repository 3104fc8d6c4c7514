"""The training-side number is the decoded number: walking over teacher-forced guesses, as rounds go."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headstart.inference.decoding.decode import generate
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.propose import Drafting
from headstart.inference.decoding.sampling import SamplingParams
from headstart.inference.reports.expected import chance_ratio, expected_walk
from headstart.inference.reports.walk import Walk, walk, walk_rows
from tests.drafters import FEW_HEADS, MADE, depth_of, learn_by_heart, make, random_tokens
from tests.tiny_targets import tiny_target

TARGET = functools.cache(tiny_target)


def naive(accept: list[list[bool]], first: int, tokens: int) -> tuple[int, int, list[int]]:
    """Rounds, tokens and accepted depths of a decoder that says x[first+2..tokens-1], told whether each guess is right."""
    rounds, said, reached, root = 0, 0, [0] * len(accept), first
    while root + 2 < tokens:
        rounds += 1
        k = 0
        # a guess is drafted only where the target's own token still fits behind it
        while k < len(accept) and root + 2 + k < tokens - 1 and accept[k][root]:
            reached[k] += 1
            k += 1
        said += k + 1
        root += k + 1
    return rounds, said, reached


@st.composite
def sequences(draw: st.DrawFn) -> tuple[list[list[bool]], int, int]:
    depth, tokens = draw(st.integers(1, 5)), draw(st.integers(1, 14))
    rows = st.lists(st.booleans(), min_size=tokens, max_size=tokens)
    return draw(st.lists(rows, min_size=depth, max_size=depth)), draw(st.integers(0, tokens)), tokens


@settings(max_examples=300, deadline=None)
@given(sequences())
def test_walk_at_temperature_0_is_a_naive_simulation(case: tuple[list[list[bool]], int, int]) -> None:
    accept, first, tokens = case
    found = walk(torch.tensor(accept, dtype=torch.float64), first, tokens)
    rounds, said, reached = naive(accept, first, tokens)
    assert (found.rounds, found.tokens, found.reached) == (rounds, said, reached)
    assert said == max(tokens - 2 - first, 0)
    assert found.expected_length == (said / rounds if rounds else 0)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("depth", "tokens", "first"), [(1, 6, 0), (2, 6, 1), (3, 6, 0), (4, 5, 0)])
def test_walk_above_it_sums_every_outcome(depth: int, tokens: int, first: int, seed: int) -> None:
    """All accept and reject outcomes of all guesses, each walked naively and weighted."""
    p_KT = torch.rand(depth, tokens, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    p_KT[0, 1], p_KT[-1, 2] = 1.0, 0.0
    cells = [(k, t) for t in range(first, tokens - 2) for k in range(min(depth, tokens - 3 - t))]  # the guesses a round can hold
    expected, total = Walk(reached=[0.0] * depth), 0.0
    for outcome in itertools.product([False, True], repeat=len(cells)):
        accept, weight = [[False] * tokens for _ in range(depth)], 1.0
        for (k, t), yes in zip(cells, outcome, strict=True):
            accept[k][t] = yes
            weight *= float(p_KT[k, t]) if yes else 1 - float(p_KT[k, t])
        if weight:
            rounds, said, reached = naive(accept, first, tokens)
            expected.add(Walk(weight * rounds, weight * said, [weight * r for r in reached]))
        total += weight
    assert total == pytest.approx(1, abs=1e-12)
    found = walk(p_KT, first, tokens)
    assert found.rounds == pytest.approx(expected.rounds, abs=1e-12) and found.tokens == pytest.approx(expected.tokens, abs=1e-12)
    assert found.reached == pytest.approx(expected.reached, abs=1e-12)


def test_certain_and_impossible_guesses() -> None:
    ones, zeros = torch.ones(3, 30), torch.zeros(3, 30)
    assert walk(ones, 0, 30).expected_length == 4 and walk(ones, 0, 30).reached == [7, 7, 7]
    assert walk(zeros, 0, 30).expected_length == 1 and walk(zeros, 0, 30).rounds == 28


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=3))
def test_packed_rows_are_the_walks_of_their_documents(seed: int, lengths: list[list[int]]) -> None:
    """Every document of a packed row as if it stood alone; valid roots are those with x[t+2] in their document."""
    K, T = 3, max(map(sum, lengths))
    accept_KBT = torch.rand(K, len(lengths), T, generator=torch.Generator().manual_seed(seed)) < 0.6
    valid_BT = torch.zeros(len(lengths), T, dtype=torch.bool)
    rounds, said, reached = 0, 0, [0] * K
    for b, row in enumerate(lengths):
        start = 0
        for n in row:
            valid_BT[b, start : max(start + n - 2, start)] = True
            own: Tensor = accept_KBT[:, b, start : start + n]
            one = naive(own.tolist(), 0, n)
            rounds, said, reached = rounds + one[0], said + one[1], [x + y for x, y in zip(reached, one[2], strict=True)]
            start += n
    found = walk_rows(accept_KBT, valid_BT)
    assert (found.rounds, found.tokens, found.reached) == (rounds, said, reached)


@functools.cache
def said(prompt: int) -> tuple[int, ...]:
    return tuple(generate(TARGET(), None, random_tokens(9, prompt), new_tokens=32).tokens)


@pytest.mark.parametrize("head", FEW_HEADS)
def test_expected_length_is_the_accepted_length(head: str) -> None:
    """Walked over the target's own greedy continuation, the teacher-forced guesses give the very rounds of decoding."""
    target, lengths, drafter = TARGET(), set(), make(head, TARGET())
    prompts = [random_tokens(9, i) for i in range(2)]
    depth = depth_of(drafter, 4)
    for steps in (0, 12):  # untrained, then right more often
        learn_by_heart(drafter, target, [p + list(said(i)) for i, p in enumerate(prompts)], depth=3, steps=steps)
        for i, prompt in enumerate(prompts):
            decoded = generate(target, Drafting(drafter), prompt, new_tokens=32, policy=TreePolicy("chain", depth=depth))
            assert decoded.tokens == list(said(i))
            walked = expected_walk(target, drafter, prompt, decoded.tokens, depth, SamplingParams())
            assert (walked.rounds, walked.tokens) == (len(decoded.emitted), sum(decoded.emitted))
            assert walked.expected_length == decoded.accepted_length
            by_depth = [sum(min(e, 1 + a) > d for e, a in zip(decoded.emitted, decoded.asked, strict=True)) for d in range(1, depth + 1)]
            assert walked.reached == by_depth
            lengths.add(walked.expected_length)
    stopped = generate(target, Drafting(drafter), prompt, new_tokens=32, policy=TreePolicy("chain", depth=depth), stop_ids=[said(i)[17]])
    walked = expected_walk(target, drafter, prompt, stopped.tokens, depth, SamplingParams())
    assert (walked.rounds, walked.tokens) == (len(stopped.emitted), sum(stopped.emitted))
    assert len(lengths) >= 3 and max(lengths) > 1.5, "a drafter that is never right tests nothing"


@pytest.mark.parametrize("head", MADE)
def test_a_short_text_can_be_walked(head: str) -> None:
    target = TARGET()
    drafter = make(head, target)
    for new in (1, 2, 3):
        walked = expected_walk(target, drafter, [7], list(said(0))[:new], 5, SamplingParams())
        assert walked.tokens == new - 1


@pytest.mark.parametrize("head", MADE)
def test_at_temperature_1_a_walk_lies_between_its_bounds(head: str) -> None:
    target = TARGET()
    drafter = make(head, target)
    text = generate(target, None, random_tokens(9, 0), new_tokens=24, sampling=SamplingParams(1.0, seed=5)).tokens
    walked = expected_walk(target, drafter, random_tokens(9, 0), text, 4, SamplingParams(1.0))
    assert walked.tokens == pytest.approx(23) and 1 < walked.expected_length < 5


def test_on_a_chain_traversal_is_the_block_rule() -> None:
    """Both weigh a path as a whole; the token rule accepts less."""
    target = TARGET()
    drafter, prompt = make("eagle", target), random_tokens(9, 0)
    text = generate(target, None, prompt, new_tokens=24, sampling=SamplingParams(1.0, seed=0)).tokens
    token, block, traversal, auto = (
        expected_walk(target, drafter, prompt, text, 4, SamplingParams(1.0, rule=rule)) for rule in ("token", "block", "traversal", "auto")
    )
    assert block == traversal == auto and block.expected_length > token.expected_length + 1e-6


@pytest.mark.parametrize(("how", "kept"), [({}, [0, 1, 2, 3]), ({"top_k": 2}, [0, 1]), ({"top_p": 0.7}, [0, 1])])
@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_a_chance_is_a_ratio_of_filtered_probabilities(temperature: float, how: dict[str, float], kept: list[int]) -> None:
    """Of both sides, as decoding filters them: the draft's likeliest two are tokens 0 and 1, the target's 1 and 0."""
    q, p = torch.tensor([1.0, 0.8, -0.6, -0.7]), torch.tensor([0.5, 0.9, -0.8, -0.4])
    mine, theirs = ((x[kept] / temperature).softmax(0).tolist() for x in (q, p))
    x_N = torch.tensor(kept)
    found = chance_ratio(q.expand(len(kept), -1), p.expand(len(kept), -1), x_N, SamplingParams(temperature, **how))  # type: ignore[arg-type]
    assert found.tolist() == pytest.approx([a / b for a, b in zip(mine, theirs, strict=True)], rel=1e-5)
