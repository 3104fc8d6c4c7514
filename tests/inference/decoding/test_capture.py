"""Rounds as graphs say what they say as they are; what cannot be captured is launched as it is, and a server captures at its start."""

from __future__ import annotations

import functools
import logging
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import nn

from headstart.heads.errors import warn_once
from headstart.inference.decoding import auto, capture, rounds, warm_up
from headstart.inference.decoding.decode import generate
from headstart.inference.decoding.engine import Engine
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.sampling import SamplingParams
from headstart.inference.decoding.tree import Tree
from headstart.inference.serving.worker import Job, Worker
from tests.drafters import learn_by_heart, make, random_tokens
from tests.inference.decoding.replays import Replays, replaying
from tests.tiny_targets import tiny_target

NEW, PROMPTS = 20, [random_tokens(n, seed=n) for n in (11, 1, 25, 4, 18)]
TREE = TreePolicy(depth=4, nodes=10, branch=3, least=0.05)
TARGET = functools.cache(tiny_target)
MIXED = [SamplingParams(0.9 * (i % 2), top_k=20 * (i == 3), top_p=0.95, repetition_penalty=1.0 + 0.3 * (i == 4), seed=i) for i in range(5)]


@functools.cache
def trained() -> Any:
    target = TARGET()
    texts = [(p + generate(target, None, p, new_tokens=NEW).tokens)[: 1 + NEW] for p in PROMPTS]
    return learn_by_heart(make("eagle", target), target, texts, depth=3, steps=15)


def said(engine: Engine, each: list[SamplingParams]) -> list[tuple[list[int], list[int]]]:
    return [(row.tokens, row.emitted) for row in engine.run(PROMPTS, new_tokens=NEW, sampling=each, stop_ids=())]


@pytest.mark.parametrize("policy", [None, TREE, TreePolicy("chain", depth=4)])
def test_replayed_rounds_are_those_that_are_launched(policy: TreePolicy | None) -> None:
    def engine(graphs: bool) -> Engine:
        return Engine(TARGET(), trained(), sequences=3, max_length=100, plans=policy, graphs=graphs)

    with replaying() as made:
        replayed = engine(True)
        for each in ([SamplingParams()] * 5, MIXED):
            assert said(replayed, each) == said(engine(False), each)
        assert replayed.rounds.graphs is not None
        assert made.recorded == (1 if policy is None else 2) * len(replayed.rounds.graphs.kept) - sum(
            policy is not None and kind.policy is None for kind, _ in replayed.rounds.graphs.kept
        )


class Picky(nn.Module):
    """Experts that are picked on the host, as those of transformers' loop are."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: torch.Tensor) -> Any:
        for _ in hidden.abs().sum(-1).nonzero():
            pass
        return self.inner(hidden)


@pytest.mark.parametrize("policy", [None, TREE])
def test_no_graph_reads_what_the_rehearsal_left_in_a_tree(policy: TreePolicy | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is freed after the capture, while the graph is replayed on."""
    before, read, recording, whole = list[torch.Tensor](), list[torch.Tensor](), False, Tree.rows

    class Watched(Replays):
        def record(self, call: Any) -> Any:
            nonlocal recording
            recording = True
            made = super().record(call)
            recording = False
            return made

    def watched(tree: Tree) -> torch.Tensor:
        found = whole(tree)
        (read if recording else before).append(found)
        return found

    monkeypatch.setattr(Tree, "rows", watched)
    monkeypatch.setattr(rounds, "Graphs", Watched)
    engine = Engine(TARGET(), trained(), sequences=1, max_length=100, plans=policy, graphs=True)
    engine.run(PROMPTS[:1], new_tokens=4, sampling=[SamplingParams()], stop_ids=())
    assert read and not any(x is y for x in read for y in before)


def test_what_waits_for_the_device_is_not_captured_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    target = tiny_target("mixtral")
    plain = [generate(target, None, p, new_tokens=NEW).tokens for p in PROMPTS]
    target.layers[2].mlp = Picky(target.layers[2].mlp)
    warn_once.cache_clear()
    with replaying() as made, caplog.at_level(logging.WARNING):
        for _ in range(2):
            engine = Engine(target, make("eagle", target), sequences=3, max_length=100, plans=TREE, graphs=True)
            assert [tokens for tokens, _ in said(engine, [SamplingParams()] * 5)] == plain
            assert engine.rounds.graphs is None and made.recorded == 0
    (warning,) = caplog.messages
    assert warning == ("mixtral: its rounds cannot be device graphs (called a synchronizing operation: nonzero): "
                       "they are launched kernel by kernel, which is slower")  # fmt: skip


def test_no_room_for_a_capture_is_no_reason_to_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("full")

    with replaying() as made:
        monkeypatch.setattr(made, "rehearse", full)
        engine = Engine(TARGET(), None, sequences=1, max_length=40, graphs=True)
        with pytest.raises(torch.OutOfMemoryError):
            engine.run([[5]], new_tokens=4, sampling=[SamplingParams()], stop_ids=())


def test_at_most_so_many_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "MOST_GRAPHS", 2)
    with replaying() as made:
        engine = Engine(TARGET(), trained(), sequences=3, max_length=100, plans=TREE, graphs=True)
        assert said(engine, MIXED) == said(Engine(TARGET(), trained(), sequences=3, max_length=100, plans=TREE), MIXED)
        assert engine.rounds.graphs is not None and len(engine.rounds.graphs.kept) == 2 < made.recorded


def test_a_least_length_without_tokens_that_end_is_none() -> None:
    """What it records does not hold stop tokens back, so it may not stand for what does."""
    with replaying():
        engine = Engine(TARGET(), None, sequences=1, max_length=60, graphs=True)
        for stop, held in (((), {False}), ((2,), {False, True})):
            engine.run([PROMPTS[0]], new_tokens=6, sampling=[SamplingParams(min_tokens=4)], stop_ids=stop)
            assert engine.rounds.graphs is not None and {kind.hold for kind, _ in engine.rounds.graphs.kept} == held


@pytest.mark.parametrize("policy", [None, pytest.param(TREE, marks=pytest.mark.slow), TreePolicy("auto", depth=2, nodes=1)])
def test_a_server_captures_before_anybody_waits(policy: TreePolicy | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever comes and goes, whatever they ask for; log-probabilities too, which nobody expected."""
    for name, value in dict(KNOWN=WeakKeyDictionary(), TURNS=1, ROUNDS=2, LONG=0.0).items():
        monkeypatch.setattr(auto, name, value)
    with replaying() as made:
        worker = Worker(lambda: Engine(TARGET(), trained(), sequences=2, max_length=100, plans=policy, graphs=True))
        graphs = worker.engine.rounds.graphs
        assert graphs is not None and graphs.complete and made.recorded > 10
        assert {kind.padded_length for kind, _ in graphs.kept} == {64, worker.engine.rounds.cache.capacity}
        before = made.recorded
        jobs = [Job(p, NEW, s, lambda event: None, ()) for p, s in zip(PROMPTS, MIXED, strict=True)]
        jobs[4].logprobs = 3
        worker.waiting += jobs
        while worker.waiting or worker.running:
            while worker.waiting and worker.engine.free:
                worker._enter(worker.waiting.popleft())
            worker._round()
        assert made.recorded == before
        found = [job.said for job in jobs]
    if policy is None or policy.kind != "auto":  # its choice hangs on what rounds cost
        plain = Engine(TARGET(), trained(), sequences=3, max_length=100, plans=policy)
        assert found == [tokens for tokens, _ in said(plain, MIXED)]
    else:
        greedy = [generate(TARGET(), None, p, new_tokens=NEW).tokens for p in PROMPTS]
        assert (found[0], found[2]) == (greedy[0], greedy[2])


def test_a_server_captures_every_plan_for_every_number_of_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence that is left alone at the last place has the plan of one sequence in a round over all places."""
    monkeypatch.setattr(warm_up, "HOWS", warm_up.HOWS[:1])
    chain, rounds_run = TreePolicy("chain", depth=2), list[tuple[int, TreePolicy | None, bool]]()
    with replaying() as made:
        engine = Engine(TARGET(), trained(), sequences=2, max_length=40, plans={1: chain, 2: None}, graphs=True)
        engine.warm_up()
        find = made.find

        def watched(graphs: Any, kind: Any, warp: Any) -> Any:
            rounds_run.append((kind.n, kind.policy, (found := find(graphs, kind, warp)) is not None))
            return found

        monkeypatch.setattr(made, "find", watched)
        for new_tokens in (3, NEW):
            engine.add_request(PROMPTS[0], new_tokens=new_tokens, stop_ids=())
        while engine.active:
            engine.step()
    assert (2, None, True) in rounds_run and (2, chain, True) in rounds_run and all(captured for *_, captured in rounds_run)


def test_more_than_can_be_kept_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(warm_up, "MOST_GRAPHS", 5)
    with replaying():
        engine = Engine(TARGET(), trained(), sequences=2, max_length=60, plans=TREE, graphs=True)
        engine.warm_up()
        assert engine.rounds.graphs is not None and len(engine.rounds.graphs.kept) == 5 and "5 rounds are captured" in caplog.text
        assert [tokens for tokens, _ in said(engine, [SamplingParams()] * 5)] == [
            generate(TARGET(), None, p, new_tokens=NEW).tokens for p in PROMPTS
        ]
