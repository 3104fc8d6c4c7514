"""The batches that training gets from data: tokens, and the target's states of them.

Shape suffixes: B batch, T tokens, D target hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from headstart.heads.base import Roots


@dataclass
class TokenBatch:
    """Rows of packed documents. Positions restart and attention stops at the borders of documents."""

    tokens_BT: Tensor  # int64
    loss_mask_BT: Tensor  # bool: the token is supervised (an assistant's token in chats)
    positions_BT: Tensor  # int64: position in the document, from 0
    documents_BT: Tensor  # int64: number of the document in its row; a document's tokens are contiguous

    def each(self, change: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """The four tensors above, by name, with ``change`` applied to each; of subclasses too, which have more."""
        return {field.name: change(getattr(self, field.name)) for field in fields(TokenBatch)}

    def supervised(self, depth: int) -> Tensor:
        """[B, T] bool: root t has a guess to learn at this depth, x[t+1+depth], which is supervised and in the root's document.

        Depth 0 is the chosen token x[t+1] itself, and the drafter's guesses begin at depth 1.
        """
        mask = torch.zeros_like(self.loss_mask_BT)
        n = depth + 1
        mask[:, :-n] = self.loss_mask_BT[:, n:] & (self.documents_BT[:, n:] == self.documents_BT[:, :-n])
        return mask


def spans(numbers_T: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(start, stop) of each run of equal numbers. Given the number of each token's document, as in a batch, these are the documents."""
    borders = [i for i in range(1, len(numbers_T)) if numbers_T[i] != numbers_T[i - 1]]
    return zip([0, *borders], [*borders, len(numbers_T)], strict=True)


@dataclass
class NumberedBatch(TokenBatch):
    """Rows with their numbers in the data set. Held-out rows are numbered after the training rows."""

    rows: Sequence[int]

    @classmethod
    def of(cls, batch: TokenBatch, rows: Sequence[int]) -> NumberedBatch:
        """The rows of ``batch``, with their numbers."""
        return cls(**batch.each(lambda x: x), rows=rows)


@dataclass
class TargetBatch(TokenBatch):
    """Rows with the target's states. The teacher's logits are recomputed from ``final_BTD``, and never stored as [B, T, V]."""

    states: dict[int, Tensor]  # tap -> [B, T, D]
    final_BTD: Tensor  # after the final norm: the input of the target's output head

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> TargetBatch:
        """The batch on a device, with states in ``dtype`` (None: unchanged)."""
        tokens = self.each(lambda x: x.to(device))
        states = {tap: state.to(device, dtype) for tap, state in self.states.items()}
        return replace(self, **tokens, states=states, final_BTD=self.final_BTD.to(device, dtype))

    def roots(self) -> Roots:
        """Every position as a root. The last position of a row has no chosen token. It gets token 0 and is never supervised."""
        chosen_BT = torch.cat([self.tokens_BT[:, 1:], torch.zeros_like(self.tokens_BT[:, :1])], dim=1)
        return Roots(self.tokens_BT, chosen_BT, self.states, self.positions_BT)


@dataclass
class ReplayBatch(TargetBatch):
    """One decoding round in each row: a root, its chosen token, and then the tokens drafted from it. Only that root is supervised."""

    root_B: Tensor  # int64: position of the root in its row
    drafted_B: Tensor  # number of drafted tokens, and so the largest depth at which the root is supervised

    def supervised(self, depth: int) -> Tensor:
        """[B, T] bool: the root of each row, if at least ``depth`` tokens were drafted after its chosen token."""
        mask_BT = torch.zeros_like(self.loss_mask_BT)
        return mask_BT.scatter_(1, self.root_B[:, None], self.drafted_B[:, None] >= depth)
