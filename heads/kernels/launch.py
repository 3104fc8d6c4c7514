"""Whether our Triton kernels can be launched: they need triton, a C compiler for its launchers, and a GPU that it knows."""

from __future__ import annotations

import functools
import logging
import os

import torch
from torch import Tensor, nn

from headstart.heads.errors import UserError

log = logging.getLogger(__name__)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # that the kernels read and write
MOST_TOKENS = 32  # most tokens of a row that best_tokens.py finds: it takes one turn for each, so for many a sort is faster
TILE = 1024  # numbers of the first halves of some heads, which rotation.py rotates together
OLDEST = (8, 0)  # compute capability: older GPUs have no bfloat16


@functools.cache
def refused(device: torch.device) -> str | None:
    """Why our kernels cannot be launched on the device; None where they can. Tried once. Raises UserError for a switch that is neither on
    nor off.
    """
    switch = os.environ.get("HEADSTART_KERNELS") or "1"
    if switch not in ("0", "1"):
        raise UserError(f"HEADSTART_KERNELS={switch} in the environment: 0 switches our kernels off, 1 leaves them on")
    if switch == "0":
        return "HEADSTART_KERNELS=0"
    try:
        if torch.version.cuda and torch.cuda.get_device_capability(device) < OLDEST:
            return "the GPU is older than they are made for"
        from headstart.heads.kernels.operations import normed

        normed(nn.RMSNorm(16, eps=1e-6, device=device))(torch.ones(1, 16, device=device))
        torch.cuda.synchronize(device)
    except Exception as e:  # whatever the error is, torch's operations remain
        return f"{type(e).__name__}: {e}"
    return None


@functools.cache
def launches(device: torch.device) -> bool:
    """Whether our kernels can be launched on the device. Where not, the log says why, once, and torch's operations are used."""
    if (why := refused(device)) is not None:
        log.warning("our kernels (triton) cannot be launched on %s, torch's operations are slower: %s", device, why)
    return why is None


def takes(x: Tensor) -> bool:
    """Whether our kernels can read this tensor: it is on a GPU where they launch, and not of a subclass, which may have no values."""
    return x.device.type == "cuda" and type(x) is Tensor and launches(x.device)
