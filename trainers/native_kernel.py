"""The divergences of ``loss.kernel=native``: C++ code for CPUs (heads/native_loss.h), which computes the loss of a row of draft logits and
overwrites the row with its gradient. The formulas are those of trainers/kernel.py. Sums are fp32.

Shape suffixes: C positions that the target judges, R draft rows, V vocabulary of the drafter, W vocabulary of the target.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from headstart.heads import native
from headstart.trainers.divergences import Teacher, find
from headstart.trainers.divergences.teacher import row_of
from headstart.trainers.terms import Judged, Weights

log = logging.getLogger(__name__)


class _Judge(ctypes.Structure):
    """The struct ``Judge`` of heads/native_loss.h."""

    _fields_ = [
        *((name, native.POINTER) for name in ("logits", "said", "ids", "place", "best", "data", "lse", "weight")),
        *((name, native.POINTER) for name in ("loss", "alpha", "truth", "match")),
        *((name, native.LONG) for name in ("rows", "V", "logits_row", "said_row", "grad", "threads")),
        *((name, native.DOUBLE) for name in Weights._fields),
    ]


@dataclass
class Said:
    """The target's logits at C positions with the statistics that the loss needs."""

    logits_CW: Tensor
    ids_V: Tensor | None  # the target's ids of the drafter's tokens; None: all
    lse_C: Tensor  # log-sum-exp over W
    best_C: Tensor  # index into V of the most likely token, or -1
    data_C: Tensor  # index into V of the token in the data, or -1

    @classmethod
    def of(cls, logits_CW: Tensor, data_C: Tensor, ids_V: Tensor | None) -> Said:
        """From the target's logits and the tokens of the data (target ids)."""
        C, W = logits_CW.shape
        logits_CW = logits_CW.contiguous()
        lse_C, best_C = (torch.empty(C, dtype=dtype, device="cpu") for dtype in (torch.float32, torch.int64))
        look = getattr(native.library(), f"look_{native.DTYPES[logits_CW.dtype]}")
        look.argtypes = [native.POINTER, *[native.LONG] * 3, *[native.POINTER] * 2, native.LONG]
        look(logits_CW.data_ptr(), W, C, W, lse_C.data_ptr(), best_C.data_ptr(), torch.get_num_threads())
        if ids_V is None:
            return cls(logits_CW, None, lse_C, best_C, data_C.contiguous())
        row_W = row_of(ids_V, W)
        return cls(logits_CW, ids_V.contiguous(), lse_C, row_W[best_C], row_W[data_C])


def judge(logits_RV: Tensor, said: Said, place_R: Tensor, weight_R: Tensor, weights: Weights, grad: bool) -> Judged:
    """Judge the draft logits [R, V]: row r by position ``place_R[r]`` of ``said``, with weight ``weight_R[r]``. With ``grad`` the gradient
    of the summed losses overwrites the logits.
    """
    (R, V), kinds = logits_RV.shape, native.DTYPES
    ids_V, W = said.ids_V, said.logits_CW.shape[1]
    if (judged := W if ids_V is None else len(ids_V)) != V:
        raise RuntimeError(f"draft logits of {V} tokens, and the target's of {judged}")
    loss_R, alpha_R, true_R = torch.empty(3, R, dtype=torch.float32, device="cpu")
    match_R = torch.empty(R, dtype=torch.int8, device="cpu")
    read = [place_R.contiguous(), said.best_C, said.data_C, said.lse_C, weight_R.float().contiguous()]
    sizes = R, V, logits_RV.stride(0), W, grad, torch.get_num_threads()
    places = [logits_RV.data_ptr(), said.logits_CW.data_ptr(), None if ids_V is None else ids_V.data_ptr()]
    about = _Judge(*places, *[x.data_ptr() for x in (*read, loss_R, alpha_R, true_R, match_R)], *sizes, *weights)
    getattr(native.library(), f"judge_{kinds[logits_RV.dtype]}_{kinds[said.logits_CW.dtype]}")(ctypes.byref(about))
    return Judged(loss_R, alpha_R, true_R, match_R.bool())


@functools.cache
def right() -> bool:
    """Whether the library is there and computes the same as torch in float64, up to rounding."""
    if native.library() is None:
        return False
    right = native.apart(_as_in_float64)
    if not right:
        log.warning("what the compiler made of heads/native_loss.h computes wrongly: training takes torch's operations, which are slower")
    return right


def _as_in_float64() -> bool:
    exact, said_CW = (f(torch.arange(37, dtype=torch.float64))[None] for f in (torch.sin, torch.cos))
    data_C, log_q = torch.tensor([3]), exact.requires_grad_().log_softmax(-1)
    teacher, weights = Teacher.of(said_CW.log_softmax(-1), data_C, None), {"kl": 1.0, "lk_hybrid": 1.0, "data_ce": 1.0}
    loss_R = torch.stack([find(name)(log_q, teacher) for name in weights]).sum(0)
    (grad_RV,) = torch.autograd.grad(loss_R, exact)
    logits_RV, said = exact.detach().float(), Said.of(said_CW.float(), data_C, None)
    made = judge(logits_RV, said, torch.tensor([0]), torch.ones(1), Weights.of(weights, None), True)
    return all(torch.allclose(a.double(), b, rtol=0, atol=1e-4) for a, b in ((made.loss_R, loss_R.detach()), (logits_RV, grad_RV)))
