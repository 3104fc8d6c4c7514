"""Run by torchrun: two processes whose evaluations find different numbers. The step at which each ended is left in a folder."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from headstart.data.live import look
from headstart.trainers import trainer
from headstart.trainers.arm import Arm
from headstart.trainers.processes import leave, open_accelerator
from tests.drafters import HEADS
from tests.tiny_targets import tiny_target
from tests.trainers.small import quiet, repetitive, train


def main(out: Path) -> None:
    torch.set_num_threads(1)
    accelerator = open_accelerator("fp32", torch.device("cpu"))
    target, arms, rank = tiny_target(), list[Arm](), accelerator.process_index
    drafter = quiet(HEADS[0], target)
    lengths = iter([1.5, 1.4, 1.3, 1.2, 1.1] if rank == 0 else [1.1, 1.2, 1.3, 1.4, 1.5])
    trainer.evaluate = lambda *_: {"heldout_loss": 1.0, "heldout_expected_length": next(lengths)}
    held_out = [look(repetitive(seed=7, documents=12).batch(slice(0, 4)), target, drafter.taps)]
    fitted = train(
        drafter, target, out / "run", rows=2, accelerator=accelerator, arms=arms, held_out=held_out, eval_every=1, patience=2, steps=5
    )
    (out / f"ended-{rank}").write_text(str(fitted.steps))
    leave(accelerator, arms)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
