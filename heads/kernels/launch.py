"""Whether our Triton kernels can be launched: they need triton, a C compiler for its launchers, and a GPU that it knows."""

from __future__ import annotations

import functools
import logging

import torch

log = logging.getLogger(__name__)


@functools.cache
def launches(device: torch.device) -> bool:
    """Tried once. Where it fails, the log says why, and that torch's operations are taken instead."""
    try:
        from headstart.heads.kernels.fused import add_and_norm

        x_RD = torch.ones(1, 16, device=device)
        with torch.cuda.device_of(x_RD):
            add_and_norm(x_RD, x_RD, x_RD[0], 1e-6)
            torch.cuda.synchronize(device)
    except Exception as e:  # whatever it is, there is another way
        log.warning("our kernels (triton) cannot be launched on %s, torch's operations are slower: %s: %s", device, type(e).__name__, e)
        return False
    return True
