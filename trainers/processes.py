"""The processes of a run: how they find each other, and how they leave."""

from __future__ import annotations

import atexit
import itertools
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import InitProcessGroupKwargs, patch_environment

from headstart.heads.errors import UserError
from headstart.inference.decoding.placement import multiplies_bf16
from headstart.trainers.arm import Arm

PATIENCE = 60.0  # seconds for other processes to fail as one has
LONGEST = 1800.0  # seconds for a collective operation, at least: while targets are loaded nobody watches (trainers/watch.py)


def is_main() -> bool:
    """Before there is an ``Accelerator`` to ask."""
    return int(os.environ.get("RANK", 0)) == 0


def processes() -> int:
    """How many processes train together, as torchrun says it."""
    return int(os.environ.get("WORLD_SIZE", 1))


def open_accelerator(precision: str, device: torch.device, timeout: float = 0.0) -> Accelerator:
    """The processes of this run, each on its target's ``device``. ``timeout``: seconds after which the loop ends by itself.

    Raises UserError where they do not find each other, or where several have been given the same GPU.
    """
    AcceleratorState._reset_state(reset_partial_state=True)  # an earlier run of this process (--multirun) has left its own
    own = {}
    if device.type == "cuda":
        if processes() > 1 and device.index not in (None, int(os.environ.get("LOCAL_RANK", 0))):
            raise UserError(
                f"target.device={device} is one GPU, and there are {processes()} processes: take auto, which gives each its own"
            )
        torch.cuda.set_device(device)  # for kernels that are launched wherever one is
        own = {"ACCELERATE_TORCH_DEVICE": str(device)}  # it would take the first
    with patch_environment(**own):
        meeting = _meeting() if processes() > 1 else None
        patience = InitProcessGroupKwargs(init_method=meeting, timeout=timedelta(seconds=max(LONGEST, 2 * timeout)))
        how: dict[str, Any] = dict(mixed_precision=_precision(precision, device), cpu=device.type == "cpu")
        try:
            accelerator = Accelerator(**how, kwargs_handlers=[patience])
        except torch.distributed.DistStoreError as e:
            joined = re.search(r"\d+/\d+ clients joined", str(e))
            where = ":".join(os.environ.get(key, "?") for key in ("MASTER_ADDR", "MASTER_PORT"))
            why = f"not all came in {patience.timeout} ({joined[0] if joined else e})"
            raise UserError(f"{processes()} processes were to meet at {where}, and {why}") from e
    if accelerator.num_processes != processes():
        raise UserError(f"{processes()} processes were started, accelerate sees {accelerator.num_processes}: start them with torchrun")
    return accelerator


_meetings = itertools.count()  # of these processes: the runs of a --multirun


@cache
def _meeting() -> str:
    """Where processes meet, as torch writes it: env://, apart from what an earlier meeting of theirs, or an earlier start, has left in the
    store. (torchrun keeps one store over its restarts; with torch 2.13 the new processes find the addresses of the dead ones there.)
    """
    from torch.distributed.rendezvous import register_rendezvous_handler, rendezvous

    def meet(url: str, timeout: timedelta = timedelta(seconds=LONGEST), **_: Any) -> Iterator[Any]:
        store, rank, world = next(rendezvous("env://", timeout=timeout))
        start = f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)} {next(_meetings)}"
        yield torch.distributed.PrefixStore(start, store), rank, world

    register_rendezvous_handler("headstart", meet)
    return "headstart://"


def _precision(name: str, device: torch.device) -> str:
    if name == "auto":  # five times the speed of fp32 on a CPU that multiplies bf16 itself, slower on others
        return "bf16" if multiplies_bf16(device) else "no"
    return {"bf16": "bf16", "fp32": "no"}[name]


def leave(accelerator: Accelerator, arms: Iterable[Arm]) -> None:
    """End the process group; each process goes on by itself. Called by all of them.

    What DistributedDataParallel holds is released first. If it were the last to hold the group, its release would wait for the group's
    threads while it holds Python's lock, which those threads may be waiting for: a deadlock.
    """
    for arm in arms:
        arm.close()
    accelerator.free_memory()
    accelerator.end_training()


@contextmanager
def together() -> Iterator[None]:
    """Around the work of a run: where one process fails, no other waits for it. A run of one process is not affected.

    A process that fails ends without closing its process group, because the group's threads may wait for the others. These find their
    connection closed, and the first process says so in a line; where they do not notice, the launcher ends them.
    """
    try:
        yield
    except BaseException as e:
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            raise
        lost = isinstance(e, RuntimeError) and _lost(e)
        code = 130 if isinstance(e, KeyboardInterrupt) else 2 if isinstance(e, UserError) or lost else 1
        if isinstance(e, SystemExit):
            code = e.code if isinstance(e.code, int) else 1
        atexit.register(_go, code)
        if not lost:
            raise
        if not is_main():
            raise SystemExit(code) from None
        raise UserError("another process of this run has ended: if it left a message, that says why") from e


def all_failed(accelerator: Accelerator, where: str) -> bool:
    """Called by a process in which an arm has failed at ``where``: whether the arm has failed there in all processes, so that they can go
    on together without it. A process in which it has not failed waits in an exchange that this one does not join, and the run can only end.

    The processes ask each other through the store by which they met, because that needs no such exchange.
    """
    if accelerator.num_processes == 1:
        return True
    store, key = torch.distributed.distributed_c10d._get_default_store(), f"failed {where}"
    count, until = accelerator.num_processes, time.monotonic() + PATIENCE
    all_here = -(-store.add(key, 1) // count) * count  # an earlier run of a --multirun may have left its own
    while store.add(key, 0) < all_here:
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def _lost(error: RuntimeError) -> bool:
    """Whether this is the error that gloo or NCCL raise when another process is gone."""
    return isinstance(error, torch.distributed.DistError) or any(word in str(error) for word in ("gloo", "Connection closed", "NCCL"))


def _go(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
