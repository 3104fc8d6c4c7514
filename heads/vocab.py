"""The drafter's own vocabulary, where it is trimmed: which target tokens its head can say.

In memory it is a sorted list of target ids (row i of the head is target token ids[i]). In files it is a pair of
maps: ``d2t`` holds offsets (target id = i + d2t[i]) and ``t2d`` says which target tokens are in (FORMATS of EAGLE-3).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from heads.errors import UserError


def check_ids(ids: Sequence[int] | None, vocab_size: int) -> Tensor | None:
    """The ids as a tensor, or None for the whole vocabulary. Raises UserError unless they ascend within the vocabulary."""
    if ids is None:
        return None
    ids_V = torch.as_tensor(ids, dtype=torch.int64, device="cpu")
    if ids_V.ndim != 1 or len(ids_V) == 0 or len(ids_V) > vocab_size:
        raise UserError(f"the draft vocabulary must be a list of 1 to {vocab_size} token ids, got {tuple(ids_V.shape)}")
    if (ids_V[1:] <= ids_V[:-1]).any() or ids_V[0] < 0 or ids_V[-1] >= vocab_size:
        raise UserError(f"the draft vocabulary must be strictly ascending ids within 0..{vocab_size - 1}")
    return None if len(ids_V) == vocab_size else ids_V


def most_frequent(counts_V: Tensor, size: int) -> list[int]:
    """The ``size`` most frequent tokens by their counts in the training data, ascending by id."""
    if not 0 < size <= len(counts_V):
        raise UserError(f"head.draft_vocab must be within 1..{len(counts_V)} (the target's vocabulary), got {size}")
    return counts_V.argsort(descending=True, stable=True)[:size].sort().values.tolist()


def to_maps(ids_V: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """(d2t offsets int64 [Vd], t2d bool [V])."""
    d2t = ids_V - torch.arange(len(ids_V))
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[ids_V] = True
    return d2t, t2d


def from_d2t(d2t_V: Tensor) -> list[int]:
    return (torch.arange(len(d2t_V)) + d2t_V.long()).tolist()
