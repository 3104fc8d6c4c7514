"""The diagonals of training's attention on a GPU (Triton): one kernel merges all earlier depths, another computes their gradients.

In torch's operations each diagonal is several passes over fp32 numbers in memory. Here queries, outputs and gradients are read and written
once, for all diagonals together; sums stay in registers, in fp32, and no product is rounded. Scores are not kept: the backward pass
recomputes them from queries and keys, which it reads anyway.

A program computes one row of all heads that share keys. So it alone sums the gradients of these keys, always in the same order.

This module is imported only where it is used: it needs triton, and a GPU or TRITON_INTERPRET=1.

Shape suffixes: B batch, h attention heads, g key-value heads (h is a multiple), N rows, d head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

# Kernels -------------------------------------------------------------------------------------------------------------


@triton.jit
def _heads(x, steps, b, h, row, i, inside):  # type: ignore[no-untyped-def]
    """The row of some heads, in fp32. ``steps``: strides of batch, heads and rows."""
    return tl.load(x + b * steps[0] + h * steps[1] + row * steps[2] + i, mask=inside, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["N"])
def _merge(  # type: ignore[no-untyped-def]
    q, roots, roots_lse, keys, values, out, lse, by_q, by_roots, by_roots_lse, by_k, by_v, by_out, by_lse, N, scale,
    DIAGONALS: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BH: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """The softmax over the roots, of which output and log-sum-exp are known, and one more key for each diagonal."""
    place = tl.program_id(0)
    g, row, b = (place % G).to(tl.int64), (place // G % N).to(tl.int64), (place // G // N).to(tl.int64)
    n, i = tl.arange(0, BH)[:, None], tl.arange(0, BD)[None, :]
    h, own = g * GROUP + n, n < GROUP
    q_hd = _heads(q, by_q, b, h, row, i, own & (i < D))
    sum_hd = _heads(roots, by_roots, b, h, row, i, own & (i < D))
    most_h1 = _heads(roots_lse, by_roots_lse, b, h, row, 0, own)
    mass_h1 = tl.full([BH, 1], 1.0, tl.float32)  # the softmax's denominator, divided by exp(most)
    for j in tl.static_range(DIAGONALS):
        k_1d = _heads(keys[j], by_k, b, g, row, i, i < D)
        v_1d = _heads(values[j], by_v, b, g, row, i, i < D)
        s_h1 = tl.sum(q_hd * k_1d, 1, keep_dims=True) * scale
        high_h1 = tl.maximum(most_h1, s_h1)
        shrink_h1, p_h1 = tl.exp(most_h1 - high_h1), tl.exp(s_h1 - high_h1)
        sum_hd = sum_hd * shrink_h1 + p_h1 * v_1d
        mass_h1 = mass_h1 * shrink_h1 + p_h1
        most_h1 = high_h1
    out += b * by_out[0] + row * by_out[2]
    lse += b * by_lse[0] + row * by_lse[2]
    tl.store(out + h * by_out[1] + i, (sum_hd / mass_h1).to(out.dtype.element_ty), mask=own & (i < D))
    tl.store(lse + h * by_lse[1], most_h1 + tl.log(mass_h1), mask=own)


@triton.jit(do_not_specialize=["N"])
def _merge_backward(  # type: ignore[no-untyped-def]
    grad, q, out, lse, roots, keys, values, dq, dkeys, dvalues,
    by_grad, by_q, by_out, by_lse, by_roots, by_k, by_v, by_dq, by_dk, by_dv, N, scale,
    DIAGONALS: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BH: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Gradients of the diagonals' keys and values, and of the queries: ``roots`` is the part of the latter that comes from the roots."""
    place = tl.program_id(0)
    g, row, b = (place % G).to(tl.int64), (place // G % N).to(tl.int64), (place // G // N).to(tl.int64)
    n, i = tl.arange(0, BH)[:, None], tl.arange(0, BD)[None, :]
    h, own = g * GROUP + n, n < GROUP
    grad_hd = _heads(grad, by_grad, b, h, row, i, own & (i < D))
    q_hd = _heads(q, by_q, b, h, row, i, own & (i < D))
    delta_h1 = tl.sum(grad_hd * _heads(out, by_out, b, h, row, i, own & (i < D)), 1, keep_dims=True)
    lse_h1 = _heads(lse, by_lse, b, h, row, 0, own)
    dq_hd = _heads(roots, by_roots, b, h, row, i, own & (i < D))
    into_dk, into_dv = b * by_dk[0] + g * by_dk[1] + row * by_dk[2] + i, b * by_dv[0] + g * by_dv[1] + row * by_dv[2] + i
    for j in tl.static_range(DIAGONALS):
        k_1d = _heads(keys[j], by_k, b, g, row, i, i < D)
        v_1d = _heads(values[j], by_v, b, g, row, i, i < D)
        p_h1 = tl.exp(tl.sum(q_hd * k_1d, 1, keep_dims=True) * scale - lse_h1)
        ds_h1 = p_h1 * (tl.sum(grad_hd * v_1d, 1, keep_dims=True) - delta_h1) * scale
        dq_hd += ds_h1 * k_1d
        dk_1d, dv_1d = tl.sum(ds_h1 * q_hd, 0, keep_dims=True), tl.sum(p_h1 * grad_hd, 0, keep_dims=True)
        tl.store(dkeys[j] + into_dk, dk_1d.to(dkeys[j].dtype.element_ty), mask=i < D)
        tl.store(dvalues[j] + into_dv, dv_1d.to(dvalues[j].dtype.element_ty), mask=i < D)
    tl.store(dq + b * by_dq[0] + h * by_dq[1] + row * by_dq[2] + i, dq_hd.to(dq.dtype.element_ty), mask=own & (i < D))


# Their calls ---------------------------------------------------------------------------------------------------------


def merge(
    q: Tensor, roots: Tensor, roots_lse: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], scale: float
) -> tuple[Tensor, Tensor]:
    """(output [B, h, N, d], log-sum-exp [B, h, N]) of the attention over the roots and one key per diagonal. ``roots``, ``roots_lse``: the
    same two for the roots alone. ``keys``, ``values``: [B, g, N, d] for each diagonal.
    """
    q, roots, keys, values = _dense(q), _dense(roots), _alike(keys), _alike(values)
    out, lse = torch.empty_like(roots), torch.empty_like(roots_lse)
    programs, how, warps = _layout(q, keys)
    if programs:
        steps = (_steps(x) for x in (q, roots, roots_lse, keys[0], values[0], out, lse))
        with torch.cuda.device_of(q):  # triton launches on the current device
            _merge[(programs,)](q, roots, roots_lse, keys, values, out, lse, *steps, q.shape[2], scale, *how, num_warps=warps)
    return out, lse


def merge_backward(
    grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, dq: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], scale: float
) -> tuple[Tensor, list[Tensor]]:
    """(gradient of the queries, gradients of each diagonal's keys and values in turn), from ``grad``, the gradient of the output. ``dq``:
    the part of the queries' gradient that comes from the roots.
    """
    grad, q, out, dq, keys, values = _dense(grad), _dense(q), _dense(out), _dense(dq), _alike(keys), _alike(values)
    whole, dkeys, dvalues = torch.empty_like(dq), *(tuple(torch.empty_like(x) for x in some) for some in (keys, values))
    programs, how, warps = _layout(q, keys)
    if programs:
        steps = (_steps(x) for x in (grad, q, out, lse, dq, keys[0], values[0], whole, dkeys[0], dvalues[0]))
        tensors = (grad, q, out, lse, dq, keys, values, whole, dkeys, dvalues)
        with torch.cuda.device_of(q):
            _merge_backward[(programs,)](*tensors, *steps, q.shape[2], scale, *how, num_warps=warps)
    return whole, [x for pair in zip(dkeys, dvalues, strict=True) for x in pair]


def _layout(q: Tensor, keys: Sequence[Tensor]) -> tuple[int, tuple[int, ...], int]:
    """(programs, constants of the kernels, warps), for some 16 numbers of a tensor in each thread."""
    (B, h, N, d), g = q.shape, keys[0].shape[1]
    tile = triton.next_power_of_2(h // g), triton.next_power_of_2(d)
    return B * g * N, (len(keys), g, h // g, d, *tile), min(8, max(1, tile[0] * tile[1] // 512))


def _dense(x: Tensor) -> Tensor:
    """With the numbers of a head side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _alike(xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Dense, and with strides of the same kind: the depths' projections make them so."""
    first = xs[0].stride()
    return tuple(xs) if first[-1] == 1 and all(x.stride() == first for x in xs) else tuple(x.contiguous() for x in xs)


def _steps(x: Tensor) -> tuple[int, ...]:
    return x.stride()[:3]
