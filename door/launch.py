"""Starts a run of several processes on this machine: the same command in each, with torchrun's variables but not its log output.

Each process is in a session of its own, so that a signal to the launcher (Ctrl-C, SIGTERM, a terminal that is closed) reaches it once,
from the launcher. An error is printed once, however many processes report it.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from tempfile import TemporaryFile
from typing import IO, Any

from headstart.door.arguments import ERRORS
from headstart.heads.errors import UserError
from headstart.heads.parent import with_its_parent

PATIENCE, LAST = 30.0, 300.0  # seconds until the remaining processes are killed (see ``_wait``)
POLL = 0.1  # seconds
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
Process = subprocess.Popen[bytes]


def free_port() -> int:
    """A free port for processes that bind it seconds later, below the ports that the system assigns by itself (on Linux from 32768 on)."""
    for port in random.SystemRandom().sample(range(20000, 32000), 100):  # not a seeded generator, which repeats its ports
        with socket.socket() as one, suppress(OSError):
            one.bind(("", port))
            return port
    raise UserError("launcher.processes: of 100 ports between 20000 and 32000 none is free")


def launch(command: Sequence[str], processes: int) -> int:
    """Run ``command`` in ``processes`` processes. Returns the exit code of the first one that failed (128 + n where signal n ended it, as
    in shells), 130 if a signal ended the run, else 0. Raises UserError where no port is free.
    """
    threads = max(1, (os.cpu_count() or 1) // processes)
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
    children: list[Process] = []
    with TemporaryFile() as errors, _caught() as signals:
        own: dict[str, Any] = {"start_new_session": True, "pass_fds": [errors.fileno()], "preexec_fn": with_its_parent()}
        world |= {ERRORS: errors.fileno()}
        try:
            for rank in range(processes):
                ours = {key: str(value) for key, value in {**world, "RANK": rank, "LOCAL_RANK": rank}.items()}
                environment = {"OMP_NUM_THREADS": str(threads), **os.environ, **ours}
                children.append(subprocess.Popen(command, env=environment, **own))
            code = _wait(children, signals)
        finally:
            killed = _kill(children)
        _say(errors)
        if killed and not code:  # else what has failed is said, or it was a signal
            which = f"process{'es' * (len(killed) > 1)} {', '.join(map(str, killed))} {'were' if len(killed) > 1 else 'was'} killed"
            print(f"{which}, {LAST:g} seconds after process 0 had ended: what they were writing may be incomplete", file=sys.stderr)
    code = code or (130 if signals else 0)  # the signal came when all processes had ended
    return code if code >= 0 else 128 - code


def _wait(children: Sequence[Process], signals: list[int]) -> int:
    """Pass ``signals`` on until all processes have ended, or are to be killed. Returns the exit code of the first one that failed.

    There is no time limit at first: processes may finish a step, write a checkpoint, or wait for a full disk. Once a process has failed,
    or a third Ctrl-C has come, the others get ``PATIENCE`` seconds: they may be waiting for a process that is gone, in a collective
    operation that no signal interrupts. Once rank 0 has ended otherwise, they get ``LAST`` seconds: they may write the rest of a capture.
    """
    code, asked, until = 0, Counter[int](), float("inf")
    while alive := [child for child in children if child.poll() is None]:
        code = code or next((child.returncode for child in children if child.returncode), 0)
        failed = code and not (asked and code == 130)  # 130 after a signal is what was asked for
        if failed and not asked:
            signals.append(signal.SIGTERM)
        while signals:
            asked[number := signals.pop(0)] += 1
            for child in alive:
                child.send_signal(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
        if failed or asked[signal.SIGINT] > 2:
            until = min(until, time.monotonic() + PATIENCE)
        elif children[0] not in alive:  # it ends only when the run is done
            until = min(until, time.monotonic() + LAST)
        if time.monotonic() > until:
            return code or (130 if asked else 0)
        time.sleep(POLL)
    return code or next((child.returncode for child in children if child.returncode), 0)


@contextmanager
def _caught() -> Iterator[list[int]]:
    """Collects the signals that come in the context, except those that this process ignores (nohup)."""
    came: list[int] = []
    numbers = [number for number in ENDING if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, lambda number, _: came.append(number)) for number in numbers}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _kill(children: Sequence[Process]) -> list[int]:
    """Kill the processes that still run, with those that they have started. Returns their ranks."""
    running = [rank for rank, child in enumerate(children) if child.poll() is None]
    for child in (children[rank] for rank in running):
        with suppress(OSError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    return running


def _say(errors: IO[bytes]) -> None:
    """Print each reported error once, in the order in which they came."""
    errors.seek(0)
    said: dict[str, list[int]] = {}
    for line in errors.read().splitlines():
        rank, text = json.loads(line)
        said.setdefault(text, []).append(rank)
    for text, ranks in said.items():
        where = "" if 0 in ranks else f" (process{'es' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))})"
        print(f"error{where}: {text}", file=sys.stderr)
