"""The suffix automaton and its guesses against a search through the whole text."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from headstart.heads.errors import UserError
from headstart.inference.decoding.context import Context
from headstart.inference.decoding.counter_rng import CounterRNG
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.sampling import SamplingParams
from headstart.inference.proposers.suffix import Automaton, Suffix
from tests.drafters import random_tokens
from tests.inference.decoding.test_lossless import TARGET
from tests.inference.decoding.toys import prefixes
from tests.inference.decoding.trees import validate
from tests.inference.proposers.common import roots_of_text
from tests.inference.proposers.test_ngram import TEXTS, Path, naive_places

CPU = torch.device("cpu")


def naive_values(text: list[int], after: list[int], least: int, depth: int) -> dict[Path, float]:
    """The estimated probability of every path that followed a match. Every length is a match of its own where it has more places."""
    weights: dict[int, float] = {}
    rest, before = 1.0, list[int]()
    for n in range(len(text) + len(after) - 1, least - 1, -1):
        places = naive_places(text, after, n)
        if places and places != before:
            rest /= len(places) + 1
            for place in places:
                weights[place] = weights.get(place, 0.0) + rest
            before = places
    values: dict[Path, float] = {}
    for place, weight in weights.items():
        followed = (text + after)[place:]
        for d in range(1, depth + 1):
            path = tuple(followed[i % len(followed)] for i in range(d))
            values[path] = values.get(path, 0.0) + weight
    return values


def fed(text: Sequence[int], **how: int) -> Suffix:
    proposer = Suffix(**how)
    proposer.clear()
    proposer.extend(text)
    return proposer


@settings(max_examples=200, deadline=None)
@given(TEXTS)
def test_the_automaton_knows_every_piece_and_where_it_ends(text: list[int]) -> None:
    automaton = Automaton()
    for place, token in enumerate(text):
        automaton.push(token, place)
    found: dict[Path, int] = {(): 0}
    queue: list[Path] = [()]
    for piece in queue:
        for token, state in automaton.next[found[piece]].items():
            found[(*piece, token)] = state
            queue.append((*piece, token))
    pieces = {tuple(text[i:j]) for i in range(len(text)) for j in range(i, len(text) + 1)}
    assert found.keys() == pieces
    assert len(automaton.link) <= 2 * len(text), "linear in the text"
    for piece, state in found.items():
        ends, stack = set(), [state]
        while stack:
            at = stack.pop()
            stack += automaton.below[at]
            ends |= {automaton.end[at]} - {-1}
        assert ends == {j - 1 for j in range(1, len(text) + 1) if tuple(text[j - len(piece) : j]) == piece or not piece}
        assert len(piece) <= automaton.length[state]


@settings(max_examples=300, deadline=None)
@given(TEXTS, st.lists(st.integers(0, 3), max_size=3), st.integers(1, 3), st.integers(1, 20), st.integers(1, 5))
def test_its_guesses_are_the_most_probable_ones(text: list[int], after: list[int], least: int, nodes: int, depth: int) -> None:
    proposer = fed(text, least=least, places=999)
    matches = [n for n in range(least, len(text)) if naive_places(text, [], n)]
    assert proposer.matched == max(matches, default=0)
    values = naive_values(text, after, least, depth)
    paths = prefixes(proposer.guess(after, depth, nodes, 999, 0.0).tree(CPU))
    assert len(set(paths)) == len(paths) == min(nodes, len(values))
    best = sorted(values.values(), reverse=True)[: len(paths)]  # ties may go either way
    assert sorted((values[path] for path in paths), reverse=True) == pytest.approx(best, abs=1e-12)
    assert proposer.text == text


@settings(max_examples=100, deadline=None)
@given(TEXTS, st.integers(1, 4), st.floats(0.05, 0.6))
def test_width_and_least_probability(text: list[int], branch: int, least: float) -> None:
    proposer, values = fed(text, places=999), naive_values(text, [], 1, 5)
    assume(all(abs(value - least) > 1e-12 for value in values.values()))  # equal up to rounding: either way is right
    paths = prefixes(proposer.guess((), 5, 999, branch, least).tree(CPU))
    for row in [(), *paths]:
        children = sorted((values[path] for path in paths if path[:-1] == row), reverse=True)
        beneath = sorted((v for path, v in values.items() if path[:-1] == row), reverse=True)
        goes_on = not row or (len(row) < 5 and values[row] >= least)
        assert children == pytest.approx(beneath[:branch] if goes_on else [], abs=1e-12)


@settings(max_examples=100, deadline=None)
@given(TEXTS, st.integers(1, 6))
def test_only_so_many_places_are_looked_at(text: list[int], places: int) -> None:
    """Those of longer matches first."""
    found = fed(text, places=places).matches(())
    length = {
        end: max(n for n in range(1, end + 2) if text[end + 1 - n : end + 1] == text[-n:])
        for end in range(len(text) - 1)
        if text[end] == text[-1]
    }
    assert len(found) == len({end for end, *_ in found}) == min(places, len(length))
    assert sorted((length[end] for end, *_ in found), reverse=True) == sorted(length.values(), reverse=True)[: len(found)]


def test_a_text_by_hand() -> None:
    """1 2 was followed by 3 twice and by 4 once; 2 alone also by 5. In the order of their probability."""
    proposer = Suffix()
    proposer.start(Context(TARGET("llama"), ()), 256)
    text = [1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 4, 7, 2, 5, 1, 2]
    for first, stop in ((0, 6), (6, 7), (7, len(text) - 1)):
        proposer.absorb(roots_of_text(text, first, stop))
    assert proposer.matched == 2
    tree = proposer.propose(TreePolicy(depth=2, nodes=9, branch=4), CounterRNG.of(), SamplingParams(1.0))
    validate(tree, 96)
    of = dict(zip(prefixes(tree), range(9), strict=False))
    assert next(iter(of)) == (3,) and set(of) == {(3,), (3, 9), (3, 8), (4,), (4, 7), (5,), (5, 1)} and tree.drawn_BN is None
    assert of[4,] < of[4, 7] and of[4,] < of[5,] < of[5, 1]
    chain = proposer.propose(TreePolicy("chain", depth=4), CounterRNG.of(), SamplingParams(1.0, rule="block"))
    assert prefixes(chain)[-1] in [(3, 8, 1, 2), (3, 9, 1, 2)] and len(chain) == 4
    assert proposer.follow([4], 3) == [7, 2, 5] and proposer.follow([5, 1], 3) == [2, 5, 1] and proposer.follow([50], 2) == []


def test_it_forgets_the_sequence_before() -> None:
    proposer = fed([7, 8, 7, 8, 7])
    assert proposer.follow([], 3) == [8, 7, 8]
    proposer.clear()
    proposer.extend([1, 2, 3, 8, 7])
    assert proposer.matched == 0 and len(proposer.guess((), 4, 9, 4, 0.0)) == 0


def test_a_long_text_is_read_in_time_that_grows_with_it() -> None:
    """By counting what the automaton holds, not by a clock: repetitive texts and random ones."""
    for text in ([3] * 3000, [3, 4, 5] * 1000, random_tokens(3000, seed=1), [*range(3000)]):
        automaton = fed(text).automaton
        assert len(automaton.link) <= 2 * len(text) and sum(map(len, automaton.next)) <= 3 * len(text)


@pytest.mark.parametrize("wrong", [{"least": 0}, {"places": "many"}, {"least": 2.0}, {"places": False}])
def test_bad_settings(wrong: dict[str, int]) -> None:
    with pytest.raises(UserError, match=f"proposer suffix: {next(iter(wrong))} must be a whole number of at least 1"):
        Suffix(**wrong)
