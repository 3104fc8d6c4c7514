"""Run by torchrun, two processes: trains some drafters with each given ``parallel``. Losses, gradient norms and last checkpoints stay.

``python -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.trainers.spread FOLDER WAY...``
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import save_file

from headstart.heads.errors import UserError
from headstart.inference.decoding.target import Target
from headstart.trainers import sharded
from headstart.trainers.arm import Arm
from headstart.trainers.parallel import Parallel
from headstart.trainers.pieces import Pieces
from headstart.trainers.processes import leave, open_accelerator
from headstart.trainers.trainer import fit
from tests.drafters import FEW
from tests.tiny_targets import tiny_target
from tests.trainers.small import COMMON, LOOP, open_arm, quiet, repetitive, train

HEADS = [head for head in FEW if head != "exit_head"] + ["draft_lm"]  # step by step, a block at once, a model of transformers
STEPS = 5
CASES = [(head, "adamw") for head in HEADS] + [(FEW[1], "muon")]


def settings(optimizer: str) -> dict[str, Any]:
    return dict(steps=STEPS, optimizer=optimizer, lr=1e-4, save_every=2, clip=0.5, accumulate=2)


def run(out: Path, head: str, rows: int, target: Target, **changes: Any) -> dict[str, list[float]]:
    """Train for five steps. Returns the loss and the gradient norm of each."""
    said: dict[str, list[float]] = {"loss": [], "gradient_norm": []}
    step = Arm.step

    def recorded(self: Arm, *given: Any) -> None:
        step(self, *given)
        for key, values in said.items():
            values.append(self.shown[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Arm, "step", recorded)
        train(quiet(head, target), target, out, rows=rows, **changes)
    return said


def two_arms(out: Path, accelerator: Accelerator, target: Target, parallel: dict[str, Any]) -> list[Arm]:
    """Train two arms side by side, each as if it were alone."""
    from headstart.data.live import look

    packed, loop = repetitive(), LOOP | settings("adamw")
    main = accelerator.is_main_process
    for head in HEADS[:2] if main else ():
        (out / head).mkdir(parents=True)
    arms = [open_arm(h, quiet(h, target), out / h, loop | {"parallel": parallel}, main=main) for h in HEADS[:2]]
    fit(arms, lambda *place: packed.stream(2, 0, *place), lambda batch, taps: look(batch, target, taps), [], accelerator,
        **{k: loop[k] for k in COMMON})  # fmt: skip
    return arms


def main(out: Path, ways: list[str]) -> None:
    torch.set_num_threads(1)
    Pieces.LEAST = 64  # else nothing in these small drafters would be cut
    accelerator, target, arms = open_accelerator("fp32", torch.device("cpu")), tiny_target(), list[Arm]()
    rank = accelerator.process_index
    for way in ways:
        parallel = json.loads(way)
        name = "-".join(map(str, parallel.values()))
        for head, optimizer in CASES if parallel["name"] != "deepspeed" else CASES[:-1]:
            more: dict[str, Any] = dict(accelerator=accelerator, arms=arms, parallel=parallel)
            said = run(out / name / f"{head}-{optimizer}", head, 2, target, **settings(optimizer), **more)
            (out / name / f"{head}-{optimizer}-{rank}.json").write_text(json.dumps(said))
            # resumed in the middle, from a checkpoint of a single process
            run(out / f"resumed-{name}" / f"{head}-{optimizer}", head, 2, target, **settings(optimizer), **more)
            arms[-1].close()
            if rank == 0:
                whole = {k: v.clone() for k, v in arms[-1].drafter.state_dict().items()}
                save_file(whole, out / name / f"{head}-{optimizer}.safetensors")
        if parallel["name"] != "deepspeed":
            arms += two_arms(out / name / "two", accelerator, target, parallel)
    _unsynchronised_is_refused(out, accelerator, target)
    leave(accelerator, arms)  # then every process must end by itself; the caller checks the exit status


def _unsynchronised_is_refused(out: Path, accelerator: Accelerator, target: Target) -> None:
    """If accelerate's settings disagree, it wraps nothing and every process trains by itself. This must be an error."""
    for way, wrapper in (
        ("ddp", (Parallel, "_wrap", lambda self: self.learner)),
        ("fsdp", (sharded, "fully_shard", lambda *_, **__: None)),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(*wrapper)
            with pytest.raises(UserError, match=f"parallel={way} is not what runs in these 2 processes"):
                more: dict[str, Any] = dict(accelerator=accelerator, parallel={"name": way})
                run(out / f"refused-{way}", HEADS[0], 2, target, **settings("adamw"), **more)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
