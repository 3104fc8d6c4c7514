"""Run by torchrun, two processes: whether the gradients of two parameters are parts of one tensor after a backward pass: of a bucket, in
which the processes add them up. Each writes FOLDER/RANK.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import nn

from headstart.trainers.processes import leave, open_accelerator


def main(out: Path) -> None:
    accelerator = open_accelerator("fp32", torch.device("cpu"))
    module = accelerator.prepare(nn.Linear(4, 4))
    module(torch.ones(2, 4)).sum().backward()
    tensors = {p.grad.untyped_storage().data_ptr() for p in module.parameters()}
    (out / f"{accelerator.process_index}.json").write_text(json.dumps(len(tensors) == 1))
    leave(accelerator, [])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
