"""Training's attention in closed form: a causal block over the roots plus one diagonal per earlier depth, with its own backward.

Shape suffixes: B batch, h attention heads, N rows, d head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class ChainAttention(torch.autograd.Function):
    """Causal flash attention over the roots, merged by log-sum-exp with one dot product per earlier depth.

    Forward: with l0 the log-sum-exp of the causal block and s_j the score of the own row at depth j, the
    softmax over all of them is exp(l0 - l) times the block's output plus exp(s_j - l) v_j, l = log(e^l0 + sum e^s_j).
    Backward: the flash kernel's backward takes the output and log-sum-exp only to rebuild the probabilities and
    their row sum, so it is given the merged ones; the diagonals are three lines. (As in ring attention, 2310.01889.)
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, spans: list[tuple[slice, slice]], *kv: Tensor) -> Tensor:
        k0, v0, scale = kv[0], kv[1], q.shape[-1] ** -0.5
        exact = torch.promote_types(q.dtype, torch.float32)
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=exact)
        for b, t in spans:
            out[b, :, t], lse[b, :, t] = _flash(q[b, :, t], k0[b, :, t], v0[b, :, t])
        if len(kv) > 2:
            scores = [(q * k).sum(-1, dtype=exact) * scale for k in kv[2::2]]
            total = torch.logsumexp(torch.stack([lse, *scores]), 0)
            merged = out * (lse - total).exp()[..., None]
            for s, v in zip(scores, kv[3::2], strict=True):
                merged = merged + v * (s - total).exp()[..., None]
            out, lse = merged.to(q.dtype), total
        ctx.spans = spans
        ctx.save_for_backward(q, out, lse, *kv)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, out, lse, *kv = ctx.saved_tensors
        scale, grad = q.shape[-1] ** -0.5, grad.contiguous()
        dq, dk0, dv0 = torch.empty_like(q), torch.empty_like(kv[0]), torch.empty_like(kv[1])
        for b, t in ctx.spans:
            rows = [x[b, :, t] for x in (grad, q, kv[0], kv[1], out, lse)]
            dq[b, :, t], dk0[b, :, t], dv0[b, :, t] = _flash_backward(*rows)
        grads: list[Tensor] = [dk0, dv0]
        if len(kv) > 2:
            delta = (grad * out).sum(-1, dtype=lse.dtype)
            for k, v in zip(kv[2::2], kv[3::2], strict=True):
                p = ((q * k).sum(-1, dtype=lse.dtype) * scale - lse).exp()
                ds = (p * ((grad * v).sum(-1, dtype=lse.dtype) - delta) * scale)[..., None].to(q.dtype)
                dq = dq + ds * k
                grads += [ds * q, p[..., None].to(q.dtype) * grad]
        return dq, None, *grads


def has_flash(q: Tensor) -> bool:
    # On CUDA the flash kernel takes half precision only; fp32 there uses the dense mask (tests, not training).
    return q.device.type == "cpu" or (q.device.type == "cuda" and q.dtype in (torch.bfloat16, torch.float16))


def _flash(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Causal attention and its log-sum-exp [B, h, N] (natural logarithm, at least fp32), by torch's own kernels."""
    if q.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
        return out, lse
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
    return out, lse


def _flash_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, 0.0, True)
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # unused: no dropout
    n = q.shape[2]
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse.contiguous(), None, None, n, n, 0.0, True, seed, seed[:0]
    )
