"""SwiGLU of the drafter's MLP in training on a GPU (Triton): one pass over gate and up, and one over their gradients. torch's operations
are two and four, and the first keeps silu(gate) for the others.

This module is imported only where it is used: it needs triton, and a GPU or TRITON_INTERPRET=1.

Shape suffixes: R rows, W width of the MLP.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from headstart.heads.kernels.operations import GATED, gated, here


@triton.jit
def _gate_backward(  # type: ignore[no-untyped-def]
    grad, gate, up, d_gate, d_up, grad_row, gate_row, up_row, W: tl.constexpr, BLOCK: tl.constexpr
):
    """Both gradients of a part of one row. Rounded where those of torch's operations are."""
    r = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dy = tl.load(grad + r * grad_row + at, mask=at < W, other=0.0)
    x = tl.load(gate + r * gate_row + at, mask=at < W, other=0.0).to(tl.float32)
    y = tl.load(up + r * up_row + at, mask=at < W, other=0.0).to(tl.float32)
    wide, total = dy.to(tl.float32), 1.0 + tl.exp(-x)
    silu = (x / total).to(dy.dtype).to(tl.float32)
    tl.store(d_up + r * W + at, (wide * silu).to(dy.dtype), mask=at < W)
    of_silu, sigmoid = (wide * y).to(dy.dtype).to(tl.float32), 1.0 / total
    tl.store(d_gate + r * W + at, (of_silu * sigmoid * (1.0 + x * (1.0 - sigmoid))).to(dy.dtype), mask=at < W)


class Gated(torch.autograd.Function):
    """silu(gate) * up. The gradients are rounded as often as those of torch's operations."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        """``gate`` and ``up`` [.., W], of one shape and dtype."""
        ctx.save_for_backward(gate, up)
        with here(gate):
            return gated(_rows(gate), _rows(up)).view(gate.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of both, in their dtype."""
        gate, up = ctx.saved_tensors
        rows = [_rows(x) for x in (grad, gate, up)]
        (R, W), d_gate, d_up = rows[0].shape, *(gate.new_empty(gate.shape) for _ in range(2))
        with here(gate):
            _gate_backward[(R, triton.cdiv(W, GATED))](*rows, d_gate, d_up, *(x.stride(0) for x in rows), W, GATED, num_warps=4)
        return d_gate, d_up


def _rows(x: Tensor) -> Tensor:
    """[.., W] as [R, W], copied only if its rows are not in one piece each or not evenly apart."""
    x_RW = x.reshape(-1, x.shape[-1])
    return x_RW if x_RW.stride(1) == 1 else x_RW.contiguous()
