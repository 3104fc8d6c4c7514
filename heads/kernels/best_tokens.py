"""The likeliest tokens of rows of logits, with their log probabilities, in two passes (Triton).

torch takes about twenty kernels for this (a radix selection, a sort, a logsumexp), which together take longer than the drafter's layer.
Here each block finds the best tokens of one part of the vocabulary, one after the other, and a second kernel finds the best of those.

Shape suffixes: R rows, V vocabulary, P parts of it, K tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headstart.heads.kernels.launch import MOST_TOKENS

PART = 2048  # logits per block


@triton.jit
def _flip(bits):  # type: ignore[no-untyped-def]
    """The bits of fp32 numbers to integers of the same order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _best_of_part(logits, keys, tops, sums, row, V, K: tl.constexpr, PART: tl.constexpr):  # type: ignore[no-untyped-def]
    """The K best logits of one part of a row, each as a 64-bit key: the logit in the upper half, 0x7FFFFFFF - token in the lower one, so
    that among equal logits the first is the best. Also the largest logit, and the sum of exp(logit - largest) over the part.
    """
    r, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    token = part * PART + tl.arange(0, PART)
    x = tl.load(logits + r * row + token, mask=token < V, other=float("-inf")).to(tl.float32) + 0.0  # zeros of one sign
    top = tl.max(x, 0)
    tl.store(tops + r * parts + part, top)
    tl.store(sums + r * parts + part, tl.sum(tl.exp(x - tl.where(top == float("-inf"), 0.0, top)), 0))
    lowest = -0x7FFFFFFFFFFFFFFF
    key = tl.where(token < V, (_flip(x.to(tl.int32, bitcast=True)).to(tl.int64) << 32) + (0x7FFFFFFF - token), lowest)
    for k in range(K):
        best = tl.max(key, 0)
        tl.store(keys + (r * parts + part) * K + k, best)
        key = tl.where(key == best, lowest, key)


@triton.jit
def _best(keys, tops, sums, values, tokens, P, K: tl.constexpr, BP: tl.constexpr, BPK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The K best of all parts of a row, and their log probabilities."""
    r, lowest = tl.program_id(0).to(tl.int64), -0x7FFFFFFFFFFFFFFF
    p = tl.arange(0, BP)
    top_P = tl.load(tops + r * P + p, mask=p < P, other=float("-inf"))
    top = tl.max(top_P, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    total = base + tl.log(tl.sum(tl.exp(top_P - base) * tl.load(sums + r * P + p, mask=p < P, other=0.0), 0))
    i = tl.arange(0, BPK)
    key = tl.load(keys + r * P * K + i, mask=i < P * K, other=lowest)
    for k in range(K):
        best = tl.max(key, 0)
        value = _flip((best >> 32).to(tl.int32)).to(tl.float32, bitcast=True)
        tl.store(values + r * K + k, value - total)
        tl.store(tokens + r * K + k, 0x7FFFFFFF - (best & 0xFFFFFFFF))
        key = tl.where(key == best, lowest, key)


def best_tokens(logits_RV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(log probabilities in fp32, tokens in int64) of the ``count`` likeliest tokens of each row, [R, count] each, best first. ``count`` is
    at most ``MOST_TOKENS`` (launch.py) and V. There may be gaps between the rows of ``logits_RV``.
    """
    (R, V), device = logits_RV.shape, logits_RV.device
    assert count <= min(V, MOST_TOKENS) and logits_RV.stride(1) == 1
    P = triton.cdiv(V, PART)
    keys, tokens = (torch.empty(size, dtype=torch.int64, device=device) for size in ((R, P, count), (R, count)))
    tops, sums, values = (torch.empty(size, dtype=torch.float32, device=device) for size in ((R, P), (R, P), (R, count)))
    with torch.cuda.device_of(logits_RV):
        _best_of_part[(R, P)](logits_RV, keys, tops, sums, logits_RV.stride(0), V, count, PART, num_warps=8)
        sizes = triton.next_power_of_2(P), triton.next_power_of_2(P * count)
        _best[(R,)](keys, tops, sums, values, tokens, P, count, *sizes, num_warps=4)
    return values, tokens
