"""Attention of few rows over a long memory, by a mask, on a GPU: the memory is split among the processors (Triton).

In a decoding round of one sequence with eight key-value heads, torch's kernels start eight blocks on a GPU that has room for hundreds. Here
each part of the memory is a block of its own, which keeps its softmax unnormalized; a second kernel adds the parts up, as in
Flash-Decoding. Heads that share keys are rows of one block, so that every key is read once. The mask is stored once for all heads.

Shape suffixes: B batch, N rows, M rows in memory, h heads, g key-value heads, d head size, R = group * N rows of a key-value head, Q rows
and K keys of a block, S parts.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, KEYS = 64, 64  # of a block, at most
HEAD = 128  # largest head size: with larger heads, a block does not fit in the shared memory of every GPU


@triton.jit(do_not_specialize=["M", "N"])
def _part(  # type: ignore[no-untyped-def]
    q, keys, values, bias, out, sums, tops, weights, scale, N, M, by_sequence, by_head, by_slot, bias_sequence, bias_row,
    GROUP: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BIASED: tl.constexpr, ALONE: tl.constexpr,
    SPAN: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """The rows of a block over one part of the memory: unnormalized sum, largest score, and sum of the exponentials. ``ALONE``: there is
    no other part, and the result is written to ``out``.
    """
    bg = tl.program_id(0).to(tl.int64)
    b, g, part, parts = bg // G, bg % G, tl.program_id(1), tl.num_programs(1)
    R = GROUP * N
    r_Q = tl.program_id(2) * BQ + tl.arange(0, BQ)
    d = tl.arange(0, BD)
    n_Q, h_Q = r_Q % N, g * GROUP + r_Q // N
    there = (r_Q < R)[:, None] & (d < D)[None, :]
    q_QD = tl.load(q + ((b * N + n_Q) * (GROUP * G) + h_Q)[:, None] * D + d[None, :], mask=there, other=0.0)
    top_Q = tl.full([BQ], float("-inf"), tl.float32)
    weight_Q = tl.zeros([BQ], tl.float32)
    sum_QD = tl.zeros([BQ, BD], tl.float32)
    keys += b * by_sequence + g * by_head
    values += b * by_sequence + g * by_head
    for start in range(0, SPAN * BK, BK):
        m_K = part * (SPAN * BK) + start + tl.arange(0, BK)
        inside = (m_K < M)[:, None] & (d < D)[None, :]
        place = m_K.to(tl.int64)[:, None] * by_slot + d[None, :]
        k_KD = tl.load(keys + place, mask=inside, other=0.0)
        s_QK = tl.dot(q_QD, tl.trans(k_KD)) * scale
        seen = (r_Q < R)[:, None] & (m_K < M)[None, :]
        if BIASED:
            s_QK += tl.load(bias + b * bias_sequence + n_Q[:, None] * bias_row + m_K[None, :], mask=seen, other=0.0).to(tl.float32)
        s_QK = tl.where(seen, s_QK, float("-inf"))
        new_Q = tl.maximum(top_Q, tl.max(s_QK, 1))
        base_Q = tl.where(new_Q == float("-inf"), 0.0, new_Q)
        p_QK = tl.exp(s_QK - base_Q[:, None])
        shrunk_Q = tl.exp(top_Q - base_Q)
        weight_Q = weight_Q * shrunk_Q + tl.sum(p_QK, 1)
        v_KD = tl.load(values + place, mask=inside, other=0.0)
        sum_QD = sum_QD * shrunk_Q[:, None] + tl.dot(p_QK.to(v_KD.dtype), v_KD)
        top_Q = new_Q
    if ALONE:
        place_Q = (b * N + n_Q) * (GROUP * G) + h_Q
        sum_QD = sum_QD / tl.where(weight_Q > 0, weight_Q, 1.0)[:, None]
        tl.store(out + place_Q[:, None] * D + d[None, :], sum_QD.to(out.dtype.element_ty), mask=there)
        return
    at_Q = (bg * parts + part) * R + r_Q
    tl.store(sums + at_Q[:, None] * D + d[None, :], sum_QD, mask=there)
    tl.store(tops + at_Q, top_Q, mask=r_Q < R)
    tl.store(weights + at_Q, weight_Q, mask=r_Q < R)


@triton.jit(do_not_specialize=["N", "parts"])
def _whole(  # type: ignore[no-untyped-def]
    sums, tops, weights, out, N, parts,
    GROUP: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BR: tl.constexpr, BS: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Some rows of one key-value head: their parts, added up and normalized."""
    bg, R = tl.program_id(0).to(tl.int64), GROUP * N
    r_R = tl.program_id(1) * BR + tl.arange(0, BR)
    d = tl.arange(0, BD)
    s = tl.arange(0, BS)
    there = (s < parts)[None, :] & (r_R < R)[:, None]
    top_R = tl.max(tl.load(tops + (bg * parts + s)[None, :] * R + r_R[:, None], mask=there, other=float("-inf")), 1)
    top_R = tl.where(top_R == float("-inf"), 0.0, top_R)
    weight_R = tl.zeros([BR], tl.float32)
    sum_RD = tl.zeros([BR, BD], tl.float32)
    for part in range(BS):
        inside = (r_R < R) & (part < parts)
        at_R = (bg * parts + part) * R + r_R
        share_R = tl.exp(tl.load(tops + at_R, mask=inside, other=float("-inf")) - top_R)
        weight_R += share_R * tl.load(weights + at_R, mask=inside, other=0.0)
        sum_RD += share_R[:, None] * tl.load(sums + at_R[:, None] * D + d[None, :], mask=inside[:, None] & (d < D)[None, :], other=0.0)
    place_R = ((bg // G * N + r_R % N) * (GROUP * G) + (bg % G) * GROUP + r_R // N) * D
    found_RD = sum_RD / tl.where(weight_R > 0, weight_R, 1.0)[:, None]
    tl.store(out + place_R[:, None] + d[None, :], found_RD.to(out.dtype.element_ty), mask=(r_R < R)[:, None] & (d < D)[None, :])


def supports(q_BNhd: Tensor, keys: Tensor) -> bool:
    """Whether the kernels support these: only half precision, because fp32 products compile slowly and need much shared memory."""
    return q_BNhd.dtype == keys.dtype != torch.float32 and q_BNhd.shape[3] <= HEAD


def attend(q_BNhd: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
    """Attention of queries [B, N, h, d], contiguous, over ``keys`` and ``values`` [B, g, M, d] with the same strides: [B, N, h, d].
    ``bias``: the additive mask, [B or 1, 1, N, M]; None: all is visible. A row that sees nothing gives zeros. Scores are divided by the
    root of d. No gradients.
    """
    (B, N, h, d), (g, M) = q_BNhd.shape, keys.shape[1:3]
    assert keys.stride() == values.stride() and keys.stride(3) == 1
    group, BD = h // g, max(16, triton.next_power_of_2(d))
    R = group * N
    BQ = min(ROWS, max(16, triton.next_power_of_2(R)))
    blocks, pieces = triton.cdiv(R, BQ), triton.cdiv(M, KEYS)
    parts = max(1, min(pieces, 2 * _processors(q_BNhd.device) // (B * g * blocks)))
    span = triton.cdiv(pieces, parts)
    step = max(1, triton.next_power_of_2(span) // 16)  # few lengths of a part, because a kernel is compiled for each
    span = step * triton.cdiv(span, step)
    parts = triton.cdiv(pieces, span)
    kept = (B * g, parts, R) if parts > 1 else (0, 0, 0)
    sums = torch.empty(*kept, d, dtype=torch.float32, device=q_BNhd.device)
    tops, weights = (torch.empty(kept, dtype=torch.float32, device=q_BNhd.device) for _ in range(2))
    out_BNhd = torch.empty_like(q_BNhd)
    mask, by_sequence, by_row = (q_BNhd, 0, 0) if bias is None else (bias, bias.stride(0) if bias.shape[0] > 1 else 0, bias.stride(2))
    _part[(B * g, parts, blocks)](
        q_BNhd, keys, values, mask, out_BNhd, sums, tops, weights, d**-0.5, N, M, *keys.stride()[:3], by_sequence, by_row,
        group, g, d, bias is not None, parts == 1, span, BQ, KEYS, BD, num_warps=4, num_stages=2,
    )  # fmt: skip
    if parts > 1:
        BR = 8 if B * g * R > 4 * _processors(q_BNhd.device) else 1  # many blocks of one row would wait for each other
        sizes = group, g, d, BR, triton.next_power_of_2(parts), BD
        _whole[(B * g, triton.cdiv(R, BR))](sums, tops, weights, out_BNhd, N, parts, *sizes, num_warps=4)
    return out_BNhd


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8
