"""A whole target folder and a file of conversations, small enough that a run takes seconds."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

from headstart.inference.reports import timing
from headstart.trainers import checkpoint
from tests.composed import composed as composed_by_hydra
from tests.tiny_targets import tiny_target

ROOT = Path(__file__).resolve().parents[2]
# without the address, workers look up the machine's own name, which does not resolve everywhere
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1")
TEMPLATE = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' }}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<end>' }}"
    "{% endgeneration %}{% else %}{{ m['content'] + '<end>' }}{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def save_target(folder: Path, **changes: Any) -> Path:
    """A random target with a byte-level BPE, as a Hugging Face folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator([" ".join(map(str, range(40)))] * 5, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<end>", chat_template=TEMPLATE)
    settings = {"vocab_size": 320, "num_hidden_layers": 4, "max_position_embeddings": 512, **changes}
    model = tiny_target(**settings).model
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Counting: few patterns, often repeated."""
    path = tmp_path_factory.mktemp("chat") / "counting.jsonl"
    lines = []
    for i in range(60):
        counted = " ".join(str(n % 40) for n in range(i % 4, i % 4 + 30))
        messages = [{"role": "user", "content": f"count from {i % 4}"}, {"role": "assistant", "content": counted}]
        lines.append(json.dumps({"messages": messages}))
    path.write_text("\n".join(lines) + "\n")
    return path


Composed = Callable[..., dict[str, Any]]


def small_run(target: Path, data: Path, out: Path) -> list[str]:
    """Command-line overrides of a run of seconds, the same on every machine."""
    sizes = [
        "trainer.steps=4",
        "trainer.batch_size=2",
        "trainer.length=64",
        "trainer.warmup=2",
        "trainer.save_every=2",
        "trainer.eval_every=4",
    ]
    where = [
        "target=folder",
        f"target.path={target}",
        "target.dtype=float32",
        "target.device=cpu",
        "data=chat",
        f"path={data}",
        f"out={out}",
        "out_wait=0",
    ]
    return [*where, *sizes, "trainer.precision=fp32", "loss.depth=2", "decode.depth=2", "decode.prompts=1", "decode.new_tokens=8"]


@pytest.fixture
def overrides(target_folder: Path, conversations: Path, tmp_path: Path) -> list[str]:
    return small_run(target_folder, conversations, tmp_path / "run")


def weights(out: Path) -> dict[str, torch.Tensor]:
    """The weights in the newest checkpoint of a run."""
    return load_file(checkpoint.folders(out)[-1] / "drafter.safetensors")


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def check_trained_alike(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], lr: float, steps: int) -> None:
    """Check that two trainings with AdamW had the same gradients, up to the order of summation. Nearly all weights must agree within a
    hundredth of a step. AdamW divides a gradient by its size, so where it is nearly zero, its rounding error may become a part of a step.
    With other gradients, nearly all weights would be far apart.
    """
    assert found.keys() == wanted.keys()
    for key in wanted:
        apart = (found[key].double() - wanted[key].double()).abs()
        far, most = int((apart > lr / 100).sum()), float(apart.max())
        assert far <= 2 + apart.numel() // 1000 and most <= 2 * lr * steps, f"{key}: {far} of {apart.numel()} differ, up to {most}"


@pytest.fixture(scope="session")
def composed() -> Composed:
    """``composed(*overrides, door="config")``: the settings of a command line, as plain dictionaries."""

    def plain(*overrides: str, door: str = "config") -> dict[str, Any]:
        config = composed_by_hydra(*overrides, door=door)
        for key in ("launcher", "path", "plan", "nodes", "gpus", "gpu", "gpu_hour") if door == "config" else ():
            config.pop(key, None)
        return config

    return plain


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MB, which a test can really fill."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(place)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root may mount a file system")
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


@pytest.fixture(autouse=True)
def comparisons_time_a_round_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of tests they repeat for seconds, to catch a quiet moment of a noisy machine."""
    monkeypatch.setitem(timing.TIMED, "cpu", (1, 0.0, 1))


@pytest.fixture(autouse=True)
def fresh_accelerate() -> Iterator[None]:
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
