"""How the processes of a run find each other."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from datetime import timedelta
from functools import cache
from typing import Any

import torch

from headstart.heads.errors import UserError


def meet(device: torch.device, patience: float) -> None:
    """Open the process group of all processes, unless there is one. ``patience``: seconds within which all must come, and the timeout of
    the group's collective operations.

    The group is bound to the process's GPU, so that it has one NCCL communicator from the beginning, which sending from one process to
    another uses too. Raises UserError if the processes do not find each other.
    """
    if torch.distributed.is_initialized():
        return
    how: dict[str, Any] = {"backend": "gloo"}
    if device.type == "cuda":
        torch.cuda.set_device(device)
        how = {"backend": "nccl", "device_id": torch.device("cuda", torch.cuda.current_device())}
    timeout = timedelta(seconds=patience)
    try:
        torch.distributed.init_process_group(init_method=_url(), timeout=timeout, **how)
    except torch.distributed.DistStoreError as e:
        joined = re.search(r"\d+/\d+ clients joined", str(e))
        count, *where = (os.environ.get(key, "?") for key in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
        why = f"not all came in {timeout} ({joined[0] if joined else e})"
        raise UserError(f"{count} processes were to meet at {':'.join(where)}, and {why}") from e


_meetings = itertools.count()  # counts the meetings of these processes: the runs of a --multirun


@cache
def _url() -> str:
    """The URL of torch's rendezvous: as env://, but with a separate key prefix for each run and each restart. (torchrun keeps one store
    over its restarts; with torch 2.13 the new processes would find the addresses of the dead ones there.)
    """
    from torch.distributed.rendezvous import register_rendezvous_handler, rendezvous

    def found(url: str, timeout: timedelta, **_: Any) -> Iterator[Any]:
        store, rank, world = next(rendezvous("env://", timeout=timeout))
        start = f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)} {next(_meetings)}"
        yield torch.distributed.PrefixStore(start, store), rank, world

    register_rendezvous_handler("headstart", found)
    return "headstart://"
