"""The main door: target, drafter, data, trainer; fit, export, decode, report. `python train.py --help` lists the choices."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any

from door import enter, overrides


def main(config: dict[str, Any]) -> None:
    processes = config.pop("launcher")["processes"]
    config.pop("path", None)  # shorthand of data.path
    if processes > 1 and "WORLD_SIZE" not in os.environ:
        return _launch(processes)
    from trainers.run import run  # here, so that --help and --cfg need not wait for torch

    run(**config)


def _launch(processes: int) -> None:
    """Run the same command in several processes of this machine (torchrun's variables, without its noise)."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    threads = max(1, (os.cpu_count() or 1) // processes)
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
    children = []
    for rank in range(processes):
        ours = {**world, "RANK": rank, "LOCAL_RANK": rank}
        environment = {"OMP_NUM_THREADS": str(threads), **os.environ, **{k: str(v) for k, v in ours.items()}}
        children.append(subprocess.Popen([sys.executable, __file__, *overrides()], env=environment))

    def pass_on(*_: object) -> None:  # the children save a checkpoint and end
        for child in children:
            child.terminate()

    signal.signal(signal.SIGTERM, pass_on)
    interrupted, code = False, 0
    while any(child.poll() is None for child in children):
        try:
            time.sleep(0.1)
        except KeyboardInterrupt:  # the children have it too: they save a checkpoint and end
            interrupted = True
        code = code or next((child.returncode for child in children if child.returncode), 0)
        if code and not interrupted:  # the others would wait for it for ever
            for child in children:
                child.terminate()
    code = code or next((child.returncode for child in children if child.returncode), 0)
    if code:
        raise SystemExit(code if code > 0 else 128 - code)


if __name__ == "__main__":
    enter("config", main)
