"""A full disk, in training and at its end: what was trained is on some disk, and it is said on which."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError
from safetensors.torch import load_file

from headstart.heads import hub
from headstart.heads.errors import UserError
from headstart.trainers import checkpoint, space
from headstart.trainers.run import export, fit, prepare, run
from headstart.trainers.space import Room, own_spare, places_of
from tests.trainers.conftest import Composed, equal

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
NO_SPACE = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


def refusing(*places: Path, error: Exception | None = None) -> Callable[[Path], None]:
    """Writes a file, but for what a disk refuses."""

    def write(place: Path) -> None:
        if place in places:
            raise error or OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        (place / "written").touch()

    return write


# ---- the patience of a run ----


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Time passes only in sleep."""
    naps: list[float] = []
    monkeypatch.setattr(space, "sleep", naps.append)
    monkeypatch.setattr(space, "monotonic", lambda: 1000 + sum(naps))
    return naps


def test_elsewhere(tmp_path: Path, slept: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    """Where both have space, into the first; and no word."""
    a, b = tmp_path / "a", tmp_path / "b"
    a.mkdir(), b.mkdir()
    room, freed = Room(600), []
    assert room.keep("it", 10, [a, b], refusing()) == a and not capsys.readouterr().out
    assert room.keep("it", 10, [a, b], refusing(a), lambda: freed.append(1) or []) == b and not freed
    assert capsys.readouterr().out == f"it is in {b} (out_fallback): {a}: No space left on device\n" and not slept


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
def test_room_is_made_where_that_helps(code: int, tmp_path: Path, slept: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    full, old = [tmp_path], tmp_path / "step-00000003"

    def write(place: Path) -> None:
        refusing(*full, error=OSError(code, os.strerror(code)))(place)

    def make_room() -> list[Path]:
        return [old] if full and not full.clear() else []  # type: ignore[func-returns-value]

    if code in (errno.ENOSPC, errno.EDQUOT):
        assert Room(600).keep("it", 10, [tmp_path], write, make_room) == tmp_path and not slept
        said = capsys.readouterr().out.splitlines()
        assert said == [f"{tmp_path}: {os.strerror(code)}: step-00000003 removed to make room for it", f"it is in {tmp_path} now"]
    else:
        with pytest.raises(UserError, match=os.strerror(code)):
            Room(0).keep("it", 10, [tmp_path], write, make_room)
        assert full


@pytest.mark.parametrize("error", [FULL, OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)), OSError(errno.EIO, os.strerror(errno.EIO))])
def test_space_is_waited_for(error: Exception, tmp_path: Path, slept: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    """However the disk says that it refuses, and through whom; quotas do not show in what is free."""

    def write(place: Path) -> None:
        if sum(slept) < 130:
            raise UserError("folder cannot be written") from error
        refusing()(place)

    assert Room(600).keep("it", 10, [tmp_path], write) == tmp_path and 130 <= sum(slept) < 200
    said = capsys.readouterr().out.splitlines()
    assert isinstance(error, OSError)
    assert said[0].startswith(f"it cannot be written into {tmp_path} ({os.strerror(error.errno or 0)}): 0.0 MB needed, ")
    assert "Waiting for space, for at most 600 seconds (out_wait); Ctrl-C gives up" in said[0] and said[-1] == f"it is in {tmp_path} now"
    assert len(said) == 4  # a line a minute


def test_it_is_tried_again_when_so_much_is_free(tmp_path: Path, slept: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[float] = []
    monkeypatch.setattr(space, "free_space", lambda places: 99 if sum(slept) >= 20 else 3)

    def write(place: Path) -> None:
        tries.append(sum(slept))
        if sum(slept) < 20:
            raise OSError(errno.ENOSPC, "full")

    Room(600).keep("it", 50, [tmp_path], write)
    assert tries == [0, 20]


def test_patience_ends_for_all_together(tmp_path: Path, slept: list[float]) -> None:
    room = Room(100)
    for _ in range(2):
        with pytest.raises(UserError, match=rf"^it cannot be written into {tmp_path} \(No space left on device\): what was there before is "
                                            r"untouched; do this$") as e:  # fmt: skip
            room.keep("it", 10, [tmp_path], refusing(tmp_path), advice="do this")
        assert isinstance(e.value.__cause__, OSError) and 100 <= sum(slept) <= 101
    with pytest.raises(UserError):
        Room(100).keep("it", 10, [tmp_path], refusing(tmp_path), patient=False)
    assert sum(slept) <= 101


def test_what_is_no_fault_of_the_disk_is_not_waited_for(tmp_path: Path, slept: list[float]) -> None:
    for error in (UserError("holds NaN"), ZeroDivisionError()):
        with pytest.raises(type(error)):
            Room(100).keep("it", 10, [tmp_path], refusing(tmp_path, error=error))
    assert not slept


# ---- whole runs ----


def deny(monkeypatch: pytest.MonkeyPatch, out: Path, what: str = "checkpoint speculator", when: Callable[[], bool] = lambda: True) -> None:
    """The disk of ``out`` is full for these."""
    save_file, save = checkpoint.save_file, hub.save

    def full_checkpoint(tensors: Any, path: Path) -> None:
        if out in path.parents and "checkpoint" in what and when():
            raise NO_SPACE
        save_file(tensors, path)

    def full_export(drafter: Any, folder: Path, *rest: Any, **more: Any) -> None:
        if out in folder.parents and "speculator" in what and when():
            raise UserError(f"{folder} cannot be written") from FULL
        save(drafter, folder, *rest, **more)

    monkeypatch.setattr(checkpoint, "save_file", full_checkpoint)
    monkeypatch.setattr(hub, "save", full_export)


@pytest.mark.slow
def test_a_run_on_a_full_disk_ends_on_another(
    composed: Composed, overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is reported, said where it is, and the same command goes on from there."""
    out, spare = tmp_path / "run", tmp_path / "spare" / "run"
    spare.parent.mkdir()
    config = composed(*overrides, f"out_fallback={spare.parent}", "trainer.schedule=cosine")
    undisturbed = tmp_path / "undisturbed"
    with prepare(**config | {"out": str(undisturbed)}) as job:
        fit(job)
    with monkeypatch.context() as patch:
        deny(patch, out)
        assert run(**config)[""]["train_steps"] == 4
    said = " ".join(capsys.readouterr().out.split())
    for step in (2, 4):
        assert f"checkpoint of step {step} is in {spare}/checkpoints/step-0000000{step} (out_fallback), where the same command finds it: " \
               "[Errno 28] Error while serializing: I/O error: No space left on device (os error 28). Free some space." in said  # fmt: skip
    assert f"the speculator is in {spare} (out_fallback): {out}: No space left on device" in said
    assert f"speculator: {spare}/speculator report: {out}/report.md" in said and not (out / "speculator").exists()
    assert [p.name for p in checkpoint.folders(spare)] == ["step-00000002", "step-00000004"] and not checkpoint.folders(out)
    trained = load_file(checkpoint.folders(spare)[-1] / "drafter.safetensors")
    assert equal(trained, load_file(checkpoint.folders(undisturbed)[-1] / "drafter.safetensors"))
    assert (spare / "speculator" / "model.safetensors").is_file()
    with prepare(**config) as job:
        fit(job)
        (exported,) = export(job).values()
    assert f"resuming after step 4 ({spare}/checkpoints/step-00000004)" in " ".join(capsys.readouterr().out.split())
    one, other = (load_file(place / "speculator" / "model.safetensors") for place in (out, spare))
    assert exported.place == out and equal(one, other)
    with pytest.raises(UserError, match=rf"{spare} holds a run with trainer\.lr=0\.008, now it is 0\.5"):
        prepare(**config | {"trainer": config["trainer"] | {"lr": 0.5}})
    over = config | {"trainer": config["trainer"] | {"resume": False, "lr": 0.5, "steps": 2}}
    with prepare(**over) as job:
        fit(job)
    assert [p.name for p in checkpoint.folders(out)] == ["step-00000002"] and not checkpoint.folders(spare)


@pytest.mark.parametrize("full", ["checkpoint", "speculator", "checkpoint speculator"])
def test_a_run_on_a_full_disk_without_another(
    full: str, composed: Composed, overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of the two is enough; without either, what is lost is said. (Step 2 was still written.)"""
    out = tmp_path / "run"
    config = composed(*overrides)
    deny(monkeypatch, out, full, when=lambda: bool(checkpoint.folders(out)))
    with prepare(**config) as job:
        assert not fit(job)
        if full == "checkpoint":
            assert export(job)[""].place == out
        else:
            with pytest.raises(UserError) as e:
                export(job)
    said = " ".join(capsys.readouterr().out.split())
    newest = out / "checkpoints" / f"step-0000000{4 if full == 'speculator' else 2}"
    assert checkpoint.folders(out)[-1] == newest
    if full == "checkpoint":
        assert f"there was no space for a checkpoint: the weights are in {out}/speculator alone" in said
        return
    refused = f"the speculator cannot be written into {out} (No space left on device): what was there before is untouched; "
    if full == "speculator":
        assert str(e.value) == f"{refused}the weights are safe in {newest}: free some space and run the same command again"
    else:
        assert str(e.value) == f"{refused}the weights of step 4 are on no disk: the same command goes on from {newest}"


def fill(disk: Path, leave: int) -> Path:
    """A file that takes all but so many bytes."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        with pytest.raises(OSError, match="No space left"):
            while True:
                file.write(bytes(4096))
        file.truncate(file.tell() - leave)
    return ballast


@pytest.mark.parametrize("how", ["waits", "removes older checkpoints"])
def test_a_disk_that_is_really_full(
    how: str, small_disk: Path, composed: Composed, overrides: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """A tmpfs of 8 MB: whole runs, with everything that they write."""
    out = small_disk / "run"
    config = composed(*overrides, f"out={out}", "out_wait=600", "trainer.save_every=1", "trainer.keep=3", "trainer.steps=5")
    naps: list[float] = []
    if how == "waits":
        ballast = fill(small_disk, 65536)  # for the small files
        monkeypatch.setattr(space, "sleep", lambda seconds: naps.append(seconds) or (ballast.unlink() if len(naps) == 3 else None))
    else:
        saved = checkpoint.save

        def then_full(run: Path, step: int, *rest: Any) -> Path:
            if step == 4:
                fill(small_disk, 65536)
            return saved(run, step, *rest)

        monkeypatch.setattr(checkpoint, "save", then_full)
    assert run(**config)[""]["train_steps"] == 5
    said = " ".join(capsys.readouterr().out.split())
    assert "checkpoint of step 4 not written: [Errno 28]" in said and "checkpoint of step 5 not written: [Errno 28]" in said
    if how == "waits":
        assert f"the speculator cannot be written into {out} (No space left on device): " in said and "Waiting for space" in said
        assert len(naps) == 3 and f"the checkpoint of step 5 is in {out} now" not in said  # it was not tried before there was space
    else:
        assert "step-00000001, step-00000002 removed to make room for the checkpoint of step 5" in said and not naps
    assert [p.name for p in checkpoint.folders(out)][-1] == "step-00000005"
    assert (out / "speculator" / "model.safetensors").is_file() and json.loads((out / "report.json").read_text())["lossless"]


def test_runs_of_one_last_name_do_not_share_a_fallback(tmp_path: Path) -> None:
    """One would resume from, or remove, what the other had no space for."""
    spare = tmp_path / "spare"
    spare.mkdir()
    first = places_of(str(tmp_path / "a" / "run"), str(spare))
    own_spare(first)
    assert places_of(str(tmp_path / "a" / "run"), str(spare)) == first == [tmp_path / "a" / "run", spare / "run"]
    with pytest.raises(UserError, match=rf"{spare}/run keeps what {tmp_path}/a/run had no space for: name another out_fallback"):
        places_of(str(tmp_path / "b" / "run"), str(spare))
    (spare / "run" / "out").write_text(str(tmp_path / "b" / "run"))  # as the error says
    assert places_of(str(tmp_path / "b" / "run"), str(spare))[1] == spare / "run"


@pytest.mark.slow
def test_a_run_goes_on_in_its_fallback_while_the_disk_is_full(
    small_disk: Path, composed: Composed, overrides: list[str], tmp_path: Path, capsys: Any
) -> None:
    """The same command finds there what it had to put there."""
    out, spare = small_disk / "run", tmp_path / "spare"
    spare.mkdir()
    config = composed(*overrides, f"out={out}", f"out_fallback={spare}", "trainer.save_every=1", "report=none")
    ballast = fill(small_disk, 0)
    run(**config)
    assert checkpoint.folders(spare / "run") and not checkpoint.folders(out)
    capsys.readouterr()
    run(**config | {"trainer": config["trainer"] | {"resume": True}})
    said = " ".join(capsys.readouterr().out.split())
    assert f"the settings go to {spare / 'run'} (out_fallback)" in said and "resuming after step 4" in said, said
    assert (spare / "run" / "config.json").is_file()
    ballast.unlink()


def test_an_interrupted_run_waits_for_its_checkpoint(
    composed: Composed, overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stopped by a signal after the third step, on a disk that is full for a while."""
    import signal

    from headstart.trainers.arm import Arm, Step

    out, naps = tmp_path / "run", list[float]()
    step = Arm.step

    def signalled(self: Arm, begun: Step, tokens: int) -> None:
        step(self, begun, tokens)
        if self.fitted.steps == 3:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Arm, "step", signalled)
    monkeypatch.setattr(space, "sleep", naps.append)
    deny(monkeypatch, out, when=lambda: not naps)
    with pytest.raises(SystemExit) as ended:
        run(**composed(*overrides, "out_wait=600"))
    said = " ".join(capsys.readouterr().out.split())
    assert ended.value.code == 130 and "the checkpoint of step 3 cannot be written into" in said and "Waiting for space" in said
    assert f"stopped after step 3; the same command resumes from {out}/checkpoints" in said
    assert [p.name for p in checkpoint.folders(out)] == ["step-00000003"]
