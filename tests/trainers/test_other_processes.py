"""A run goes on in another number of processes: every step has the rows it would have had, and the weights come out alike."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headstart.door.launch import free_port
from headstart.heads.errors import UserError
from headstart.trainers import checkpoint
from headstart.trainers.resume import Batch, shared_out
from headstart.trainers.run import prepare
from tests.trainers.conftest import ROOT, TORCHRUN, Composed, check_trained_alike, equal, weights
from tests.trainers.other_processes import part

STEPS = 6


def rows_of(read: Path) -> dict[int, list[list[int]]]:
    """Step -> the rows of all its micro-batches, of all processes."""
    found: dict[int, list[list[int]]] = {}
    for path in sorted(read.iterdir(), key=lambda path: [int(number) for number in path.stem.split("-")]):
        found.setdefault(int(path.stem.split("-")[0]), []).extend(json.loads(path.read_text()))
    return found


@pytest.mark.slow
def test_one_two_and_one_again(composed: Composed, overrides: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Compared with one process that was left alone: the same rows in the same order, weights but for rounding."""
    loop = [f"trainer.steps={STEPS}", "trainer.batch_size=4", "trainer.optimizer=adamw", "head=medusa"]
    settings = composed(*overrides, *loop) | {"report": "none"}
    lr = settings["trainer"]["lr"]
    run, file = tmp_path / "run", tmp_path / "settings.json"
    part(settings | {"out": str(tmp_path / "alone")}, STEPS, tmp_path / "read-alone")
    part(settings, 2, tmp_path / "read")
    file.write_text(json.dumps(settings))
    world = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    command += ["-m", "tests.trainers.other_processes", str(file), "4", str(tmp_path / "read")]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | world, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    said = "a step has the 4 rows that the run began with: 2 x trainer.batch_size=2 x trainer.accumulate=1"
    assert said in done.stdout and "resuming after step 2" in done.stdout
    assert checkpoint.read_state(checkpoint.folders(run)[-1])["settings"]["launcher"] == {"processes": 1}  # as it began, for good
    capsys.readouterr()
    part(settings, STEPS, tmp_path / "read")
    assert "resuming after step 4" in capsys.readouterr().out
    read, alone = rows_of(tmp_path / "read"), rows_of(tmp_path / "read-alone")
    assert {step: sorted(rows) for step, rows in read.items()} == {step: sorted(rows) for step, rows in alone.items()}
    assert read == alone and sorted(read) == list(range(STEPS))
    check_trained_alike(weights(run), weights(tmp_path / "alone"), lr, STEPS)


@pytest.mark.slow
def test_torchrun_starts_them_again(overrides: list[str], tmp_path: Path) -> None:
    """One kills itself; all are started again, and end with the weights of two that nobody disturbed. Its store is the same again, with the
    addresses of the dead.
    """

    def torchrun(out: Path, killed: Path) -> str:
        command = [*TORCHRUN, "--nproc-per-node", "2", "--max-restarts", "1"]
        command += ["-m", "tests.trainers.killed_once", *overrides, f"out={out}"]
        command += ["trainer.steps=8", "trainer.save_every=2", "report=none"]
        world = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "KILLED": str(killed)}
        done = subprocess.run(command, cwd=ROOT, env=os.environ | world, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return done.stdout

    assert "resuming after step 4" in torchrun(tmp_path / "run", tmp_path / "killed") and (tmp_path / "killed").exists()
    assert "resuming" not in torchrun(tmp_path / "alone", tmp_path / "killed")
    assert equal(weights(tmp_path / "run"), weights(tmp_path / "alone"))


LOSS: dict[str, Any] = {"on_policy": None, "weighting": "decay"}


@pytest.mark.parametrize(
    ("begun", "now", "wanted"),
    [((4, 1, 1), (4, 1, 2), (2, 1)), ((2, 1, 2), (2, 1, 1), (2, 2)), ((4, 1, 8), (4, 1, 2), (4, 4)), ((4, 2, 1), (4, 2, 8), (1, 1)),
     ((4, 3, 2), (4, 3, 3), (4, 2)), ((3, 2, 1), (3, 2, 2), (3, 1)), ((4, 1, 3), (4, 1, 2), (3, 2)), ((4, 2, 3), (4, 2, 3), (4, 2)),
     ((4, 1, 1), (1, 4, 1), (1, 4)), ((4, 1, 2), (2, 4, 1), (2, 4)), ((4, 1, 1), (2, 1, 1), (2, 1))],
)  # fmt: skip
def test_the_rows_of_a_step_are_shared_out(begun: Any, now: Any, wanted: tuple[int, int]) -> None:
    """As asked for where they are as many; with the same settings in other processes, none holds more rows at a time than it was to."""
    shared = shared_out(Batch(*now), Batch(*begun), [LOSS])
    assert shared == Batch(*wanted, now[2]) and shared.rows <= now[0]
    assert shared.size == Batch(*begun).size or now == (2, 1, 1)  # the last one is another run, and refused as such


@pytest.mark.parametrize(
    ("change", "now", "says"),
    [
        ({}, 3, r"a step of this run has 8 rows, which 3 processes cannot share equally: go on with one of 1, 2, 4, 8, or start over"),
        ({"on_policy": {"kind": "rejected"}}, 1, r"loss\.on_policy keeps rows of each process: go on with 2"),
        (
            {"weighting": "dpace"},
            4,
            r"loss\.weighting=dpace is of the rows that are read together: go on with trainer\.batch_size=4 and 2 proc",
        ),
    ],
)
def test_what_cannot_be_shared_out_is_said(change: dict[str, Any], now: int, says: str) -> None:
    with pytest.raises(UserError, match=says):
        shared_out(Batch(4, 1, now), Batch(4, 1, 2), [LOSS | change])
    assert shared_out(Batch(4, 1, 1), Batch(4, 1, 2), [LOSS | {"weighting": "dpace"}]) == (4, 2, 1)
    own = LOSS | {"on_policy": {"kind": "rejected"}}
    with pytest.raises(UserError, match=r"loss\.on_policy takes as many .* go on with trainer\.batch_size=2, as the run began"):
        shared_out(Batch(4, 1, 1), Batch(2, 2, 1), [own])
    assert shared_out(Batch(2, 2, 1), Batch(2, 2, 1), [own]) == (2, 2, 1)
    with pytest.raises(UserError, match=r"data\.stream: which rows are read depends on the number of processes: go on with 2, as"):
        shared_out(Batch(4, 1, 1), Batch(4, 1, 2), [LOSS], streamed=True)


def test_before_a_target_is_loaded(composed: Composed, overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot go on is said; fewer rows at a time and more of them are the same run, fewer of them are another."""
    settings = composed(*overrides, "trainer.steps=2", "trainer.save_every=1") | {"report": "none"}
    part(settings, 1, tmp_path / "read")
    with monkeypatch.context() as patch:
        patch.setenv("WORLD_SIZE", "3")
        with pytest.raises(UserError, match=r"a step of this run has 2 rows.* 3 processes"):
            prepare(**settings)
    trainer = settings["trainer"]
    with pytest.raises(UserError, match=r"holds a run with trainer\.batch_size=2, now it is 1"):
        prepare(**settings | {"trainer": trainer | {"batch_size": 1}})
    with prepare(**settings | {"trainer": trainer | {"batch_size": 1, "accumulate": 2}}) as job:
        assert (job.settings["trainer"]["batch_size"], job.settings["trainer"]["accumulate"]) == (1, 2)
        assert job.arms[0].settings["trainer"]["batch_size"] == 2
