"""Checkpoints that are written while training goes on: what is in them, one at a time, and what stays."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

from headstart.heads.files import sealed
from headstart.inference.decoding.target import Target
from headstart.trainers import checkpoint
from headstart.trainers.arm import Arm
from headstart.trainers.saver import Saver
from tests.drafters import FEW, make
from tests.tiny_targets import tiny_target
from tests.trainers.small import train


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


def steps(run: Path) -> list[int]:
    return [checkpoint.step_of(folder) for folder in checkpoint.folders(run)]


@pytest.mark.parametrize("name", FEW)
def test_what_is_written_late_is_what_was_there(name: str, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is so slow that two more steps are trained meanwhile: files are those of a run that waits for it."""
    moved, there = threading.Event(), threading.current_thread()

    def slowly(tensors: Any, path: Path) -> None:
        if "run" in path.parts and path.parent.name.startswith(".step-00000003"):
            assert threading.current_thread() is not there and moved.wait(60)
        save_file(tensors, path)

    for run in ("at once", "run"):
        torch.manual_seed(3)
        monkeypatch.setattr(checkpoint, "save_file", slowly)
        each = (lambda i: moved.set() if i == 5 else None) if run == "run" else None
        train(make(name, target), target, tmp_path / run, steps=6, keep=3, background=run == "run", each=each)
    assert steps(tmp_path / "run") == steps(tmp_path / "at once") == [3, 6]
    for step in ("step-00000003", "step-00000006"):
        for file in ("drafter", "optimizer", "rng"):
            one, other = ((tmp_path / run / "checkpoints" / step / f"{file}.safetensors").read_bytes() for run in ("run", "at once"))
            assert one == other
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("checkpoint")]


def test_one_at_a_time_and_the_last_is_waited_for(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save, busy, most, done = checkpoint.save, threading.Lock(), 0, list[int]()

    def counted(run: Path, step: int, *rest: Any) -> Path:
        nonlocal most
        assert busy.acquire(blocking=False), "two at a time"
        threading.Event().wait(0.05)
        try:
            return save(run, step, *rest)
        finally:
            done.append(step)
            busy.release()

    monkeypatch.setattr(checkpoint, "save", counted)
    train(make(FEW[0], target), target, tmp_path, steps=5, save_every=1, keep=9, background=True)
    assert done == [1, 2, 3, 4, 5] == steps(tmp_path)


def test_what_fails_in_it_is_raised_in_the_loop(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    reached: list[int] = []
    monkeypatch.setattr(checkpoint, "save_file", broken)
    with pytest.raises(ZeroDivisionError):
        train(make(FEW[0], target), target, tmp_path, steps=9, save_every=2, background=True, each=reached.append)
    assert max(reached) < 5 and steps(tmp_path) == []  # where the next one would have begun


def test_a_disk_that_refuses_is_told_of_and_training_goes_on(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def full(tensors: Any, path: Path) -> None:
        if "step-00000004" in path.parent.name:
            raise OSError(28, "No space left on device")
        save_file(tensors, path)

    monkeypatch.setattr(checkpoint, "save_file", full)
    assert train(make(FEW[0], target), target, tmp_path, steps=6, save_every=2, keep=9, background=True).steps == 6
    said = " ".join(capsys.readouterr().out.split())
    assert "checkpoint of step 4 not written: [Errno 28] No space left on device. Training goes on; the last whole one is" in said
    assert steps(tmp_path) == [2, 6]


def test_an_error_waits_for_what_is_on_its_way(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever ends training, the folder is given back whole."""

    def slowly(tensors: Any, path: Path) -> None:
        threading.Event().wait(0.05)
        save_file(tensors, path)

    monkeypatch.setattr(checkpoint, "save_file", slowly)
    with pytest.raises(ZeroDivisionError):
        train(make(FEW[0], target), target, tmp_path, background=True, each=lambda i: 1 // (3 - i))
    assert steps(tmp_path) == [3] and not list((tmp_path / "checkpoints").glob(".*"))


def saved_by(saver: Saver, *saves: int, keep: int = 9, before_the_fall: int | None = None, weight: float = 0.0) -> str:
    """What is said while these steps are saved, one after the other."""
    console = Console(file=io.StringIO(), width=300)
    for step in saves:
        snapshot = step, {"drafter": {"w": torch.full((1,), weight)}}, {"seconds": 0.0, "tokens": 0, "settings": {}}
        saver.save(snapshot, keep, before_the_fall, console, last=False)
    return cast("io.StringIO", console.file).getvalue()


def test_weights_that_are_not_finite_are_written_neither_now_nor_later(tmp_path: Path) -> None:
    saver = Saver("", [tmp_path], background=False)
    saved_by(saver, 1)
    said = saved_by(saver, 2, weight=torch.nan)
    assert "step 2 not written: its weights are not finite. The last one is" in said and "step-00000001" in said
    assert steps(tmp_path) == [1] and saver.unsaved is None


def test_the_first_disk_that_takes_it_has_it_and_the_first_that_refuses_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    saver, full = Saver("", [one, other], background=False), set[str]()

    def some(tensors: Any, path: Path) -> None:
        for name in full & {*path.parts}:
            raise OSError(28, f"no space on {name}")
        save_file(tensors, path)

    monkeypatch.setattr(checkpoint, "save_file", some)
    assert saved_by(saver, 1) == "" and (steps(one), steps(other)) == ([1], [])
    full.add("one")
    assert f"is in {other}" in saved_by(saver, 2) and saver.unsaved is None and (steps(one), steps(other)) == ([1], [2])
    full.add("other")
    assert "no space on one" in saved_by(saver, 3) and saver.unsaved is not None


def test_the_one_before_the_fall_stays(tmp_path: Path) -> None:
    saved_by(Saver("", [tmp_path], background=False), 1, 2, 3, 4, keep=1, before_the_fall=2)
    assert steps(tmp_path) == [2, 4]


def test_the_error_that_ended_the_training_is_the_one_that_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that was being written may have failed too."""

    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(checkpoint, "save_file", broken)
    with pytest.raises(KeyError), Saver("", [tmp_path], background=True) as saver:
        saved_by(saver, 1)
        raise KeyError
    with pytest.raises(ZeroDivisionError), Saver("", [tmp_path], background=True) as saver:
        saved_by(saver, 1)


# ---- which stay ----


def put(run: Path, step: int, length: float | None) -> None:
    figures = {} if length is None else {"figures": {"step": step, "heldout_expected_length": length}}
    checkpoint.save(run, step, {"drafter": {"w": torch.zeros(1)}}, {"seconds": 0.0, "tokens": 0, "settings": {}, **figures})


@pytest.mark.parametrize(
    ("lengths", "best", "left"),
    [
        ((1.5, 2.5, 2.0, 1.0, 1.2), 2, [2, 4, 5]),
        ((1.5, None, 2.0, None, 1.2), 3, [3, 4, 5]),
        ((None,) * 5, None, [4, 5]),
        ((1.0, 2.0, 2.0, 1.0, 2.0), 2, [2, 4, 5]),  # of several the first, as for trainer.keep=best and trainer.patience
    ],
)
def test_the_best_stays_beside_the_newest(lengths: tuple[float | None, ...], best: int | None, left: list[int], tmp_path: Path) -> None:
    for step, length in enumerate(lengths, start=1):
        put(tmp_path, step, length)
    assert checkpoint.best([tmp_path]) == best
    checkpoint.prune(tmp_path, 2, checkpoint.best([tmp_path]))
    assert steps(tmp_path) == left


def test_a_damaged_one_is_nobodys_best(tmp_path: Path) -> None:
    put(tmp_path, 1, 9.0)
    put(tmp_path, 2, 1.0)
    (tmp_path / "checkpoints/step-00000001/state.json").write_text("{")
    assert checkpoint.best([tmp_path]) == 2
    (tmp_path / "checkpoints/step-00000002/state.json").write_text(str(sealed({"figures": []})).replace("'", '"'))
    assert checkpoint.best([tmp_path]) is None


def test_a_run_keeps_its_best(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what was evaluated at that very step, through a resume."""
    lengths: Callable[[int], float] = {2: 1.0, 4: 3.0, 6: 2.0, 8: 1.5, 10: 1.0}.__getitem__
    monkeypatch.setattr(
        "headstart.trainers.trainer.evaluate", lambda learner, _: {"heldout_loss": 1.0, "heldout_expected_length": lengths(at())}
    )
    arms: list[Arm] = []

    def at() -> int:
        return arms[-1].fitted.steps

    for last in (6, 10):
        train(make(FEW[0], target), target, tmp_path, steps=last, save_every=2, eval_every=2, keep=1, schedule="wsd", warmup=0,
              held_out=[None], arms=arms, background=True)  # type: ignore[list-item]  # fmt: skip
    assert 4 in steps(tmp_path) and steps(tmp_path)[-1] == 10
