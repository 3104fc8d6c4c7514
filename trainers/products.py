"""Products with a vocabulary's matrix, by the fastest library that is there.

torch multiplies fp32 on a CPU by MKL, which takes its slower kernels on processors of other makers: with AVX-512 oneDNN's take half the
time there (AMD EPYC, 512 rows by 128,000: 224 and 117 GFLOP/s). In half precision torch takes oneDNN by itself. Which one it is hangs on
the processor alone, so a run that goes on finds the same numbers.

Shape suffixes: R rows, W width of the matrix, V its rows.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import Tensor

BLOCK = 1 << 20  # numbers of a result: what a CPU's cache holds


@functools.cache
def slow_mkl() -> bool:
    """Whether this processor is one for which MKL has slower kernels than oneDNN."""
    cpuinfo = Path("/proc/cpuinfo")
    other = cpuinfo.is_file() and "AuthenticAMD" in cpuinfo.read_text()
    return other and torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512"


def by_onednn(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype == torch.float32 and x.numel() > 0 and slow_mkl()  # which refuses what is empty


def times(x_RW: Tensor, weight_VW: Tensor) -> Tensor:
    """x [R, W] times the matrix: [R, V]. Nothing is learnt through it."""
    return torch.ops.mkldnn._linear_pointwise(x_RW, weight_VW, None, "none", [], "") if by_onednn(x_RW) else x_RW @ weight_VW.T


def fill(out_RV: Tensor, x_RW: Tensor, weight_VW: Tensor) -> None:
    """``times`` into memory that is there."""
    if not by_onednn(x_RW):
        torch.mm(x_RW, weight_VW.T, out=out_RV)
        return
    rows = max(1, BLOCK // len(x_RW))  # of the matrix: oneDNN writes to memory of its own, which is small so
    for block_RV, block_VW in zip(out_RV.split(rows, dim=1), weight_VW.split(rows), strict=True):
        block_RV.copy_(times(x_RW, block_VW))


def add(out_RV: Tensor, x_RW: Tensor, weight_VW: Tensor, block: int = BLOCK) -> None:
    """``times`` added to a matrix, which may be of a wider dtype: ``block`` numbers at a time."""
    if out_RV.dtype == x_RW.dtype and not by_onednn(x_RW):
        out_RV.addmm_(x_RW, weight_VW.T)
        return
    rows = max(1, block // len(weight_VW))
    for block_RV, block_RW in zip(out_RV.split(rows), x_RW.split(rows), strict=True):
        block_RV += times(block_RW, weight_VW)
