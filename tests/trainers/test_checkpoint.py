"""Checkpoints: whole or not there, named when they are damaged, and never mixed with another run's."""

from __future__ import annotations

import errno
import json

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from heads.errors import UserError
from tests.drafters import HEADS
from tests.tiny_targets import tiny_target
from tests.trainers.small import LOSS, quiet, train
from trainers import checkpoint


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture
def trained(target, tmp_path):
    """A run folder with the checkpoints of steps 3 and 6."""
    train(quiet(HEADS[0], target), target, tmp_path)
    return tmp_path


def go_on(target, run, **changes):
    return train(quiet(HEADS[0], target), target, run, **({"steps": 9} | changes))


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
    half = trained / "checkpoints" / ".step-00000009.tmp"
    half.mkdir()
    (half / "drafter.safetensors").write_bytes(b"half of it")
    go_on(target, trained, steps=12)
    assert "resuming after step 6" in capsys.readouterr().out
    assert sorted(p.name for p in (trained / "checkpoints").iterdir()) == ["step-00000009", "step-00000012"]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), SafetensorError("I/O error: No space left on device")])
@pytest.mark.parametrize("file", ["drafter.safetensors", "optimizer.safetensors"])
def test_a_full_disk_costs_one_checkpoint_not_the_training(error, file, target, trained, monkeypatch, capsys):
    def full(tensors, path):
        if path.name == file:
            path.write_bytes(b"half of it")
            raise error
        save_file(tensors, path)

    before = load_file(checkpoint.folders(trained)[-1] / "drafter.safetensors")
    monkeypatch.setattr(checkpoint, "save_file", full)
    assert go_on(target, trained, steps=8, save_every=1).steps == 8
    said = capsys.readouterr().out
    assert "checkpoint of step 7 not written" in said and "No space left" in said and "step-00000006. Free some space" in said
    assert sorted(p.name for p in (trained / "checkpoints").iterdir()) == ["step-00000003", "step-00000006"]
    after = load_file(checkpoint.folders(trained)[-1] / "drafter.safetensors")
    assert all(torch.equal(before[k], after[k]) for k in before)
    monkeypatch.undo()
    assert go_on(target, trained, steps=8).steps == 8
    assert "resuming after step 6" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["drafter", "optimizer", "rng"])
def test_a_truncated_file_is_named(name, target, trained):
    path = checkpoint.folders(trained)[-1] / f"{name}.safetensors"
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(UserError, match=rf"cannot resume: .*step-00000006/{name}\.safetensors is damaged.*Delete .*step-00000006 to go on"):
        go_on(target, trained)
    for file in path.parent.iterdir():  # what the message says to do
        file.unlink()
    path.parent.rmdir()
    assert go_on(target, trained).steps == 9


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"step": "six"}, r"state\.json: step is missing or of the wrong type"),
        ({"settings": None}, r"state\.json: settings is missing or of the wrong type"),
    ],
)
def test_a_damaged_state_is_named(change, says, target, trained):
    path = checkpoint.folders(trained)[-1] / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError, match=says):
        go_on(target, trained)
    path.write_text(path.read_text()[:20])
    with pytest.raises(UserError, match=r"state\.json is not valid JSON"):
        go_on(target, trained)


def test_tensors_of_something_else_are_refused_before_anything_is_restored(target, trained):
    path = checkpoint.folders(trained)[-1] / "optimizer.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "0.0.exp_avg": torch.zeros(2, 2)}, path)
    drafter = quiet(HEADS[0], target)
    before = {k: v.clone() for k, v in drafter.state_dict().items()}
    with pytest.raises(UserError, match=r"optimizer\.safetensors: 0\.0\.exp_avg is not what this drafter has"):
        train(drafter, target, trained, steps=9)
    assert all(torch.equal(v, before[k]) for k, v in drafter.state_dict().items())
    save_file({**tensors, "0.0.exp_avg_max": torch.zeros(2, 2)}, path)
    with pytest.raises(UserError, match=r"0\.0\.exp_avg_max is not what"):
        go_on(target, trained)


def test_other_settings_are_refused_by_name(target, trained):
    with pytest.raises(UserError, match=r"holds a run with trainer\.lr=None, now it is 0\.5: .*out=DIR.*trainer\.resume=false"):
        go_on(target, trained, settings={"x": 1, "trainer": {"lr": 0.5}})


def test_long_settings_are_shortened(target, trained):
    with pytest.raises(UserError, match=r"holds a run with x=1, now it is \[0, 1, 2, 3, 4, 5, \.\.\.\]: give"):
        go_on(target, trained, settings={"x": list(range(32000))})


@pytest.mark.parametrize("wrong", [{"schedule": "linear"}, {"loss": LOSS | {"terms": {"kll": 1.0}}}])
def test_starting_over_with_settings_that_do_not_work_costs_nothing(wrong, target, trained):
    before = (trained / "metrics.jsonl").read_text()
    with pytest.raises(UserError, match=r"schedule|kll"):
        go_on(target, trained, resume=False, **wrong)
    assert steps(trained) == ["step-00000003", "step-00000006"] and (trained / "metrics.jsonl").read_text() == before


def test_starting_over_leaves_nothing_of_the_earlier_run(target, trained, capsys):
    go_on(target, trained, resume=False, steps=3, settings={"x": 2})
    assert "starting over, 2 earlier checkpoints removed" in capsys.readouterr().out
    assert steps(trained) == ["step-00000003"]  # not deleted as the older one of a finished run
    assert len((trained / "metrics.jsonl").read_text().splitlines()) == 2
    assert go_on(target, trained, steps=3, settings={"x": 2}).steps == 3
    assert "resuming after step 3" in capsys.readouterr().out
