"""Causal flash attention of training on a CPU, in C++ (heads/native_flash.h).

Both passes are operations of torch, so that they are counted (trainers/operations.py) and appear in traces.

Shape suffixes: B batch, h attention heads, g key-value heads (h is a multiple), N rows, d head size.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from headstart.heads import native

log = logging.getLogger(__name__)

VIEWS = ("q", "k", "v", "out", "grad", "dq", "dk", "dv")


class _View(ctypes.Structure):
    """``View`` of heads/native_flash.h."""

    _fields_ = [("at", native.POINTER), *((name, native.LONG) for name in ("batch", "head", "row"))]


class _Flash(ctypes.Structure):
    """``Flash`` of heads/native_flash.h."""

    _fields_ = [
        *((name, _View) for name in VIEWS),
        *((name, native.POINTER) for name in ("lse", "documents")),
        *((name, native.LONG) for name in ("count", "heads", "kv_heads", "rows", "d", "threads", "pieces")),
        ("scale", native.DOUBLE),
    ]


def takes(q: Tensor) -> bool:
    """Whether attention of these queries is computed here. Not with heads wider than 64 in bfloat16: torch uses the processor's bfloat16
    products, which are as fast from 128 on. Not for a subclass of Tensor, which may have no values. Not under torch.compile, which cannot
    trace the calls.
    """
    if torch.compiler.is_compiling():
        return False
    known = q.dtype == torch.float32 or (q.dtype == torch.bfloat16 and q.shape[-1] <= 64)
    return known and q.device.type == "cpu" and type(q) is Tensor and _right()


@functools.cache
def _right() -> bool:
    """Whether there is a library, and its results agree with a softmax in float64."""
    if native.library() is None:
        return False
    right = native.apart(_as_in_float64)
    if not right:
        log.warning("what the compiler made of heads/native_flash.h computes wrongly: training takes torch's attention, which is slower")
    return right


def _as_in_float64() -> bool:
    q, k, v, grad = torch.sin(torch.arange(4 * 2 * 70 * 20, dtype=torch.float64)).view(4, 1, 2, 70, 20)
    exact = [x.requires_grad_() for x in (q, k, v)]
    scores = (q @ k.mT).masked_fill(torch.ones(70, 70).triu(1).bool(), -torch.inf)
    expected = scores.softmax(-1) @ v
    expected = [expected, scores.logsumexp(-1), *torch.autograd.grad(expected, exact, grad)]
    q, k, v, grad = (x.detach().float() for x in (q, k, v, grad))
    out, lse = attend(q, k, v, (0, 70), 1.0)
    found = out, lse, *attend_backward(grad, q, k, v, out, lse, (0, 70), 1.0)
    return all(torch.allclose(a.double(), b, rtol=0, atol=1e-4) for a, b in zip(found, expected, strict=True))


@torch.library.custom_op("headstart::causal_flash", mutates_args=(), device_types="cpu")
def attend(q: Tensor, k: Tensor, v: Tensor, cuts: Sequence[int], scale: float) -> tuple[Tensor, Tensor]:
    """The output, [B, h, N, d], and the log-sum-exp, [B, h, N] in fp32, of ``q`` [B, h, N, d] over ``k`` and ``v`` [B, g, N, d]. ``cuts``:
    borders of documents in the flattened rows, those of the batch's rows among them.
    """
    q, k, v = _whole_rows(q, k, v)
    out, lse = _like(q, q.dtype), q.new_empty(q.shape[:3], dtype=torch.float32)
    _call("flash", cuts, scale, lse, pieces=True, q=q, k=k, v=v, out=out)
    return out, lse


@torch.library.custom_op("headstart::causal_flash_backward", mutates_args=(), device_types="cpu")
def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cuts: Sequence[int], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, in their shapes and dtypes. ``out`` and ``lse`` may come from a softmax over more keys than these."""
    grad, q, k, v, out = _whole_rows(grad.to(q.dtype), q, k, v, out)
    dq, dk, dv = _like(q, q.dtype), _like(q, torch.float32), _like(q, torch.float32)
    _call("flash_backward", cuts, scale, lse.float().contiguous(), q=q, k=k, v=v, out=out, grad=grad, dq=dq, dk=dk, dv=dv)
    if q.shape[1] > k.shape[1]:
        dk, dv = (x.unflatten(1, (k.shape[1], -1)).sum(2) for x in (dk, dv))
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def spans_of(cuts: Sequence[int], rows: int) -> list[tuple[int, int, int]]:
    """Of each document: its row of the batch, its first position in it, and the one behind its last."""
    found = [(start // rows, start, stop) for start, stop in itertools.pairwise(cuts)]
    return [(b, start - b * rows, stop - b * rows) for b, start, stop in found]


def _whole_rows(*some: Tensor) -> list[Tensor]:
    return [x if x.stride(-1) == 1 else x.contiguous() for x in some]


def _like(q: Tensor, dtype: torch.dtype) -> Tensor:
    """An empty [B, h, N, d] whose heads lie side by side, as the layer's output matrix reads them."""
    B, h, N, d = q.shape
    return q.new_empty((B, N, h, d), dtype=dtype).transpose(1, 2)


def _call(what: str, cuts: Sequence[int], scale: float, lse: Tensor, pieces: bool = False, **views: Tensor) -> None:
    """``pieces``: a head may be computed by several threads."""
    q, k, v = views["q"], views["k"], views["v"]
    fits = k.shape == v.shape and q.shape[::2] == k.shape[::2] and q.shape[3] == k.shape[3] and q.shape[1] % k.shape[1] == 0
    if not (q.dtype == k.dtype == v.dtype and fits):
        raise RuntimeError(f"attention of {tuple(q.shape)} over {tuple(k.shape)} and {tuple(v.shape)}, {q.dtype}, {k.dtype}, {v.dtype}")
    rows, spans = q.shape[2], spans_of(cuts, q.shape[2])
    documents = torch.tensor(spans, dtype=torch.int64, device="cpu")
    structs = [_View(x.data_ptr(), *x.stride()[:3]) if (x := views.get(name)) is not None else _View() for name in VIEWS]
    threads = torch.get_num_threads()
    sizes = len(spans), q.shape[1], k.shape[1], rows, q.shape[3], threads, -(-threads // max(len(spans) * q.shape[1], 1)) if pieces else 1
    about = _Flash(*structs, lse.data_ptr(), documents.data_ptr(), *sizes, scale)
    getattr(native.library(), f"{what}_{native.DTYPES[q.dtype]}")(ctypes.byref(about))
