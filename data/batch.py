"""What crosses from data to training: tokens, and what the target said about them.

Shape suffixes: B batch, T tokens, D target hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from headstart.heads.base import Roots


@dataclass
class TokenBatch:
    """Packed documents. Positions restart, and attention stops, at document borders."""

    tokens_BT: Tensor  # int64
    loss_mask_BT: Tensor  # bool: the token is supervised (an assistant's token in chats)
    positions_BT: Tensor  # position in its document, from 0
    documents_BT: Tensor  # same number in a row: same document; contiguous

    def supervised(self, depth: int) -> Tensor:
        """[B, T] bool: root t has a guess at this depth to learn, x[t+1+depth] supervised and of its own document."""
        mask = torch.zeros_like(self.loss_mask_BT)
        n = depth + 1
        mask[:, :-n] = self.loss_mask_BT[:, n:] & (self.documents_BT[:, n:] == self.documents_BT[:, :-n])
        return mask


@dataclass
class NumberedBatch(TokenBatch):
    """Rows with their numbers in the data set; the held-out rows are numbered behind the others."""

    rows: Sequence[int]

    @classmethod
    def of(cls, batch: TokenBatch, rows: Sequence[int]) -> NumberedBatch:
        """The same rows, with their numbers."""
        return cls(**{field.name: getattr(batch, field.name) for field in fields(TokenBatch)}, rows=rows)


@dataclass
class TargetBatch(TokenBatch):
    """The same with the target's states. Teacher logits are recomputed from ``final_BTD``; [T, V] is never stored."""

    states: dict[int, Tensor]  # tap -> [B, T, D]
    final_BTD: Tensor  # after the final norm: meets the target's head

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> TargetBatch:
        """On a device, the states in ``dtype`` (None: as they are)."""
        tokens = {field.name: getattr(self, field.name).to(device) for field in fields(TokenBatch)}
        states = {tap: state.to(device, dtype) for tap, state in self.states.items()}
        return replace(self, **tokens, states=states, final_BTD=self.final_BTD.to(device, dtype))

    def roots(self) -> Roots:
        """Every position as a root. The last one of a row has no chosen token; it gets 0 and is never supervised."""
        chosen_BT = torch.cat([self.tokens_BT[:, 1:], torch.zeros_like(self.tokens_BT[:, :1])], dim=1)
        return Roots(self.tokens_BT, chosen_BT, self.states, self.positions_BT)


@dataclass
class ReplayBatch(TargetBatch):
    """A round of decoding in each row: one root, and behind its chosen token what was drafted from it. Only that root is supervised."""

    root_B: Tensor  # int64
    drafted_B: Tensor  # guesses: the depths at which it is supervised

    def supervised(self, depth: int) -> Tensor:
        """[B, T] bool: the one root of each row, if at least ``depth`` tokens were drafted behind it."""
        mask_BT = torch.zeros_like(self.loss_mask_BT)
        return mask_BT.scatter_(1, self.root_B[:, None], self.drafted_B[:, None] >= depth)
