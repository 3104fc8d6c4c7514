"""The drafter's own vocabulary where it is trimmed: the target tokens that its head can guess.

In memory it is a sorted list of target ids: row i of the head is target token ids[i]. Files hold a pair of maps, in EAGLE-3's format:
``d2t`` holds offsets (target id = i + d2t[i]), and ``t2d`` marks the target tokens that are in the draft vocabulary.

Shape suffixes: V tokens or rows of the head, D target hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from headstart.heads.errors import UserError
from headstart.heads.unembedding import Unembedding


def check_ids(ids: Sequence[int] | None, vocab_size: int) -> Tensor | None:
    """The ids as a tensor; None for the whole vocabulary. Raises UserError unless they ascend strictly within the vocabulary."""
    if ids is None:
        return None
    ids_V = torch.as_tensor(ids, dtype=torch.int64, device="cpu")
    if ids_V.ndim != 1 or len(ids_V) == 0 or len(ids_V) > vocab_size:
        raise UserError(f"the draft vocabulary must be a list of 1 to {vocab_size} token ids, got {tuple(ids_V.shape)}")
    if (ids_V[1:] <= ids_V[:-1]).any() or ids_V[0] < 0 or ids_V[-1] >= vocab_size:
        raise UserError(f"the draft vocabulary must be strictly ascending ids within 0..{vocab_size - 1}")
    return None if len(ids_V) == vocab_size else ids_V


def most_frequent(counts_V: Tensor, size: int) -> list[int]:
    """The ``size`` most frequent tokens, ascending by id. ``counts_V``: how often each occurs in the training data. Raises UserError for a
    wrong size.
    """
    if not 0 < size <= len(counts_V):
        raise UserError(f"head.draft_vocab must be within 1..{len(counts_V)} (the target's vocabulary), got {size}")
    return counts_V.argsort(descending=True, stable=True)[:size].sort().values.tolist()


def maps_of(ids_V: Tensor | None, vocab_size: int) -> dict[str, Tensor]:
    """The maps as tensors of a file (``d2t``: int64). ``ids_V`` None: the whole vocabulary, which has none."""
    if ids_V is None:
        return {}
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[ids_V.cpu()] = True
    return {"d2t": ids_V.cpu() - torch.arange(len(ids_V)), "t2d": t2d}


def ids_of(tensors: dict[str, Tensor], vocab_size: int) -> list[int] | None:
    """The target ids that the maps in a file stand for. None: all tokens; maps of all tokens are removed from ``tensors``."""
    if "d2t" not in tensors:
        return None
    ids = (torch.arange(len(tensors["d2t"])) + tensors["d2t"].long()).tolist()
    if ids != list(range(vocab_size)):
        return ids
    tensors.pop("d2t"), tensors.pop("t2d", None)  # some write maps of zeros for a whole vocabulary
    return None


class OutputHead(nn.Linear):
    """A drafter's own output head, [V, width] without bias, for the whole vocabulary or for the target ids in ``draft_vocab``."""

    ids: Tensor | None

    def __init__(self, width: int, vocab_size: int, draft_vocab: Sequence[int] | None) -> None:
        ids = check_ids(draft_vocab, vocab_size)
        super().__init__(width, vocab_size if ids is None else len(ids), bias=False)
        self.register_buffer("ids", ids, persistent=False)  # not saved: the ids are among the drafter's arguments

    @torch.no_grad()
    def start_from(self, head_VD: Tensor) -> None:
        """Copy the rows of the target's head. Columns beyond the target's width are zero."""
        rows_VD = head_VD if self.ids is None else head_VD[self.ids.to(head_VD.device)]
        self.weight.zero_()
        self.weight[:, : rows_VD.shape[1]].copy_(rows_VD)

    def unembedding(self) -> Unembedding:
        """The matrix and the target ids of its rows."""
        return Unembedding(self.weight, self.ids)
