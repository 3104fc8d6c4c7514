"""Divides the guesses of a batch into chunks, and chunks into strips: this decides which rows of logits exist at the same time.

The teacher at position p judges the guess of depth d of root p - d. A *chunk* is a run of positions with as many guesses as may have
logits at the same time. (A position has guesses of all depths if every root has drafts, but about one if only few roots do.) So the matrix
products of a chunk are large. Row-wise operations on its logits run on one *strip* at a time. A strip is a run of the chunk's positions,
short enough that the intermediate results stay in the processor's cache and that the allocator keeps their memory. (For buffers of a whole
chunk the operating system maps new pages at each operation, which takes as long as the arithmetic.)

All of this is computed before the first product, from masks on the CPU. So no chunk waits for the device.

Shape suffixes: N judged positions of the batch, K depths, P = B * T positions of the batch, C positions of a chunk, R guesses of a chunk,
S strips of a chunk.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from dataclasses import dataclass

import torch
from torch import Tensor

CACHED, LAUNCHED = 1 << 20, 1 << 26  # elements in a strip: on a CPU what its cache holds; on a GPU more, because each launch costs time
KEPT = 30 << 20  # bytes; blocks above 32 MiB no longer raise glibc's trim threshold (see keep_freed_memory)


@functools.cache  # once a process is enough
def keep_freed_memory() -> None:
    """Make glibc keep the memory that a chunk frees, so that the next chunk can use it. glibc returns free memory to the system once it is
    more than twice the largest block freed so far: so one large block is allocated and freed here.
    """
    torch.empty(KEPT, dtype=torch.uint8, device="cpu")  # its pages are never touched


def strip_of(device: torch.device) -> int:
    """The most elements (rows times vocabulary) in a strip on this device."""
    return CACHED if device.type == "cpu" else LAUNCHED


def guesses_of(chunk: int, depths: int, vocab: int, device: torch.device) -> int:
    """The most guesses in a chunk: ``chunk``. On a GPU it is at least a strip at all depths, otherwise launch overhead would dominate."""
    return chunk if device.type == "cpu" else max(chunk, depths * (strip_of(device) // vocab))


@dataclass
class Chunk:
    """A run of positions and the guesses judged there. ``strips``: slices of ``positions_C``, each with its guesses per depth [K]."""

    positions_C: Tensor  # flat (0..P-1), ascending
    root_R: Tensor  # flat root of each guess, ordered by depth, then by position
    said_R: Tensor  # index into positions_C of the position that judges each guess
    counts_K: list[int]  # guesses of each depth
    strips: list[tuple[slice, list[int]]]


def chunks(at_KP: Tensor, most: int, strip: int, device: torch.device) -> list[Chunk]:
    """The chunks of a batch. ``at_KP`` [K, P] bool, on the CPU: whether position p judges the guess of depth k + 1 of root p - k - 1.
    A chunk has at most ``most`` guesses, but at least those of one position. A strip has at most ``strip`` positions. The chunks'
    tensors are on ``device``.
    """
    positions_N = at_KP.any(0).nonzero()[:, 0]
    until_N = at_KP[:, positions_N].sum(0).cumsum(0).tolist()  # guesses up to and including each position
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
    if device.type != "cpu" and made:  # moved in a single copy
        tensors = [x for chunk in made for x in (chunk.positions_C, chunk.root_R, chunk.said_R)]
        moved = iter(torch.cat(tensors).to(device, non_blocking=True).split([len(x) for x in tensors]))
        for chunk in made:
            chunk.positions_C, chunk.root_R, chunk.said_R = next(moved), next(moved), next(moved)
    return made
