"""Training from captured states without the target's layers: they are loaded for the report, or not at all (report=none)."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from headstart.door.data import capture_states
from headstart.door.idle import of_trees, refuse, said_of
from headstart.door.sweep import changed
from headstart.heads.errors import UserError
from headstart.inference.decoding.target import Target
from headstart.inference.decoding.used import idle
from headstart.inference.settings import open_target
from headstart.trainers import prepare as prepare_module
from headstart.trainers import run as run_module
from headstart.trainers.metrics import read_metrics
from headstart.trainers.run import run, words_of_decode
from tests.doors import call
from tests.trainers.conftest import Composed, equal, weights


@pytest.fixture
def captured(composed: Composed, overrides: list[str], tmp_path: Path) -> list[str]:
    """The settings of a training from shards of the conversations."""
    where = [*overrides[:6], f"out={tmp_path / 'shards'}"]
    capture_states(composed(*where, "length=64", "taps=[1,2,4]", door="capture"))  # of two drafters: the final state is a tap too
    return [*(o for o in overrides if not o.startswith(("data=", "path=", "out="))), "data=shards", f"path={tmp_path / 'shards'}"]


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The targets that were loaded, in their order."""
    found, load = list[str](), Target.load.__func__  # type: ignore[attr-defined]
    monkeypatch.setattr(Target, "load", classmethod(lambda cls, path, **how: found.append(path) or load(cls, path, **how)))
    return found


def losses(out: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["train/loss"]) for line in read_metrics(out) if "train/loss" in line]


def test_the_same_to_the_last_bit_as_with_the_loaded_target(
    composed: Composed, captured: list[str], target_folder: Path, tmp_path: Path, loads: list[str], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """From a folder whose layers hold nothing but NaN behind the values that tell it: loaded, it would be refused."""
    folder = Path(shutil.copytree(target_folder, tmp_path / "hollow"))
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if "layers" in name:
            tensor.flatten()[64:] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    hollow = [*(o for o in captured if not o.startswith("target.path=")), f"target.path={folder}"]

    assert run(**composed(*hollow, "report=none", f"out={tmp_path / 'without'}")) == {}
    assert loads == []
    out = tmp_path / "without"
    left = {p.name for p in out.iterdir()}
    assert left == {"config.json", "checkpoints", "speculator", "metrics.jsonl"}
    said = capsys.readouterr().out
    assert "not reported (report=none)" in said and "lossless" not in said
    with pytest.raises(UserError, match="cannot be driven from outside"):
        open_target(composed(*hollow)["target"])

    loads.clear()
    monkeypatch.setattr(prepare_module, "read_target", open_target)
    run(**composed(*captured, "report=none", f"out={tmp_path / 'with'}"))
    assert loads == [str(target_folder)]
    assert equal(weights(out), weights(tmp_path / "with")) and losses(out) == losses(tmp_path / "with") != []


@pytest.mark.slow
def test_the_layers_are_loaded_for_the_report(
    composed: Composed, captured: list[str], target_folder: Path, tmp_path: Path, loads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, export = list[int](), run_module.export
    monkeypatch.setattr(run_module, "export", lambda job: before.append(len(loads)) or export(job))
    report = run(**composed(*captured, f"out={tmp_path / 'run'}"))[""]
    assert before == [0] and loads == [str(target_folder)] and report["lossless"] is True


def test_passes_need_the_layers(composed: Composed, captured: list[str], tmp_path: Path, loads: list[str]) -> None:
    """Text of the drafter's own is read by the target, captured or not; a drafter that shares its layers asks for them itself."""
    for i, choice in enumerate((["loss=on_policy_rejected", "loss.on_policy.new_tokens=4"], ["head=exit_head"])):
        loads.clear()
        run(**composed(*captured, *choice, "report=none", f"out={tmp_path / str(i)}"))
        assert len(loads) == 1


@pytest.mark.parametrize(
    "asked",
    [["decode.prompts=2", "decode.sequences=[4,8]"], ["decode=chain", "decode.depth=3", "decode.rule=token"], ["decode=fixed"],
     ["decode=fixed", "decode.paths=[[0],[1]]"], ["decode=best_first", "decode.nodes=9", "decode.top_p=0.9"],
     ["experiment=chat8b", "path=FILE"], ["decode=dynamic", "decode.expand=null"], ["decode=chain"]],
)  # fmt: skip
def test_the_printed_command_decodes_as_the_training_would(asked: list[str], composed: Composed) -> None:
    config = composed(*asked)
    found = words_of_decode(config["decode"], changed("config", config))
    there = composed(*found, door="inference")["decode"]
    refuse(of_trees([there]), said_of(found), ())
    unused = idle(config["decode"])
    assert {k: v for k, v in there.items() if k not in unused} == {k: v for k, v in config["decode"].items() if k not in unused}


@pytest.mark.slow
def test_what_is_printed_reports_it_elsewhere(
    composed: Composed, captured: list[str], target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """The command of each arm, as it stands there; and the same training with report=here."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "count from 1"}\n')
    arms = [*captured, "arms={a:'head=eagle',b:'head=mtp'}", f"data.prompts_file={prompts}", "decode=chain", f"out={tmp_path / 'two'}"]
    assert call("train", [*arms, "report=none"], tmp_path, monkeypatch) == 0
    commands = [line for line in capsys.readouterr().out.splitlines() if line.startswith("headstart infer ")]
    assert len(commands) == 2 and not list(tmp_path.glob("two/**/*.md"))
    words = shlex.split(commands[1])[2:]
    assert f"target.path={target_folder}" in words and "target.dtype=float32" in words and "decode=chain" in words
    assert {"decode.depth=2", "decode.prompts=1", "decode.new_tokens=8"} <= {*words}
    assert call("inference", [*words, "target.device=cpu"], tmp_path, monkeypatch) == 0
    report = json.loads((tmp_path / "two" / "b" / "report-prompts" / "report.json").read_text())
    assert report["head"] == "mtp" and report["lossless"] is True and report["tree"]["kind"] == "chain"
    assert (tmp_path / "two" / "b" / "speculator" / "README.md").is_file()

    trained = weights(tmp_path / "two" / "b")
    assert call("train", arms, tmp_path, monkeypatch) == 0
    assert equal(weights(tmp_path / "two" / "b"), trained) and (tmp_path / "two" / "comparison.md").is_file()
