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

from headstart.heads.base import Draft, Roots
from headstart.heads.memory import Memory
from headstart.heads.visibility import KEPT, CausalSees, LaterSees, Sees
from headstart.inference.decoding import engine, propose
from headstart.inference.decoding.context import CHUNK, Context
from headstart.inference.decoding.counter_rng import CounterRNG
from headstart.inference.decoding.decode import generate
from headstart.inference.decoding.engine import Engine
from headstart.inference.decoding.fixed import FixedMemory
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.propose import Drafting
from headstart.inference.decoding.rounds import Rounds
from headstart.inference.decoding.row import Row
from headstart.inference.decoding.said import Said
from headstart.inference.decoding.sampling import SamplingParams
from headstart.inference.decoding.tree import Tree
from tests.drafters import make, random_tokens, roots_of
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
    own = Engine(TARGET(), drafter, sequences=rows, max_length=max(map(len, prompts)) + NEW, plans=POLICY if drafts else None)
    return own.run(prompts, new_tokens=NEW, sampling=[SamplingParams()] * len(prompts), stop_ids=())


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


@pytest.mark.parametrize(("family", "attention"), [("mistral", "sdpa"), ("gemma3_text", "sdpa"), ("llama", "eager")])
def test_targets_that_need_masks_read_pieces_and_what_is_shared(family: str, attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their own modules are given masks as wide as what was read before, padding not counted beyond the room of a sequence."""
    monkeypatch.setattr(engine, "CHUNK", 32)
    windows = {"sliding_window": 8} if family != "llama" else {}
    target, start = tiny_target(family, **windows), random_tokens(30, seed=1)
    target.model.set_attn_implementation(attention)
    prompts = [[*start, *random_tokens(n, seed=n)] for n in (3, 9)] + [random_tokens(75, seed=4), random_tokens(4, seed=2)]
    drafter = make("eagle", target)
    for plans in (None, POLICY):
        own = Engine(target, drafter if plans else None, sequences=4, max_length=75 + NEW, plans=plans)
        made = own.run(prompts, new_tokens=NEW, sampling=[SamplingParams()] * 4, stop_ids=())
        assert [row.tokens for row in made] == [generate(target, None, prompt, new_tokens=NEW, stop_ids=()).tokens for prompt in prompts]


def test_padding_hides_nothing_that_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece whose padding is as long as a sequence may be: a draft model that finds nothing before it would begin anew."""
    target, load, before = TARGET(), FixedMemory.load, list[int]()

    def noting(self: FixedMemory, places: Sequence[int], kept: Sequence[int], rows: int, real: Sequence[int] = ()) -> Sees:
        sees = load(self, places, kept, rows, real)
        before.extend([self.rows()] * any(kept))
        return sees

    monkeypatch.setattr(FixedMemory, "load", noting)
    for shared in range(16, 22):
        start = random_tokens(shared, seed=1)
        prompts = [[*start, *random_tokens(n, seed=n)] for n in (3, 117 - shared)]
        own = Engine(target, make("draft_lm", target), sequences=2, max_length=120, plans=TreePolicy("chain", depth=1))
        made = own.run(prompts, new_tokens=3, sampling=[SamplingParams()] * 2, stop_ids=())
        assert [row.tokens for row in made] == [generate(target, None, prompt, new_tokens=3, stop_ids=()).tokens for prompt in prompts]
    assert len(before) == 12 and min(before) > 0


def test_a_drafter_that_rests_while_a_long_prompt_is_read_absorbs_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that began while nothing was drafted is not followed, and others are drafted for again: their rows must find room."""
    monkeypatch.setattr(engine, "CHUNK", 8)
    prompts, target = [random_tokens(n, seed=n) for n in (3, 2, 1, 150)], TARGET()
    own = Engine(target, make("medusa", target), sequences=4, max_length=200, plans={2: TreePolicy("chain", depth=3), 1 << 30: None})
    rows = [own.add_request(prompt, new_tokens=n, stop_ids=()) for prompt, n in zip(prompts[:3], (60, 4, 4), strict=True)]
    own.step()
    own.step()
    rows.append(own.add_request(prompts[3], new_tokens=5, stop_ids=()))
    while not all(row.ended for row in rows):
        own.step()
    for row, prompt in zip(rows, prompts, strict=True):
        assert row.tokens == generate(target, None, prompt, new_tokens=row.most, stop_ids=()).tokens


def test_nobody_waits_for_the_whole_of_a_long_prompt(passes: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "CHUNK", 10)
    own = Engine(TARGET(), None, sequences=3, max_length=120)
    long = own.add_request(random_tokens(100, seed=1), new_tokens=4, stop_ids=())
    own.step()
    short = [own.add_request(random_tokens(3, seed=n), new_tokens=4, stop_ids=()) for n in (2, 3)]
    while not all(row.tokens for row in (long, *short)):
        own.step()
    assert passes == [[10], [10], [3, 3], *[[10]] * 8] or passes == [[10], [3, 3], *[[10]] * 9]


def test_what_fails_while_prompts_are_read_is_what_callers_get(monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of memory, above all: the buffers are made then. Rows that had been read go on."""
    own = Engine(TARGET(), None, sequences=2, max_length=60)
    first = own.add_request(random_tokens(5, seed=1), new_tokens=20, stop_ids=())
    own.step()
    read = Rounds.read_prompts

    def full(*_: Any) -> Said:
        raise torch.OutOfMemoryError("no memory is left")

    monkeypatch.setattr(Rounds, "read_prompts", full)
    second = own.add_request(random_tokens(6, seed=2), new_tokens=4, stop_ids=())
    with pytest.raises(torch.OutOfMemoryError, match="no memory is left"):
        own.step()
    monkeypatch.setattr(Rounds, "read_prompts", read)
    while not first.ended:
        own.step()
    assert second.ended == "failed" and own.free == 2
    assert first.tokens == generate(TARGET(), None, random_tokens(5, seed=1), new_tokens=20, stop_ids=()).tokens


def test_who_waits_for_another_reads_by_itself_once_that_has_gone() -> None:
    start = random_tokens(40, seed=1)
    prompts = [[*start, *random_tokens(n, seed=n)] for n in (3, 9)]
    own = Engine(TARGET(), None, sequences=2, max_length=80)
    first, second = (own.add_request(prompt, new_tokens=NEW, stop_ids=()) for prompt in prompts)
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


@pytest.mark.parametrize("head", ["eagle", "dflash", "exit_head", "draft_lm", "medusa"])
def test_a_drafter_reads_a_prompt_in_pieces(head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it then guesses is what it guesses of the prompt at once, and of the rows before a piece there is no mask."""
    drafter, n, piece = make(head, TARGET()), 200, KEPT + 16
    tokens = torch.tensor([random_tokens(n, seed=4)])
    roots, policy = roots_of(TARGET(), drafter, tokens)[: n - 1], TreePolicy(depth=3, nodes=8, branch=2)
    rows, trees, own = list[int](), [], type(drafter).begin

    def counted(self: Any, roots: Roots, memory: Memory, sees: Sees, ask: Tensor | None = None) -> Draft:
        rows.append(roots.read_BT.shape[1])
        return own(self, roots, memory, sees, ask)

    monkeypatch.setattr(type(drafter), "begin", counted)
    for size in (n, piece):
        monkeypatch.setattr(propose, "PIECE", size)
        proposer = Drafting(drafter)
        proposer.start(None, n)
        if size == piece:
            monkeypatch.setattr(CausalSees, "dense", few_rows(CausalSees.dense))
        proposer.absorb(roots)
        trees.append(proposer.propose(policy, CounterRNG.of(), SamplingParams()))
    assert rows == [n - 1, piece, piece, n - 1 - 2 * piece] and len(trees[0]) == 8
    assert torch.equal(trees[0].tokens_BN, trees[1].tokens_BN) and torch.equal(trees[0].parents_BN, trees[1].parents_BN)


def few_rows(dense: Any) -> Any:
    def checked(self: Sees, rows: int, memory: int, device: torch.device) -> Tensor | None:
        assert rows <= KEPT, f"a mask of {rows} by {memory}"
        found: Tensor | None = dense(self, rows, memory, device)
        return found

    return checked


@pytest.mark.parametrize("head", ["eagle", "exit_head", "draft_lm"])
def test_pieces_of_long_prompts_cost_no_mask_side_by_side(head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As serving reads them: of two sequences of unequal lengths, and between the rounds of the first to be ready."""
    monkeypatch.setattr(engine, "CHUNK", KEPT + 16)
    prompts = [random_tokens(n, seed=n) for n in (200, 180, 9)]
    expected = said_alone(prompts)
    for rule in (CausalSees, LaterSees):
        monkeypatch.setattr(rule, "dense", few_rows(rule.dense))
    drafter = make(head, TARGET())
    own = Engine(TARGET(), drafter, sequences=3, max_length=max(map(len, prompts)) + NEW, plans=POLICY)
    made = own.run(prompts, new_tokens=NEW, sampling=[SamplingParams()] * 3, stop_ids=())
    assert [row.tokens for row in made] == expected


class Says:
    """The same guesses in every round."""

    taps: tuple[int, ...] = ()

    def __init__(self, tokens: Sequence[int], parents: Sequence[int]) -> None:
        self.tree = Tree.of(tokens, parents)

    def start(self, context: Context, tokens: int) -> None: ...

    def absorb(self, roots: Roots) -> None: ...

    def propose(self, policy: TreePolicy, rng: CounterRNG, sampling: SamplingParams) -> Tree:
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
