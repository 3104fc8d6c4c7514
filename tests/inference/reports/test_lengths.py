"""Expected and decoded part where something is wrong, and not by chance: over rounds drawn here, where the truth is known."""

from __future__ import annotations

import random
from math import sqrt
from statistics import mean, stdev

import pytest

from headstart.inference.reports.lengths import Lengths, compared, error_text

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


@pytest.mark.parametrize(("sigmas", "apart"), [(2.5, False), (3.5, True)])
def test_above_it_three_standard_errors_of_the_difference_count(sigmas: float, apart: bool) -> None:
    """Sixteen texts of 30 tokens in 10 rounds each, and 0.4 rounds fewer expected: more in one half of the texts than in the other."""
    texts, gap = 16, 30 / 9.6 - 3
    off = gap / sigmas * 10 * sqrt(texts) / 3 * sqrt((texts - 1) / texts)  # of one text: the difference has the error gap / sigmas then
    expected = Lengths([30.0] * texts, [9.6 + off, 9.6 - off] * (texts // 2))
    found = compared(expected, Lengths([30.0] * texts, [10.0] * texts))
    assert found["standard_error"] == pytest.approx(gap / sigmas) and found["apart"] == apart


@pytest.mark.parametrize(("share", "apart"), [(1.015, False), (1.025, True)])
def test_two_percent_are_the_share(share: float, apart: bool) -> None:
    assert compared(Lengths([30.0], [10.0 / share]), Lengths([30.0], [10.0]), certain=True)["apart"] == apart


def test_the_standard_error_of_a_length() -> None:
    """With equally many rounds in each text the length is a mean over texts; else it is how far lengths lie apart that are drawn again."""
    alike = Lengths([8.0, 12.0, 13.0, 15.0], [4.0] * 4)
    assert alike.standard_error == pytest.approx(stdev(t / 4 for t in alike.tokens) / sqrt(4))
    chance, drawn = random.Random(0), [Lengths() for _ in range(TRIES)]
    for lengths in drawn:
        for _ in range(64):
            lengths.add(*rounds_of_a_text(chance, 0.6))
    assert mean(each.standard_error for each in drawn) == pytest.approx(stdev(each.length for each in drawn), rel=0.1)


def test_a_single_text_has_no_standard_error() -> None:
    assert error_text(Lengths([30.0], [10.0]).standard_error) == error_text(None) == "of one text: no standard error"
    assert error_text(0.1234, " of the difference") == "standard error of the difference 0.123"
