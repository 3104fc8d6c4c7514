"""Expected and decoded part where something is wrong, and not by chance: over rounds drawn here, where the truth is known."""

from __future__ import annotations

import random

import pytest

from headstart.inference.reports.lengths import Lengths, compared

DEPTH, NEW_TOKENS, TRIES = 8, 24, 400


def rounds_of_a_text(chance: random.Random, accepted: float) -> tuple[int, int]:
    """Rounds and tokens of one text whose every guess is accepted with this probability."""
    rounds = tokens = 0
    while tokens < NEW_TOKENS:
        rounds, tokens = rounds + 1, tokens + 1
        for _ in range(DEPTH):
            if chance.random() >= accepted:
                break
            tokens += 1
    return rounds, tokens


def share_of_alarms(texts: int, expected: float, decoded: float) -> float:
    """Of ``TRIES`` comparisons: training knows what rounds are expected, decoding draws them."""
    chance, alarms = random.Random(texts), 0
    mean = sum(rounds_of_a_text(chance, expected)[0] for _ in range(4000)) / 4000
    for _ in range(TRIES):
        told, drawn = Lengths(), Lengths()
        for _ in range(texts):
            rounds, tokens = rounds_of_a_text(chance, decoded)
            drawn.add(rounds, tokens)
            told.add(mean, tokens)
        alarms += compared(told, drawn)["apart"]
    return alarms / TRIES


@pytest.mark.parametrize("texts", [2, 3, 4, 16, 64])
@pytest.mark.parametrize("accepted", [0.1, 0.5, 0.7])
def test_chance_alone_raises_no_alarm(texts: int, accepted: float) -> None:
    assert share_of_alarms(texts, accepted, accepted) <= 0.02


@pytest.mark.parametrize("texts", [2, 4, 16])
def test_a_drafter_that_is_served_far_worse_is_found(texts: int) -> None:
    assert share_of_alarms(texts, 0.7, 0.2) > 0.95


def test_at_temperature_0_any_difference_beyond_the_share_counts() -> None:
    expected, decoded = Lengths([30.0], [10.0]), Lengths([30.0], [11.0])
    assert compared(expected, decoded, certain=True)["apart"]
    assert not compared(expected, Lengths([30.0], [10.1]), certain=True)["apart"], "less than two percent"
    alone = compared(expected, decoded)
    assert not alone["apart"] and alone["standard_error"] is None, "a single text says nothing of chance"
