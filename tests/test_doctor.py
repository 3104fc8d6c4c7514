"""`python train.py doctor`: what is wrong is named, with what to do; one look that fails hides no other."""

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch

from headstart.door import doctor
from headstart.heads import native, orders
from tests.doors import call
from tests.starting import LONGEST

ROOT = Path(__file__).parent.parent


def test_here_a_run_can_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "_cache", lambda: tmp_path)  # whatever this machine's is
    monkeypatch.setattr(doctor.shutil, "which", lambda _: None)
    assert call("train", ["doctor"], tmp_path, monkeypatch) == 0
    said = capsys.readouterr().out
    for what in ("python", "packages", "processor", "gpu", "runs", "hub", "wandb"):
        assert f" {what} " in said
    assert "WRONG" not in said and said.endswith("all that a run needs is here\n")
    assert not list(tmp_path.iterdir()), "nothing is left"


def test_a_package_that_is_missing_or_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def installed(name: str) -> str:
        if name == "peft":
            raise PackageNotFoundError(name)
        return "1.0" if name == "transformers" else version(name)

    monkeypatch.setattr(doctor, "version", installed)
    (found,) = doctor._packages()
    assert found.kind == "wrong" and "peft is not installed" in found.said and "transformers 1.0 is not" in found.said
    assert "pip install" in found.said


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "runs").write_text("a file")
    assert call("train", ["doctor"], tmp_path, monkeypatch) == 1
    assert "runs cannot be written" in capsys.readouterr().out


def test_a_look_that_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def _gpus() -> object:
        raise RuntimeError("driver\nbroken")

    monkeypatch.setattr(doctor, "_gpus", _gpus)
    assert doctor.doctor() == 1
    said = capsys.readouterr().out
    assert "RuntimeError: driver broken" in said and " wandb " in said and "1 of" in said


def test_every_gpu_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    from headstart.heads.kernels import launch

    pretended = {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "mem_get_info": lambda i: (8 << 30, (16 << 30) + i),
        "get_device_capability": lambda i: (9, 0) if i == 0 else (7, 5),
        "get_device_name": lambda i: f"card {i}",
    }
    for name, answer in pretended.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(launch, "refused", lambda device: None if device.index == 0 else "no compiler")
    found = {each.what: each for each in doctor._gpus()}
    assert [each.kind for each in found.values()] == ["ok", "ok", "note", "note"]
    assert "card 1, 8 of 16 GiB free: no bf16" in found["gpu 1"].said and "no compiler" in found["kernels on gpu 1"].said


@pytest.mark.parametrize(
    ("seconds", "kind", "said"), [(0.5, "ok", "takes 0.25 in fp32 and 0.25 in bf16"), (4.0, "note", "takes 2.00 in fp32")]
)
def test_whether_decoding_in_cpp_is_the_faster(seconds: float, kind: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor on which it is slower was once found by its speed alone: nothing said that it was not used."""
    monkeypatch.setattr(native, "searched", lambda: object())
    times = {"dense": 3.0, "onednn": 2.0, "panels": seconds}
    monkeypatch.setattr(orders, "measured", lambda _: {order: dict.fromkeys(orders.ROWS, each) for order, each in times.items()})
    found = list(doctor._processor())[-1]
    assert (found.kind, found.what) == (kind, "decoding") and said in found.said
    monkeypatch.setattr(native, "searched", lambda: native.Unavailable("no compiler"))
    found = list(doctor._processor())[-1]
    assert found.kind == "note" and "no compiler" in found.said


def test_another_word_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("train", ["docter"], tmp_path, monkeypatch) == 2
    assert "doctor" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["train.py", "doctor"], ["train.py", "--help"], ["-m", "trainers", "compare", "--help"]])
def test_a_reader_that_leaves(words: list[str]) -> None:
    """`| head`: no trace."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as out:
        done = subprocess.run([sys.executable, *words], cwd=ROOT, stdout=out, stderr=subprocess.PIPE, text=True, timeout=LONGEST)
    assert (done.returncode, done.stderr) == (0, "")
