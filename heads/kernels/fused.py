"""A Llama-shaped decoder on a GPU: between two matrix products there is one kernel (Triton), where transformers launches up to ten.

A pass of few rows takes as long as its weights take to be read, and every small kernel comes on top: 36 a layer in transformers, ten
here. A pass of many rows writes and reads its states again in each of them. What is computed is the same, rounded at the same places.

This module is imported only where it is used: it needs triton, and a GPU or TRITON_INTERPRET=1.

Shape suffixes: B batch, N rows of any kind, R = B * N, D hidden, W width of the MLP, h heads, g key-value heads, d head size.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn

from headstart.heads.kernels import split_attention
from headstart.heads.layers import Rope
from headstart.heads.memory import Memory
from headstart.heads.prepack import JOINT
from headstart.heads.visibility import KEPT, Sees

GATED = 1024  # numbers of a row that are gated together


# Kernels -------------------------------------------------------------------------------------------------------------


@triton.jit
def _add_and_norm(  # type: ignore[no-untyped-def]
    x, more, weight, total, out, eps, D: tl.constexpr, ADDS: tl.constexpr, BLOCK: tl.constexpr
):
    """One row of the RMSNorm of x + more. The sum is written to ``total``."""
    row = tl.program_id(0).to(tl.int64) * D
    at = tl.arange(0, BLOCK)
    x_D = tl.load(x + row + at, mask=at < D, other=0.0)
    if ADDS:
        x_D = (x_D.to(tl.float32) + tl.load(more + row + at, mask=at < D, other=0.0).to(tl.float32)).to(x_D.dtype)
        tl.store(total + row + at, x_D, mask=at < D)
    wide_D = x_D.to(tl.float32)
    wide_D = (wide_D * tl.rsqrt(tl.sum(wide_D * wide_D, 0) / D + eps)).to(x_D.dtype).to(tl.float32)
    tl.store(out + row + at, (wide_D * tl.load(weight + at, mask=at < D, other=0.0).to(tl.float32)).to(x_D.dtype), mask=at < D)


@triton.jit
def _halves(x, i, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """The two halves of a vector, in fp32."""
    a, b = tl.load(x + i, mask=i < HALF, other=0.0), tl.load(x + HALF + i, mask=i < HALF, other=0.0)
    return a.to(tl.float32), b.to(tl.float32)


@triton.jit
def _turned(  # type: ignore[no-untyped-def]
    x, cos, sin, weight, eps, HEADS: tl.constexpr, HALF: tl.constexpr, NORMED: tl.constexpr, BH: tl.constexpr, BD: tl.constexpr
):
    """The two halves of all heads of one row after their norm and RoPE. The first half of the sines is negated."""
    h = tl.arange(0, BH)[:, None]
    i = tl.arange(0, BD)[None, :]
    inside, at = (h < HEADS) & (i < HALF), h * 2 * HALF + i
    a, b = tl.load(x + at, mask=inside, other=0.0), tl.load(x + at + HALF, mask=inside, other=0.0)
    kind = a.dtype
    a, b = a.to(tl.float32), b.to(tl.float32)
    if NORMED:
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + eps)[:, None]
        of_a, of_b = _halves(weight, i, HALF)
        a = ((a * scale).to(kind).to(tl.float32) * of_a).to(kind).to(tl.float32)
        b = ((b * scale).to(kind).to(tl.float32) * of_b).to(kind).to(tl.float32)
    cos_a, cos_b = _halves(cos, i, HALF)
    sin_a, sin_b = _halves(sin, i, HALF)
    first = ((a * cos_a).to(kind).to(tl.float32) + (b * sin_a).to(kind).to(tl.float32)).to(kind)
    second = ((b * cos_b).to(kind).to(tl.float32) + (a * sin_b).to(kind).to(tl.float32)).to(kind)
    return first, second


@triton.jit(do_not_specialize=["start", "N"])
def _turn_and_store(  # type: ignore[no-untyped-def]
    q, k, v, q_row, k_row, v_row, cos, sin, q_weight, k_weight, q_eps, k_eps, q_out, keys, values, starts, start, N,
    by_sequence, by_head, by_slot,
    H: tl.constexpr, G: tl.constexpr, HALF: tl.constexpr, NORMED: tl.constexpr, STARTS: tl.constexpr,
    BH: tl.constexpr, BG: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """One row: its queries to ``q_out`` [R, h, d], its keys and values to a slot of ``keys`` and ``values``."""
    r = tl.program_id(0).to(tl.int64)
    b = r // N
    slot = r % N + (tl.load(starts + b) if STARTS else start)
    cos += r * 2 * HALF
    sin += r * 2 * HALF
    first, second = _turned(q + r * q_row, cos, sin, q_weight, q_eps, H, HALF, NORMED, BH, BD)
    i = tl.arange(0, BD)[None, :]
    h = tl.arange(0, BH)[:, None]
    out = q_out + r * H * 2 * HALF + h * 2 * HALF + i
    tl.store(out, first, mask=(h < H) & (i < HALF))
    tl.store(out + HALF, second, mask=(h < H) & (i < HALF))
    first, second = _turned(k + r * k_row, cos, sin, k_weight, k_eps, G, HALF, NORMED, BG, BD)
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


# Their calls ---------------------------------------------------------------------------------------------------------


def add_and_norm(x_RD: Tensor, more_RD: Tensor | None, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x + more, its RMSNorm), [R, D] each. ``more`` None: nothing is added, and the first is ``x`` itself."""
    (R, D), out_RD = x_RD.shape, torch.empty_like(x_RD)
    total_RD = x_RD if more_RD is None else torch.empty_like(x_RD)
    more = x_RD if more_RD is None else more_RD
    warps = 4 if D <= 2048 else 8 if D <= 8192 else 16
    _add_and_norm[(R,)](x_RD, more, weight_D, total_RD, out_RD, eps, D, more_RD is not None, triton.next_power_of_2(D), num_warps=warps)
    return total_RD, out_RD


def gated(gate_RW: Tensor, up_RW: Tensor) -> Tensor:
    """silu(gate) * up, [R, W]. Rows may lie apart."""
    R, W = gate_RW.shape
    out_RW = gate_RW.new_empty(R, W)
    _gate[(R, triton.cdiv(W, GATED))](gate_RW, up_RW, out_RW, gate_RW.stride(0), up_RW.stride(0), W, GATED, num_warps=4)
    return out_RW


class Norm:
    """An RMSNorm's weight and epsilon."""

    def __init__(self, module: Any) -> None:
        self.weight = module.weight.detach()
        self.eps = float(module.eps if hasattr(module, "eps") else module.variance_epsilon)


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
    _turn_and_store[(B * N,)](
        q_RW, k_RW, v_RW, q_RW.stride(0), k_RW.stride(0), v_RW.stride(0), *cos_sin, *weights, *([x.eps for x in norms] or [0.0, 0.0]),
        q_BNhd, keys, values, start if starts else q_RW, 0 if starts else start, N, *keys.stride()[:3],
        h, g, d // 2, bool(norms), starts, *map(triton.next_power_of_2, (h, g, d // 2)), num_warps=4,
    )  # fmt: skip
    return q_BNhd


class Layer:
    """A Llama-shaped layer of transformers, with or without norms of each head's queries and keys."""

    def __init__(self, theirs: Any, sizes: tuple[int, int, int], own: bool) -> None:
        """``own``: matrices that read the same input may be stored as one."""
        attention, mlp = theirs.self_attn, theirs.mlp
        self.sizes, (heads, kv_heads, head_dim) = sizes, sizes
        self.before, self.after = Norm(theirs.input_layernorm), Norm(theirs.post_attention_layernorm)
        self.head_norms = [Norm(getattr(attention, name)) for name in ("q_norm", "k_norm") if hasattr(attention, name)]
        self.qkv = _products([getattr(attention, name) for name in JOINT[0]], own)
        self.feed = _products([getattr(mlp, name) for name in JOINT[1]], own)
        self.out, self.down = _products([attention.o_proj], False), _products([mlp.down_proj], False)
        self.widths = [count * head_dim for count in (heads, kv_heads, kv_heads)]
        self.mlp = mlp.down_proj.in_features

    def attend(self, y_RD: Tensor, shape: torch.Size, cos_sin: Sequence[Tensor], memory: Memory, place: int, sees: Sees) -> Tensor:
        """The attention's output of rows that are normed, [R, D]. ``cos_sin``: [R, d] each."""
        (B, N), (h, g, d), room = shape[:2], self.sizes, memory.room(place, shape[1])
        q_RW, k_RW, v_RW = _apart([F.linear(y_RD, *each) for each in self.qkv], self.widths)
        keys, values = (y_RD.new_empty(B, g, N, d) for _ in range(2)) if room is None else (room.keys, room.values)
        start = 0 if room is None else room.start
        q_BNhd = turn(q_RW, k_RW, v_RW, cos_sin, self.head_norms, self.sizes, (B, N), keys, values, start)
        if room is None:
            segments = memory.write(place, keys, values)
        else:
            segments = [(keys[:B, :, room.first : room.stop], values[:B, :, room.first : room.stop])]
        if room is not None and N <= KEPT and split_attention.supports(q_BNhd, keys):
            bias = sees.bias(N, room.stop - room.first, 1, keys.dtype, keys.device)
            found_BNhd = split_attention.attend(q_BNhd, *segments[0], bias)
        else:
            found_BNhd = sees.attend(q_BNhd.transpose(1, 2), segments).transpose(1, 2)
        return F.linear(found_BNhd.reshape(B * N, h * d), *self.out[0])

    def fed(self, y_RD: Tensor) -> Tensor:
        """The MLP's output of rows that are normed, [R, D]."""
        gate_RW, up_RW = _apart([F.linear(y_RD, *each) for each in self.feed], [self.mlp, self.mlp])
        return F.linear(gated(gate_RW, up_RW), *self.down[0])


class Fused:
    """``decoder`` (a language model without its head) of a structure that heads/lean.py knows, with the same weights."""

    native, memory_dtype, passes = None, None, "fused kernels between the matrix products"

    def __init__(self, decoder: Any, rope: Rope, sizes: tuple[int, int, int], own: bool) -> None:
        self.embedding, self.rope = decoder.embed_tokens, rope.to(decoder.embed_tokens.weight.device)
        self.layers = [Layer(layer, sizes, own) for layer in decoder.layers]
        self.norm = None if isinstance(decoder.norm, nn.Identity) else Norm(decoder.norm)
        if own and torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # the matrices that were joined stood in blocks too small for what comes now

    def read(
        self, tokens_BN: Tensor, positions_BN: Tensor, memory: Memory, sees: Sees, taps: Collection[int] = ()
    ) -> tuple[dict[int, Tensor], Tensor]:
        """(tap -> state, final state), [B, N, D] each. Keys and values of the rows are appended to ``memory``."""
        x = F.embedding(tokens_BN, self.embedding.weight)
        shape, states = x.shape, dict[int, Tensor]()
        x, more = x.flatten(0, 1), None
        cos_sin = [y.to(x.dtype).expand(shape[0], -1, -1, -1).reshape(len(x), -1) for y in self.rope(positions_BN)]
        # Triton launches on the current device. A pass is computed in the target's own dtype, also within a training's autocast
        with torch.cuda.device_of(x), torch.autocast(x.device.type, enabled=False):
            for i, layer in enumerate(self.layers):
                x, y = add_and_norm(x, more, layer.before.weight, layer.before.eps)
                if i in taps:
                    states[i] = x.view(shape)
                x, y = add_and_norm(x, layer.attend(y, shape, cos_sin, memory, i, sees), layer.after.weight, layer.after.eps)
                more = layer.fed(y)
            assert more is not None
            final = x + more if self.norm is None else add_and_norm(x, more, self.norm.weight, self.norm.eps)[1]
        if len(self.layers) in taps:
            states[len(self.layers)] = final.view(shape)
        return states, final.view(shape)


def _products(modules: Sequence[Any], own: bool) -> list[tuple[Tensor, Tensor | None]]:
    """(matrix, bias) of each module; one pair for all of them where ``own`` allows it. The modules then read views of the one matrix, so
    that nothing is stored twice.
    """
    if len(modules) == 1 or not own or len({m.bias is None for m in modules}) > 1:
        return [(m.weight.detach(), None if m.bias is None else m.bias.detach()) for m in modules]
    weight = torch.cat([m.weight.detach() for m in modules])
    for module, part in zip(modules, weight.split([m.out_features for m in modules]), strict=True):
        module.weight.data = part
    return [(weight, None if modules[0].bias is None else torch.cat([m.bias.detach() for m in modules]))]


def _apart(found: Sequence[Tensor], widths: Sequence[int]) -> Sequence[Tensor]:
    """The results of ``_products``, one for each module."""
    return found if len(found) > 1 else found[0].split(list(widths), dim=-1)
