"""Several drafters from one pass of the target: each learns what it would learn alone, and fails alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from headstart.data.batch import TargetBatch, TokenBatch
from headstart.data.live import look
from headstart.door import train as door
from headstart.heads.errors import UserError
from headstart.inference.decoding.target import Target
from headstart.trainers import checkpoint
from headstart.trainers.arm import Arm
from headstart.trainers.run import run
from headstart.trainers.trainer import evaluate, fit
from tests.drafters import HEADS, make
from tests.tiny_targets import tiny_target
from tests.trainers.conftest import small_run
from tests.trainers.small import COMMON, LOOP, open_arm, repetitive, train

SOME = [name for name in HEADS if name != HEADS[1]][::4]  # a few of all kinds; each is tried as an arm in benchmarks/drafters.py


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


def side_by_side(
    target: Target, names: list[str], folder: Path, each: Callable[[int], None] | None = None, held_out: bool = False, **changes: Any
) -> list[Arm]:
    packed, passes = repetitive(), iter(range(10**6))

    def observe(batch: TokenBatch, taps: Collection[int]) -> TargetBatch:
        if each is not None:
            each(next(passes))
        return look(batch, target, taps)

    def stream(start: int, rank: int, world: int) -> Iterator[TokenBatch]:
        return packed.stream(4, 0, start, rank, world)

    arms, loop = [], LOOP | changes
    for i, name in enumerate(names):
        drafter = make(name, target)
        torch.manual_seed(5)
        (folder / f"{i}").mkdir(parents=True, exist_ok=True)
        arms.append(open_arm(f"{i}", drafter, folder / f"{i}", loop))
    taps = {tap for arm in arms for tap in arm.drafter.taps}
    held = [look(repetitive(seed=7, documents=12).batch(slice(0, 4)), target, taps)] if held_out else []
    try:
        fit(arms, stream, observe, held, Accelerator(cpu=True), **{k: loop[k] for k in COMMON})
    except BaseException as e:
        e.arms = arms  # type: ignore[attr-defined]
        raise
    return arms


def alone(target: Target, name: str, folder: Path, **changes: Any) -> dict[str, torch.Tensor]:
    drafter = make(name, target)
    torch.manual_seed(5)
    train(drafter, target, folder, **changes)
    return drafter.state_dict()


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_an_arm_learns_what_it_learns_alone(target: Target, tmp_path: Path) -> None:
    """To the bit, its noise and its anchors included; the target reads every batch once."""
    passes: list[int] = []
    arms = side_by_side(target, SOME, tmp_path / "together", passes.append)
    assert len(passes) == LOOP["steps"]
    for arm, name in zip(arms, SOME, strict=True):
        assert equal(arm.drafter.state_dict(), alone(target, name, tmp_path / name))
        lines = [json.loads(line) for line in (arm.run / "metrics.jsonl").read_text().splitlines()]
        assert lines[-1]["step"] == LOOP["steps"] and lines[-1]["train/expected_length"] >= 1
        assert checkpoint.folders(arm.run)


@pytest.mark.parametrize("why", [torch.OutOfMemoryError("no memory is left"), ZeroDivisionError("a bug"), "diverged"])
def test_one_that_fails_stops_alone(why: Any, target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names, arms = SOME[:2], []

    def disturb(i: int) -> None:
        if i == 3:
            arm = next(a for a in _alive if a.name == "0")
            if why == "diverged":
                next(arm.drafter.parameters()).data.fill_(torch.nan)
            else:
                arm.module.forward = raising  # type: ignore[method-assign]

    def raising(*_: Any, **__: Any) -> None:
        raise why

    _alive: list[Arm] = []
    opened = Arm.open

    def remember(self: Arm, *a: Any) -> None:
        _alive.append(self)
        opened(self, *a)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Arm, "open", remember)
        arms = side_by_side(target, names, tmp_path / "together", disturb)
    said = " ".join(capsys.readouterr().out.split())
    assert "0: stopped after step 3, the others go on" in said and arms[0].fitted.steps == 3
    assert ("diverged" if why == "diverged" else str(why)) in arms[0].failed and not arms[1].failed
    assert ("Traceback" in said) == isinstance(why, ZeroDivisionError)  # where a bug is, is said
    assert equal(arms[1].drafter.state_dict(), alone(target, names[1], tmp_path / "alone"))
    kept = [optimizer for arm in (arms[0], arms[-1]) for optimizer in arm.parallel.optimizers]
    assert not kept[0].state and kept[-1].state  # its moments do not stay where the others train


def test_when_all_fail_the_run_ends(target: Target, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no arm is left.*diverged"):
        side_by_side(target, SOME[:2], tmp_path, lr=float("inf"), warmup=0)


def test_every_evaluation_is_logged_and_may_end_an_arm(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found: dict[str, list[float]] = {name: [] for name in SOME[:2]}

    def evaluated(learner: Any, batches: Any) -> dict[str, float]:
        losses = found[learner.drafter.config["head"]]
        losses.append((figures := evaluate(learner, batches))["heldout_loss"])
        if losses is found[SOME[0]] and len(losses) == 2:
            raise UserError("it does not learn")
        return figures

    monkeypatch.setattr("headstart.trainers.trainer.evaluate", evaluated)
    arms = side_by_side(target, SOME[:2], tmp_path / "gate", held_out=True, eval_every=2)
    assert arms[0].failed == "it does not learn" and arms[0].fitted.steps == 4 and not arms[1].failed
    assert "0: stopped after step 4, the others go on: it does not learn" in " ".join(capsys.readouterr().out.split())
    lines = [json.loads(line) for arm in arms for line in (arm.run / "metrics.jsonl").read_text().splitlines()]
    logged = [(line["step"], line["heldout/loss"]) for line in lines if "heldout/loss" in line]
    first, second = found.values()
    assert len(first) == 2 and logged == [(2, first[0]), *zip((2, 4, 6), second, strict=True)]
    assert equal(arms[1].drafter.state_dict(), alone(target, SOME[1], tmp_path / "alone"))


def test_an_evaluation_that_fails_ends_one_arm(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(learner: Any, batches: Any) -> dict[str, float]:
        if learner.drafter.config["head"] == SOME[0]:
            raise torch.OutOfMemoryError("no memory is left")
        return evaluate(learner, batches)

    monkeypatch.setattr("headstart.trainers.trainer.evaluate", out_of_memory)
    arms = side_by_side(target, SOME[:2], tmp_path, held_out=True)
    assert arms[0].failed == "no memory is left" and not arms[1].failed and arms[1].fitted.steps == LOOP["steps"]


def test_arms_that_stopped_at_different_steps_catch_up(target: Target, tmp_path: Path) -> None:
    """Killed between the checkpoints of two arms, or an arm added later: the end is the same."""
    at_once = side_by_side(target, SOME[:2], tmp_path / "a")
    side_by_side(target, SOME[:2], tmp_path / "b", steps=6)
    checkpoint.remove(checkpoint.folders(tmp_path / "b" / "0")[-1])  # the first one's last checkpoint was not written
    passes: list[int] = []
    again = side_by_side(target, SOME[:2], tmp_path / "b", passes.append)
    assert len(passes) == 3
    for a, b in zip(at_once, again, strict=True):
        assert equal(a.drafter.state_dict(), b.drafter.state_dict())


@pytest.mark.slow
def test_a_run_of_several(composed: Any, target_folder: Path, conversations: Path, tmp_path: Path, capsys: Any) -> None:
    overrides = small_run(target_folder, conversations, tmp_path / "run")
    base = composed(*overrides)
    arms = {
        "a": {k: base[k] for k in ("head", "loss", "trainer")},
        "b": {"head": base["head"], "loss": base["loss"] | {"terms": {"tv": 1.0}}, "trainer": base["trainer"] | {"lr": 1e-4}},
    }
    reports = run(**(base | {"arms": arms}))
    assert reports.keys() == {"a", "b"} and reports["a"]["lossless"] and reports["b"]["loss"]["terms"] == {"tv": 1.0}
    out = tmp_path / "run"
    assert {p.name for p in out.iterdir()} == {"a", "b", "comparison.json", "comparison.md", "comparison.png", "comparison.html"}
    made = json.loads((out / "comparison.json").read_text())
    assert {row["name"] for row in made["arms"]} == {"a", "b"} and made["failed"] == {}
    for row in made["arms"]:
        assert row["c"] > 0 and row["v"] > 0 and row["predicted_speedup"] > 0 and row["t0_chain"] >= 1 and row["train_seconds"] > 0
    table = capsys.readouterr().out
    assert "speed-up" in table and "comparison.md" in table
    first = made["arms"][0]["name"]
    assert f"how {first} is served: {out / first / 'speculator' / 'README.md'}" in table
    single = run(**(base | {"out": str(tmp_path / "single")}))[""]
    for key in ("accepted_length", "acceptance_by_depth", "expected_length"):
        assert single["temperature_0"][key] == reports["a"]["temperature_0"][key]


def test_what_arms_cannot_differ_in_is_named(composed: Any, target_folder: Path, conversations: Path, tmp_path: Path) -> None:
    base = composed(*small_run(target_folder, conversations, tmp_path / "run"))
    arms = {"a": {k: base[k] for k in ("head", "loss", "trainer")}}
    arms["b"] = arms["a"] | {"trainer": base["trainer"] | {"batch_size": 7}}
    with pytest.raises(UserError, match=r"arm b: all arms share trainer.batch_size"):
        run(**(base | {"arms": arms}))
    arms["b"] = arms["a"] | {"head": base["head"] | {"heads": 3, "kv_heads": 2}}
    with pytest.raises(UserError, match=r"arm b: .*head.heads"):
        run(**(base | {"arms": arms}))


def test_the_command_line_names_arms() -> None:
    assert door._spread(["head=[a, b]", "out=x"]) == ["head=a", "arms={a:'head=a',b:'head=b'}", "out=x"]
    assert door._spread(["head=a", "arms={x:'head=a loss=tv'}"]) == ["head=a", "arms={x:'head=a loss=tv'}"]


@pytest.mark.parametrize(("arguments", "words"), [
    (["head=[a,a]"], ["two arms are called a", "arms={a:"]),
    (["head=[a,b]", "arms={c:'head=a'}"], ["not both"]),
])  # fmt: skip
def test_two_arms_need_two_names(arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        door._spread(arguments)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and all(word in said for word in words)


def test_arms_start_over(target: Target, tmp_path: Path) -> None:
    side_by_side(target, SOME[:2], tmp_path)
    arms = side_by_side(target, SOME[:2], tmp_path, resume=False, steps=2)
    assert [[p.name for p in checkpoint.folders(arm.run)] for arm in arms] == [["step-00000002"]] * 2
