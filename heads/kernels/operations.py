"""The operations between the matrix products of a Llama-shaped layer, one Triton kernel each: norms, RoPE and the memory, the gate.

Shape suffixes: B batch, N rows of any kind, R = B * N, D hidden, W width of a product, h heads, g key-value heads, d head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

GATED = 1024  # numbers of a row that are gated together


# Kernels -------------------------------------------------------------------------------------------------------------


@triton.jit
def _add_and_norm(  # type: ignore[no-untyped-def]
    x, more, weight, total, out, eps, out_row, D: tl.constexpr, ADDS: tl.constexpr, TWICE: tl.constexpr, BLOCK: tl.constexpr
):
    """One row of the RMSNorm of x + more. The sum is written to ``total``. ``TWICE``: see ``Norm``."""
    r = tl.program_id(0).to(tl.int64)
    row = r * D
    at = tl.arange(0, BLOCK)
    x_D = tl.load(x + row + at, mask=at < D, other=0.0)
    if ADDS:
        x_D = (x_D.to(tl.float32) + tl.load(more + row + at, mask=at < D, other=0.0).to(tl.float32)).to(x_D.dtype)
        tl.store(total + row + at, x_D, mask=at < D)
    wide_D = x_D.to(tl.float32)
    wide_D = wide_D * tl.rsqrt(tl.sum(wide_D * wide_D, 0) / D + eps)
    if TWICE:
        wide_D = wide_D.to(x_D.dtype).to(tl.float32)
    wide_D = wide_D * tl.load(weight + at, mask=at < D, other=0.0).to(tl.float32)
    tl.store(out + r * out_row + at, wide_D.to(x_D.dtype), mask=at < D)


@triton.jit
def _halves(x, i, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """The two halves of a vector, in fp32."""
    a, b = tl.load(x + i, mask=i < HALF, other=0.0), tl.load(x + HALF + i, mask=i < HALF, other=0.0)
    return a.to(tl.float32), b.to(tl.float32)


@triton.jit
def _turned(  # type: ignore[no-untyped-def]
    x, cos, sin, weight, eps, HEADS: tl.constexpr, HALF: tl.constexpr, NORMED: tl.constexpr, TWICE: tl.constexpr,
    BH: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """The two halves of all heads of one row after their norm and RoPE, whose products are rounded to the dtype of the cosines. The first
    half of the sines is negated.
    """
    turns = cos.dtype.element_ty
    h = tl.arange(0, BH)[:, None]
    i = tl.arange(0, BD)[None, :]
    inside, at = (h < HEADS) & (i < HALF), h * 2 * HALF + i
    a, b = tl.load(x + at, mask=inside, other=0.0), tl.load(x + at + HALF, mask=inside, other=0.0)
    kind = a.dtype
    a, b = a.to(tl.float32), b.to(tl.float32)
    if NORMED:
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + eps)[:, None]
        of_a, of_b = _halves(weight, i, HALF)
        a, b = a * scale, b * scale
        if TWICE:
            a, b = a.to(kind).to(tl.float32), b.to(kind).to(tl.float32)
        a, b = (a * of_a).to(kind).to(tl.float32), (b * of_b).to(kind).to(tl.float32)
    cos_a, cos_b = _halves(cos, i, HALF)
    sin_a, sin_b = _halves(sin, i, HALF)
    first = ((a * cos_a).to(turns).to(tl.float32) + (b * sin_a).to(turns).to(tl.float32)).to(kind)
    second = ((b * cos_b).to(turns).to(tl.float32) + (a * sin_b).to(turns).to(tl.float32)).to(kind)
    return first, second


@triton.jit(do_not_specialize=["start", "N"])
def _turn_and_store(  # type: ignore[no-untyped-def]
    q, k, v, q_row, k_row, v_row, cos, sin, q_weight, k_weight, q_eps, k_eps, q_out, keys, values, starts, start, N,
    by_sequence, by_head, by_slot,
    H: tl.constexpr, G: tl.constexpr, HALF: tl.constexpr, NORMED: tl.constexpr, TWICE: tl.constexpr, STARTS: tl.constexpr,
    BH: tl.constexpr, BG: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """One row: its queries to ``q_out`` [R, h, d], its keys and values to a slot of ``keys`` and ``values``. ``TWICE``: see ``Norm``."""
    r = tl.program_id(0).to(tl.int64)
    b = r // N
    slot = r % N + (tl.load(starts + b) if STARTS else start)
    cos += r * 2 * HALF
    sin += r * 2 * HALF
    first, second = _turned(q + r * q_row, cos, sin, q_weight, q_eps, H, HALF, NORMED, TWICE, BH, BD)
    i = tl.arange(0, BD)[None, :]
    h = tl.arange(0, BH)[:, None]
    out = q_out + r * H * 2 * HALF + h * 2 * HALF + i
    tl.store(out, first, mask=(h < H) & (i < HALF))
    tl.store(out + HALF, second, mask=(h < H) & (i < HALF))
    first, second = _turned(k + r * k_row, cos, sin, k_weight, k_eps, G, HALF, NORMED, TWICE, BG, BD)
    g = tl.arange(0, BG)[:, None]
    inside, place = (g < G) & (i < HALF), b * by_sequence + g * by_head + slot * by_slot + i
    tl.store(keys + place, first.to(keys.dtype.element_ty), mask=inside)
    tl.store(keys + place + HALF, second.to(keys.dtype.element_ty), mask=inside)
    own = v + r * v_row + g * 2 * HALF + i
    tl.store(values + place, tl.load(own, mask=inside, other=0.0).to(values.dtype.element_ty), mask=inside)
    tl.store(values + place + HALF, tl.load(own + HALF, mask=inside, other=0.0).to(values.dtype.element_ty), mask=inside)


@triton.jit
def _gate(gate, up, out, gate_row, up_row, W: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """silu(gate) * up of a part of one row."""
    r = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(gate + r * gate_row + at, mask=at < W, other=0.0)
    wide = x.to(tl.float32)
    wide = (wide / (1.0 + tl.exp(-wide))).to(x.dtype).to(tl.float32)
    tl.store(out + r * W + at, (wide * tl.load(up + r * up_row + at, mask=at < W, other=0.0).to(tl.float32)).to(x.dtype), mask=at < W)


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


# Their calls ---------------------------------------------------------------------------------------------------------


class Norm:
    """An RMSNorm's weight and epsilon. ``twice``: it also rounds before it multiplies by the weight, as transformers' norms do."""

    def __init__(self, module: Any) -> None:
        self.weight = module.weight.detach()
        self.eps = float(module.eps if hasattr(module, "eps") else module.variance_epsilon)
        self.twice = not isinstance(module, nn.RMSNorm)


def add_and_norm(x_RD: Tensor, more_RD: Tensor | None, norm: Norm, out_RD: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(x + more, its RMSNorm), [R, D] each. ``more`` None: nothing is added, and the first is ``x`` itself. ``out_RD``: to write the norm
    to; its rows may lie apart.
    """
    (R, D), out_RD = x_RD.shape, torch.empty_like(x_RD) if out_RD is None else out_RD
    total_RD = x_RD if more_RD is None else torch.empty_like(x_RD)
    more, warps = x_RD if more_RD is None else more_RD, 4 if D <= 2048 else 8 if D <= 8192 else 16
    _add_and_norm[(R,)](
        x_RD, more, norm.weight, total_RD, out_RD, norm.eps, out_RD.stride(0), D, more_RD is not None, norm.twice,
        triton.next_power_of_2(D), num_warps=warps,
    )  # fmt: skip
    return total_RD, out_RD


def normed(module: Any) -> Callable[[Tensor], Tensor]:
    """The norm as a function of [.., D], as ``heads.frozen.normed``."""
    norm = Norm(module)

    def run(x: Tensor) -> Tensor:
        with here(x):
            return add_and_norm(flat(x), None, norm)[1].view(x.shape)

    return run


def gated(gate_RW: Tensor, up_RW: Tensor) -> Tensor:
    """silu(gate) * up, [R, W]. Rows may lie apart."""
    R, W = gate_RW.shape
    out_RW = gate_RW.new_empty(R, W)
    _gate[(R, triton.cdiv(W, GATED))](gate_RW, up_RW, out_RW, gate_RW.stride(0), up_RW.stride(0), W, GATED, num_warps=4)
    return out_RW


class Gated(torch.autograd.Function):
    """silu(gate) * up in training: one pass over gate and up, and one over their gradients. torch takes two operations and four, and keeps
    silu(gate) for the backward pass. The gradients are rounded at the same places as torch's.
    """

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


def turn(
    q_RW: Tensor, k_RW: Tensor, v_RW: Tensor, cos_sin: Sequence[Tensor], norms: Sequence[Norm], sizes: tuple[int, int, int],
    shape: Sequence[int], keys: Tensor, values: Tensor, start: int | Tensor,
) -> Tensor:  # fmt: skip
    """The queries of rows of ``shape`` [B, N], normed (by two ``norms``, if any) and rotated: [B, N, h, d]. Keys, likewise, and values are
    written to ``keys`` and ``values`` [B or more, g, S, d], from slot ``start`` on (int64 [B] where sequences differ). ``cos_sin``:
    [R, d] each, as of ``Rope``. ``sizes``: (h, g, d).
    """
    (B, N), (h, g, d), starts = shape, sizes, isinstance(start, Tensor)
    q_BNhd = q_RW.new_empty(B, N, h, d)
    weights = [x.weight for x in norms] or [q_RW, q_RW]  # without norms nobody reads them
    twice = any(x.twice for x in norms)
    _turn_and_store[(B * N,)](
        q_RW, k_RW, v_RW, q_RW.stride(0), k_RW.stride(0), v_RW.stride(0), *cos_sin, *weights, *([x.eps for x in norms] or [0.0, 0.0]),
        q_BNhd, keys, values, start if starts else q_RW, 0 if starts else start, N, *keys.stride()[:3],
        h, g, d // 2, bool(norms), twice, starts, *map(triton.next_power_of_2, (h, g, d // 2)), num_warps=4,
    )  # fmt: skip
    return q_BNhd


@contextmanager
def here(x: Tensor) -> Iterator[None]:
    """Make the device of ``x`` the current one, on which Triton launches. Switch autocast off: frozen layers compute in their own dtype."""
    with torch.cuda.device_of(x), torch.autocast(x.device.type, enabled=False):
        yield


def flat(x: Tensor) -> Tensor:
    """[.., D] as [R, D], in one piece."""
    return x.reshape(-1, x.shape[-1]).contiguous()
