"""The Hydra tree: everything composes, drafters accept their YAML, and what a user gets wrong is one line."""

from __future__ import annotations

import dataclasses
import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

ROOT = Path(__file__).resolve().parent.parent
CONF = ROOT / "conf"
GROUPS = sorted(p.name for p in CONF.iterdir() if p.is_dir())
CHOICES = [(group, p.stem) for group in GROUPS for p in sorted((CONF / group).glob("*.yaml"))]
HEADS = [choice for group, choice in CHOICES if group == "head"]


@pytest.fixture(scope="module", autouse=True)
def hydra_conf() -> Iterator[None]:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield


def plain(*overrides: str, door: str = "config") -> dict[str, Any]:
    """The composed configuration, with something in the places that the user must fill."""
    config = compose(door, list(overrides))
    shorthands = [str(key) for key in config if OmegaConf.is_missing(config, str(key))]  # first: others refer to them
    for key in shorthands:
        config[key] = "given"
    for key in OmegaConf.missing_keys(config):
        OmegaConf.update(config, key, "given")
    filled = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    assert isinstance(filled, dict)
    return filled


@pytest.mark.parametrize("door", sorted(p.stem for p in CONF.glob("*.yaml")))
def test_every_door_composes(door: str) -> None:
    assert plain(door=door)["target"]["name"]


@pytest.mark.parametrize("head", HEADS)
def test_a_capture_composes_for_every_head(head: str) -> None:
    assert plain(f"head={head}", door="capture")["head"]["name"] == head  # whatever else it chooses: some bring a loss


@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_every_choice_composes(group: str, choice: str) -> None:
    config = plain(f"{group}={choice}")
    assert config["out"].startswith("runs/")
    if group in ("head", "target", "data"):
        assert config[group]["name"] == choice  # the same word for file, class, YAML and saved type


def test_every_group_has_a_default_and_every_choice_a_comment() -> None:
    listed = {key for item in OmegaConf.load(CONF / "config.yaml").defaults if OmegaConf.is_dict(item) for key in item}
    assert listed >= set(GROUPS)
    for group, choice in CHOICES:
        assert (CONF / group / f"{choice}.yaml").read_text().startswith("#"), f"{group}/{choice}.yaml says nothing about itself"


@pytest.mark.parametrize("head", HEADS)
def test_a_head_takes_what_its_yaml_gives(head: str) -> None:
    from heads.hub import drafter_class

    keys = plain(f"head={head}")["head"].keys() - {"name"}
    assert keys == inspect.signature(drafter_class(head)).parameters.keys() - {"shape"}


@pytest.mark.parametrize("choice", [choice for group, choice in CHOICES if group == "decode"])
def test_trees_are_valid_and_go_with_their_rule(choice: str) -> None:
    from inference.propose import TreePolicy

    decode = plain(f"decode={choice}")["decode"]
    shape = {field.name: decode[field.name] for field in dataclasses.fields(TreePolicy)}
    policy = TreePolicy(**shape)
    policy.check(decode["rule"])
    assert choice == (policy.kind if decode["proposer"]["kind"] == "drafter" else decode["proposer"]["kind"])
    assert policy.depth <= 2 * plain()["loss"]["depth"]  # a module shared by all depths guesses on, but not for ever


def train(*arguments: str, script: tuple[str, ...] = ("train.py",)) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "HYDRA_FULL_ERROR"}
    command = [sys.executable, *script, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["head=eagel"], ["head=eagel", "eagle", "medusa"]),
        (["trainer.stepz=3"], ["trainer.stepz", "did you mean trainer.steps?"]),
        (["experiment=smoke", "trainer.steps=many"], ["trainer.steps", "whole number", "'many'"]),
        (["+trainer.turbo=true"], ["trainer.turbo", "trainer.steps"]),
        (["data=chat"], ["data.path", "path="]),
        (["head=["], ["head=["]),
        (["-m", "trainer.seed=0,1", "decode.depht=3"], ["decode.depht", "did you mean decode.depth?"]),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], words: list[str]) -> None:
    done = train(*arguments)
    assert done.returncode == 2
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ")
    for word in words:
        assert word in lines[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serv", "speculator=x"], ["'serv'", "did you mean serve?", "tune, chat, serve"]),
        (["report"], ["'report'", "tune, chat, serve"]),
        (["tune", "target.device=tp"], ["target.device=tp cannot tune", "target.device=map"]),
        (["chat", "target.device=tp"], ["target.device=tp cannot chat", "target.device=map"]),
        (["serve", "target.device=tp"], ["target.device=tp cannot serve", "target.device=map"]),
    ],
)
def test_a_command_that_cannot_run_is_one_line(arguments: list[str], words: list[str]) -> None:
    done = train(*arguments, script=("-m", "inference"))
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert all(word in done.stderr for word in words)


def test_help_names_the_commands_and_may_be_cut_short() -> None:
    whole = train("--help", script=("-m", "inference")).stdout
    assert all(f"python -m inference {command} " in whole for command in ("tune", "chat", "serve"))
    assert "python -m inference chat" not in train("tune", "--help", script=("-m", "inference")).stdout
    for script in ("train.py", "-m inference"):
        cut = f"set -o pipefail; {sys.executable} {script} --help | true"
        for unbuffered in ("", "1"):
            environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
            done = subprocess.run(["bash", "-c", cut], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
            assert (done.returncode, done.stderr) == (0, "")


def test_the_next_command_has_the_same_target_and_head(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import data.__main__

    given = ["target=folder", "target.path=my model", "head=medusa", "head.layers=2", "rows=4", "out=shards"]
    monkeypatch.setattr(data.__main__, "overrides", lambda: given)
    data.__main__.say_next(["data=shards", "path=shards"], "target", "head")
    same = "target=folder 'target.path=my model' head=medusa head.layers=2"
    assert capsys.readouterr().out == f"train with: python train.py {same} data=shards path=shards\n"


def test_cfg_job_prints_the_shapes_of_a_target_without_its_weights() -> None:
    done = train("head=eagle", "target=llama70b", "--cfg", "job")
    assert done.returncode == 0, done.stderr
    config = OmegaConf.create(done.stdout)
    assert config.head.name == "eagle" and config.target.path == "meta-llama/Llama-3.3-70B-Instruct"
    shapes = {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256}
    assert {key: config.target.config[key] for key in shapes} == shapes
