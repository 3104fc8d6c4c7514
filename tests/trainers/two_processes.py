"""Run by torchrun: trains every drafter, or with ``lora`` one and its target, for three steps. The weights are left in a folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from headstart.trainers.arm import Arm
from headstart.trainers.processes import leave, open_accelerator
from tests.drafters import HEADS
from tests.tiny_targets import tiny_target
from tests.trainers.small import group_threads, quiet, train


def main(out: Path, lora: str = "null") -> None:
    torch.set_num_threads(1)
    accelerator = open_accelerator("fp32", torch.device("cpu"))
    arms: list[Arm] = []
    for name in HEADS if lora == "null" else HEADS[:1]:
        target = tiny_target()
        drafter = quiet(name, target)
        loop = dict(steps=3, clip=0.5, accumulate=2, optimizer="adamw", lora=json.loads(lora))
        train(drafter, target, out / name, rows=2, accelerator=accelerator, arms=arms, **loop)
        save_file({k: v.contiguous().clone() for k, v in drafter.state_dict().items()}, out / f"{name}-{accelerator.process_index}")
    leave(accelerator, arms)
    assert not group_threads()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
