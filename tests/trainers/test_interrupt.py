"""Ctrl-C once, twice and three times, wherever it comes: said at once, and no checkpoint is lost or torn."""

from __future__ import annotations

import os
import pty
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from headstart.inference.decoding.target import Target
from headstart.trainers import checkpoint
from headstart.trainers.interrupt import AFTER, ENDING, WRITING, Interrupt
from tests.drafters import make
from tests.tiny_targets import tiny_target
from tests.trainers.small import train


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """Whatever these tests were started by: nohup has them ignore SIGHUP, a shell in the background SIGINT."""
    before = {number: signal.getsignal(number) for number in ENDING}
    for number in ENDING:
        if before[number] is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def ctrl_c(times: int = 1) -> None:
    for _ in range(times):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_once_and_twice(first: signal.Signals, capfd: pytest.CaptureFixture[str]) -> None:
    before = [signal.getsignal(s) for s in ENDING]
    with pytest.raises(KeyboardInterrupt), Interrupt() as interrupt:
        signal.raise_signal(first)
        assert interrupt.asked and capfd.readouterr().err == f"\n{AFTER}\n"  # at once
        signal.raise_signal(signal.SIGTERM)  # of a launcher that passes on what its children have already
        assert not capfd.readouterr().err
        ctrl_c()
    assert [signal.getsignal(s) for s in ENDING] == before


def test_nohup_is_respected() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupt() as interrupt:
            signal.raise_signal(signal.SIGHUP)
            assert not interrupt.asked
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_what_is_written_is_finished_first(capfd: pytest.CaptureFixture[str]) -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), Interrupt() as interrupt:
        with interrupt.writing():
            ctrl_c()
        done.append("the first asks for the end of the step")
        with interrupt.writing():
            ctrl_c()
            done.append("written")
        done.append("never")
    assert done == ["the first asks for the end of the step", "written"] and capfd.readouterr().err == f"\n{AFTER}\n\n{WRITING}\n"
    with pytest.raises(KeyboardInterrupt), Interrupt(say=False) as interrupt, interrupt.writing():
        ctrl_c(2)
        done.append("still")
        ctrl_c()
        done.append("never")
    assert done[-1] == "still" and not capfd.readouterr().err


def test_on_a_terminal_the_line_of_the_bar_is_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    monkeypatch.setattr(os, "isatty", lambda fd: True)
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(theirs, data) if fd == 2 else write(fd, data))
    with Interrupt():
        ctrl_c()
    said = b""
    while not said.endswith(b"\n"):  # a terminal may give it in pieces
        said += os.read(ours, 1000)
    assert said.decode() == f"\r\x1b[2K{AFTER}\r\n"


def test_where_nobody_hears_it_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(*_: object) -> int:
        raise OSError(9, "Bad file descriptor")

    monkeypatch.setattr(os, "write", closed)
    with Interrupt() as interrupt:
        ctrl_c()
        assert interrupt.asked


# ---- in training ----


@pytest.fixture(scope="module")
def whole(target: Target, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Weights after nine steps that nothing disturbed; with noise, so that the random numbers count."""
    drafter = make("eagle1", target)
    torch.manual_seed(5)
    train(drafter, target, tmp_path_factory.mktemp("whole"), steps=9)
    return drafter.state_dict()


def disturbed(target: Target, run: Path, each: Callable[[int], None] | None = None) -> None:
    drafter = make("eagle1", target)
    torch.manual_seed(5)
    train(drafter, target, run, steps=9, each=each)


def check_same_in_the_end(target: Target, run: Path, whole: dict[str, Any]) -> None:
    assert not [path for path in run.rglob("*") if path.name.endswith(".part")]
    drafter = make("eagle1", target)
    train(drafter, target, run, steps=9)
    assert all(torch.equal(v, whole[k]) for k, v in drafter.state_dict().items())
    assert [p.name for p in sorted((run / "checkpoints").iterdir())][-1] == "step-00000009"
    assert not list((run / "checkpoints").glob(".*"))


@pytest.mark.parametrize("times", [1, 2])
def test_in_a_step(times: int, target: Target, whole: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """In the fifth step: once, the checkpoint is of that step; twice, the last one stays."""

    def each(i: int) -> None:
        if i == 4:
            ctrl_c(times)

    if times == 1:
        disturbed(target, tmp_path, each)
    else:
        with pytest.raises(KeyboardInterrupt):
            disturbed(target, tmp_path, each)
    assert checkpoint.step_of(checkpoint.folders(tmp_path)[-1]) == (5 if times == 1 else 3) and AFTER in capfd.readouterr().err
    check_same_in_the_end(target, tmp_path, whole)


@pytest.mark.parametrize("file", ["drafter", "optimizer", "rng", "rename"])
@pytest.mark.parametrize("times", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_in_a_checkpoint(
    times: int, file: str, target: Target, whole: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    """While that of step 6 is written: it is there afterwards, and with a third Ctrl-C the one before it."""
    rename = Path.rename

    def saving(tensors: Any, path: Path) -> None:
        save_file(tensors, path)
        if path.parent.name == ".step-00000006.part" and path.stem == file:
            path.write_bytes(path.read_bytes()[:-1])  # half of it, as it were
            ctrl_c(times)
            save_file(tensors, path)

    def renaming(self: Path, to: Path) -> Path:
        if self.name == ".step-00000006.part" and file == "rename":
            ctrl_c(times)
        return rename(self, to)

    monkeypatch.setattr(checkpoint, "save_file", saving)
    monkeypatch.setattr(Path, "rename", renaming)
    if times == 1:  # asked too late for this step
        disturbed(target, tmp_path)
    else:
        with pytest.raises(KeyboardInterrupt):
            disturbed(target, tmp_path)
    monkeypatch.undo()
    assert checkpoint.step_of(checkpoint.folders(tmp_path)[-1]) == {1: 7, 2: 6, 3: 3}[times]
    assert capfd.readouterr().err.count(WRITING) == (times > 1)
    check_same_in_the_end(target, tmp_path, whole)


def test_while_an_older_one_is_removed(target: Target, whole: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remove = checkpoint.shutil.rmtree

    def removing(path: Path, *rest: Any, **more: Any) -> None:
        if path.name == ".step-00000003.old" and path.exists():
            ctrl_c(3)
        remove(path, *rest, **more)

    monkeypatch.setattr(checkpoint.shutil, "rmtree", removing)
    with pytest.raises(KeyboardInterrupt):
        disturbed(target, tmp_path)
    monkeypatch.undo()
    assert [checkpoint.step_of(p) for p in checkpoint.folders(tmp_path)] == [6, 9]
    train(make("eagle1", target), target, tmp_path, steps=9)
