"""Training that captures as it goes: the folder is that of `python -m data`, and the run is the one that ``data=shards`` makes of it."""

from __future__ import annotations

import shutil
import subprocess
import threading
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headstart.data import index as indexes
from headstart.data.capture import capture
from headstart.data.capturing import Capturing
from headstart.data.folder import Folder, open_folder
from headstart.data.index import files_in_all
from headstart.data.packed import Packed
from headstart.data.shards import Shards
from headstart.data.source import Source
from headstart.data.verify import verify
from headstart.door.data import capture_states
from headstart.heads.errors import UserError
from headstart.trainers import checkpoint
from headstart.trainers.arm import Arm
from headstart.trainers.run import run
from tests.data.captures import FakeTarget, rows
from tests.data.captures import equal as equal_states
from tests.trainers.conftest import ROOT, TORCHRUN, Composed, equal, weights
from tests.trainers.test_without_layers import losses


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few rows each."""
    monkeypatch.setattr("headstart.data.capture.ROWS", 5)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows that the target reads."""
    from headstart.inference.decoding.target import Target

    read, found = Target.read, list[int]()
    monkeypatch.setattr(Target, "read", lambda self, tokens, *more: (found.append(len(tokens)), read(self, tokens, *more))[1])
    return found


LONG = ["trainer.steps=30", "trainer.eval_every=10", "trainer.save_every=4", "trainer.accumulate=2", "report=none"]


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".lock")}


def from_shards(overrides: list[str], folder: Path, out: Path) -> list[str]:
    return [*(o for o in overrides if not o.startswith(("data=", "path=", "out="))), "data=shards", f"path={folder}", f"out={out}"]


def capture_of(overrides: list[str]) -> list[str]:
    return [o for o in overrides if o.startswith(("target", "data=", "path="))]


@pytest.mark.parametrize("storage", ["bf16", pytest.param("int8", marks=pytest.mark.slow)])
def test_what_a_run_captures(
    storage: str, composed: Composed, overrides: list[str], tmp_path: Path, small_files: None, passes: list[int],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    run(**composed(*overrides, *LONG, f"capture.out={tmp_path / 'kept'}", f"capture.storage={storage}"))
    said, rows = capsys.readouterr().out, Shards(tmp_path / "kept").index["rows"]
    assert sum(passes) < 30 * 2 * 2, "later epochs are read from the folder"
    assert said.index("bytes a token") < said.index("expected length") and "captured: " in said.replace("\n", " ")
    verify(tmp_path / "kept")
    capture_states(composed(*capture_of(overrides), f"out={tmp_path / 'shards'}", "length=64", "batch_size=2", f"storage={storage}",
                            door="capture"))  # fmt: skip
    assert content(tmp_path / "kept") == content(tmp_path / "shards") and len(content(tmp_path / "kept")) > 4
    run(**composed(*from_shards(overrides, tmp_path / "shards", tmp_path / "other"), *LONG))
    assert equal(weights(tmp_path / "run"), weights(tmp_path / "other"))
    assert losses(tmp_path / "run") == losses(tmp_path / "other")
    assert rows < 30 * 2 * 2


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 3])
def test_a_run_that_was_killed(
    lost: int, composed: Composed, overrides: list[str], tmp_path: Path, small_files: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two checkpoints, and some rows before it could put them down: the same folder and the same drafter in the end."""
    run(**composed(*overrides, *LONG, f"capture.out={tmp_path / 'whole'}", f"out={tmp_path / 'undisturbed'}"))
    step = Arm.step

    def killed(self: Arm, *more: Any) -> None:
        if self.fitted.steps == 6:
            raise SystemExit(9)
        step(self, *more)

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(Arm, "step", killed)
        run(**composed(*overrides, *LONG, f"capture.out={tmp_path / 'kept'}"))
    assert checkpoint.step_of(checkpoint.folders(tmp_path / "run")[-1]) == 4
    put_down = sorted(path for path in (tmp_path / "kept").iterdir() if indexes.ROW.fullmatch(path.name))
    assert len(put_down) > lost
    for path in put_down[:lost]:
        path.unlink()
    with pytest.raises(UserError, match="capture=bf16, now it is None"):
        run(**composed(*overrides, *LONG))
    run(**composed(*overrides, *LONG, f"capture.out={tmp_path / 'kept'}"))
    assert content(tmp_path / "kept") == content(tmp_path / "whole")
    assert equal(weights(tmp_path / "run"), weights(tmp_path / "undisturbed"))


@pytest.mark.slow
def test_a_row_that_is_damaged_is_read_again(
    composed: Composed, overrides: list[str], tmp_path: Path, small_files: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is trusted that is broken. What a run of few steps has captured, `python -m data` goes on with."""
    few, out = [*LONG, "trainer.steps=4"], f"capture.out={tmp_path / 'kept'}"
    run(**composed(*overrides, *few, out))
    assert "captured so far: 16 of " in capsys.readouterr().out.replace("\n", " ")
    put_down = sorted(path for path in (tmp_path / "kept").iterdir() if indexes.ROW.fullmatch(path.name))
    broken = bytearray(put_down[0].read_bytes())
    broken[-1] ^= 1
    put_down[0].write_bytes(broken)
    again = [*overrides, *LONG, out, "trainer.resume=false"]
    with pytest.raises(UserError, match=r"the checksum differs.*it is taken away: the same command reads that row again"):
        run(**composed(*again))
    shutil.copytree(tmp_path / "kept", tmp_path / "gone_on_with")
    run(**composed(*again))
    how = ["length=64", "batch_size=2"]
    for folder in ("gone_on_with", "shards"):
        capture_states(composed(*capture_of(overrides), f"out={tmp_path / folder}", *how, door="capture"))
        assert content(tmp_path / folder) == content(tmp_path / "kept")


@pytest.mark.slow
@pytest.mark.parametrize("more", [["loss.depth=3"], ["capture.storage=int8"]])
def test_another_run_over_the_same_folder(
    more: list[str], composed: Composed, overrides: list[str], tmp_path: Path, small_files: None, passes: list[int]
) -> None:
    """Trains from it from its first step on; a capture of other settings is refused before anything is written."""
    run(**composed(*overrides, *LONG, f"capture.out={tmp_path / 'kept'}"))
    before, read = content(tmp_path / "kept"), sum(passes)
    other = composed(*overrides, *LONG, f"capture.out={tmp_path / 'kept'}", f"out={tmp_path / 'other'}", *more)
    if "capture.storage=int8" in more:
        with pytest.raises(UserError, match="dtype differs: the shards have 'bfloat16', here it is 'int8'"):
            run(**other)
    else:
        run(**other)
        assert sum(passes) - read < 2 * 16, "held-out rows, and what a drafter is tried on"
    assert content(tmp_path / "kept") == before


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["data.stream=true"], "capture.out: data.stream has no end"),
        (
            ["trainer.lora={rank:2,alpha:4,names:[q_proj],lr:1e-3,start:0.0,weight:1.0}"],
            "capture.out: trainer.lora changes what the target says",
        ),
        (["capture.out=${out}"], "capture.out=.* is the run's own folder: give another"),
    ],
)
def test_what_cannot_be_captured(more: list[str], says: str, composed: Composed, overrides: list[str], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=says):
        run(**composed(*overrides, f"capture.out={tmp_path / 'kept'}", *more))


def test_of_several_processes(tmp_path: Path) -> None:
    """Each its own rows; a shard is put together by one of them, of rows that both have read."""
    one = tmp_path / "one"
    capture(rows(), FakeTarget(), (0, 2), one, batch_size=2, storage="int8", held_out=rows(seed=3, documents=60), rows_per_shard=4)
    both, failed = threading.Barrier(2), list[BaseException]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headstart.data.capture.ROWS", 4)

        def part(rank: int) -> None:
            try:
                run_part(rank, tmp_path / "two", both)
            except BaseException as error:
                failed.append(error)
                both.abort()

        threads = [threading.Thread(target=part, args=(rank,)) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failed
    assert content(tmp_path / "two") == content(one)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["folder", "bucket"])
def test_of_torchrun(place: str, composed: Composed, overrides: list[str], tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Two processes for good, into a folder or a bucket, and on from where the first run has ended."""
    out, said = request.getfixturevalue("s3") if place == "bucket" else str(tmp_path / "kept"), list[str]()
    for steps in (8, 30):
        torchrun = [*TORCHRUN, "--nproc-per-node", "2", str(ROOT / "train.py")]
        command = [*torchrun, *overrides, "report=none", "trainer.decode_every=0", f"trainer.steps={steps}", f"capture.out={out}"]
        ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
        assert ended.returncode == 0, ended.stderr[-3000:]
        said.append(ended.stdout)
    count = Shards(out).index["rows"]
    assert f"captured so far: {8 * 2 * 2} of {count} rows" in said[0] and f"holds all {count} rows" in said[1]
    capture_states(composed(*capture_of(overrides), f"out={tmp_path / 'shards'}", "length=64", "batch_size=2", door="capture"))
    folder = open_folder(out)
    assert {name for name in folder.sizes() if not name.startswith(".lock")} == content(tmp_path / "shards").keys()
    for name, text in content(tmp_path / "shards").items():
        with folder.file(name) as path:
            assert path.read_bytes() == text


OTHERS = {"target": FakeTarget(scale=2.0), "packed": rows(seed=9), "taps": (2,)}


@pytest.mark.parametrize("other", [{key: value} for key, value in OTHERS.items()], ids=list(OTHERS))
def test_rows_of_another_capture_are_refused(other: dict[str, Any], tmp_path: Path) -> None:
    """Though no shard was whole yet, so that no index says what they are: a number is not enough to know a row by."""
    made = capturing(tmp_path)
    made.source.observe(next(made.source.stream((0, 2), 2, 7, 0, 0, 1)), (2,))
    made.close()
    names = {path.name for path in tmp_path.iterdir()}
    assert len(names) == 2 and all(map(indexes.ROW.fullmatch, names))
    with pytest.raises(UserError, match=r"row-.* is of another capture .*: choose another folder, or delete this one"):
        capturing(tmp_path, **other)
    assert {path.name for path in tmp_path.iterdir()} == names
    capturing(tmp_path).close()


@pytest.mark.parametrize("world", [1, 2])
def test_a_folder_is_not_listed_for_each_batch(world: int, small_files: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket is slow to list. The other process of two is slow: this one's shards are not whole for long."""
    monkeypatch.setattr("headstart.data.capturing.time", SimpleNamespace(monotonic=lambda: 100.0))  # else a slow machine may look again
    listed, sizes = [0], Folder.sizes
    monkeypatch.setattr(Folder, "sizes", lambda self: (listed.append(1), sizes(self))[1])
    made = capturing(tmp_path, world=world)
    batches = made.source.stream((0, 2), 1, 7, 0, 0, world)
    before, count = None, len(rows()) // world
    for batch in (next(batches) for _ in range(count)):
        made.source.observe(batch, (2,))
        made._writing.result()
        before = before or len(listed)
    shards = files_in_all(made.settings) // world
    assert count > 4 * shards and len(listed) - before <= shards, "once a shard at most"
    made._pool.shutdown()


def test_a_row_is_put_down_by_the_process_that_reads_it_first(tmp_path: Path) -> None:
    """The last batches begin the next epoch, beside another process that may be done and tidy up."""
    found: list[int] = []
    for rank in (0, 1):
        made = capturing(tmp_path / str(rank), world=2, rank=rank, accumulate=4)
        for batch in islice(made.source.stream((0, 2), 4, 7, 0, rank, 2), 8):
            made.source.observe(batch, (2,))
        made._pool.shutdown()
        found += [int(match[1]) for path in (tmp_path / str(rank)).iterdir() if (match := indexes.ROW.fullmatch(path.name))]
    assert 8 * 4 * 2 > len(rows()) == len(found) == len({*found})


def capturing(
    folder: Path,
    *,
    target: Any = None,
    packed: Any = None,
    taps: tuple[int, ...] = (0, 2),
    world: int = 1,
    rank: int = 0,
    accumulate: int = 1,
) -> Capturing:
    target = target or FakeTarget()
    target.sharded, target.dtype = False, torch.float32
    return Capturing(
        source_of(packed or rows(), None), target, taps, out=str(folder), storage="int8", accumulate=accumulate, rank=rank, world=world
    )


def source_of(packed: Packed, held: Packed | None) -> Source:
    """A source of these rows that is never asked for anything else."""
    counts, digest = lambda: torch.zeros(90), packed.digest
    return Source(lambda *_: iter(()), lambda batch, taps: batch, counts, held, lambda *_: [], digest, len(packed), packed)  # type: ignore


def run_part(rank: int, folder: Path, both: threading.Barrier) -> None:
    target: Any = FakeTarget()
    target.sharded, target.dtype = False, torch.float32
    packed, held = rows(), rows(seed=3, documents=60)
    made = Capturing(source_of(packed, held), target, (0, 2), out=str(folder), storage="int8", accumulate=3, rank=rank, world=2)
    assert made.source.held_out is not None
    made.source.observe(made.source.held_out.batch(slice(0, 16)), (0,))
    batches, steps = made.source.stream((0, 2), 2, 7, 0, rank, 2), -(-len(packed) // 12) * 3 + 6
    seen: list[Any] = []
    for _ in range(steps // 3):
        both.wait(200)
        seen += [made.source.observe(batch, (2,)) for batch in [next(batches) for _ in range(3)]]
    whole = Shards(folder, None, (2,)).stored_stream(2, 7, 0, rank, 2)
    assert all(equal_states(ours, theirs.states_on(torch.device("cpu"), torch.float32)) for ours, theirs in zip(seen, whole, strict=False))
    made.close()
