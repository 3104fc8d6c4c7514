"""Run twice by test_processes.py, as the two processes of a run that ends in each of WAYS. Each way runs in forks, so that modules are
imported only once.

The exit codes, and what each fork printed, are written into the folder of the checkpoints.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from headstart.data.live import look
from headstart.heads.errors import UserError
from headstart.inference.decoding.target import Target
from headstart.trainers import processes
from headstart.trainers.arm import Arm
from headstart.trainers.processes import leave, open_accelerator, together
from headstart.trainers.trainer import fit
from tests.tiny_targets import tiny_target
from tests.trainers.small import COMMON, LOOP, group_threads, open_arm, quiet, repetitive, train

PATIENCE = 60  # seconds


def refuse() -> None:
    raise UserError("the fourth batch is not to its taste")


WAYS = {  # what happens at the fourth batch: (in the first process, in the second)
    "the second fails": (lambda: None, lambda: 1 // 0),
    "the second is killed": (lambda: None, lambda: os.kill(os.getpid(), signal.SIGKILL)),
    "the second sleeps": (lambda: None, lambda: time.sleep(PATIENCE)),
    "the first refuses": (refuse, lambda: None),
    "both refuse an arm": (refuse,) * 2,
    "the first refuses an arm": (refuse, lambda: None),
    "both are stopped": (lambda: signal.raise_signal(signal.SIGINT),) * 2,
    "both are stopped twice": (lambda: [signal.raise_signal(signal.SIGINT) for _ in range(2)],) * 2,
}


def two_arms(each: Callable[[int], None], target: Target, out: Path, accelerator: Accelerator) -> list[Arm]:
    """Train two arms. The first calls ``each`` at the beginning of every step."""
    loop = LOOP | {"steps": 8, "optimizer": "adamw"}
    arms = [open_arm(name, quiet("medusa", target), out / name, loop, main=accelerator.is_main_process) for name in ("run", "other")]
    start = arms[0].start

    def checked(*how: Any) -> Any:
        each(arms[0].fitted.steps)
        return start(*how)

    arms[0].start = checked  # type: ignore[method-assign]
    packed = repetitive()

    def stream(first: int, rank: int, world: int) -> Any:
        return packed.stream(4, 0, first, rank, world)

    fit(arms, stream, lambda batch, taps: look(batch, target, taps), [], accelerator, **{k: loop[k] for k in COMMON})
    return arms


def one(way: str, rank: int, out: Path, target: Target) -> None:
    """One run in one fork, with the errors and exit codes of the command line."""

    def each(i: int) -> None:
        if i == 3:
            WAYS[way][rank]()

    arms: list[Arm] = []
    processes.PATIENCE = 60.0 if way == "both refuse an arm" else 2.0  # a slow disk may delay one of them
    try:
        with together():
            accelerator = open_accelerator("fp32", torch.device("cpu"))
            drafter = quiet("medusa", target)
            if "an arm" in way:
                arms = two_arms(each, target, out, accelerator)
            else:
                patience = 6.0 if way == "the second sleeps" else 600.0
                train(drafter, target, out / "run", steps=8, accelerator=accelerator, each=each, arms=arms, timeout=patience)
            leave(accelerator, arms)
            assert not group_threads()
            raise SystemExit(130)
    except UserError as e:
        print(f"error (process {rank}): {e}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def main(rank: int, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    left, target = {}, tiny_target()
    train(quiet("medusa", target), target, folder / f"alone-{rank}", steps=1)  # imports, before the forks, what is imported late
    for number, way in enumerate(WAYS):
        out = folder / str(number)
        out.mkdir(exist_ok=True)
        child = os.fork()
        if not child:
            world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port + number, "WORLD_SIZE": 2, "RANK": rank, "LOCAL_RANK": rank}
            os.environ |= {key: str(value) for key, value in world.items()}
            for stream, fd in (("out", 1), ("err", 2)):
                os.dup2(os.open(out / f"{stream}-{rank}", os.O_WRONLY | os.O_CREAT), fd)
            return one(way, rank, out, target)
        start, ended = time.monotonic(), 0
        while not ended and time.monotonic() - start < PATIENCE:
            time.sleep(0.02)
            ended, status = os.waitpid(child, os.WNOHANG)
        if not ended:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        left[way] = os.waitstatus_to_exitcode(status) if ended else "never"
    (folder / f"left-{rank}.json").write_text(json.dumps(left))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
