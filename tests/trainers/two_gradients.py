"""Run by torchrun, two processes: in each step, how many tensors hold the gradients of two parameters after each of two micro-batches. One
from the second step on: the bucket in which the processes add them up. Each writes FOLDER/RANK.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headstart.trainers.parallel import Parallel
from headstart.trainers.processes import leave, open_accelerator


class Pair(nn.Linear):
    """What ``Parallel`` asks of a learner."""

    trained = property(lambda self: self)


def main(out: Path) -> None:
    accelerator, learner = open_accelerator("fp32", torch.device("cpu")), Pair(4, 4)
    optimizer: Any = torch.optim.AdamW(learner.parameters())
    parallel, counts = Parallel(accelerator, learner, [optimizer]), list[int]()  # type: ignore[arg-type]
    for _ in range(3):
        for last in (False, True):
            with parallel.together(last):
                parallel.backward(parallel.module(torch.ones(2, 4)).sum())
            counts.append(len({p.grad.untyped_storage().data_ptr() for p in learner.parameters() if p.grad is not None}))
        assert float(learner.bias.grad.sum()) == 16.0, "the sum over micro-batches and rows, whatever earlier steps left"  # type: ignore[union-attr]
        parallel.step()
    (out / f"{accelerator.process_index}.json").write_text(json.dumps(counts))
    leave(accelerator, [])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
