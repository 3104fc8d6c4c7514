"""Whom the watch names when nothing moves."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headstart.data.batch import TokenBatch
from headstart.door.launch import free_port
from headstart.trainers.arm import Arm
from headstart.trainers.watch import Watch
from tests.tiny_targets import tiny_target
from tests.trainers.small import quiet, repetitive, train


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The watches of two processes, both in this one. The first ends nothing, but keeps whom it names in ``named``."""
    port = free_port()
    store = torch.distributed.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    made: list[Any] = []
    for rank, seconds in ((0, 0.4), (1, 60.0)):
        monkeypatch.setattr(Watch, "runs", 0)  # the runs of a process are counted alike in both
        made.append(Watch(SimpleNamespace(process_index=rank, num_processes=2), seconds))  # type: ignore[arg-type]
    first, named, told = made[0], list[str](), threading.Event()

    def end(behind: Sequence[str]) -> None:
        named.extend(behind)
        told.set()
        first.ended.set()

    first._end, first.named, first.told, first.kept = end, named, told, store
    return made


def test_one_that_has_left_the_loop_is_not_waited_for(two: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The last that it said may be that it takes its time, for a checkpoint."""
    first, second = two
    monkeypatch.setattr(Watch, "runs", 0)
    with second:
        second.at("step 4, target")
        with second.patiently("step 4, checkpoint"):
            second._tell()
    monkeypatch.setattr(Watch, "runs", 0)
    with first:
        for step in (4, 5, 6):
            first.at(f"step {step}, data")
        assert first.told.wait(20), "it waits for ever"
    (line,) = first.named
    assert line.startswith("process 1 (") and "at the end of its loop, after step 4, checkpoint" in line


def test_it_watches_while_arms_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There the processes of a run compute something together for the first time."""
    seen: list[str] = []
    enter, leave, target = Watch.__enter__, Watch.__exit__, tiny_target()
    monkeypatch.setattr(Watch, "__enter__", lambda self: (seen.append("watched"), enter(self))[1])
    monkeypatch.setattr(Watch, "__exit__", lambda self, *how: (seen.append(self.where), leave(self, *how))[1])
    monkeypatch.setattr(Arm, "open", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        train(quiet("medusa", target), target, tmp_path / "run", steps=1)
    assert seen == ["watched", f"the opening of {tmp_path / 'run'}"]


def test_a_resumed_run_looks_for_its_place_in_the_data_without_a_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streamed data are read from their beginning for it."""
    watches, patient, target, packed = list[Watch](), list[bool](), tiny_target(), repetitive()
    enter, stream = Watch.__enter__, packed.stream
    monkeypatch.setattr(Watch, "__enter__", lambda self: (watches.append(self), enter(self))[1])

    def noted(*where: Any) -> Iterator[TokenBatch]:
        for batch in stream(*where):
            patient.append(watches[-1].alone)
            yield batch

    monkeypatch.setattr(packed, "stream", noted)
    for steps in (3, 5):
        train(quiet("medusa", target), target, tmp_path / "run", steps=steps, packed=packed, schedule="constant")
    assert patient == [False] * 3 + [True, False]
