"""Checkpoints: whole or not there, named when they are damaged, and never mixed with another run's."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from headstart.heads.errors import UserError
from headstart.trainers import checkpoint
from headstart.trainers.resume import check_earlier
from tests.drafters import HEADS, arguments, make
from tests.tiny_targets import tiny_target
from tests.trainers.mutations import HARMLESS, MUTATIONS, reseal
from tests.trainers.small import LOSS, train


@pytest.fixture(scope="module")
def target():
    return tiny_target()


NOISY = next(name for name in HEADS if "noise" in arguments(name))  # in training: the state of the random generators counts


def noisy(target):
    return make(NOISY, target)


@pytest.fixture(scope="module")
def nine(target, tmp_path_factory):
    """A run of nine steps that lost its last checkpoint, those of steps 3 and 6 are there; and the weights that it had come to."""
    run, drafter = tmp_path_factory.mktemp("nine"), noisy(target)
    torch.manual_seed(5)
    train(drafter, target, run, steps=9, keep=3)
    checkpoint.remove(checkpoint.folders(run)[-1])
    return run, drafter.state_dict()


@pytest.fixture
def whole(nine):
    return nine[1]


@pytest.fixture
def trained(nine, tmp_path):
    """A copy of the run to break."""
    return shutil.copytree(nine[0], tmp_path, dirs_exist_ok=True)


def go_on(target, run, **changes):
    return train(noisy(target), target, run, **({"steps": 9} | changes))


def steps(run) -> list[str]:
    return [p.name for p in checkpoint.folders(run)]


def test_what_is_in_it_and_how_many_are_kept(target, trained):
    assert steps(trained) == ["step-00000003", "step-00000006"]
    files = {"drafter.safetensors", "optimizer.safetensors", "rng.safetensors", "state.json"}
    assert {p.name for p in checkpoint.folders(trained)[0].iterdir()} == files
    state = json.loads((checkpoint.folders(trained)[1] / "state.json").read_text())
    assert state["step"] == 6 and state["tokens"] == 6 * 4 * 32 and state["seconds"] > 0 and state["settings"] == {"x": 1}
    assert state["why"] == "test"  # whatever else the run wants to be remembered
    go_on(target, trained)
    assert steps(trained) == ["step-00000006", "step-00000009"]


def test_what_a_kill_left_half_written_is_ignored_and_cleaned(target, trained, capsys):
    half = trained / "checkpoints" / ".step-00000009.part"
    half.mkdir()
    (half / "drafter.safetensors").write_bytes(b"half of it")
    go_on(target, trained, steps=12)
    assert "resuming after step 6" in capsys.readouterr().out
    assert sorted(p.name for p in (trained / "checkpoints").iterdir()) == ["step-00000009", "step-00000012"]


FULL = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
REFUSALS = [FULL, *(OSError(code, os.strerror(code)) for code in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS))]


FILES = ["drafter.safetensors", "optimizer.safetensors", "rng.safetensors", "state.json", "fsync"]


@pytest.mark.parametrize(
    ("file", "error"),
    [
        pytest.param(file, error, id=f"{file}-{getattr(error, 'errno', 'safetensors')}", marks=() if i in (j, 0) else pytest.mark.slow)
        for i, error in enumerate(REFUSALS)
        for j, file in enumerate(FILES)
    ],
)
def test_a_disk_that_refuses_costs_one_checkpoint_not_the_training(error, file, target, trained, monkeypatch, capsys):
    def full(tensors, path):
        if path.name == file:
            path.write_bytes(b"half of it")
            raise error
        save_file(tensors, path)

    def full_json(self, *a, **k):
        if self.name == file:
            raise OSError(28 if error is FULL else error.errno, str(error))
        return write_text(self, *a, **k)

    def full_sync(handle):
        raise OSError(28 if error is FULL else error.errno, str(error))

    write_text = Path.write_text
    before = load_file(checkpoint.folders(trained)[-1] / "drafter.safetensors")
    monkeypatch.setattr(checkpoint, "save_file", full)
    monkeypatch.setattr(Path, "write_text", full_json)
    if file == "fsync":
        monkeypatch.setattr(checkpoint.os, "fsync", full_sync)
    assert go_on(target, trained, steps=8, save_every=1).steps == 8
    said = " ".join(capsys.readouterr().out.split())
    why = "No space left on device" if error is FULL else os.strerror(error.errno)
    assert f"checkpoint of step 7 not written: [Errno {28 if error is FULL else error.errno}] " in said and why in said
    assert f"Training goes on; the last whole one is {trained}/checkpoints/step-00000006. Free some space." in said
    assert "checkpoint of step 8 not written" in said and said.count("Training goes on") == 1
    assert sorted(p.name for p in (trained / "checkpoints").iterdir()) == ["step-00000003", "step-00000006"]
    after = load_file(checkpoint.folders(trained)[-1] / "drafter.safetensors")
    assert all(torch.equal(before[k], after[k]) for k in before)
    monkeypatch.undo()
    assert go_on(target, trained, steps=8).steps == 8
    assert "resuming after step 6" in capsys.readouterr().out


def test_what_is_no_fault_of_the_disk_is_not_taken_for_one(target, trained, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(checkpoint, "save_file", broken)
    with pytest.raises(ZeroDivisionError):
        go_on(target, trained)
    assert sorted(p.name for p in (trained / "checkpoints").iterdir()) == ["step-00000003", "step-00000006"]


@pytest.mark.parametrize("mutation", [name for name in MUTATIONS if name not in HARMLESS])
def test_what_happened_on_disk_is_refused(mutation, target, trained):
    """Every file: bits flipped, cut, swapped, gone; every key of state.json. Nothing is restored, and nothing trained."""
    earlier, newest = checkpoint.folders(trained)
    MUTATIONS[mutation](newest, earlier)
    there = sorted(trained.rglob("*"))
    drafter = noisy(target)
    before = {k: v.clone() for k, v in drafter.state_dict().items()}
    with pytest.raises(UserError, match=r"^cannot resume: .*step-0000000[67].*Delete .* or start over with trainer\.resume=false$"):
        train(drafter, target, trained, steps=9)
    assert all(torch.equal(v, before[k]) for k, v in drafter.state_dict().items()) and sorted(trained.rglob("*")) == there


@pytest.mark.parametrize("mutation", HARMLESS)
def test_what_changes_nothing_is_not(mutation, target, trained, whole):
    earlier, newest = checkpoint.folders(trained)
    MUTATIONS[mutation](newest, earlier)
    drafter = noisy(target)
    train(drafter, target, trained, steps=9)
    assert all(torch.equal(v, whole[k]) for k, v in drafter.state_dict().items())


def test_after_a_damaged_one_the_one_before_it_leads_to_the_same(target, trained, whole, capsys):
    newest = checkpoint.folders(trained)[-1]
    MUTATIONS["drafter.safetensors: two tensors swapped"](newest, newest)
    with pytest.raises(UserError, match=rf"drafter\.safetensors is damaged: .*Delete {newest} to go on from the checkpoint before it"):
        train(noisy(target), target, trained, steps=9)
    shutil.rmtree(newest)
    drafter = noisy(target)
    train(drafter, target, trained, steps=9)
    assert "resuming after step 3" in capsys.readouterr().out
    assert all(torch.equal(v, whole[k]) for k, v in drafter.state_dict().items())


def test_tensors_of_something_else_are_refused_before_anything_is_restored(target, trained):
    """With checksums that fit: a checkpoint that was made so."""
    path = checkpoint.folders(trained)[-1] / "optimizer.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "0.0.exp_avg": torch.zeros(2, 2)}, path)
    reseal(path.parent)
    drafter = noisy(target)
    before = {k: v.clone() for k, v in drafter.state_dict().items()}
    with pytest.raises(UserError, match=r"optimizer\.safetensors: 0\.0\.exp_avg is not what this drafter has"):
        train(drafter, target, trained, steps=9)
    assert all(torch.equal(v, before[k]) for k, v in drafter.state_dict().items())
    save_file({**tensors, "0.0.exp_avg_max": torch.zeros(2, 2)}, path)
    reseal(path.parent)
    with pytest.raises(UserError, match=r"0\.0\.exp_avg_max is not what"):
        go_on(target, trained)


@pytest.mark.parametrize(("begin", "length", "token", "processes", "fits"), [
    (2, 8, 95, 2, True), (2, 3, 0, 1, True), (1, 8, 0, 1, False), (8, 8, 0, 1, False), (2, 9, 0, 1, False), (2, 8, 96, 1, False),
    (2, 8, -1, 1, False), (2, 8, 0, 3, False),
])  # fmt: skip
def test_own_rows_begin_behind_a_root_and_hold_tokens_of_the_target(begin, length, token, processes, fits, tmp_path):
    """Two rows of eight tokens, the second of them unused; the target has 96 tokens."""
    rows = {"tokens": torch.full((2, 8), token), "begin": torch.tensor([begin, 0]), "length": torch.tensor([length, 0])}
    save_file(rows, tmp_path / "on_policy.safetensors")
    with nullcontext() if fits else pytest.raises(UserError, match=r"cannot resume: .*on_policy\.safetensors"):
        assert checkpoint.load_own_rows(tmp_path, processes, 96).keys() == rows.keys()


def test_random_numbers_go_on_where_they_were():
    """Those of Python too, for a drafter that draws them."""
    random.seed(5)
    state = checkpoint.rng_state()
    drawn = random.random(), float(torch.rand(()))
    random.seed(6)
    torch.manual_seed(6)
    checkpoint.set_rng_state(state)
    assert (random.random(), float(torch.rand(()))) == drawn


def test_a_checkpoint_of_an_earlier_version_says_what_to_do(target, trained):
    path = checkpoint.folders(trained)[-1] / "state.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k not in ("files", "sha256")}))
    with pytest.raises(UserError, match=r"has no checksums, an earlier version of Headstart wrote it: finish the run with that version"):
        go_on(target, trained)


@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize("what", ["a file", "a link to nothing", "no permission"])
def test_checkpoints_that_cannot_be_listed_are_no_fresh_start(what, resume, target, trained, monkeypatch):
    place = trained / "checkpoints"
    if what == "no permission":  # root may read everything: as others meet it

        def refuse(self, *_):
            raise PermissionError(errno.EACCES, "Permission denied", str(self))

        monkeypatch.setattr(type(place), "iterdir", refuse)
    else:
        place.rename(trained / "elsewhere")
        place.write_text("") if what == "a file" else place.symlink_to(trained / "nowhere")
    before = (trained / "metrics.jsonl").read_text()
    with pytest.raises(UserError, match=rf"^{place} cannot be read \(.+\): mend that, or choose another folder \(out=DIR\)$"):
        check_earlier([trained], {"x": 1}, resume)
    if resume:
        with pytest.raises(UserError, match=r"cannot be read"):
            go_on(target, trained)
    assert (trained / "metrics.jsonl").read_text() == before


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_checkpoints_without_permission(target, trained):
    (trained / "checkpoints").chmod(0)
    try:
        with pytest.raises(UserError, match=r"checkpoints cannot be read \(Permission denied\)"):
            go_on(target, trained)
    finally:
        (trained / "checkpoints").chmod(0o755)


def test_a_kill_while_an_old_one_is_removed_leaves_none_torn(target, trained, monkeypatch):
    """Its name goes first."""
    calls = []

    def killed(path, *a, **k):
        calls.append(path)
        if path.exists() and path.name.startswith(".step-00000003"):
            raise KeyboardInterrupt
        rmtree(path, *a, **k)

    rmtree = shutil.rmtree
    monkeypatch.setattr(checkpoint.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        go_on(target, trained)
    monkeypatch.undo()
    assert steps(trained) == ["step-00000006", "step-00000009"] and calls
    go_on(target, trained, steps=12)
    assert sorted(p.name for p in (trained / "checkpoints").iterdir()) == ["step-00000009", "step-00000012"]


def test_other_settings_are_refused_by_name(target, trained):
    with pytest.raises(UserError, match=r"holds a run with trainer\.lr=None, now it is 0\.5: .*out=DIR.*trainer\.resume=false"):
        go_on(target, trained, settings={"x": 1, "trainer": {"lr": 0.5}})


def test_long_settings_are_shortened(target, trained):
    with pytest.raises(UserError, match=r"holds a run with x=1, now it is \[0, 1, 2, 3, 4, 5, \.\.\.\]: give"):
        go_on(target, trained, settings={"x": list(range(32000))})


def test_starting_over_with_settings_that_do_not_work_costs_nothing(target, trained):
    before = (trained / "metrics.jsonl").read_text()
    with pytest.raises(UserError, match="kll"):
        go_on(target, trained, resume=False, loss=LOSS | {"terms": {"kll": 1.0}})
    assert steps(trained) == ["step-00000003", "step-00000006"] and (trained / "metrics.jsonl").read_text() == before


def test_starting_over_leaves_nothing_of_the_earlier_run(target, trained, capsys):
    go_on(target, trained, resume=False, steps=3, settings={"x": 2})
    assert "starting over, 2 earlier checkpoints removed" in capsys.readouterr().out
    assert steps(trained) == ["step-00000003"]  # not deleted as the older one of a finished run
    assert len((trained / "metrics.jsonl").read_text().splitlines()) == 2
    assert go_on(target, trained, steps=3, settings={"x": 2}).steps == 3
    assert "resuming after step 3" in capsys.readouterr().out
