"""The static path says what the dynamic path says, token for token, whatever shares the batch; and waits for nothing inside a round."""

from __future__ import annotations

import functools
import itertools
import random
from collections import Counter

import pytest
import torch
from torch import Tensor

from headstart.heads import hub
from headstart.heads.base import Drafter
from headstart.heads.errors import UserError
from headstart.inference.decoding import row as row_module
from headstart.inference.decoding.decode import Generation, generate
from headstart.inference.decoding.decoder import generate_batch
from headstart.inference.decoding.engine import Engine
from headstart.inference.decoding.fixed import FixedMemory
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.propose import Drafting
from headstart.inference.decoding.rounds import Kind
from headstart.inference.decoding.row import ALIKE, Row, in_common, shared_by
from headstart.inference.decoding.sampling import LogitsWarper, SamplingParams
from headstart.inference.decoding.verify import RULES
from tests.drafters import FEW, FEW_HEADS, MADE, depth_of, everywhere, learn_by_heart, make, random_tokens
from tests.inference.decoding.waiting import waits
from tests.tiny_targets import ARCHITECTURES, tiny_target

NEW, PROMPTS = 20, [random_tokens(n, seed=n) for n in (11, 1, 25, 4, 18)]  # past the sliding window of 16
TARGET = functools.cache(tiny_target)
PATHS = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (1, 0, 0), (0, 0, 0, 0))
POLICIES = {
    "chain": TreePolicy("chain", depth=4),
    "dynamic": TreePolicy(depth=4, nodes=10, branch=3, least=0.05),
    "best_first": TreePolicy("best_first", depth=4, nodes=6, branch=3),
    "fixed": TreePolicy("fixed", paths=PATHS),
}


@functools.cache
def plain(architecture: str) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(generate(TARGET(architecture), None, p, new_tokens=NEW).tokens) for p in PROMPTS)


@functools.cache
def trained(head: str, architecture: str):  # type: ignore[no-untyped-def]
    texts = [(p + list(said))[: 1 + NEW] for p, said in zip(PROMPTS, plain(architecture), strict=True)]
    return learn_by_heart(make(head, TARGET(architecture)), TARGET(architecture), texts, depth=3, steps=15)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_plain_batches_equal_one_at_a_time(architecture: str) -> None:
    made = generate_batch(TARGET(architecture), None, PROMPTS, new_tokens=NEW, sequences=3)
    assert [tuple(g.tokens) for g in made] == list(plain(architecture))
    assert all(g.emitted == [1] * (NEW - 1) and g.ended == "length" for g in made)


def check_lossless(drafter: Drafter, architecture: str, policy: TreePolicy) -> list[Generation]:
    shape = policy.at_most(depth_of(drafter))
    made = generate_batch(TARGET(architecture), drafter, PROMPTS, new_tokens=NEW, policy=shape, sequences=3)
    assert [tuple(g.tokens) for g in made] == list(plain(architecture))
    return made


@pytest.mark.parametrize(("head", "architecture"), everywhere(ARCHITECTURES))
def test_batches_of_drafted_sequences_are_lossless(head: str, architecture: str) -> None:
    check_lossless(make(head, TARGET(architecture)), architecture, POLICIES["dynamic"])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("head", FEW_HEADS)
def test_batches_are_lossless_under_every_tree(head: str, policy: str) -> None:
    made = check_lossless(trained(head, "llama"), "llama", POLICIES[policy])
    assert sum(sum(g.emitted) for g in made) > 1.1 * sum(len(g.emitted) for g in made), "nothing was accepted: this tested nothing"


ROUNDS = [
    pytest.param(head, name, rule, marks=() if (name == "dynamic" and head in FEW) or head == FEW[1] else pytest.mark.slow)
    for head in MADE
    for name in POLICIES
    for rule in (RULES if name in ("chain", "fixed") else ["top_plus_one"])
    if name == "chain" or not RULES[rule].chain_only
]


@pytest.mark.parametrize(("head", "policy", "rule"), ROUNDS)
def test_the_rounds_are_those_of_the_dynamic_path(head: str, policy: str, rule: str) -> None:
    """The same guesses are made and accepted, above temperature 0 too, to the last token."""
    target, drafter = TARGET("llama"), trained(head, "llama")
    shape = POLICIES[policy].at_most(depth_of(drafter))
    each = [SamplingParams(0.9 * (i % 2), top_k=20, top_p=0.95, min_p=0.01, rule=rule, seed=i) for i in range(len(PROMPTS))]
    made = generate_batch(target, drafter, PROMPTS, new_tokens=NEW, policy=shape, sampling=each, sequences=4)
    for i in (0, 1, 4):  # the last one waits for a place
        alone = generate(target, Drafting(drafter), PROMPTS[i], new_tokens=NEW, policy=shape, sampling=each[i])
        assert made[i].tokens == alone.tokens
        assert made[i].emitted[:2] == alone.emitted[:2]


def test_a_penalty_is_that_of_each_sequence() -> None:
    target, drafter = TARGET("llama"), trained("eagle", "llama")
    each = [SamplingParams(repetition_penalty=1.0 + 0.3 * i) for i in range(len(PROMPTS))]
    made = generate_batch(target, drafter, PROMPTS, new_tokens=NEW, policy=POLICIES["dynamic"], sampling=each, sequences=3)
    for g, prompt, sampling in zip(made, PROMPTS, each, strict=True):
        ids = torch.tensor([prompt])
        how = {"do_sample": False, "repetition_penalty": sampling.repetition_penalty, "pad_token_id": 0, "max_new_tokens": NEW}
        said = target.model.generate(ids, attention_mask=torch.ones_like(ids), **how)
        assert g.tokens == said[0, len(prompt) :].tolist()
    assert len({tuple(g.tokens[:6]) for g in made}) == len(made)


@pytest.mark.parametrize("late", [False, True])
def test_sequences_come_and_go(late: bool) -> None:
    """In any order, of any length, dropped on the way, with tokens read a round late as on a GPU."""
    target, drafter, dice = TARGET("llama"), trained("eagle", "llama"), random.Random(0)
    engine = Engine(target, drafter, sequences=3, max_length=60, plans=POLICIES["dynamic"])
    engine.late = late
    waiting, running, finished = [(i % 5, dice.randint(1, NEW)) for i in range(25)], {}, 0
    while waiting or running:
        while engine.free and waiting and dice.random() < 0.7:
            prompt, new = waiting.pop()
            row = engine.add_request(PROMPTS[prompt], new_tokens=new)
            running[id(row)] = (row, prompt, new)
        engine.step()
        for key, (row, prompt, new) in list(running.items()):
            assert tuple(row.tokens) == plain("llama")[prompt][: len(row.tokens)]
            if row.done:
                assert len(row.tokens) == new and row.ended == "length"
                finished += 1
                del running[key]
            elif dice.random() < 0.05:
                engine.drop(row)
                del running[key]
    assert finished >= 15 and engine.free == 3


@pytest.mark.parametrize("late", [False, True])
def test_a_sequence_may_fill_the_capacity(late: bool) -> None:
    """Every guess is right, prompt and new tokens fill the cache, and a longer sequence goes on after the first has left."""
    target = TARGET("llama")
    drafter = hub.build("draft_lm", target.shape, config={**target.config.to_diff_dict(), "model_type": "llama"}).eval()
    drafter.lm.load_state_dict(target.model.state_dict())  # the target itself
    drafter.attach(target.ends)
    engine = Engine(target, drafter, sequences=2, max_length=45, plans=TreePolicy("chain", depth=8))
    engine.late = late
    rows = [engine.add_request(PROMPTS[2], new_tokens=NEW), engine.add_request(PROMPTS[1], new_tokens=44)]
    while engine.active:
        engine.step()
    assert tuple(rows[0].tokens) == plain("llama")[2] and tuple(rows[1].tokens[:NEW]) == plain("llama")[1] and len(rows[1].tokens) == 44
    assert max(rows[0].emitted) == 9 and len(rows[1].emitted) > len(rows[0].emitted)


def test_a_stop_token_ends_its_own_sequence_only() -> None:
    target, drafter = TARGET("llama"), trained("eagle", "llama")
    stop = plain("llama")[0][7]
    made = generate_batch(target, drafter, PROMPTS, new_tokens=NEW, policy=POLICIES["chain"], stop_ids=[stop])
    for g, said in zip(made, plain("llama"), strict=True):
        end = said.index(stop) + 1 if stop in said else NEW
        assert g.tokens == list(said[:end]) and g.ended == ("stop" if stop in said else "length")


def test_plans_switch_drafting_down_and_off() -> None:
    target, drafter = TARGET("llama"), trained("eagle", "llama")
    plans = {1: POLICIES["dynamic"], 2: TreePolicy("chain", depth=1), 4: None}
    engine = Engine(target, drafter, sequences=4, max_length=60, plans=plans)
    rows = [engine.add_request(PROMPTS[i], new_tokens=n) for i, n in ((0, 20), (2, 20), (3, 8), (4, 5))]
    while engine.active:
        engine.step()
    assert [tuple(r.tokens) for r in rows] == [plain("llama")[i][:n] for i, n in ((0, 20), (2, 20), (3, 8), (4, 5))]
    assert set(rows[2].asked) == {0} and 0 in rows[0].asked and set(rows[0].asked) <= {0, 1, 4} and max(rows[0].asked) >= 1


LOADS = {  # rounds before which sequences come in: (round, prompt, new tokens)
    "falls": [(0, 0, 20), (0, 2, 20), (0, 3, 4), (0, 4, 6)],
    "rises": [(0, 0, 20), (2, 2, 20), (4, 3, 4), (4, 4, 5)],
    "and again": [(0, 0, 20), (0, 1, 3), (0, 3, 3), (5, 2, 20), (6, 4, 2), (6, 1, 3), (11, 3, 9), (12, 4, 3)],
}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("head", FEW_HEADS)
def test_loads_rise_and_fall(head: str, load: str, late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence that was read while nothing was drafted is drafted for later, next to others; and nothing is kept for no drafter."""
    target, drafter = TARGET("llama"), trained(head, "llama")
    plans = {2: POLICIES["dynamic"].at_most(depth_of(drafter)), 4: None}
    engine = Engine(target, drafter, sequences=4, max_length=60, plans=plans)
    engine.late = late
    passes: list[tuple[int, tuple[int, ...]]] = []  # the load, and what was tapped
    read, rows, coming, number = target.read_rows, list[tuple[Row, int, int]](), list(LOADS[load]), 0
    here = {"load": 0}

    def noting(*inputs):  # type: ignore[no-untyped-def]
        passes.append((here["load"], tuple(inputs[-1])))
        return read(*inputs)

    monkeypatch.setattr(target, "read_rows", noting)
    while coming or engine.active:
        now = [c for c in coming if c[0] == number]
        coming = [c for c in coming if c[0] != number]
        here["load"] = len(engine.active) + len(now)
        rows += [(engine.add_request(PROMPTS[p], new_tokens=n), p, n) for _, p, n in now]
        engine.step()
        number += 1
    for row, prompt, new in rows:
        assert tuple(row.tokens) == plain("llama")[prompt][:new]
    assert {taps for load, taps in passes if load > 2} == {()}
    assert drafter.taps in {taps for load, taps in passes if load <= 2}
    assert {None, plans[2]} <= set(rows[0][0].shapes), "this tested nothing"


@pytest.mark.parametrize("head", MADE)
def test_a_static_round_waits_for_nothing(head: str) -> None:
    target, drafter = TARGET("llama"), make(head, TARGET("llama"))
    cases = [(POLICIES["dynamic"], "top_plus_one"), (POLICIES["chain"], "block")]
    if head in FEW:
        cases += [(p, "top_plus_one") for p in POLICIES.values()] + [(POLICIES["fixed"], "multi_round")]
        cases += [(POLICIES["fixed"], "without_replacement"), (None, "top_plus_one")]
    for policy, rule in cases:
        shape = None if policy is None else policy.at_most(depth_of(drafter))
        engine = Engine(target, drafter, sequences=2, max_length=60, plans=shape, rule=rule)
        for temperature in (0.0, 1.0):
            how = [
                SamplingParams(temperature * i, top_k=5, top_p=0.9, min_p=0.1, repetition_penalty=1.1, rule=rule)
                for i in (1, 1 - temperature)
            ]
            rows = [engine.add_request(PROMPTS[0], new_tokens=NEW, sampling=s) for s in how]
            engine.step()
            warp = LogitsWarper.over(engine.rounds.warps, how)
            engine.rounds.looks = False
            with torch.inference_mode():
                engine.rounds.run(Kind(2, 60, shape, True, 0, True), warp)  # constants are made once in a process
                with waits() as found:
                    engine.rounds.run(Kind(2, 60, shape, True, 0, True), warp)
            assert not found
            for row in rows:
                engine.drop(row)


@pytest.mark.parametrize("resting", range(6, 12))
def test_what_waits_for_the_drafter_has_room_in_fixed_shapes(resting: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many rounds go by without guesses; on a GPU nobody looks how many rows wait."""
    target, chain = TARGET("llama"), TreePolicy("chain", depth=2)
    engine = Engine(target, trained("eagle", "llama"), sequences=1, max_length=60, plans=TreePolicy("auto", depth=2, nodes=1))
    engine.rounds.looks, choices = False, itertools.cycle([None] * resting + [chain])
    monkeypatch.setattr(engine, "_choose", lambda kind, *_: kind._replace(policy=next(choices)))
    (row,) = engine.run(PROMPTS[:1], new_tokens=NEW, sampling=[SamplingParams()])
    assert tuple(row.tokens) == plain("llama")[0] and {0, 2} == set(row.asked)


def test_what_does_not_fit_is_refused_and_harms_nobody() -> None:
    target, drafter = TARGET("llama"), trained("eagle", "llama")
    engine = Engine(target, drafter, sequences=2, max_length=40, plans=POLICIES["chain"])
    row = engine.add_request(PROMPTS[0], new_tokens=NEW)
    for prompt, new, how, message in [
        ([], 4, None, "the prompt is empty"),
        ([5] * 30, 11, None, "max_length=40"),
        ([5] * 250, 11, None, "context of 256"),
        ([5, 96], 4, None, "vocabulary has 96"),
        ([5], 4, SamplingParams(1.0, rule="token"), "by the rule auto"),
    ]:
        with pytest.raises(UserError, match=message):
            engine.add_request(prompt, new_tokens=new, sampling=how)
        engine.step()
    while not row.done:
        engine.step()
    assert tuple(row.tokens) == plain("llama")[0] and engine.free == 2
    assert engine.add_request(PROMPTS[0], new_tokens=0).ended == "length" and engine.free == 2
    with pytest.raises(UserError, match="chain"):
        Engine(target, drafter, sequences=1, max_length=40, plans=POLICIES["dynamic"], rule="block")


def test_the_whole_context_can_be_used() -> None:
    target, drafter = TARGET("llama"), trained("eagle", "llama")
    prompts = [random_tokens(n, seed=9) for n in (244, 230)]
    made = generate_batch(target, drafter, prompts, new_tokens=12, policy=POLICIES["dynamic"])
    for g, prompt in zip(made, prompts, strict=True):
        assert g.tokens == generate(target, None, prompt, new_tokens=12).tokens


@pytest.mark.parametrize("sizes", [(6, 6), (6, 4)], ids=["alike", "values are smaller"])
def test_no_device_has_memory_for_layers_of_another(sizes: tuple[int, int]) -> None:
    devices = [torch.device("cpu")] * 3 + [torch.device("meta")] * 2
    memory = FixedMemory(2, capacity=9, scratch=4, device=torch.device("cpu"), layers=Counter(devices))
    for layer, device in enumerate(devices):
        k, v = (torch.zeros(2, 3, 1, size, device=device) for size in sizes)
        memory.layers[layer] = [memory._new_buffers(layer, k, v)]
    used = [buffer for pairs in memory.layers.values() for buffer in pairs[0]]
    assert sum(stack.numel() for stack in memory.stacks) == sum(buffer.numel() for buffer in used)
    assert len(memory.stacks) == 2 * len(set(sizes))  # as few moves as there are kinds


def test_rows_that_say_the_same_are_not_the_same() -> None:
    """Compared by value, the rounds of equal prompts side by side get slower with every token."""
    a, b = Row(prompt=[1, 2]), Row(prompt=[1, 2])
    assert a != b and a in [b, a] and a not in [b]
    long = list(range(2000))
    for n in (0, 5, 511, 512, 513, 1999, 2000):
        assert in_common(long, [*long[:n], -1, *long]) == in_common([*long[:n], -1], long) == n


def test_a_beginning_is_copied_from_a_row_that_has_read_it() -> None:
    text = [*range(100)]

    def row(shared: int, read: int, follow: bool = True) -> Row:
        """Its prompt shares this many tokens with ``new``."""
        return Row(prompt=[*text[:shared], -1, *text], read=read, follow=follow)

    new, none = Row(prompt=[*text[:60], -2]), (False, None, 0)
    less, more, alone = row(40, 141), row(60, 161), row(60, 161, follow=False)  # ``alone``: its drafter has not read it
    assert shared_by(new, [new], [], True) == none
    assert shared_by(new, [less, new, more], [], True) == shared_by(new, [more, less], [], True) == (False, more, 59)  # all but the last
    assert shared_by(new, [less, alone], [], True) == (False, less, 39) and shared_by(new, [less, alone], [], False) == (False, alone, 59)
    assert shared_by(new, [row(60, 0)], [], True) == none
    # it waits for one that will soon have read what they share, not for one that has read it and goes on
    unread, begun, onward = row(40, 0), row(40, 39), row(40, 40)
    assert shared_by(new, [unread], [unread], True) == shared_by(new, [more, begun], [], True) == (True, None, 0)
    assert shared_by(new, [onward], [], True) == (False, onward, 39) and shared_by(new, [row(ALIKE, 1)], [], True) == (True, None, 0)
    least, fewer = row(ALIKE, 150), row(ALIKE - 1, 150)
    assert shared_by(new, [least], [], True) == (False, least, ALIKE - 1) and shared_by(new, [fewer], [fewer], True) == none


def test_only_rows_that_have_something_to_give_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    target, looks = TARGET("llama"), list[int]()
    monkeypatch.setattr(row_module, "in_common", lambda a, b: looks.append(1) or in_common(a, b))
    engine = Engine(target, None, sequences=16, max_length=120)
    prompts = [random_tokens(60, seed=3)] * 16
    rows = engine.run(prompts, new_tokens=3, sampling=[SamplingParams()] * 16)
    assert len(looks) < 3 * 16 and len({tuple(row.tokens) for row in rows}) == 1


def test_accepted_rows_move_behind_the_kept_ones_in_layers_of_any_shape() -> None:
    g = torch.Generator().manual_seed(0)
    sizes = [(2, 3, 5), (2, 3, 5), (1, 4, 4)]  # heads, size of keys, of values
    memory = FixedMemory(2, capacity=9, scratch=4, device=torch.device("cpu"), layers={torch.device("cpu"): 3})
    expected: dict[tuple[int, int, int], Tensor] = {}  # layer, sequence, row -> keys
    for b, rows in ((0, 3), (1, 1)):
        memory.load([b], [0], rows)
        for layer, (h, k, v) in enumerate(sizes):
            keys = torch.randn(1, h, rows, k, generator=g)
            memory.write(layer, keys, torch.randn(1, h, rows, v, generator=g))
            expected |= {(layer, b, t): keys[0, :, t] for t in range(rows)}
        memory.loading = None
        memory.kept_B[b] = rows
    assert sorted(tuple(x.shape) for x in memory.stacks) == [(3, 2, 2, 13, 3), (3, 2, 2, 13, 5), (6, 2, 1, 13, 4)]
    for rows_BA, counts in (([[0, 2], [0, 1]], [2, 1]), ([[0, 1], [0, 2]], [1, 2])):
        memory.use(2, 7, 3)
        memory.sees_nodes(torch.eye(3, dtype=torch.bool).expand(2, 3, 3))
        kept = memory.kept_B.tolist()
        for layer, (h, k, v) in enumerate(sizes):
            keys = torch.randn(2, h, 3, k, generator=g)
            seen, _ = memory.write(layer, keys, torch.randn(2, h, 3, v, generator=g))[0]
            assert seen.shape == (2, h, 3 + 7, k) and torch.equal(seen[:, :, :3], keys)
            for b in (0, 1):
                expected |= {(layer, b, kept[b] + i): keys[b, :, rows_BA[b][i]] for i in range(counts[b])}
        memory.keep(torch.tensor(rows_BA), torch.tensor(counts))
        assert memory.kept_B.tolist() == [a + b for a, b in zip(kept, counts, strict=True)]
    for (layer, b, t), keys in expected.items():
        assert torch.equal(memory.layers[layer][0][0][b, :, 4 + t], keys)
