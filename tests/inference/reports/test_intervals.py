"""Intervals against all sets of prompts that can be drawn, written out; and what the drafter was sure of against its own drafting."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from headstart.inference.decoding import growth
from headstart.inference.decoding.decode import generate
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.propose import Drafting
from headstart.inference.decoding.sampling import SamplingParams
from headstart.inference.reports.confidence import confidences, probabilities
from headstart.inference.reports.figures import intervals, rounds_of, times_as_long
from tests.drafters import learn_by_heart, make, random_tokens
from tests.tiny_targets import tiny_target

TARGET = functools.cache(tiny_target)
PROMPTS = [random_tokens(n, seed=n) for n in (9, 12, 5)]


def made(emitted: list[int], seconds: float) -> Any:
    return SimpleNamespace(tokens=[0] * (1 + sum(emitted)), emitted=emitted, guesses=[], seconds=seconds)


@pytest.mark.parametrize("prompts", [2, 3, 4, 5])
def test_they_are_those_of_all_sets_that_can_be_drawn(prompts: int) -> None:
    rng = np.random.default_rng(prompts)
    drafted = [made(rng.integers(1, 6, rng.integers(3, 30)).tolist(), rng.uniform(1, 2)) for _ in range(prompts)]
    plain = [made([1] * int(rng.integers(20, 60)), rng.uniform(2, 3)) for _ in range(prompts)]  # which stopped elsewhere
    every = list(itertools.product(range(prompts), repeat=prompts))  # equally likely

    def speed(runs: list[Any], some: Sequence[int]) -> float:
        return float(sum(len(runs[i].tokens) for i in some) / sum(runs[i].seconds for i in some))

    def share(depth: int, some: Sequence[int]) -> float:
        rounds = [n for i in some for n in drafted[i].emitted]
        return sum(n > depth for n in rounds) / len(rounds)  # so many guesses, and the target's own token

    figures: dict[str, Callable[[Sequence[int]], float]] = {
        "accepted_length": lambda s: sum(sum(drafted[i].emitted) for i in s) / sum(len(drafted[i].emitted) for i in s),
        "speedup": lambda s: speed(drafted, s) / speed(plain, s),
        **{f"depth {d}": functools.partial(share, d) for d in (1, 2, 3)},
    }
    whole = intervals(drafted, plain, 3)
    found = whole | {f"depth {d}": pair for d, pair in enumerate(whole["acceptance_by_depth"], start=1)}
    for key, figure in figures.items():
        values = sorted(figure(some) for some in every)
        low, high = found[key]
        for share, edge in ((0.025, low), (0.975, high)):  # 2,000 sets: a quantile's share is known to within 0.02
            near = [values[min(int(len(values) * min(max(share + off, 0), 1)), len(values) - 1)] for off in (-0.02, 0.02)]
            assert near[0] - 1e-3 <= edge <= near[1] + 1e-3, key
        assert low <= figure(range(prompts)) <= high
    assert len(whole["acceptance_by_depth"]) == 3 and whole == intervals(drafted, plain, 3), "the same for the same"


def test_how_many_times_as_long_is_told_of_the_same_prompts_for_both() -> None:
    """Against all sets of prompts that can be drawn. Drawn for each by itself, the interval would be wider: here one is always twice."""
    rng = np.random.default_rng(7)
    other = [made(rng.integers(1, 6, rng.integers(3, 30)).tolist(), 1.0) for _ in range(4)]
    drafted = [made(rng.integers(1, 6, rng.integers(3, 30)).tolist(), 1.0) for _ in range(4)]

    def length(runs: list[Any], some: Sequence[int]) -> float:
        return float(sum(sum(runs[i].emitted) for i in some) / sum(len(runs[i].emitted) for i in some))

    found = times_as_long(drafted, other)
    values = sorted(length(drafted, s) / length(other, s) for s in itertools.product(range(4), repeat=4))
    assert found["accepted_length"] == pytest.approx(length(other, range(4)))
    assert found["times"] == pytest.approx(length(drafted, range(4)) / length(other, range(4)))
    for share, edge in zip((0.025, 0.975), found["intervals"]["times"], strict=True):
        near = [values[min(int(len(values) * min(max(share + off, 0), 1)), len(values) - 1)] for off in (-0.02, 0.02)]
        assert near[0] - 1e-3 <= edge <= near[1] + 1e-3
    twice = [made([2 * n for n in each.emitted], 1.0) for each in other]
    assert times_as_long(twice, other) | {"accepted_length": 0} == {"accepted_length": 0, "times": 2, "intervals": {"times": [2, 2]}}
    assert "intervals" not in times_as_long(twice[:1], other[:1])
    assert times_as_long([made([], 1.0)], [made([], 1.0)]) == {}, "no text has a round"


def test_sets_of_prompts_without_a_round_tell_no_length() -> None:
    """Two texts that ended at once, and one with rounds of 2 and 4 tokens: every set that has a length has that of the one."""
    texts = [made([], 1.0), made([2, 4], 2.0), made([], 1.0)]
    found = intervals(texts, texts, 2)
    assert found["accepted_length"] == [3, 3] and found["acceptance_by_depth"] == [[1, 1], [0.5, 0.5]]


def test_more_prompts_make_them_narrower_and_one_makes_none() -> None:
    rng = np.random.default_rng(0)
    drafted = [made(rng.integers(1, 6, 20).tolist(), 1.0) for _ in range(64)]
    widths = [np.diff(intervals(drafted[:n], drafted[:n], 2)["accepted_length"])[0] for n in (4, 16, 64)]
    assert widths[0] > 1.3 * widths[1] > 1.69 * widths[2] > 0
    assert intervals(drafted[:1], drafted[:1], 2) == {} == intervals([made([], 1.0)] * 3, [made([], 1.0)] * 3, 2)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_the_drafter_was_sure_of_is_what_it_drafted_by(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every guess behind accepted ones the probability that drafting itself had; of those below a rejected one nothing."""
    target = TARGET()
    texts = [(p + generate(target, None, p, new_tokens=16).tokens)[:17] for p in PROMPTS]
    drafter = learn_by_heart(make("eagle", target), target, texts, depth=3, steps=12)
    drafted: list[torch.Tensor] = []
    logits = growth._logits

    def noted(*a: Any, **k: Any) -> torch.Tensor:
        drafted.append(logits(*a, **k)[0, 0])  # of a chain: one row a depth
        return drafted[-1]

    known = unknown = 0
    for i, prompt in enumerate(PROMPTS):
        drafted.clear()
        with monkeypatch.context() as patch:
            patch.setattr(growth, "_logits", lambda *a, **k: noted(*a, **k)[None, None])
            text = generate(target, Drafting(drafter), prompt, new_tokens=16, policy=TreePolicy("chain", depth=4),
                            sampling=SamplingParams(temperature=temperature, seed=i))  # fmt: skip
        rounds = rounds_of(text)
        assert len(drafted) == sum(len(r.guesses) for r in rounds) > 0
        ids_V, at = drafter.unembedding(1).ids_V, 0
        found = confidences(target, drafter, prompt, text.tokens, rounds)
        assert [len(q) for q in found] == [len(r.guesses) for r in rounds]
        for r, sure in zip(rounds, found, strict=True):
            for depth, (token, q) in enumerate(zip(r.guesses, sure, strict=True)):
                place = token if ids_V is None or drafted[at].shape[-1] == target.shape.vocab_size else ids_V.tolist().index(token)
                wanted = float(drafted[at].double().softmax(-1)[place])
                at += 1
                if depth <= len(r.accepted) and q is not None:
                    assert q == pytest.approx(wanted, abs=1e-3)
                    known += 1
                elif depth > len(r.accepted):
                    assert q is None
                    unknown += 1
        logits_TV = target.model(torch.tensor([prompt + text.tokens])).logits[0, len(prompt) - 1 : -1].softmax(-1)
        told = probabilities(target, prompt, text.tokens)
        assert told == pytest.approx([float(p[t]) for p, t in zip(logits_TV, text.tokens, strict=True)], abs=1e-4)
    assert known > 20 and unknown > 0
