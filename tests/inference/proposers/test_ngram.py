"""Prompt lookup against a search through the whole text."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headstart.heads.base import Roots
from headstart.heads.errors import UserError
from headstart.inference.decoding.rng import CounterRNG
from headstart.inference.decoding.context import Context
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.sampling import SamplingParams
from headstart.inference.proposers.ngram import Ngram
from tests.inference.decoding.test_lossless import TARGET
from tests.inference.decoding.toys import prefixes
from tests.inference.decoding.trees import validate
from tests.inference.proposers.common import roots_of_text

Path = tuple[int, ...]


def naive_places(text: list[int], after: list[int], n: int) -> list[int]:
    """Behind every piece of the text that equals the last n tokens, except that at its end; the latest first."""
    tail = (text + after)[-n:]
    return [at for at in range(len(text) - 1, n - 1, -1) if text[at - n : at] == tail]


def naive(text: list[int], after: list[int], most: int, least: int, matches: int, depth: int) -> tuple[int, list[Path]]:
    """The longest match, and the paths in the order in which they are merged."""
    found: list[tuple[int, int]] = []
    for n in range(min(most, len(text) + len(after)), least - 1, -1):
        found += [(n, at) for at in naive_places(text, after, n) if at not in [a for _, a in found]]
    paths = []
    for _, at in found[:matches]:
        path = (text + after)[at:]
        while len(path) < depth:  # the lookup of the guesses themselves
            path = path + path
        paths.append(tuple(path[:depth]))
    return (found[0][0] if found else 0), paths


def started(proposer: Ngram, text: Sequence[int], *cuts: int) -> Ngram:
    """Has absorbed the text in pieces."""
    proposer.start(Context(TARGET("llama"), ()), 256)
    borders = [0, *cuts, len(text) - 1]
    for first, stop in zip(borders, borders[1:], strict=False):
        proposer.absorb(roots_of_text(text, first, stop))
    return proposer


TEXTS = st.integers(1, 6).flatmap(lambda size: st.lists(st.integers(0, size), min_size=2, max_size=60))


@settings(max_examples=300, deadline=None)
@given(TEXTS, st.lists(st.integers(0, 3), max_size=3), st.integers(1, 3), st.integers(0, 3), st.integers(1, 4), st.integers(1, 6))
def test_it_equals_a_search_through_the_text(text: list[int], after: list[int], least: int, more: int, matches: int, depth: int) -> None:
    proposer = Ngram(most=least + more, least=least, matches=matches)
    proposer.clear()
    proposer.extend(text[:3])
    proposer.extend(text[3:])
    _, paths = naive(text, after, least + more, least, matches, depth)
    wanted = list(dict.fromkeys(path[:i] for path in paths for i in range(1, depth + 1)))
    trie = proposer.guess(after, depth, 999, 999, 0.0)
    assert prefixes(trie.tree(torch.device("cpu"))) == wanted
    assert proposer.follow(after, depth) == list(paths[0] if paths else ())
    assert proposer.matched == naive(text, [], least + more, least, 1, 1)[0]
    assert proposer.text == text


def test_a_tree_of_the_latest_matches() -> None:
    text = [5, 6, 1, 2, 3, 9, 8, 1, 2, 4, 9, 7, 2, 5, 6, 1, 2]
    proposer = started(Ngram(most=3), text, 4, 5, 11)
    assert proposer.matched == 3  # 6, 1, 2 at the start; then 1, 2 before 4, then 2 before 5

    def guesses(policy: TreePolicy) -> list[Path]:
        tree = proposer.propose(policy, CounterRNG.of(), SamplingParams())
        validate(tree, 96)
        assert tree.drawn_BN is None
        return prefixes(tree)

    assert guesses(TreePolicy(depth=2, nodes=9, branch=4)) == [(3,), (3, 9), (4,), (4, 9), (5,), (5, 6)]
    assert guesses(TreePolicy(depth=2, nodes=5, branch=4)) == [(3,), (3, 9), (4,), (4, 9), (5,)]
    assert guesses(TreePolicy(depth=2, nodes=9, branch=2)) == [(3,), (3, 9), (4,), (4, 9)]
    assert guesses(TreePolicy("chain", depth=3)) == [(3,), (3, 9), (3, 9, 8)]
    assert guesses(TreePolicy("fixed", paths=((0,), (1,), (0, 0)))) == [(3,), (3, 9), (4,)]


def test_it_forgets_the_sequence_before_and_may_have_nothing_to_say() -> None:
    proposer = started(Ngram(), [7, 8, 7, 8, 7])
    assert len(proposer.propose(TreePolicy(), CounterRNG.of(), SamplingParams()))
    started(proposer, [1, 2, 3, 8, 7])
    assert proposer.matched == 0 and proposer.text == [1, 2, 3, 8, 7]
    tree = proposer.propose(TreePolicy(), CounterRNG.of(), SamplingParams())
    assert len(tree) == 0 and tree.rows().tolist() == [[[True]]]
    started(proposer, [4, 4])
    assert proposer.follow([], 3) == [4, 4, 4]


def test_the_first_token_counts() -> None:
    """x[0] is chosen at no root."""
    proposer = Ngram()
    proposer.start(Context(TARGET("llama"), ()), 256)
    tokens = torch.tensor([[7, 3, 5]])
    proposer.absorb(Roots(tokens, torch.tensor([[3, 5, 7]]), {}, torch.arange(3)[None]))
    assert proposer.follow([], 4) == [3, 5, 7, 3]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"most": 0}, "most must be a whole number of at least 1, found 0"),
        ({"least": -2}, "least must be a whole number of at least 1"),
        ({"matches": 1.5}, "matches must be a whole number of at least 1, found 1.5"),
        ({"matches": True}, "found True"),
        ({"most": 2, "least": 3}, "least=3 must not exceed most=2"),
    ],
)
def test_bad_settings(wrong: dict[str, int], words: str) -> None:
    with pytest.raises(UserError, match=words):
        Ngram(**wrong)


def test_a_rule_for_chains_is_refused_for_trees() -> None:
    with pytest.raises(UserError, match="the rule block verifies chains"):
        started(Ngram(), [1, 2, 1]).propose(TreePolicy(), CounterRNG.of(), SamplingParams(1.0, rule="block"))
