"""Run by torchrun, four processes: drafters learn from a target whose layers the processes share. Their last checkpoints stay.

``python -m torch.distributed.run --standalone --nproc-per-node 4 -m tests.trainers.shared_target FOLDER TARGET DEVICE...``
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from headstart.heads.errors import UserError
from headstart.inference.decoding.target import Target
from headstart.trainers.arm import Arm
from headstart.trainers.processes import leave, open_accelerator
from tests.drafters import FEW
from tests.trainers import spread
from tests.trainers.small import train

HEADS = [FEW[1], FEW[0]]


def main(out: Path, folder: str, devices: list[str]) -> None:
    torch.set_num_threads(1)
    arms: list[Arm] = []
    for device in devices:
        target = Target.load(folder, device=device).read_apart()
        whole = Target.load(folder, device="cpu")
        assert target.sharded and target.fingerprint == whole.fingerprint
        mine = sum(p.to_local().numel() for p in target.layers.parameters())  # type: ignore[operator]
        assert mine < 0.6 * sum(p.numel() for p in whole.layers.parameters()), "every process has all of the layers"
        accelerator = open_accelerator("fp32", torch.device("cpu"))
        for head in HEADS:
            more = dict(accelerator=accelerator, arms=arms, parallel={"name": "zero1"})
            train(spread.quiet(head, target), target, out / device / head, rows=1, **spread.settings("adamw"), **more)
    try:
        target.check_taps([99])
    except UserError:
        leave(accelerator, arms)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
    sys.stdout.flush()
    os._exit(0)
