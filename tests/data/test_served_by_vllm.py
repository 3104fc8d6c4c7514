"""Hidden states of a real vLLM, in an environment of its own that HEADSTART_VLLM names: the path of its Python.

    HEADSTART_VLLM=/path/to/vllm/bin/python python -m pytest -m slow tests/data/test_served_by_vllm.py

On a CPU too, for which its connector lacks streams and events: a plugin of vLLM's own kind puts something in their place.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from headstart.data.engine import command
from headstart.data.live import look
from headstart.data.served import open_served
from headstart.data.source import open_source
from headstart.heads.errors import UserError
from headstart.inference.settings import open_target
from headstart.trainers.run import run
from tests.composed import composed
from tests.trainers.conftest import ROOT, weights

PYTHON = os.environ.get("HEADSTART_VLLM", "")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PYTHON, reason="HEADSTART_VLLM does not name a Python with vLLM")]

LAYERS, LENGTH = (0, 2, 6, 9, 12), 128
TARGET = ["target=tiny", "target.dtype=float32", "target.device=cpu"]
STAND_IN = """
import contextlib


def stand_in():
    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as connector

    if torch.cuda.is_available():
        return

    class Done:  # a stream, an event: everything has happened
        def __init__(self, *_, **__): ...
        def record(self, *_): ...
        def query(self): return True
        def synchronize(self): ...
        def wait_event(self, *_): ...

    class Cuda:
        Stream = Event = Done
        stream = staticmethod(lambda _: contextlib.nullcontext())

    class Torch:
        cuda = Cuda
        empty_like = staticmethod(lambda x, **_: torch.empty_like(x))  # without pinned memory

        def __getattr__(self, name):
            return getattr(torch, name)

    connector.torch = Torch()
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Started as `python -m data engine` says; the settings of a run that uses it."""
    place = tmp_path_factory.mktemp("vllm")
    about = place / "plugin" / "stand_in-0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: stand-in\nVersion: 0\n")
    (about / "entry_points.txt").write_text("[vllm.general_plugins]\nstand_in = stand_in:stand_in\n")
    (place / "plugin" / "stand_in.py").write_text(STAND_IN)
    (place / "states").mkdir()
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    tiny = str(ROOT / "assets" / "tiny")
    words = command(tiny, LAYERS, length=LENGTH, dtype="float32", folder=str(place / "states"), port=port)
    more = {"PYTHONPATH": str(place / "plugin"), "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    start = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", *words[2:], "--enforce-eager"]
    with (place / "log").open("w") as log, subprocess.Popen(start, env=os.environ | more, stdout=log, stderr=log, cwd=place) as process:
        try:
            wait(process, f"http://127.0.0.1:{port}/v1/models", place / "log")
            layers = f"served.layers={list(LAYERS)}".replace(" ", "")
            yield [f"served.url=http://127.0.0.1:{port}/v1", f"served.folder={place / 'states'}", layers]
        finally:
            process.terminate()


def wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    begun = time.monotonic()
    while time.monotonic() - begun < 400 and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=2) as answer:
                json.load(answer)
            return
        except OSError:
            time.sleep(0.5)
    pytest.fail(f"vLLM does not start:\n{log.read_text()[-4000:]}")


def test_its_states_are_those_of_transformers(server: list[str]) -> None:
    """Of all layers, of rows with several documents; the last one behind the final norm."""
    settings = composed(*TARGET, *server)
    served, here = open_served(settings["target"], settings["served"]), open_target(settings["target"])
    try:
        served.expect((2, 6, 9), LENGTH)
        source = open_source({"name": "stdlib"}, here, length=LENGTH, seed=0)
        assert source.packed is not None
        batch = source.packed.batch(range(16))
        found, wanted = (look(batch, target, LAYERS) for target in (served, here))
        assert torch.equal(found.states[12], found.final_BTD)
        for k in LAYERS:
            apart = found.states[k] - wanted.states[k]
            share = apart.norm(dim=-1) / wanted.states[k].norm(dim=-1)
            print(f"layer {k}: {float(apart.abs().max()):.1e}, as a share of the state {float(share.max()):.1e}")
            assert share.max() < 1e-5, k
        assert list(served.engine.folder.iterdir()) == []
    finally:
        served.close()


def test_other_layers_than_it_was_started_with(server: list[str]) -> None:
    settings = composed(*TARGET, *server[:2], "served.layers=[0,3,6,9,12]")
    served = open_served(settings["target"], settings["served"])
    with pytest.raises(UserError, match=r"state 2 of 5 should be that after 3 layers of .*, it is that after 2 layers"):
        served.expect((3, 6, 9), LENGTH)
    served.close()


def test_the_same_drafter_after_20_steps(server: list[str], tmp_path: Path) -> None:
    """By AdamW. (Muon makes of a rounding a step: there a target with another attention kernel leads as far away.)"""
    sizes = ["trainer.steps=20", "trainer.batch_size=2", f"trainer.length={LENGTH}", "trainer.precision=fp32", "report=none"]
    for name, more in {"served": server, "here": []}.items():
        config = composed(*TARGET, *sizes, "trainer.optimizer=adamw", "trainer.lr=1e-3", *more, f"out={tmp_path / name}")
        for key in ("launcher", "path", "plan", "nodes", "gpus", "gpu", "gpu_hour"):
            config.pop(key, None)
        run(**config)
    there, here = weights(tmp_path / "served"), weights(tmp_path / "here")
    assert there.keys() == here.keys()
    apart = max(float((there[name] - here[name]).abs().max()) for name in here)
    print(f"weights: {apart:.1e}")
    assert apart < 1e-4
