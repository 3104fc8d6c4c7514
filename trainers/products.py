"""Matrix products with an unembedding matrix, by the fastest library on this processor.

On a CPU torch multiplies fp32 with MKL, which uses slower kernels on processors of other makers than Intel. With AVX-512, oneDNN takes
half the time there (AMD EPYC, 512 rows by 128,000: oneDNN 224, MKL 117 GFLOP/s). In half precision torch uses oneDNN by itself. The
choice depends on the processor alone, so that a resumed run computes the same numbers.

Shape suffixes: R rows, W width of the matrix, V rows of the matrix.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

BLOCK = 1 << 20  # elements in a block of the result: what a CPU's cache holds


@functools.cache
def slow_mkl() -> bool:
    """Whether MKL is slower than oneDNN on this processor: AMD with AVX-512."""
    cpuinfo = Path("/proc/cpuinfo")
    other = cpuinfo.is_file() and "AuthenticAMD" in cpuinfo.read_text()
    return other and torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512"


def by_onednn(x: Tensor) -> bool:
    """Whether products with ``x`` go to oneDNN: fp32 on a CPU with slow MKL."""
    return x.device.type == "cpu" and x.dtype == torch.float32 and x.numel() > 0 and slow_mkl()  # oneDNN refuses empty tensors


def times(x_RW: Tensor, weight_VW: Tensor) -> Tensor:
    """x [R, W] times the transposed matrix [V, W]: [R, V]. Not for use where gradients must flow through it."""
    return torch.ops.mkldnn._linear_pointwise(x_RW, weight_VW, None, "none", [], "") if by_onednn(x_RW) else x_RW @ weight_VW.T


def fill(out_RV: Tensor, x_RW: Tensor, weight_VW: Tensor) -> None:
    """Write ``times`` into ``out_RV``."""
    if not by_onednn(x_RW):
        torch.mm(x_RW, weight_VW.T, out=out_RV)
        return
    rows = max(1, BLOCK // len(x_RW))  # rows of the matrix in a block: oneDNN allocates its own result, which blocks keep small
    for block_RV, block_VW in zip(out_RV.split(rows, dim=1), weight_VW.split(rows), strict=True):
        block_RV.copy_(times(x_RW, block_VW))


def add(out_RV: Tensor, x_RW: Tensor, weight_VW: Tensor, block: int = BLOCK) -> None:
    """Add ``times`` to ``out_RV``, which may have a wider dtype, ``block`` elements at a time."""
    if out_RV.dtype == x_RW.dtype and not by_onednn(x_RW):
        out_RV.addmm_(x_RW, weight_VW.T)
        return
    rows = max(1, block // len(weight_VW))
    for block_RV, block_RW in zip(out_RV.split(rows), x_RW.split(rows), strict=True):
        block_RV += times(block_RW, weight_VW)


class Known(torch.autograd.Function):
    """A value whose gradients are known already. ``backward`` scales them in place and returns them, so that no gradient is copied."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, grads: list[Tensor | None], *inputs: Tensor) -> Tensor:
        ctx.grads = grads
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.grads is None:
            raise RuntimeError("backward ran twice through fused_loss: its gradients were handed over the first time")
        grads, ctx.grads = ctx.grads, None
        return None, None, *(g if g is None else g.mul_(grad) for g in grads)
