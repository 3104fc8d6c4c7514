"""A frozen layer as plain functions, for decoding on a CPU: the numbers of ``heads.layers`` in fewer and cheaper calls.

One row through a small layer is some microseconds of arithmetic; what ``nn.Module`` costs at every call is more. So products that
read the same input are joined, residuals are added within a product, and the weights are bound beforehand.

Shape suffixes: B batch, N rows of any kind, d head size.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heads.memory import Memory
from heads.prepack import JOINT, joint
from heads.visibility import Sees

CosSin = tuple[Tensor, Tensor]
Product = Callable[[Tensor], Tensor]
Added = Callable[[Tensor, Tensor], Tensor]  # of x and a residual
Attends = Callable[[Tensor, CosSin, Memory, int, Sees, Tensor], Tensor]

FEW = 8192  # numbers: beyond, twice as many cost more than the operations saved (measured for sizes from 160 to 4,096)
ATTENTION, FEED = JOINT
packed_product = torch.ops.mkldnn._linear_pointwise.default
packed_sum = torch.ops.mkldnn._linear_pointwise.binary


def norm(module: Any) -> Product:
    """Of an RMSNorm. torch has no kernel of its own for it on a CPU, but one for the layer norm: that of x beside -x, whose mean is 0, is
    the RMSNorm of both. While there are few numbers it takes two thirds of the time.
    """
    weight, eps, size = module.weight, module.eps if hasattr(module, "eps") else module.variance_epsilon, module.weight.numel()
    signs, twice = torch.tensor([[1.0], [-1.0]], dtype=weight.dtype), torch.stack([weight.detach(), weight.detach()])

    def normed(x: Tensor) -> Tensor:
        if x.numel() > FEW:
            return torch.rms_norm(x, [size], weight, eps)
        return torch.native_layer_norm(x.unsqueeze(-2) * signs, [2, size], twice, None, eps)[0].select(-2, 0)

    return normed


def product(layer: nn.Linear) -> Product:
    """x [B, N, H] times the layer's matrix, in the order that is fastest for so many rows."""
    weight, bias, twin, since = _bound(layer)
    size_in, size_out = layer.in_features, layer.out_features
    if weight.is_mkldnn:
        return lambda x: packed_product(x, weight, bias, "none", [], "")
    turned = weight.t()

    def dense(x: Tensor) -> Tensor:
        flat = x.reshape(-1, size_in)
        out = torch.mm(flat, turned) if bias is None else torch.addmm(bias, flat, turned)
        return out.view(x.shape[0], x.shape[1], size_out)

    if twin is None:
        return dense
    return lambda x: packed_product(x, twin, bias, "none", [], "") if x.shape[0] * x.shape[1] >= since else dense(x)


def added(layer: nn.Linear) -> Added:
    """The same, added to a residual."""
    weight, bias, twin, since = _bound(layer)
    size_in, size_out = layer.in_features, layer.out_features
    if weight.is_mkldnn:
        return lambda x, residual: packed_sum(x, residual, weight, bias, "add")
    turned = weight.t()

    def dense(x: Tensor, residual: Tensor) -> Tensor:
        flat = residual.reshape(-1, size_out)
        return torch.addmm(flat if bias is None else flat + bias, x.reshape(-1, size_in), turned).view(x.shape[0], x.shape[1], size_out)

    if twin is None:
        return dense
    return lambda x, residual: packed_sum(x, residual, twin, bias, "add") if x.shape[0] * x.shape[1] >= since else dense(x, residual)


def _bound(layer: nn.Linear) -> tuple[Tensor, Tensor | None, Tensor | None, float]:
    return layer.weight, layer.bias, getattr(layer, "twin", None), getattr(layer, "since", inf)


def attention(module: Any, heads: int, kv_heads: int, head_dim: int) -> Attends:
    """Llama's attention (``heads.layers.Attention``, or one of transformers with the same parts), with or without norms of each head."""
    both, half = heads + kv_heads, head_dim // 2
    whole = joint(module, ATTENTION)
    parts = [product(getattr(module, name)) for name in ATTENTION] if whole is None else []
    read = (lambda x: torch.cat([part(x) for part in parts], dim=-1)) if whole is None else product(whole)
    out = added(module.o_proj)
    norms = [getattr(module, name, None) for name in ("q_norm", "k_norm")]
    normed = [None if m is None or isinstance(m, nn.Identity) else norm(m) for m in norms]

    def attends(x: Tensor, cos_sin: CosSin, memory: Memory, layer: int, sees: Sees, residual: Tensor) -> Tensor:
        cos, sin = cos_sin
        B, N = x.shape[0], x.shape[1]
        all_BhNd = read(x).view(B, N, -1, head_dim).transpose(1, 2)
        turns = all_BhNd[:, :both]
        if normed[0] is not None and normed[1] is not None:
            turns = torch.cat([normed[0](turns[:, :heads]), normed[1](turns[:, heads:])], dim=1)
        turned = torch.addcmul(turns * cos, turns.roll(half, -1), sin)
        if turned.dtype != x.dtype:
            turned = turned.to(x.dtype)
        found = sees.attend(turned[:, :heads], memory.write(layer, turned[:, heads:], all_BhNd[:, both:]))
        return out(found.transpose(1, 2).reshape(B, N, -1), residual)

    return attends


def feed(module: Any) -> Added:
    """SwiGLU (``heads.layers.MLP``, or one of transformers with the same parts), added to a residual."""
    whole, out = joint(module, FEED), added(module.down_proj)
    if whole is None:
        gate, up = product(module.gate_proj), product(module.up_proj)
        return lambda x, residual: out(F.silu(gate(x)).mul_(up(x)), residual)
    read, width = product(whole), module.down_proj.in_features

    def feeds(x: Tensor, residual: Tensor) -> Tensor:
        both = read(x)
        return out(F.silu(both[..., :width]).mul_(both[..., width:]), residual)

    return feeds
