"""The training loop on a tiny random target and a repetitive data set, without files. The shared trainer tests run it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from headstart.data.batch import TargetBatch, TokenBatch
from headstart.data.live import look
from headstart.data.pack import pack
from headstart.data.packed import Document, Packed
from headstart.heads.base import Drafter
from headstart.inference.decoding.target import Target
from headstart.trainers.arm import Arm, Fitted
from headstart.trainers.tracker import Tracker
from headstart.trainers.trainer import fit
from tests.drafters import make

LENGTH = 32
LOOP: dict[str, Any] = dict(
    steps=6, accumulate=1, optimizer="muon", lr=3e-3, betas=(0.9, 0.95), weight_decay=0.01, warmup=2, schedule="cosine", clip=1.0,
    save_every=3, keep=2, eval_every=100, resume=True, timeout=600.0, log_every=10, decode_every=0, decode_last=False, decoded=None,
)  # fmt: skip
COMMON = ("steps", "accumulate", "save_every", "keep", "eval_every", "resume", "timeout", "log_every", "decode_every", "decode_last",
          "decoded")  # fmt: skip
LOSS: dict[str, Any] = dict(depth=3, terms={"kl": 1.0}, decay=0.8, chunk=1024)


def repetitive(seed: int = 0, documents: int = 40) -> Packed:
    """Documents that each repeat one of four cycles of tokens."""
    rng, found = np.random.default_rng(seed), []
    cycles = np.random.default_rng(99).integers(3, 96, (4, 7))
    for _ in range(documents):
        tokens = np.tile(cycles[rng.integers(4)], 6)[: rng.integers(12, 33)].astype(np.int32)
        found.append(Document(tokens, np.ones(len(tokens), dtype=np.bool_)))
    return pack(found, LENGTH, seed=seed)


def quiet(name: str, target: Target) -> Drafter:
    """A drafter that adds no noise in training, so that what it learns is a function of the data."""
    drafter = make(name, target)
    if hasattr(drafter, "noise"):
        drafter.noise = 0.0
    return drafter


def train(
    drafter: Drafter,
    target: Target,
    run: Path,
    *,
    rows: int = 4,
    packed: Packed | None = None,
    seen: list[torch.Tensor] | None = None,
    accelerator: Accelerator | None = None,
    settings: dict[str, Any] | None = None,
    loss: dict[str, Any] | None = None,
    held_out: list[TargetBatch] | None = None,
    each: Callable[[int], None] | None = None,
    arms: list[Arm] | None = None,
    **changes: Any,
) -> Fitted:
    """``seen`` collects the tokens of every micro-batch, ``arms`` what was trained; ``each`` is called with the batch's number."""
    packed = repetitive() if packed is None else packed
    run.mkdir(parents=True, exist_ok=True)
    count = 0

    def observe(batch: TokenBatch, taps: Collection[int]) -> TargetBatch:
        nonlocal count
        if seen is not None:
            seen.append(batch.tokens_BT)
        if each is not None:
            each(count)
        count += 1
        return look(batch, target, taps)

    def stream(start: int, rank: int, world: int) -> Iterator[TokenBatch]:
        return packed.stream(rows, 0, start, rank, world)

    accelerator = accelerator or Accelerator(cpu=True)
    loop = LOOP | changes
    arm = open_arm("", drafter, run, loop, loss, settings, main=accelerator.is_main_process)
    if arms is not None:
        arms.append(arm)
    fit([arm], stream, observe, held_out or [], accelerator, **{k: loop[k] for k in COMMON})
    return arm.fitted


def open_arm(
    name: str,
    drafter: Drafter,
    run: Path,
    loop: dict[str, Any] = LOOP,
    loss: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
    main: bool = True,
) -> Arm:
    own = {k: v for k, v in loop.items() if k not in COMMON}
    return Arm(name, drafter, run, Tracker(run, {}, main=main), settings or {"x": 1}, {"why": "test"}, loss=loss or LOSS, **own)


def group_threads() -> list[str]:
    """This process's threads that serve a gloo process group, if the system lists them. There are none after the group is left."""
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return [name for name in names if "gloo" in name]
