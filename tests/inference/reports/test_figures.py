"""Rounds that were cut, by the limit or after an accepted stop token: their last token is an accepted guess, and is counted as one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headstart.inference.decoding.decode import Generation, Guesses
from headstart.inference.reports.evaluate import together
from headstart.inference.reports.figures import acceptance, accepted_of, intervals
from headstart.inference.reports.results import Line
from headstart.inference.reports.walk import walk


def text(*rounds: tuple[int, int]) -> Generation:
    """Rounds with three guesses in a row, each given by how many tokens it emitted and how many guesses were accepted."""
    emitted, guesses = [n for n, _ in rounds], [Guesses([], [], accepted) for _, accepted in rounds]
    return Generation([0] * (1 + sum(emitted)), emitted, asked=[3] * len(emitted), guesses=guesses, seconds=1.0)


def test_a_guess_that_ends_a_text_is_accepted() -> None:
    found = acceptance([text((3, 3))], 3)
    assert found == {"accepted_length": 3, "acceptance_by_depth": [1, 1, 1], "conditional_acceptance_by_depth": [1, 1, 1]}


def test_guesses_beyond_a_cut_are_neither_accepted_nor_rejected() -> None:
    """Of two rounds, one refused its second guess, the other was cut after its first one although two were right."""
    found = acceptance([text((2, 1), (1, 2))], 3)
    assert found["acceptance_by_depth"] == [1, 0, 0] and found["conditional_acceptance_by_depth"] == [1, 0, 0]
    found = acceptance([text((3, 2), (1, 2))], 2)
    assert found["acceptance_by_depth"] == [1, 0.5] and found["conditional_acceptance_by_depth"] == [1, 1]


def test_the_intervals_are_about_the_same_shares() -> None:
    whole = [text((3, 3))] * 2
    assert intervals(whole, whole, 3)["acceptance_by_depth"] == [[1, 1]] * 3


def test_rounds_of_unknown_guesses_end_with_the_target_s_own_token() -> None:
    assert accepted_of([3, 1], ()) == [2, 0]


def test_results_of_earlier_versions_are_read() -> None:
    turn: dict[str, Any] = {"text": "a", "tokens": [1, 2, 3], "emitted": [2]}
    for more, accepted in (({}, 1), ({"accepted": [2]}, 2)):
        made = together(Line("qa", {"eagle": {"seconds": [1.0], "talks": [[turn | more]]}}, {}, 0.0), "eagle")
        assert accepted_of(made.emitted, made.guesses) == [accepted]


@pytest.mark.parametrize(("tokens", "tried"), [(3, [0, 0, 0]), (4, [1, 0, 0]), (7, [1, 1, 1]), (8, [2, 1, 1])])
def test_a_walk_tries_no_guess_behind_which_the_text_ends(tokens: int, tried: list[int]) -> None:
    """All guesses are right: after a whole round of four tokens the last one has fewer."""
    found = walk(torch.ones(3, tokens), 0, tokens)
    assert found.tried == tried == found.reached
