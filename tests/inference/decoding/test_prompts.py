"""How prompts are read: side by side, in pieces, what they share once; the texts are those of plain decoding one at a time.

And what a scores process of the caller is asked about: texts that can come, no others.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from headstart.heads.base import Roots
from headstart.inference.decoding import engine
from headstart.inference.decoding.chance import Chance
from headstart.inference.decoding.context import CHUNK, Context
from headstart.inference.decoding.decode import generate
from headstart.inference.decoding.engine import Engine
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.rounds import Rounds
from headstart.inference.decoding.row import Row
from headstart.inference.decoding.said import Said
from headstart.inference.decoding.sampling import Sampling
from headstart.inference.decoding.tree import Tree
from tests.drafters import make, random_tokens
from tests.tiny_targets import tiny_target

NEW, POLICY = 12, TreePolicy(depth=3, nodes=6, branch=2)
TARGET = functools.cache(tiny_target)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Tokens of each prompt in every pass over prompts."""
    made: list[list[int]] = []
    own = Rounds.read_prompts

    def counted(self: Rounds, places: Sequence[int], pieces: Sequence[Sequence[int]], *rest: Any) -> Said:
        made.append([len(piece) for piece in pieces])
        return own(self, places, pieces, *rest)

    monkeypatch.setattr(Rounds, "read_prompts", counted)
    return made


def said_alone(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    return [generate(TARGET(), None, prompt, new_tokens=NEW, stop_ids=()).tokens for prompt in prompts]


def run(prompts: Sequence[Sequence[int]], drafts: bool, rows: int) -> list[Row]:
    drafter = make("eagle", TARGET()) if drafts else None
    own = Engine(TARGET(), drafter, rows=rows, capacity=max(map(len, prompts)) + NEW, policy=POLICY if drafts else None)
    return own.run(prompts, new_tokens=NEW, sampling=[Sampling()] * len(prompts), stop_ids=())


@pytest.mark.parametrize("drafts", [False, True])
def test_many_prompts_are_read_in_one_pass(drafts: bool, passes: list[list[int]]) -> None:
    prompts = [random_tokens(n, seed=n) for n in (11, 1, 25, 4, 18, 33)]
    made = run(prompts, drafts, rows=6)
    assert [row.tokens for row in made] == said_alone(prompts)
    assert passes == [[11, 1, 25, 4, 18, 33]]


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("chunk", [1, 7, 25])
def test_long_prompts_are_read_in_pieces_between_rounds(
    chunk: int, drafts: bool, passes: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "CHUNK", chunk)
    prompts = [random_tokens(n, seed=n) for n in (11, 1, 50, 7, 26)]
    made = run(prompts, drafts, rows=3)
    assert [row.tokens for row in made] == said_alone(prompts)
    assert max(map(max, passes)) == min(chunk, 50) and sum(map(sum, passes)) == sum(map(len, prompts))


def test_a_pass_takes_no_more_than_fits(passes: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "AT_ONCE", {"cpu": 32, "cuda": 32})
    prompts = [random_tokens(n, seed=n) for n in (10, 12, 9, 40, 3)]
    assert [row.tokens for row in run(prompts, False, rows=5)] == said_alone(prompts)
    assert all(len(lengths) * max(lengths) <= 32 or len(lengths) == 1 for lengths in passes) and len(passes[0]) > 1


@pytest.mark.parametrize("drafts", [False, True])
def test_what_prompts_begin_with_alike_is_read_once(drafts: bool, passes: list[list[int]]) -> None:
    start = random_tokens(40, seed=1)
    prompts = [[*start, *random_tokens(n, seed=n)] for n in (3, 9, 5)] + [start, random_tokens(20, seed=7)]
    made = run([*prompts, prompts[1]], drafts, rows=6)
    assert [row.tokens for row in made] == said_alone([*prompts, prompts[1]])
    whole = sum(map(len, prompts)) + len(prompts[1])
    assert sum(map(sum, passes)) <= whole - 4 * (len(start) - 1), "the last token that is shared is read again"


def test_who_waits_for_another_reads_by_itself_once_that_has_gone() -> None:
    start = random_tokens(40, seed=1)
    prompts = [[*start, *random_tokens(n, seed=n)] for n in (3, 9)]
    own = Engine(TARGET(), None, rows=2, capacity=80)
    first, second = (own.admit(prompt, new_tokens=NEW, stop_ids=()) for prompt in prompts)
    own.drop(first)
    while not second.ended:
        own.step()
    assert second.tokens == said_alone(prompts)[1]


@torch.inference_mode()
@pytest.mark.parametrize("length", [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 5])
def test_a_prompt_in_pieces_leaves_the_states_of_one_pass(length: int) -> None:
    target = tiny_target(max_position_embeddings=4 * CHUNK, num_hidden_layers=2)
    tokens = torch.tensor(random_tokens(length, seed=length))
    context = Context(target, (1,), length)
    taps, final = context.read_prompt(tokens)
    context.keep(length)
    right, last = target.read(tokens[None], torch.arange(length)[None], (1,))
    torch.testing.assert_close(taps[1], right[1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(final[:, -1], last[:, -1], rtol=1e-4, atol=1e-4)
    assert context.length == length


class Says:
    """The same guesses in every round."""

    taps: tuple[int, ...] = ()

    def __init__(self, tokens: Sequence[int], parents: Sequence[int]) -> None:
        self.tree = Tree.of(tokens, parents)

    def start(self, context: Context, tokens: int) -> None: ...

    def absorb(self, roots: Roots) -> None: ...

    def propose(self, policy: TreePolicy, chance: Chance, sampling: Sampling) -> Tree:
        return self.tree


@pytest.mark.parametrize("tokens", [[7, 5, 9, 5], [5, 7, 7, 5]])
def test_nobody_is_asked_about_what_stands_behind_a_guess_that_cannot_come(tokens: list[int]) -> None:
    """A caller's process that forbids a token need not know what to do with texts that hold it."""
    never, prompt, asked = 7, random_tokens(9, seed=3), list[list[int]]()

    def process(ids_1T: Tensor, scores_1V: Tensor) -> Tensor:
        new = ids_1T[0, len(prompt) :].tolist()
        asked.append(new)
        assert never not in new
        return scores_1V.index_fill(1, torch.tensor([never]), float("-inf"))

    how: dict[str, Any] = dict(new_tokens=NEW, process=process, stop_ids=())
    expected = generate(TARGET(), None, prompt, **how).tokens
    asked.clear()
    made = generate(TARGET(), Says(tokens, [-1, 0, -1, 2]), prompt, policy=TreePolicy("fixed", paths=((0,), (1,), (0, 0), (1, 0))), **how)
    assert made.tokens == expected and never not in expected
    assert any(new[-1:] == [tokens[0]] or new[-1:] == [tokens[2]] for new in asked), "it was asked about guesses"
