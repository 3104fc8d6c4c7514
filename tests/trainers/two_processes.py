"""Run by torchrun from test_trainer.py: every drafter, three steps in each process; the weights of each are left in a folder."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.drafters import HEADS
from tests.tiny_targets import tiny_target
from tests.trainers.small import quiet, train
from trainers.run import open_accelerator


def main(out: Path) -> None:
    torch.set_num_threads(1)
    accelerator = open_accelerator("fp32", torch.device("cpu"))
    for name in HEADS:
        target = tiny_target()
        drafter = quiet(name, target)
        train(drafter, target, out / name, rows=2, accelerator=accelerator, steps=3, clip=0.5, accumulate=2, optimizer="adamw")
        save_file({k: v.contiguous().clone() for k, v in drafter.state_dict().items()}, out / f"{name}-{accelerator.process_index}")
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
