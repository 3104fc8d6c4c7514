"""Matrix products of many rows, as training has them, by the fastest library on this processor.

On a CPU torch multiplies fp32 with MKL, which uses slower kernels on processors of other makers than Intel. With AVX-512, oneDNN takes
half the time there (AMD EPYC, 512 rows by 128,000: oneDNN 224, MKL 117 GFLOP/s). In half precision torch uses oneDNN by itself. The
choice depends on the processor alone, so that a resumed run computes the same numbers. (Decoding has few rows and stores its matrices
otherwise: heads/orders.py.)

Shape suffixes: R rows, W width of the matrix, V rows of the matrix.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headstart.heads.layers import autocasts

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


def times(x: Tensor, weight_VW: Tensor, bias_V: Tensor | None = None) -> Tensor:
    """x [.., W] times the transposed matrix [V, W], plus the bias: [.., V]. Not for use where gradients must flow through it."""
    if not by_onednn(x):
        return F.linear(x, weight_VW, bias_V)
    found: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight_VW, bias_V, "none", [], "")
    return found


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


def plain(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether it is a linear layer as torch has it: its class, its forward, a dense weight, nothing that is called beside it."""
    if type(layer) is not nn.Linear or "forward" in vars(layer) or layer._forward_hooks or layer._forward_pre_hooks:
        return False
    return type(layer.weight) is nn.Parameter


@contextmanager
def with_forward(layers: Sequence[nn.Linear], forward: Callable[[nn.Linear], Callable[[Tensor], Tensor]]) -> Iterator[None]:
    """Inside this context each of the layers is computed by what ``forward`` makes of it."""
    try:
        for layer in layers:
            vars(layer)["forward"] = forward(layer)
        yield
    finally:
        for layer in layers:
            del vars(layer)["forward"]


def frozen_layers(model: nn.Module) -> AbstractContextManager[None]:
    """A context in which the linear layers of ``model`` multiply by ``times``, where that is faster. No gradients flow through them."""
    layers = [m for m in model.modules() if plain(m) and by_onednn(m.weight) and not autocasts(m.weight)]
    return with_forward(layers, lambda layer: partial(times, weight_VW=layer.weight, bias_V=layer.bias))
