"""Settings under the names that they had before (heads/renamed.py): commands, YAMLs, checkpoints and exported folders keep working."""

import json
import sys
from pathlib import Path

import pytest
import torch

from headstart.door import frame
from headstart.heads import hub, renamed, seal
from headstart.heads.files import put_text, sealed
from headstart.trainers import checkpoint
from tests.drafters import make
from tests.tiny_targets import tiny_target


def composed(command: str, *arguments: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, object]:
    """What a door is given for a command line."""
    found: list[dict[str, object]] = []
    monkeypatch.setattr(sys, "argv", ["door", *arguments])
    monkeypatch.chdir(tmp_path)
    renamed._said.clear()
    frame.enter(command, found.append)
    return found[0]


@pytest.mark.parametrize(("command", "arguments"), [
    ("config", ["trainer.rows=3"]), ("config", ["head=medusa", "head.heads=3"]), ("config", ["head=mlp_speculator", "++head.heads=3"]),
    ("capture", ["rows=3"]), ("regenerate", ["rows=3", "capacity=90"]), ("serve", ["rows=3", "capacity=90"]), ("chat", ["capacity=90"]),
])  # fmt: skip
def test_a_command_with_old_keys(command, arguments, monkeypatch, tmp_path, capsys):
    old = composed(command, *arguments, monkeypatch=monkeypatch, tmp_path=tmp_path)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == sum(not a.startswith("head=") for a in arguments) and all(" is called " in line for line in said)
    names = {"trainer.rows": "trainer.batch_size", "head.heads": "head.guesses", "capacity": "max_length"}
    names["rows"] = "batch_size" if command == "capture" else "sequences"
    now = [f"{names.get(a.partition('=')[0].lstrip('+'), a.partition('=')[0])}={a.partition('=')[2]}" for a in arguments]
    assert old == composed(command, *now, monkeypatch=monkeypatch, tmp_path=tmp_path)
    assert capsys.readouterr().err == ""


def test_attention_heads_keep_their_name(monkeypatch, tmp_path, capsys):
    found = composed("config", "head=eagle", "head.heads=4", monkeypatch=monkeypatch, tmp_path=tmp_path)
    assert isinstance(found["head"], dict) and found["head"]["heads"] == 4 and capsys.readouterr().err == ""


def test_a_yaml_with_old_keys(monkeypatch, tmp_path, capsys):
    (tmp_path / "own" / "experiment").mkdir(parents=True)
    text = "# @package _global_\ndefaults: [{override /head: medusa}]\ntrainer: {rows: 3}\nhead: {heads: 2}\n"
    (tmp_path / "own" / "experiment" / "mine.yaml").write_text(text)
    found = composed("config", "experiment=mine", f"--config-dir={tmp_path / 'own'}", monkeypatch=monkeypatch, tmp_path=tmp_path)
    trainer, head = found["trainer"], found["head"]
    assert isinstance(trainer, dict) and isinstance(head, dict)
    assert (trainer["batch_size"], head["guesses"]) == (3, 2) and "rows" not in trainer and "heads" not in head
    assert capsys.readouterr().err.splitlines() == [
        "trainer.rows is called trainer.batch_size now",
        "head.heads is called head.guesses now",
    ]


def test_a_checkpoint_with_old_keys(tmp_path):
    settings = {"trainer": {"rows": 4, "steps": 8}, "head": {"name": "medusa", "heads": 3}, "loss": {}}
    state = dict(step=4, seconds=1.0, tokens=7, settings=settings, files={}, rng={})
    folder = tmp_path / "checkpoints" / "step-00000004"
    folder.mkdir(parents=True)
    state = {key: kind() if key not in state else state[key] for key, kind in checkpoint.STATE.items()} | state
    put_text(folder / "state.json", json.dumps(sealed(state)))
    found = checkpoint.read_state(folder)["settings"]
    assert found["trainer"] == {"batch_size": 4, "steps": 8} and found["head"] == {"name": "medusa", "guesses": 3}


@pytest.mark.parametrize("head", ["medusa", "hydra", "mlp_speculator"])
def test_a_folder_with_old_keys(head, tmp_path):
    target = tiny_target()
    drafter = make(head, target, guesses=2)
    hub.save(drafter, tmp_path / "s", target.card, torch.float32)
    path = tmp_path / "s" / "config.json"
    config = json.loads(path.read_text())
    ours = config[seal.OURS]
    ours["arguments"]["heads"] = ours["arguments"].pop("guesses")
    ours["sha256"] = seal.digests(config, tmp_path / "s" / seal.WEIGHTS)  # as it was saved then
    path.write_text(json.dumps(config))
    loaded = hub.load(tmp_path / "s", target.shape, target.card)
    assert loaded.config["guesses"] == 2 and "heads" not in loaded.config
    assert all(torch.equal(a, b) for a, b in zip(drafter.state_dict().values(), loaded.state_dict().values(), strict=True))
