"""Run by torchrun, or called: trains a run up to a step, in any number of processes. Each writes the rows that it reads into a folder."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from headstart.trainers.arm import Arm, Step
from headstart.trainers.processes import together
from headstart.trainers.run import fit, prepare


def part(settings: dict[str, Any], until: int, read: Path) -> None:
    """Train up to the step ``until``. ``read``/STEP-MICRO-RANK.json gets the rows of each micro-batch."""
    start, step = Arm.start, Arm.step

    def noted(self: Arm, micro: Any, steps: int) -> Step:
        for i, batch in enumerate(micro):
            file = read / f"{self.fitted.steps}-{i}-{self.accelerator.process_index}.json"
            file.write_text(json.dumps(batch.tokens_BT.tolist()))
        return start(self, micro, steps)

    def stopped(self: Arm, begun: Step, tokens: int) -> None:
        step(self, begun, tokens)
        if self.fitted.steps == until:
            signal.raise_signal(signal.SIGTERM)

    Arm.start, Arm.step = noted, stopped  # type: ignore[method-assign]
    try:
        read.mkdir(parents=True, exist_ok=True)
        with together(), prepare(**settings) as job:
            fit(job)
    finally:
        Arm.start, Arm.step = start, step  # type: ignore[method-assign]


if __name__ == "__main__":
    torch.set_num_threads(1)
    part(json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2]), Path(sys.argv[3]))
