"""Trainings whose target reads somewhere else learn what they learn beside it, and captured states are the same."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headstart.data import endpoint
from headstart.data.served import ServedTarget
from headstart.data.shards import Shards
from headstart.door.data import capture_states
from headstart.heads.errors import UserError
from headstart.trainers import checkpoint, memory
from headstart.trainers import prepare as preparing
from headstart.trainers.arm import Arm
from headstart.trainers.plan import Plan, plan
from headstart.trainers.run import fit, prepare, run
from tests.composed import composed as whole
from tests.doors import call
from tests.fake_engine import FakeEngine, serving
from tests.trainers.conftest import Composed, weights
from tests.trainers.test_without_layers import loads as loads
from tests.trainers.test_without_layers import losses


@pytest.fixture
def server(target_folder: Path, tmp_path: Path) -> FakeEngine:
    """Of the layers that `head=eagle` and `head=mtp` read of four, and the last."""
    (tmp_path / "states").mkdir()
    return FakeEngine(target_folder, tmp_path / "states", (1, 2, 3, 4))


@pytest.fixture
def served(server: FakeEngine, tmp_path: Path) -> Iterator[list[str]]:
    with serving(server.app) as url:
        yield [f"served.url={url}", f"served.folder={tmp_path / 'states'}", "served.layers=[1,2,3,4]", "served.retries=1", "report=none"]


def test_the_same_drafter(
    composed: Composed, overrides: list[str], served: list[str], server: FakeEngine, tmp_path: Path, loads: list[str]
) -> None:
    steps = ["trainer.steps=20", "trainer.eval_every=10", "trainer.optimizer=adamw", "trainer.lr=1e-3"]
    assert run(**composed(*overrides, *steps, *served, f"out={tmp_path / 'served'}")) == {}
    assert loads == [] and list(server.folder.iterdir()) == []
    run(**composed(*overrides, *steps, "report=none", f"out={tmp_path / 'here'}"))
    assert len(loads) == 1
    there, here = weights(tmp_path / "served"), weights(tmp_path / "here")
    assert there.keys() == here.keys()
    for name in here:
        torch.testing.assert_close(there[name], here[name], rtol=0, atol=1e-4)
    assert [step for step, _ in losses(tmp_path / "served")] == [step for step, _ in losses(tmp_path / "here")] == [1, 10, 20]


def test_a_report_has_prompts_that_fit(composed: Composed, overrides: list[str], served: list[str]) -> None:
    """The report loads the layers after the training; how long a prompt may be is asked before."""
    asked = [word for word in served if word != "report=none"]
    with prepare(**composed(*overrides, *asked)) as job:
        assert len(job.prompts) == 1


def test_the_server_is_checked_before_the_processes_meet(
    composed: Composed, overrides: list[str], served: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first process reads all weights for the check. From the meeting on the others would count it as one that hangs."""
    order = list[str]()
    for place, name in ((ServedTarget, "expect"), (preparing, "open_accelerator")):
        usual = getattr(place, name)
        monkeypatch.setattr(place, name, lambda *of, name=name, usual=usual: (order.append(name), usual(*of))[1])
    with prepare(**composed(*overrides, *served)):
        assert order == ["expect", "open_accelerator"]


def test_a_server_that_dies(
    overrides: list[str], served: list[str], server: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """It ends the run in one line; the same run goes on from its checkpoint, here without a server."""
    monkeypatch.setattr(endpoint, "FIRST", 0.001)
    arms = [*overrides, "arms={a:'head=eagle',b:'head=mtp'}"]
    asked = 0

    def dying(n: int, *rest: Any) -> Any:
        nonlocal asked
        asked += 1
        return rest if asked < 24 else (503, {"error": "gone"}, None)

    server.spoil = dying
    assert call("train", [*arms, *served, "trainer.save_every=1"], tmp_path, monkeypatch) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: served.url=") and "the last time: status 503: gone: run again to go on" in said and said.count("\n") == 1
    steps = checkpoint.step_of(checkpoint.folders(tmp_path / "run" / "a")[-1])
    assert 0 < steps < 4
    assert call("train", [*arms, "report=none", "trainer.save_every=1"], tmp_path, monkeypatch) == 0
    assert checkpoint.step_of(checkpoint.folders(tmp_path / "run" / "a")[-1]) == 4
    assert [step for step, _ in losses(tmp_path / "run" / "a")] == [1, 4]


def test_captured_states_are_the_same(composed: Composed, overrides: list[str], served: list[str], tmp_path: Path) -> None:
    for name, more in (("here", []), ("there", served[:-1])):
        capture_states(composed(*overrides[:6], *more, f"out={tmp_path / name}", "length=64", "taps=[1,2]", door="capture"))
    here, there = (Shards(tmp_path / name).batch([0, 1, 2]) for name in ("here", "there"))
    assert torch.equal(here.tokens_BT, there.tokens_BT)
    for k in (1, 2):
        torch.testing.assert_close(here.states[k].float(), there.states[k].float(), rtol=0.01, atol=1e-3)  # rounded to bf16


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["trainer.lora={rank:2,alpha:4,names:[q_proj],lr:1e-4,start:0.5,weight:1.0}"], "served.url: trainer.lora passes text of its own"),
        (["loss=on_policy_rejected", "loss.on_policy.new_tokens=4"], "served.url: loss.on_policy passes text of its own"),
    ],
)
def test_what_needs_layers_is_refused(more: list[str], says: str, composed: Composed, overrides: list[str], served: list[str]) -> None:
    with pytest.raises(UserError, match=says):
        run(**composed(*overrides, *more, *served))


def test_one_without_the_other(overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert call("train", [*overrides, "served.url=http://127.0.0.1:9/v1"], tmp_path, monkeypatch) == 2
    assert "served.url and served.folder go together" in capsys.readouterr().err


def test_a_plan_has_no_layers_of_a_target_that_is_served(overrides: list[str]) -> None:
    settings = whole("target=llama70b", "nodes=1", "gpus=1", "gpu=h100")
    with_layers, without = (
        plan(settings),
        plan(settings | {"served": {"url": "http://there/v1", "folder": "x", "layers": None, "key": None, "retries": 1}}),
    )
    assert without.memory["target"] < with_layers.memory["target"] / 10 and without.flops["target"] == 0


def test_where_memory_ends_the_layers_of_a_served_target_are_not_counted(
    composed: Composed, overrides: list[str], served: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The advice names the sum that the run takes here, which is that of its plan."""
    settings = composed(*overrides, *served, "trainer.batch_size=4")

    def ended(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Arm, "start", ended)
    planned = list[Plan]()
    monkeypatch.setattr(memory, "plan", lambda settings: planned.append(plan(settings)) or planned[-1])
    with prepare(**settings) as job, pytest.raises(UserError, match="memory has ended"):
        fit(job)
    known = settings | {"nodes": 1, "gpus": 1, "gpu": "h100"}
    assert planned[0].memory == plan(known).memory != plan(known | {"served": None}).memory


def test_the_command_that_starts_it(target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """For a model of which only the shapes are here; the layers are those that the head reads, and the last."""
    assert call("data engine", ["target=llama70b", "head=eagle", "folder=/shared/states", "length=4096"], tmp_path, monkeypatch) == 0
    start, train = capsys.readouterr().out.splitlines()
    words = shlex.split(start)
    assert words[:3] == ["vllm", "serve", "meta-llama/Llama-3.3-70B-Instruct"] and words[words.index("--max-model-len") + 1] == "4097"
    extraction, transfer = (json.loads(words[words.index(f"--{key}-config") + 1]) for key in ("speculative", "kv-transfer"))
    layers = extraction["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"]
    assert layers[-1] == 80 and layers == sorted(layers) and len(layers) == 4
    assert transfer["kv_connector_extra_config"] == {"shared_storage_path": "/shared/states"}
    assert words[words.index("--dtype") + 1] == "bfloat16"
    assert shlex.split(train)[2:] == [
        "python", "train.py", "target=llama70b", "head=eagle", "served.url=http://127.0.0.1:8000/v1", "served.folder=/shared/states",
        f"served.layers={json.dumps(layers, separators=(',', ':'))}", "trainer.length=4096", "report=none",
    ]  # fmt: skip
