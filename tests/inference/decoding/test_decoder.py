"""One object decides which path serves, keeps its engine, counts no preparation as decoding, and lets the engine go."""

from __future__ import annotations

import functools
import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch

from headstart.heads.base import Drafter
from headstart.heads.errors import UserError
from headstart.inference.decoding import decode, decoder, engine
from headstart.inference.decoding.auto import WORTH
from headstart.inference.decoding.decoder import Decoder
from headstart.inference.decoding.engine import Engine
from headstart.inference.decoding.plans import ALONE, MANY
from headstart.inference.decoding.policy import AUTO, TreePolicy
from headstart.inference.decoding.propose import Drafting
from headstart.inference.decoding.rounds import Kind, Rounds
from headstart.inference.decoding.sampling import LogitsWarper, SamplingParams
from headstart.inference.decoding.target import Target
from headstart.inference.proposers.ngram import Ngram
from tests.drafters import learn_by_heart, make, random_tokens
from tests.tiny_targets import tiny_target

NEW, PROMPTS = 20, [random_tokens(n, seed=n) for n in (11, 1, 25)]
TREE, CHAIN = TreePolicy(depth=4, nodes=10, branch=3), TreePolicy("chain", depth=3)
TARGET = functools.cache(tiny_target)


@functools.cache
def plain() -> list[list[int]]:
    return [decode.generate(TARGET(), None, p, new_tokens=NEW).tokens for p in PROMPTS]


@functools.cache
def drafter() -> Drafter:
    texts = [(p + said)[: 1 + NEW] for p, said in zip(PROMPTS, plain(), strict=True)]
    return learn_by_heart(make("eagle", TARGET()), TARGET(), texts, depth=3, steps=15)


@pytest.fixture
def like_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "BY_ENGINE", ("cpu",))


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Engine]]:
    """All that are made."""
    found, init, _ = list[weakref.ref[Engine]](), Engine.__init__, (plain(), drafter())

    def noting(self: Engine, *a: Any, **k: Any) -> None:
        found.append(weakref.ref(self))
        init(self, *a, **k)

    monkeypatch.setattr(Engine, "__init__", noting)
    return found


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Who guessed in the calls of the dynamic path."""
    found, generate, _ = list[Any](), decode.generate, (plain(), drafter())
    monkeypatch.setattr(decode, "generate", lambda t, proposer, *a, **k: found.append(proposer) or generate(t, proposer, *a, **k))
    return found


def test_who_serves(like_a_gpu: None, engines: list[Any], alone: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    target, ngram = TARGET(), Ngram()
    ways: list[tuple[Any, Any, dict[str, Any], bool]] = [
        (None, None, {}, True),
        (drafter(), TREE, {}, True),
        (drafter(), TREE, {"policy": CHAIN}, True),
        (drafter(), TREE, {"policy": None}, True),
        (ngram, CHAIN, {}, False),
        (drafter(), TREE, {"process": lambda ids, scores: scores}, False),
    ]
    for guesser, tree, how, static in ways:
        for prompt, said in zip(PROMPTS, plain(), strict=True):
            before, streamed = len(alone), list[int]()
            made = Decoder(target, guesser, tree).generate(prompt, new_tokens=NEW, on_tokens=streamed.extend, **how)
            assert made.tokens == said == streamed and (len(alone) == before) == static
    assert alone[-1].drafter is drafter() and alone[0] is ngram
    monkeypatch.setattr(Target, "rope_switch", 30)  # behind it an engine would have to read anew
    for new, static in ((NEW - 2, True), (NEW, False)):
        before, long = len(alone), random_tokens(12 if static else 31, seed=1)
        Decoder(target).generate(long, new_tokens=new)
        assert (len(alone) == before) == static
    monkeypatch.setattr(decoder, "BY_ENGINE", ())
    before = len(engines)
    Decoder(target, drafter(), TREE).generate(PROMPTS[0], new_tokens=4)
    assert len(engines) == before and isinstance(alone[-1], Drafting)
    with pytest.raises(UserError, match="the prompt is empty"):
        Decoder(target).generate([], new_tokens=4)


@pytest.mark.slow
def test_an_engine_is_kept_and_grows_rarely(like_a_gpu: None, engines: list[weakref.ref[Engine]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "LEAST", 32)
    one = Decoder(TARGET(), drafter(), {ALONE: TREE, MANY: CHAIN})
    assert not engines
    for length in range(1, 200, 17):
        prompt = random_tokens(length, seed=length)
        made = one.generate(prompt, new_tokens=NEW, policy="planned" if length % 2 else CHAIN)
        assert made.tokens == decode.generate(TARGET(), None, prompt, new_tokens=NEW).tokens
        assert {shape for shape in made.shapes if shape} == {TREE if length % 2 else CHAIN}
    assert len(engines) == 4  # of 32, 64, 128 and 256 tokens
    gc.collect()
    assert [there() is not None for there in engines] == [False, False, False, True]
    many = one.generate_many(PROMPTS, new_tokens=NEW, sequences=3)
    assert [row.tokens for row in many] == plain() and len(engines) == 5
    assert {depth for row in many for depth in row.asked} == {CHAIN.depth}
    one.generate(PROMPTS[0], new_tokens=NEW, policy=TreePolicy("chain", depth=5))
    assert len(engines) == 6 and engines[4]() is None, "a deeper tree needs more room"
    one.generate(PROMPTS[0], new_tokens=NEW)
    assert len(engines) == 6
    one.close()
    assert all(there() is None for there in engines), "without a look for garbage: a GPU's memory waits for nobody"
    assert one.generate(PROMPTS[0], new_tokens=NEW).tokens == plain()[0]


def test_what_a_caller_raises_leaves_the_engine_empty(like_a_gpu: None, engines: list[Any]) -> None:
    one, late = Decoder(TARGET(), drafter(), TREE), list[int]()

    def enough(tokens: list[int]) -> None:
        late.extend(tokens)
        if len(late) > 5:
            raise KeyboardInterrupt

    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            one.generate(PROMPTS[0], new_tokens=NEW, on_tokens=enough)
        assert one.engine is not None and one.engine.free == 1 and not one.engine.pending
        assert one.generate(PROMPTS[2], new_tokens=NEW).tokens == plain()[2]
    assert len(engines) == 1


class Clock:
    """Time passes where it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A round takes a second, capturing a round of a kind that was not seen before a hundred."""
    made, kept = Clock(), set[Any]()

    def timed(self: Rounds, kind: Kind, warp: LogitsWarper) -> Any:
        if (key := (self, kind, warp.sampled)) not in kept:
            made.now += 100
            kept.add(key)
            self.captures += 1
        made.now += 1
        return self.verify(self.draft(kind, warp), kind, warp)

    monkeypatch.setattr(Rounds, "run", timed)
    monkeypatch.setattr(engine, "time", made)
    return made


def test_capturing_is_not_decoding(like_a_gpu: None, clock: Clock) -> None:
    """Of new trees, temperatures and lengths (every 64 kept rows on this device)."""
    one = Decoder(TARGET(), drafter(), TREE, max_length=200)
    for length in (10, 60, 120):
        for temperature in (0.0, 1.0):
            for policy in (TREE, CHAIN, None):
                before = clock.now
                made = one.generate(random_tokens(length, 1), new_tokens=NEW, policy=policy, sampling=SamplingParams(temperature))
                captured = (clock.now - before) // 100
                assert captured, "this tested nothing"
                assert made.seconds == len(made.emitted) - captured  # the clock stands until such a round is launched


def test_sequences_that_share_rounds_wait_for_no_capture(like_a_gpu: None, clock: Clock) -> None:
    one = Decoder(TARGET(), drafter(), TREE, max_length=100)
    many = one.generate_many(PROMPTS, new_tokens=NEW, sequences=3)
    assert clock.now > 100 and max(row.seconds for row in many) <= max(len(row.emitted) for row in many) + 3


def test_what_is_timed_is_decoded_again_behind_a_capture(like_a_gpu: None, clock: Clock) -> None:
    one = Decoder(TARGET(), drafter(), TREE)
    for length in (10, 60):
        for again in (False, True):
            before = clock.now
            made, took = one.timed(random_tokens(length, 1), clock=clock.perf_counter, new_tokens=NEW)
            assert took == len(made.emitted) and (clock.now - before == took) == again


def test_measuring_shapes_is_not_decoding(like_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where decode=auto is asked for, by either path."""
    made = Clock()
    auto, auto_of_rounds = decode.auto_of, engine.auto_of_rounds

    def slowly(how: Any) -> Any:
        def measure(*a: Any) -> Any:
            made.now += 0 if made.now else 1000
            return how(*a)

        return measure

    monkeypatch.setattr(engine, "time", made)
    monkeypatch.setattr(decode, "time", made)
    monkeypatch.setattr(decode, "auto_of", slowly(auto))
    monkeypatch.setattr(engine, "auto_of_rounds", slowly(auto_of_rounds))
    target = tiny_target()
    for ways in (("cpu",), ()):
        monkeypatch.setattr(decoder, "BY_ENGINE", ways)
        one = Decoder(target, make("eagle", target), AUTO)
        assert one.generate(PROMPTS[0], new_tokens=WORTH + 4).seconds < 1000 <= made.now
        made.now = 0.0


def test_seconds_are_those_of_the_wall(like_a_gpu: None) -> None:
    """Without anything to prepare the clocks run as ever."""
    import time

    one = Decoder(TARGET(), drafter(), TREE)
    one.generate(PROMPTS[0], new_tokens=NEW)
    start = time.perf_counter()
    made = one.generate(PROMPTS[0], new_tokens=NEW, on_tokens=lambda _: time.sleep(0.002))
    assert 0.002 * len(made.emitted) <= made.seconds <= time.perf_counter() - start


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(
    "policy", [replace(TREE, least=0.2), CHAIN, TreePolicy("best_first", depth=4, nodes=6, branch=3)], ids=lambda p: p.kind
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_was_guessed_is_kept(temperature: float, policy: TreePolicy, static: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trees that the target has read, by either path, of which the accepted paths make the text."""
    from headstart.inference.reports.figures import rounds_of

    monkeypatch.setattr(decoder, "BY_ENGINE", ("cpu",) if static else ())
    seen, read, guesser = list[list[int]](), Target.read_rows, drafter()  # trained before calls are noted

    def noting(self: Target, tokens_BR: torch.Tensor, *a: Any) -> Any:
        seen.append(tokens_BR[0].tolist())
        return read(self, tokens_BR, *a)

    monkeypatch.setattr(Target, "read_rows", noting)
    made = Decoder(TARGET(), guesser, policy).generate(PROMPTS[0], new_tokens=NEW, sampling=SamplingParams(temperature, seed=3))
    rounds, (_, *trees) = rounds_of(made), seen
    text = made.tokens[:1]
    for one, tree, emitted, asked in zip(rounds, trees, made.emitted, made.asked, strict=True):
        assert tree[0] == text[-1]
        assert sorted(one.guesses) == sorted(tree[1:]) or (static and set(one.guesses) <= set(tree[1:]))
        depths: list[int] = []
        for parent in one.parents:
            depths.append(1 if parent < 0 else 1 + depths[parent])
        assert max(depths, default=0) == asked and len(one.tokens) == emitted
        assert [depths[node] for node in one.accepted] == list(range(1, len(one.accepted) + 1))
        assert all(one.parents[b] == a for a, b in zip([-1, *one.accepted], one.accepted, strict=False))
        assert [one.guesses[node] for node in one.accepted] == list(one.tokens[: len(one.accepted)])
        assert len(one.tokens) - len(one.accepted) in (0, 1)  # the target's own, unless the text ended before it
        text += one.tokens
    assert text == made.tokens and any(one.accepted for one in rounds) and any(len(one.accepted) < len(one.guesses) for one in rounds)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_graphs_are_captured_once_and_let_go() -> None:
    import copy
    import time

    there = Target(copy.deepcopy(TARGET().model).cuda(), name="tiny")
    own = copy.deepcopy(drafter()).cuda()
    own.attach(there.ends)
    before = torch.cuda.memory_allocated()
    one = Decoder(there, own, TREE)
    start = time.perf_counter()
    first = one.generate(PROMPTS[0], new_tokens=NEW)
    whole, captured = time.perf_counter() - start, one.preparations
    assert captured > 1 and first.seconds < 0.9 * whole, "capturing was counted"
    again, _ = one.timed(PROMPTS[0], new_tokens=NEW)
    assert one.preparations == captured and again.tokens == first.tokens == decode.generate(there, None, PROMPTS[0], new_tokens=NEW).tokens
    one.close()
    assert torch.cuda.memory_allocated() <= before + (1 << 20)
