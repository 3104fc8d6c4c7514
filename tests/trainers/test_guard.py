"""A step that would do harm is passed over, its rows are kept, and a run of nothing else ends."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from headstart.heads.errors import UserError
from headstart.inference.decoding.target import Target
from headstart.trainers import checkpoint
from headstart.trainers.arm import Arm
from headstart.trainers.guard import FILE, HISTORY, LEAST, WINDOW, Guard
from headstart.trainers.learner import Learner
from headstart.trainers.metrics import read_metrics
from tests.drafters import HEADS
from tests.tiny_targets import tiny_target
from tests.trainers.small import quiet, repetitive, train


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


def noted(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / FILE).read_text().splitlines()]


def spoil(monkeypatch: pytest.MonkeyPatch, steps: dict[int, Callable[[Any], Any]]) -> None:
    """The loss of these micro-batches, from 1 on, is another."""
    forward, count = Learner.forward, 0

    def spoilt(self: Learner, *how: Any, **more: Any) -> Any:
        nonlocal count
        out, count = forward(self, *how, **more), count + 1
        out.loss_sum = steps.get(count, lambda loss: loss)(out.loss_sum)
        return out

    monkeypatch.setattr(Learner, "forward", spoilt)


@pytest.mark.parametrize("what", [math.nan, math.inf])
def test_what_is_not_finite_is_passed_over(
    what: float, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """The weights after that step are those before it, and its rows can be found."""
    drafter, weights, arms = quiet(HEADS[0], target), list[torch.Tensor](), list[Arm]()

    def watch(_: int) -> None:
        weights.append(torch.cat([p.detach().reshape(-1).clone() for p in drafter.parameters()]))

    spoil(monkeypatch, {5: lambda loss: loss * what})
    seen: list[torch.Tensor] = []
    train(drafter, target, tmp_path, each=watch, seen=seen, skips=1, steps=10, save_every=10, arms=arms)
    moved = [not torch.equal(a, b) for a, b in zip(weights, weights[1:], strict=False)]
    assert moved == [i != 4 for i in range(9)] and all(x.isfinite().all() for x in weights)
    (line,) = noted(tmp_path)
    assert line["step"] == 5 and line["place"] == [16, 20] and str(what) in line["why"]
    packed = repetitive()
    wanted = packed.tokens_RT[packed.order(0, 0)[16:20]].astype(np.int32)
    assert [row["sha256"] for row in line["rows"]] == [hashlib.sha256(row.tobytes()).hexdigest() for row in wanted]
    assert [row["begins"] for row in line["rows"]] == wanted[:, :16].tolist() == seen[4][:, :16].tolist()
    said = " ".join(capsys.readouterr().out.split())
    assert f"step 5 is skipped: the loss is {what} (its rows: {tmp_path}/{FILE})" in said
    assert read_metrics(tmp_path)[-1]["train/skipped"] == 1 and arms[0].guard.skipped == [5]


def test_a_step_that_is_skipped_logs_no_loss(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the step before is not its own."""
    spoil(monkeypatch, {3: lambda loss: loss * math.inf})
    train(quiet(HEADS[0], target), target, tmp_path, skips=1, steps=4, log_every=1)
    assert [{"train/loss", "train/gradient_norm"} <= line.keys() for line in read_metrics(tmp_path)] == [True, True, False, True]
    assert all("train/lr" in line for line in read_metrics(tmp_path))


def test_a_spike_is_passed_over_and_so_it_is_after_a_resume(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is usual is kept by a checkpoint: a run that was stopped between decides as one that was not."""
    at = LEAST + 4
    loop = dict(skips=1, spike=50.0, steps=at + 2, save_every=LEAST + 1, keep=9)
    with monkeypatch.context() as patch:
        spoil(patch, {at: lambda loss: 1e3 * loss})
        train(whole := quiet(HEADS[0], target), target, tmp_path / "whole", **loop)
    assert [line["step"] for line in noted(tmp_path / "whole")] == [at] and "times the usual" in noted(tmp_path / "whole")[0]["why"]
    run = tmp_path / "run"
    with pytest.raises(ZeroDivisionError):
        train(quiet(HEADS[0], target), target, run, each=lambda i: 1 // (LEAST + 2 - i), **loop)
    with monkeypatch.context() as patch:
        spoil(patch, {at - (LEAST + 1): lambda loss: 1e3 * loss})
        train(again := quiet(HEADS[0], target), target, run, **loop)
    assert noted(run) == noted(tmp_path / "whole")
    assert all(torch.equal(v, whole.state_dict()[k]) for k, v in again.state_dict().items())


def test_too_many_end_the_run_in_a_line(target: Target, tmp_path: Path) -> None:
    drafter = quiet(HEADS[0], target)

    def break_it(i: int) -> None:
        if i == 4:
            next(drafter.parameters()).data.fill_(math.nan)

    often = rf"^step 7: the loss is nan.*diverged in 3 of the latest {WINDOW} steps \(their rows: {tmp_path}/{FILE}\)\. Lower trainer\.lr; "
    with pytest.raises(UserError, match=often + r".*step-00000003\) is whole$"):
        train(drafter, target, tmp_path, each=break_it, skips=2, steps=9, save_every=3, background=True)
    assert [line["step"] for line in noted(tmp_path)] == [5, 6, 7]
    assert all(v.isfinite().all() for v in load_file(tmp_path / "checkpoints/step-00000003/drafter.safetensors").values())
    train(quiet(HEADS[0], target), target, tmp_path, skips=2, steps=9, save_every=3)
    assert noted(tmp_path) == []  # it goes on from step 3, and nothing was wrong this time


@pytest.mark.parametrize("skips", [0, 1])
def test_a_target_that_overflows_is_said_to(skips: int, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one made for bf16 does in float16: a lower learning rate would not help."""
    read = Target.read

    def overflowing(self: Target, *given: Any) -> Any:
        states, final = read(self, *given)
        return states, final.masked_fill(torch.ones_like(final, dtype=torch.bool).tril(-9), math.inf)

    monkeypatch.setattr(Target, "read", overflowing)
    with pytest.raises(UserError, match=rf"^step {skips + 1}: .*states are not finite.* target\.dtype=bfloat16, or float32; the last"):
        train(quiet(HEADS[0], target), target, tmp_path, skips=skips, steps=3)


def test_the_window_moves_and_little_is_no_spike() -> None:
    guard = Guard(skips=1, spike=10.0)
    assert guard.skip(1) and not guard.skip(2) and guard.skip(2 + WINDOW) and not guard.skip(3 + WINDOW)
    assert [guard.shown(2 + WINDOW + more)["skipped"] for more in (1, WINDOW - 1, WINDOW)] == [2, 2, 1] and not Guard(1, 0.0).shown(9)
    for _ in range(LEAST):
        assert not guard.wrong(1e6, 1e6)  # too little is known
        guard.took(1.0, 2.0)
    assert not guard.wrong(10.0, 20.0) and "the loss is 10.1" in guard.wrong(10.1, 1.0) and "norm is 21" in guard.wrong(1.0, 21.0)
    assert "the loss is 10.1" in Guard(1, 10.0, [1.0] * 16 + [1e3], [1.0] * 17).wrong(10.1, 1.0)  # one that was let pass changes nothing
    for usual in [1.0] * HISTORY + [100.0] * HISTORY:  # of long ago nothing counts
        guard.took(usual, 2 * usual)
    assert not guard.wrong(1000.0, 2000.0) and len(guard.losses) == len(guard.norms) == HISTORY
    assert not Guard(1, 0.0, [1.0] * 64, [1.0] * 64).wrong(1e9, 1e9)
    assert not Guard(1, 10.0, [0.0] * 64, [0.0] * 64).wrong(1e-9, 1e-9)  # of nothing everything would be many times


def test_no_checkpoint_holds_weights_that_a_broken_step_was_made_of(target: Target, tmp_path: Path) -> None:
    """While steps are skipped the weights may be what is broken: none is written then, and the last one before stays."""
    drafter = quiet(HEADS[0], target)

    def break_it(i: int) -> None:
        if i == 4:
            next(drafter.parameters()).data.fill_(math.nan)

    with pytest.raises(UserError):
        train(drafter, target, tmp_path, each=break_it, skips=4, steps=20, save_every=1, keep=2)
    for folder in checkpoint.folders(tmp_path):
        assert all(v.isfinite().all() for v in load_file(folder / "drafter.safetensors").values()), folder
