"""The divergences of ``loss.kernel=triton``: one kernel computes the loss of a row of draft logits and writes the gradient over it.

The chunked form (trainers/losses.py) writes the log-softmax of both sides, the divergence and its gradient to memory, each in a buffer of
its own. Here they stay in registers. The drafter's logits are read three times and written once, those of the target are read twice. Sums
are fp32 (fp64 for logits in fp64). The gradients with respect to the draft logits are written out by hand:

    KL:     P q - p, with P = sum p, less than 1 for a trimmed vocabulary
    alpha:  q (w - sum w q), with alpha = sum min(p, q) and w = [q < p] (1/2 where q = p)
    CE:     q - [v = token]
    others: functions of a row's KL and alpha, by the chain rule

This module is imported only where it is used: it needs triton, and a GPU or TRITON_INTERPRET=1.

Shape suffixes: C positions that the target judges, R draft rows, V vocabulary of the drafter, W vocabulary of the target.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from headstart.trainers.divergences.teacher import row_of
from headstart.trainers.terms import Judged, Weights

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # triton reads it at import, too
BLOCK = 4096  # elements of a row that are processed together


@triton.jit
def _log_sum_exp(row, size: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The log-sum-exp of a row, and the index of its largest entry."""
    high = tl.full([], float("-inf"), WIDE)
    total = tl.full([], 0.0, WIDE)
    best = tl.full([], 0, tl.int32)
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(row + at, mask=at < size, other=float("-inf")).to(WIDE)
        most = tl.max(x, 0)
        best = tl.where(most > high, start + tl.argmax(x, 0).to(tl.int32), best)
        both = tl.maximum(high, most)
        both = tl.where(both == float("-inf"), 0.0, both).to(WIDE)
        total = total * tl.exp(high - both) + tl.sum(tl.exp(x - both), 0)
        high = tl.maximum(high, most)
    return high + tl.log(total), best


@triton.jit
def _places(at, ids, V: tl.constexpr, TRIMMED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Indices of the drafter's tokens in the target's logits."""
    return tl.load(ids + at, mask=at < V, other=0) if TRIMMED else at


@triton.jit
def _look(  # type: ignore[no-untyped-def]
    said, stride, ids, lse_C, best_C, mass_C, entropy_C,
    W: tl.constexpr, V: tl.constexpr, TRIMMED: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Statistics of the target's logits at one position: log-sum-exp and most likely token over its whole vocabulary, probability mass and
    entropy over the drafter's tokens.
    """
    c = tl.program_id(0).to(tl.int64)
    said += c * stride
    lse, best = _log_sum_exp(said, W, WIDE, BLOCK)
    mass = tl.full([], 0.0, WIDE)
    entropy = tl.full([], 0.0, WIDE)
    for start in range(0, V, BLOCK):
        at = start + tl.arange(0, BLOCK)
        place = _places(at, ids, V, TRIMMED)
        log_p = tl.load(said + place, mask=at < V, other=float("-inf")).to(WIDE) - lse
        p = tl.exp(log_p)
        mass += tl.sum(p, 0)
        entropy -= tl.sum(tl.where(p > 0, p * log_p, 0.0), 0)
    tl.store(lse_C + c, lse)
    tl.store(best_C + c, best)
    tl.store(mass_C + c, mass)
    tl.store(entropy_C + c, entropy)


@triton.jit
def _judge(  # type: ignore[no-untyped-def]
    logits, stride, said, said_stride, place_R, ids, lse_C, mass_C, entropy_C, best_C, data_C, weight_R,
    loss_R, alpha_R, true_R, match_R, V: tl.constexpr,
    KL: tl.constexpr, TV: tl.constexpr, LK_ALPHA: tl.constexpr, LK_HYBRID: tl.constexpr, ETA: tl.constexpr, CE: tl.constexpr,
    DATA_CE: tl.constexpr, GRAD: tl.constexpr, TRIMMED: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The loss and figures of one row. With GRAD the gradient of the weighted loss overwrites the logits."""
    r = tl.program_id(0).to(tl.int64)
    c = tl.load(place_R + r).to(tl.int64)
    logits += r * stride
    said += c * said_stride
    lse_q, most = _log_sum_exp(logits, V, WIDE, BLOCK)
    lse_p = tl.load(lse_C + c)
    cross = tl.full([], 0.0, WIDE)
    alpha = tl.full([], 0.0, WIDE)
    below = tl.full([], 0.0, WIDE)  # sum of q where q < p, half of it where q = p
    nll_best = tl.full([], 0.0, WIDE)  # summed in the loop: a separate load might see a gradient that another warp has stored already
    nll_data = tl.full([], 0.0, WIDE)
    best = tl.load(best_C + c)
    data = tl.load(data_C + c)
    for start in range(0, V, BLOCK):
        at = start + tl.arange(0, BLOCK)
        place = _places(at, ids, V, TRIMMED)
        log_q = tl.load(logits + at, mask=at < V, other=float("-inf")).to(WIDE) - lse_q
        p = tl.exp(tl.load(said + place, mask=at < V, other=float("-inf")).to(WIDE) - lse_p)
        q = tl.exp(log_q)
        cross += tl.sum(tl.where(p > 0, p * log_q, 0.0), 0)
        alpha += tl.sum(tl.minimum(p, q), 0)
        below += tl.sum(tl.where(q < p, q, tl.where(q == p, 0.5 * q, 0.0)), 0)
        nll_best -= tl.sum(tl.where(at == best, log_q, 0.0), 0)
        nll_data -= tl.sum(tl.where(at == data, log_q, 0.0), 0)
    kl = -tl.load(entropy_C + c) - cross
    mixed = tl.exp(-ETA * alpha)
    loss = KL * kl + TV * (1 - alpha) - LK_ALPHA * tl.log(tl.maximum(alpha, 1e-12)) + CE * nll_best + DATA_CE * nll_data
    loss += LK_HYBRID * (mixed * kl + (1 - mixed) * (1 - alpha))
    weight = tl.load(weight_R + r)
    tl.store(loss_R + r, weight * loss)
    tl.store(alpha_R + r, alpha)
    tl.store(true_R + r, tl.where(data >= 0, tl.exp(-nll_data), 0.0))
    tl.store(match_R + r, (most == best).to(tl.int8))
    if GRAD:
        of_kl = weight * (KL + LK_HYBRID * mixed)
        of_alpha = weight * (-TV - LK_HYBRID * (1 - mixed) - tl.where(alpha >= 1e-12, LK_ALPHA / tl.maximum(alpha, 1e-12), 0.0))
        of_best = weight * (best >= 0).to(WIDE) * CE
        of_data = weight * (data >= 0).to(WIDE) * DATA_CE
        mass = tl.load(mass_C + c)
        for start in range(0, V, BLOCK):
            at = start + tl.arange(0, BLOCK)
            place = _places(at, ids, V, TRIMMED)
            q = tl.exp(tl.load(logits + at, mask=at < V, other=float("-inf")).to(WIDE) - lse_q)
            p = tl.exp(tl.load(said + place, mask=at < V, other=float("-inf")).to(WIDE) - lse_p)
            under = tl.where(q < p, 1.0, tl.where(q == p, 0.5, 0.0))
            grad = of_kl * (mass * q - p) + of_alpha * q * (under - below)
            grad += of_best * (q - tl.where(at == best, 1.0, 0.0)) + of_data * (q - tl.where(at == data, 1.0, 0.0))
            tl.store(logits + at, grad.to(logits.dtype.element_ty), mask=at < V)


@dataclass
class Said:
    """The target's logits at C positions with the statistics that the kernel needs."""

    logits_CW: Tensor
    ids_V: Tensor | None  # the target's ids of the drafter's tokens; None: all
    lse_C: Tensor  # log-sum-exp over W
    mass_C: Tensor  # probability of the drafter's tokens together
    entropy_C: Tensor  # -sum p log p over the drafter's tokens
    best_C: Tensor  # index into V of the most likely token, or -1; as in trainers/divergences/teacher.py
    data_C: Tensor  # index into V of the token in the data, or -1

    @classmethod
    def of(cls, logits_CW: Tensor, data_C: Tensor, ids_V: Tensor | None) -> Said:
        """From the target's logits and the tokens of the data (target ids)."""
        C, W = logits_CW.shape
        lse_C, mass_C, entropy_C = (torch.empty(C, dtype=_wide(logits_CW), device=logits_CW.device) for _ in range(3))
        best_C = torch.empty(C, dtype=torch.int32, device=logits_CW.device)
        V = W if ids_V is None else len(ids_V)
        out = (lse_C, best_C, mass_C, entropy_C)
        if C:
            ids, how = best_C if ids_V is None else ids_V, (ids_V is not None, _kind(logits_CW), min(BLOCK, triton.next_power_of_2(W)))
            with torch.cuda.device_of(logits_CW):  # triton launches on the current device
                _look[(C,)](logits_CW, logits_CW.stride(0), ids, *out, W, V, *how, num_warps=8)
        if ids_V is not None:
            row_W = row_of(ids_V, W)
            return cls(logits_CW, ids_V, lse_C, mass_C, entropy_C, row_W[best_C], row_W[data_C])
        return cls(logits_CW, ids_V, lse_C, mass_C, entropy_C, best_C, data_C)


def judge(logits_RV: Tensor, said: Said, place_R: Tensor, weight_R: Tensor, weights: Weights, grad: bool) -> Judged:
    """Judge the draft logits [R, V]: row r by position ``place_R[r]`` of ``said``, with weight ``weight_R[r]``. With ``grad`` the gradient
    of the summed losses overwrites the logits.
    """
    R, V = logits_RV.shape
    loss_R, alpha_R, true_R = (torch.empty(R, dtype=_wide(logits_RV), device=logits_RV.device) for _ in range(3))
    match_R = torch.empty(R, dtype=torch.int8, device=logits_RV.device)
    ids = said.best_C if said.ids_V is None else said.ids_V
    about = (said.lse_C, said.mass_C, said.entropy_C, said.best_C, said.data_C, weight_R.contiguous(), loss_R, alpha_R, true_R, match_R)
    if R:
        how = (grad, said.ids_V is not None, _kind(logits_RV), min(BLOCK, triton.next_power_of_2(V)))
        rows = (logits_RV, logits_RV.stride(0), said.logits_CW, said.logits_CW.stride(0), place_R, ids)
        with torch.cuda.device_of(logits_RV):
            _judge[(R,)](*rows, *about, V, *weights, *how, num_warps=8)
    return Judged(loss_R, alpha_R, true_R, match_R.bool())


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _kind(x: Tensor) -> Any:
    return tl.float64 if x.dtype == torch.float64 else tl.float32
