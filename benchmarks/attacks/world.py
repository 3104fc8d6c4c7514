"""The attacked files: a small target, conversations, a run with its checkpoints and speculator, shards, regenerated answers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from benchmarks.attacks.outcome import door
from headstart.trainers import checkpoint
from tests.trainers.conftest import save_target, small_run

STEPS = 6


@dataclass
class World:
    """``run``: the command line of a training that writes ``out``, with a checkpoint at every step; ``shards`` and others likewise."""

    folder: Path

    @property
    def target(self) -> list[str]:
        return ["target=folder", f"target.path={self.folder / 'target'}", "target.dtype=float32", "target.device=cpu"]

    @property
    def chat(self) -> list[str]:
        return ["data=chat", f"path={self.folder / 'chat.jsonl'}"]

    def run(self, out: Path, *more: str) -> list[str]:
        sizes = [f"trainer.steps={STEPS}", "trainer.save_every=1", "trainer.keep=3", "trainer.eval_every=100"]
        return [*small_run(self.folder / "target", self.folder / "chat.jsonl", out), *sizes, *more]

    def shards(self, out: Path) -> list[str]:
        return [*self.target, *self.chat, "length=32", "batch_size=8", f"out={out}"]

    def answers(self, out: Path) -> list[str]:
        return [*self.target, *self.chat, "limit=8", "new_tokens=12", "max_length=160", "sequences=4", f"out={out}"]

    @property
    def speculator(self) -> Path:
        return self.folder / "run" / "speculator"

    @property
    def decoding(self) -> list[str]:
        sizes = ["decode.prompts=2", "decode.new_tokens=4", "decode.depth=2"]
        return [*self.target, f"speculator={self.speculator}", f"prompts={self.folder / 'prompts.jsonl'}", *sizes]

    @property
    def tuning(self) -> list[str]:
        return [*self.decoding[:-3], "count=1", "new_tokens=2", "sequences=1"]


def build(folder: Path) -> World:
    """Make all files by running the commands."""
    world = World(folder)
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    save_target(folder / "target")
    lines = []
    for i in range(90):  # three shards, two of them of one size
        counted = " ".join(str(n % 40) for n in range(i % 4, i % 4 + 30))
        talk = [{"role": "user", "content": f"count from {i % 4}"}, {"role": "assistant", "content": counted}]
        lines.append(json.dumps({"messages": talk}))
    (folder / "chat.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "prompts.jsonl").write_text('{"prompt": "count from 1"}\n{"text": "4 5 6 7"}\n')
    for name, words in (
        ("train", world.run(folder / "run")),
        ("data", world.shards(folder / "shards")),
        ("data regenerate", world.answers(folder / "answers.jsonl")),
    ):
        done = door(name, words, folder)
        if done.code:
            raise SystemExit(f"{name} does not work at all:\n{done.said}")
    return world


def weights(out: Path) -> dict[str, torch.Tensor]:
    """The weights in the newest checkpoint of a run, even if it is damaged."""
    return load_file(checkpoint.folders(out)[-1] / "drafter.safetensors")


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
