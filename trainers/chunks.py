"""Which rows of logits exist at the same time: the guesses that are judged, in chunks, and these in strips.

The teacher at position p judges the guess of depth d of root p - d. A *chunk* is a run of positions at which so many guesses are
judged as may have logits together: one depth of each where few roots are asked, all depths where all are. Its matrix products are
large. What is done to its logits, row by row, is done a *strip* at a time: a run of the chunk's positions with few enough numbers that
a processor keeps what it makes of them in its cache, and its allocator the memory. (Buffers of a whole chunk are mapped anew by the
operating system at each operation, which takes as long as the arithmetic.)

All of it is known before the first product, from masks that lie on the CPU: no chunk waits for the device.

Shape suffixes: K depths, P = B * T positions of the batch, C positions of a chunk, R guesses of a chunk, S strips of a chunk.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import torch
from torch import Tensor

CACHED, LAUNCHED = 1 << 20, 1 << 26  # numbers of a strip: what a CPU's cache holds; on a GPU, where each launch costs


def strip_of(device: torch.device) -> int:
    """How many numbers are worked on at a time."""
    return CACHED if device.type == "cpu" else LAUNCHED


def guesses_of(chunk: int, depths: int, vocab: int, device: torch.device) -> int:
    """How many guesses have logits at the same time: ``chunk``, but on a GPU a strip at all depths at least, or it waits for launches."""
    return chunk if device.type == "cpu" else max(chunk, depths * (strip_of(device) // vocab))


@dataclass
class Chunk:
    """``strips``: positions, as a part of ``positions_C``, and how many guesses of each depth are judged there."""

    positions_C: Tensor  # flat, ascending
    root_R: Tensor  # flat root of every guess that is judged there, depth by depth, each in the order of positions
    said_R: Tensor  # by which of positions_C
    counts_K: list[int]  # guesses of each depth
    strips: list[tuple[slice, list[int]]]


def chunks(at_KP: Tensor, most: int, strip: int, device: torch.device) -> list[Chunk]:
    """``at_KP`` [K, P] bool, on the CPU: whether position p judges the guess of depth k + 1 of root p - k - 1. Chunks have at most ``most``
    guesses (those of one position at least), strips ``strip`` positions. Their tensors are on ``device``.
    """
    positions_N = at_KP.any(0).nonzero()[:, 0]
    until_N = at_KP[:, positions_N].sum(0).cumsum(0).tolist()  # guesses that are judged there and before
    made, start = [], 0
    while start < len(until_N):
        stop = max(start + 1, bisect_right(until_N, most + (until_N[start - 1] if start else 0)))
        positions_C = positions_N[start:stop]
        at_KC = at_KP[:, positions_C]
        depth_R, said_R = at_KC.nonzero().unbind(1)
        C = len(positions_C)
        places = [slice(i, min(i + strip, C)) for i in range(0, C, strip)]
        counts_SK = [at_KC[:, place].sum(1).tolist() for place in places]
        root_R = positions_C[said_R] - depth_R - 1
        made.append(Chunk(positions_C, root_R, said_R, at_KC.sum(1).tolist(), list(zip(places, counts_SK, strict=True))))
        start = stop
    if device.type != "cpu" and made:  # in one copy
        tensors = [x for chunk in made for x in (chunk.positions_C, chunk.root_R, chunk.said_R)]
        moved = iter(torch.cat(tensors).to(device, non_blocking=True).split([len(x) for x in tensors]))
        for chunk in made:
            chunk.positions_C, chunk.root_R, chunk.said_R = next(moved), next(moved), next(moved)
    return made
