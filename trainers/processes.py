"""The processes of a run: how they meet, and how they end."""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedDataParallelKwargs, patch_environment

from headstart.heads.errors import UserError
from headstart.inference.decoding.meeting import meet
from headstart.inference.decoding.placement import is_main, multiplies_bf16, processes
from headstart.trainers.arm import Arm

PATIENCE, ANSWER = 60.0, 20.0  # seconds within which the other processes must fail as well, and the store must answer
# words in the errors of gloo, NCCL and torch's store that say that another process has ended
GONE = ("Connection closed", "Connection was likely closed", "Connection reset", "Broken pipe", "ncclRemoteError")
VIEWS = DistributedDataParallelKwargs(gradient_as_bucket_view=True)  # gradients are in the buckets, not also beside them
LONGEST = 1800.0  # the least timeout of collective operations, in seconds: long enough for loading a target, when no watch runs


def open_accelerator(precision: str, device: torch.device, timeout: float = 0.0) -> Accelerator:
    """The accelerator of this run, each process on its target's ``device``. ``timeout``: seconds after which the watch ends a hanging loop.

    Raises UserError if the processes do not find each other, or if several were given the same GPU.
    """
    AcceleratorState._reset_state(reset_partial_state=True)  # an earlier run of this process (--multirun) has left its state
    own = {}
    if device.type == "cuda":
        if processes() > 1 and device.index not in (None, int(os.environ.get("LOCAL_RANK", 0))):
            raise UserError(
                f"target.device={device} is one GPU, and there are {processes()} processes: take auto, which gives each its own"
            )
        torch.cuda.set_device(device)  # for kernels that run on the current device
        own = {"ACCELERATE_TORCH_DEVICE": str(device)}  # else accelerate takes the first GPU
    if processes() > 1:
        meet(device, max(LONGEST, 2 * timeout))
    with patch_environment(**own):
        accelerator = Accelerator(mixed_precision=_precision(precision, device), cpu=device.type == "cpu", kwargs_handlers=[VIEWS])
    if accelerator.num_processes != processes():
        raise UserError(f"{processes()} processes were started, accelerate sees {accelerator.num_processes}: start them with torchrun")
    return accelerator


def _precision(name: str, device: torch.device) -> str:
    if name == "auto":  # five times as fast as fp32 on a CPU that multiplies bf16 natively, slower on others
        return "bf16" if multiplies_bf16(device) else "no"
    return {"bf16": "bf16", "fp32": "no"}[name]


def leave(accelerator: Accelerator, arms: Iterable[Arm]) -> None:
    """End the process group, after which each process continues by itself. All processes call this.

    References held by DistributedDataParallel are released first. If they were the last ones to the group, their release would wait for
    the group's threads while it holds Python's GIL, for which those threads may be waiting: a deadlock.
    """
    for arm in arms:
        arm.close()
    accelerator.free_memory()
    accelerator.end_training()


@contextmanager
def together() -> Iterator[None]:
    """Around the work of a run: if one process fails, no other waits for it. A run of one process is not affected.

    A failing process exits without closing its process group, because the group's threads may be waiting for the others. The others find
    their connection closed: the first process raises UserError, the rest SystemExit. If they do not notice, the launcher ends them. Other
    errors of gloo or NCCL (a full /dev/shm, a wrong network interface) are a UserError in every process that has one.
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
        if not any(word in str(e) for word in GONE):  # perhaps this process alone knows
            raise UserError(f"the processes cannot work together: {' '.join(str(e).split())[:600]}") from e
        if not is_main():
            raise SystemExit(code) from None
        raise UserError("another process of this run has ended: if it left a message, that says why") from e


def all_failed(accelerator: Accelerator, where: str) -> bool:
    """Whether an arm that has failed in this process at ``where`` fails there in all processes within PATIENCE seconds. Then they can
    continue together without it. Otherwise another process waits in a collective operation that this one does not join, and the run must
    end.

    The processes tell each other through the store by which they met, because that needs no collective operation.
    """
    if accelerator.num_processes == 1:
        return True
    return _counted(torch.distributed.distributed_c10d._get_default_store(), f"failed {where}")


def failed_alike(run: str) -> bool:
    """Whether a run of a --multirun that has failed in this process fails in all processes within PATIENCE seconds. They may not have met
    yet, so this goes through the store of torchrun. False where no store answers.
    """
    try:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = torch.distributed.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=ANSWER))
        return _counted(store, f"failed run {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)} {run}")
    except (KeyError, ValueError, RuntimeError):  # RuntimeError: no connection, or the process that holds the store has gone
        return False


def _counted(store: torch.distributed.Store, key: str) -> bool:
    """Count this process at ``key``, and wait until all are counted. Returns whether they are after PATIENCE seconds."""
    count, until = processes(), time.monotonic() + PATIENCE
    all_here = -(-store.add(key, 1) // count) * count  # an earlier run of a --multirun may have left its count
    while store.add(key, 0) < all_here:
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def _lost(error: RuntimeError) -> bool:
    """Whether this is an error of gloo or NCCL. They raise one when another process is gone, and when something of their own fails."""
    return isinstance(error, torch.distributed.DistError) or any(word in str(error) for word in ("gloo", "Connection closed", "NCCL"))


def _go(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
