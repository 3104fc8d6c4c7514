"""Training's attention in closed form: a causal block over the roots plus one diagonal per earlier depth, with its own backward pass.

Shape suffixes: B batch, h attention heads, g key-value heads, n heads that share keys (h = g * n), m is n or 1, N rows, d head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from headstart.heads.flash import Cuts, flash, flash_backward
from headstart.heads.kernels.launch import DTYPES, takes

ROWS = 128  # rows that a CPU multiplies at a time
GROUP = 16  # most heads that share keys, for the kernels in heads/kernels/diagonals.py: one program computes all of them
HEAD = 256  # largest head size for these kernels


class ChainAttention(torch.autograd.Function):
    """Causal flash attention over the roots, merged by log-sum-exp with one dot product per earlier depth.

    Forward: let l0 be the log-sum-exp of the causal block, and s_j the score of the row's own node at depth j. The softmax over
    all of them is exp(l0 - l) times the block's output plus the sum of exp(s_j - l) v_j, with l = log(e^l0 + sum e^s_j).
    Backward: the flash kernel's backward pass uses output and log-sum-exp only to rebuild the probabilities and the row sums of
    grad * out. So it gets the merged ones. The gradients of the diagonals are a few lines. (As in ring attention, 2310.01889.)

    Keys and values are kept as they are written, [B, g, N, d], once for all depths. The diagonals accumulate in fp32, as the kernel
    does: products of half-precision numbers are not rounded. On a GPU they are two kernels (heads/kernels/diagonals.py).
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, cuts: Cuts | None, scale: float | None, *kv: Tensor) -> Tensor:
        """``q`` [B, h, N, d]; ``kv``: keys and values of the roots, then of each later depth, [B, g, N, d] each. Returns [B, h, N, d].
        ``cuts``, ``scale``: as in ``heads.flash.flash``.
        """
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        out, lse = flash(q, kv[0], kv[1], cuts, scale=scale)
        scores: list[Tensor] = []
        ctx.fused = len(kv) > 2 and takes(q) and mergeable(q, kv)
        if ctx.fused:
            from headstart.heads.kernels import diagonals

            out, lse = diagonals.merge(q, out, lse, kv[2::2], kv[3::2], scale)
        elif len(kv) > 2:
            scores = [_dots(_grouped(q, k), k[:, :, None]).mul_(scale) for k in kv[2::2]]
            total = torch.logsumexp(torch.stack([lse, *scores]), 0)
            out = out * (lse - total).exp()[..., None]
            for s, v in zip(scores, kv[3::2], strict=True):
                _grouped(out, v).addcmul_(v[:, :, None].to(out.dtype), _grouped((s - total).exp()[..., None], v))
            out, lse = out.to(q.dtype), total
        ctx.cuts, ctx.scale, ctx.segments = cuts, scale, len(kv) // 2
        ctx.save_for_backward(q, out, lse, *kv, *scores)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of ``q`` and of each of ``kv``, in their dtypes."""
        q, out, lse, *saved = ctx.saved_tensors
        kv, scores = saved[: 2 * ctx.segments], saved[2 * ctx.segments :]
        dq, *grads = flash_backward(grad, q, kv[0], kv[1], out, lse, ctx.cuts, ctx.scale)
        if ctx.fused:
            from headstart.heads.kernels import diagonals

            dq, more = diagonals.merge_backward(grad, q, out, lse, dq, kv[2::2], kv[3::2], ctx.scale)
            grads += more
        elif scores:
            q_BgnNd, grad_BgnNd, dq = _grouped(q, kv[0]), _grouped(grad, kv[0]), dq.to(lse.dtype)
            delta = _dots(grad_BgnNd, _grouped(out, kv[0]))
            for s, k, v in zip(scores, kv[2::2], kv[3::2], strict=True):
                p = (s - lse).exp()
                ds = p * (_dots(grad_BgnNd, v[:, :, None]) - delta) * ctx.scale
                p, ds = (_grouped(x[..., None], k) for x in (p, ds))
                _grouped(dq, k).addcmul_(k[:, :, None].to(dq.dtype), ds)
                grads += [_summed(ds, q_BgnNd).to(k.dtype), _summed(p, grad_BgnNd).to(v.dtype)]
        return dq.to(q.dtype), None, None, *grads


def mergeable(q: Tensor, kv: Sequence[Tensor]) -> bool:
    """Whether the kernels support these queries, keys and values."""
    h, d, g = q.shape[1], q.shape[3], kv[0].shape[1]
    return all(x.dtype in DTYPES for x in (q, *kv)) and h <= GROUP * g and d <= HEAD and d % 8 == 0


def _grouped(x: Tensor, keys: Tensor) -> Tensor:
    """[B, h, ..] to [B, g, n, ..], which broadcasts with keys and values [B, g, 1, ..]."""
    return x.unflatten(1, (keys.shape[1], -1))


def _dots(x_BgnNd: Tensor, y_BgmNd: Tensor) -> Tensor:
    """Dot products over d: [B, h, N], at least fp32."""
    exact = torch.promote_types(x_BgnNd.dtype, torch.float32)
    return _by_rows(lambda x, y: (x.to(exact) * y).sum(-1), x_BgnNd, y_BgmNd).flatten(1, 2)


def _summed(weight_BgnN1: Tensor, x_BgnNd: Tensor) -> Tensor:
    """Weighted sum over the heads that share keys: [B, g, N, d]."""
    return _by_rows(lambda w, x: (w * x).sum(2, keepdim=True), weight_BgnN1, x_BgnNd).squeeze(2)


def _by_rows(f: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    """``f`` on pieces of the rows. On a CPU the products then stay in the cache, and never exist for all rows at once."""
    if x.device.type != "cpu" or x.shape[3] <= ROWS:
        return f(x, y)
    return torch.cat([f(*part) for part in zip(x.split(ROWS, 3), y.split(ROWS, 3), strict=True)], 3)
