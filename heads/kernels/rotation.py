"""RoPE of the drafter in training on a GPU (Triton): one pass over queries or keys, and one over their gradient. torch takes several
operations for each, most of them in fp32.

This module is imported only where it is used: it needs triton, and a GPU or TRITON_INTERPRET=1.

Shape suffixes: B batch, h heads, N rows, d head size.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from headstart.heads.kernels.launch import TILE


@triton.jit(do_not_specialize=["N"])
def _rotate(  # type: ignore[no-untyped-def]
    x, cos, sin, out, by_x, by_cos, by_sin, by_out, N,
    H: tl.constexpr, HALF: tl.constexpr, BACK: tl.constexpr, PARTS: tl.constexpr, BH: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Some heads of one row. The first half of the sines is negated. BACK: the transposed rotation."""
    place = tl.program_id(0)
    row, b = (place // PARTS % N).to(tl.int64), (place // PARTS // N).to(tl.int64)
    h, i = (place % PARTS).to(tl.int64) * BH + tl.arange(0, BH)[:, None], tl.arange(0, BD)[None, :]
    inside = (h < H) & (i < HALF)
    x += b * by_x[0] + h * by_x[1] + row * by_x[2] + i
    cos += b * by_cos[0] + row * by_cos[2] + i
    sin += b * by_sin[0] + row * by_sin[2] + i
    out += b * by_out[0] + h * by_out[1] + row * by_out[2] + i
    first, second = tl.load(x, mask=inside, other=0.0).to(tl.float32), tl.load(x + HALF, mask=inside, other=0.0).to(tl.float32)
    sin_a, sin_b = tl.load(sin, mask=i < HALF, other=0.0), tl.load(sin + HALF, mask=i < HALF, other=0.0)
    into_first, into_second = (sin_b, sin_a) if BACK else (sin_a, sin_b)
    turned = first * tl.load(cos, mask=i < HALF, other=0.0) + second * into_first
    tl.store(out, turned.to(out.dtype.element_ty), mask=inside)
    turned = second * tl.load(cos + HALF, mask=i < HALF, other=0.0) + first * into_second
    tl.store(out + HALF, turned.to(out.dtype.element_ty), mask=inside)


class Rotation(torch.autograd.Function):
    """What ``rotate`` of heads/layers.py computes. The gradient is rounded once, as the result is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``x`` [B, h, N, d]; ``cos`` and ``sin`` [B or 1, 1, N, d], in fp32."""
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, back=False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """The gradient of ``x``, in its dtype."""
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, sin, back=True), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    x = x if x.stride(-1) == 1 else x.contiguous()
    (B, h, N, d), out = x.shape, torch.empty_like(x)
    width = triton.next_power_of_2(d // 2)
    heads = min(triton.next_power_of_2(h), max(1, TILE // width))
    parts = triton.cdiv(h, heads)
    if x.numel():
        steps = (y.expand(B, -1, -1, -1).stride()[:3] for y in (x, cos, sin, out))
        how = (h, d // 2, back, parts, heads, width)
        with torch.cuda.device_of(x):  # triton launches on the current device
            _rotate[(B * N * parts,)](x, cos, sin, out, *steps, N, *how, num_warps=min(4, max(1, heads * width // 256)))
    return out
