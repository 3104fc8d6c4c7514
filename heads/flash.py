"""Direct calls of flash attention kernels: torch's, and our own on a CPU (heads/native_flash.py).

torch's kernels are called below ``scaled_dot_product_attention``. Only there they return the log-sum-exp, take heads that share keys and
values without copies, and compute many documents in one launch.

Shape suffixes: B batch, h attention heads, g key-value heads (h is a multiple), N rows, M rows in memory, d head size.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from headstart.heads import native_flash

Cuts = tuple[int, ...]  # borders of documents in the flattened rows [B * N], including 0 and B * N


def has_flash(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the kernels support the device, dtypes and head sizes of these queries, keys and values."""
    if not q.dtype == k.dtype == v.dtype or not q.shape[-1] == k.shape[-1] == v.shape[-1]:
        return False
    if q.device.type == "cpu":
        return q.is_floating_point()
    if q.device.type != "cuda" or q.shape[-1] % 8:
        return False
    causal = q.shape[2] == k.shape[2]  # torch rejects a causal mask of other shapes; here it is split into two calls
    params = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, causal, True)
    return torch.backends.cuda.can_use_flash_attention(params)


def flash(
    q: Tensor, k: Tensor, v: Tensor, cuts: Cuts | None = None, causal: bool = True, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of q [B, h, N, d] over k and v [B, g, M, d]: (output [B, h, N, d], log-sum-exp [B, h, N]).

    The log-sum-exp is a natural logarithm, in at least fp32.
    ``cuts``: rows see only their own document; None: each row of the batch is one document. With ``causal`` or ``cuts``, N must equal M.
    ``scale``: factor on the scores; None: 1 / sqrt(d).
    """
    if causal and native_flash.takes(q):
        return native_flash.attend(q, k, v, cuts or _whole(q), q.shape[-1] ** -0.5 if scale is None else scale)
    if q.device.type == "cpu":
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        if cuts is None or len(cuts) == len(q) + 1:  # there are no other borders than those of the batch's rows
            return op(q, k, v, 0.0, causal, scale=scale)
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.promote_types(q.dtype, torch.float32))
        for b, t in _spans(cuts, q.shape[2]):
            out[b, :, t], lse[b, :, t] = op(q[b, :, t], k[b, :, t], v[b, :, t], 0.0, causal, scale=scale)
        return out, lse
    (B, _, N, _), borders = q.shape, _borders(q, k, cuts)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(_rows(q), _rows(k), _rows(v), *borders, 0.0, causal, False, scale=scale)
    return _heads(out, B), lse.view(-1, B, N).transpose(0, 1)


def flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cuts: Cuts | None = None, scale: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v for causal attention, in their shapes. ``out`` and ``lse`` may come from a softmax over more keys
    than these.
    """
    if native_flash.takes(q):
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        return native_flash.attend_backward(grad, q, k, v, out, lse, cuts or _whole(q), scale)
    if q.device.type == "cpu":
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        if cuts is None or len(cuts) == len(q) + 1:  # there are no other borders than those of the batch's rows
            return op(grad, q, k, v, out, lse, 0.0, True, scale=scale)
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        for b, t in _spans(cuts, q.shape[2]):
            for whole, part in zip(grads, op(*(x[b, :, t] for x in (grad, q, k, v, out, lse)), 0.0, True, scale=scale), strict=True):
                whole[b, :, t] = part
        return grads
    borders, seed = _borders(q, k, cuts), torch.zeros(2, dtype=torch.uint64, device=q.device)  # unused, as there is no dropout
    rows, lse_hN = [_rows(x) for x in (grad, q, k, v, out)], lse.transpose(0, 1).flatten(1).contiguous()
    found = torch.ops.aten._flash_attention_backward(*rows, lse_hN, *borders, 0.0, True, seed, seed[:0], scale=scale)
    dq, dk, dv = (_heads(x, len(q)) for x in found)
    return dq, dk, dv


def flash_behind(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """Causal attention of q [B, h, N, d] over k and v [B, g, M, d] without an N x M mask, where the queries' own rows are the last N of the
    M. Returns [B, h, N, d]. It has no backward pass.
    """
    first = k.shape[2] - q.shape[2]
    if not first:  # without any key, torch's kernel divides by zero on a CPU, which ends the process
        return flash(q, k, v, scale=scale)[0].to(q.dtype)
    before, lse_before = flash(q, k[:, :, :first], v[:, :, :first], causal=False, scale=scale)
    own, lse_own = flash(q, k[:, :, first:], v[:, :, first:], scale=scale)
    total = torch.logaddexp(lse_before, lse_own)
    out = before * (lse_before - total).exp()[..., None]
    return out.addcmul_(own.to(out.dtype), (lse_own - total).exp()[..., None]).to(q.dtype)


def cuts_of(documents_BT: Tensor) -> Cuts:
    """The borders of contiguous documents, from each row's document number [B, T]. Batch rows have borders between them too."""
    (B, T), borders_BT = documents_BT.shape, documents_BT[:, 1:] != documents_BT[:, :-1]
    starts_BT = torch.nn.functional.pad(borders_BT, (1, 0), value=True)
    return (*starts_BT.flatten().nonzero()[:, 0].tolist(), B * T)


def _spans(cuts: Cuts, rows: int) -> Iterator[tuple[slice, slice]]:
    """(row of the batch, positions in it), as slices, of each document."""
    for b, start, stop in native_flash.spans_of(cuts, rows):
        yield slice(b, b + 1), slice(start, stop)


def _rows(x: Tensor) -> Tensor:
    """[B, h, N, d] to [B * N, h, d], which kernels for sequences of unequal length take. No copy if ``x`` comes straight from a
    projection.
    """
    return x.transpose(1, 2).flatten(0, 1)


def _heads(x: Tensor, batch: int) -> Tensor:
    return x.unflatten(0, (batch, -1)).transpose(1, 2)


def _whole(x: Tensor) -> Cuts:
    """The borders of the batch's rows."""
    return tuple(range(0, len(x) * x.shape[2] + 1, x.shape[2]))


def _borders(q: Tensor, k: Tensor, cuts: Cuts | None) -> tuple[Tensor, Tensor, int, int]:
    """(borders of queries, borders of keys, length of the longest document in each), as the kernels take them."""
    found = [cuts or _whole(x) for x in (q, k)]
    longest = [max(j - i for i, j in zip(some, some[1:], strict=False)) for some in found]
    on_device = [_on(some, q.device) for some in found]
    return on_device[0], on_device[1], longest[0], longest[1]


@functools.lru_cache(maxsize=16)
def _on(cuts: Sequence[int], device: torch.device) -> Tensor:
    """The borders on a device, cached: they are the same at every depth and in every layer."""
    with torch.inference_mode(False):
        return torch.tensor(cuts, dtype=torch.int32, device=device)
