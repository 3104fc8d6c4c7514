"""Run by torchrun: ``train.py``, whose second process kills itself once, after the fifth step. The file $KILLED records that it did."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from headstart.door import train
from headstart.trainers.arm import Arm, Step


def main() -> None:
    killed, step = Path(os.environ["KILLED"]), Arm.step

    def dies(self: Arm, begun: Step, tokens: int) -> None:
        step(self, begun, tokens)
        if self.fitted.steps == 5 and os.environ["RANK"] == "1" and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    Arm.step = dies  # type: ignore[method-assign]
    train.start()


if __name__ == "__main__":
    main()
