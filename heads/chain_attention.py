"""Training's attention in closed form: a causal block over the roots plus one diagonal per earlier depth, with its own backward.

Shape suffixes: B batch, h attention heads, g key-value heads, n heads that share keys (h = g * n), N rows, d head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headstart.heads.flash import Cuts, flash, flash_backward


class ChainAttention(torch.autograd.Function):
    """Causal flash attention over the roots, merged by log-sum-exp with one dot product per earlier depth.

    Forward: with l0 the log-sum-exp of the causal block and s_j the score of the own row at depth j, the
    softmax over all of them is exp(l0 - l) times the block's output plus exp(s_j - l) v_j, l = log(e^l0 + sum e^s_j).
    Backward: the flash kernel's backward takes the output and log-sum-exp only to rebuild the probabilities and
    their row sum, so it is given the merged ones; the diagonals are a few lines. (As in ring attention, 2310.01889.)

    Keys and values are kept as they are written, [B, g, N, d], once for all depths. The diagonals accumulate as the kernel does:
    products of half precision are not rounded, nor are sums before the last.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, cuts: Cuts | None, scale: float | None, *kv: Tensor) -> Tensor:
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        out, lse = flash(q, kv[0], kv[1], cuts, scale=scale)
        scores: list[Tensor] = []
        if len(kv) > 2:
            q_BgnNd = _grouped(q, kv[0]).to(lse.dtype)
            scores = [(q_BgnNd * k[:, :, None]).sum(-1).flatten(1, 2).mul_(scale) for k in kv[2::2]]
            total = torch.logsumexp(torch.stack([lse, *scores]), 0)
            merged = out * (lse - total).exp()[..., None]
            for s, v in zip(scores, kv[3::2], strict=True):
                weight = _grouped((s - total).exp()[..., None], v)
                _grouped(merged, v).addcmul_(v[:, :, None].to(lse.dtype), weight)
            out, lse = merged.to(q.dtype), total
        ctx.cuts, ctx.scale, ctx.segments = cuts, scale, len(kv) // 2
        ctx.save_for_backward(q, out, lse, *kv, *scores)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, out, lse, *saved = ctx.saved_tensors
        kv, scores = saved[: 2 * ctx.segments], saved[2 * ctx.segments :]
        dq, *grads = flash_backward(grad, q, kv[0], kv[1], out, lse, ctx.cuts, ctx.scale)
        if scores:
            delta, dtype = (grad * out.to(lse.dtype)).sum(-1), lse.dtype
            dq = dq.to(dtype)
            q_BgnNd, grad_BgnNd, dq_BgnNd = (_grouped(x, kv[0]) for x in (q.to(dtype), grad.to(dtype), dq))
            for s, k, v in zip(scores, kv[2::2], kv[3::2], strict=True):
                p = (s - lse).exp()
                ds = p * ((grad_BgnNd * v[:, :, None]).sum(-1).flatten(1, 2) - delta) * ctx.scale
                p_BgnN1, ds_BgnN1 = (_grouped(x[..., None], v) for x in (p, ds))
                dq_BgnNd.addcmul_(k[:, :, None].to(dtype), ds_BgnN1)
                grads += [(ds_BgnN1 * q_BgnNd).sum(2).to(k.dtype), (p_BgnN1 * grad_BgnNd).sum(2).to(v.dtype)]
        return dq.to(q.dtype), None, None, *grads


def _grouped(x: Tensor, keys: Tensor) -> Tensor:
    """[B, h, ..] as [B, g, n, ..]: beside their keys and values [B, g, 1, ..]."""
    return x.unflatten(1, (keys.shape[1], -1))
