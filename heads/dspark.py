"""DSpark (2607.05147): DFlash's backbone, a bias that depends on the token before, and an estimate of whether the guess is accepted.

The anchor's slot guesses too: slot k guesses x[a+k+1]. The Markov head of rank r adds logits += W2 W1[prev]. prev is x[a] at depth 1 and
the previous guess afterwards, so that the tokens of a chain agree with each other. W2 is zero at the start. The confidence is a
logit, linear in [slot; W1[prev]], which is trained on the acceptance (loss term ``confidence``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from headstart.heads.base import Draft, TargetShape
from headstart.heads.dflash import Dflash
from headstart.heads.unembedding import Unembedding


class Dspark(Dflash):
    """``rank``: rank of the Markov head."""

    first_slot = 0

    def __init__(self, shape: TargetShape, *, block: int = 7, rank: int = 256, **more: Any) -> None:
        super().__init__(shape, block=block, **more)
        self.markov_w1 = nn.Embedding(shape.vocab_size, rank)
        nn.init.normal_(self.markov_w1.weight, std=0.02)
        guessed = shape.vocab_size if self.draft_ids is None else len(self.draft_ids)  # tokens that it can guess
        self.markov_w2 = nn.Parameter(torch.zeros(guessed, rank))
        self.confidence = nn.Linear(shape.hidden_size + rank, 1)

    def _after(self, depth: int, tokens_BN: Tensor, state: Tensor) -> Draft:
        slot = self.slot(depth, state)
        hidden = torch.cat([slot, self.markov_w1(tokens_BN).to(slot.dtype)], dim=-1)
        return Draft(hidden, state, self.confidence(hidden).squeeze(-1))

    def unembedding(self, depth: int) -> Unembedding:
        """DFlash's head, and the Markov head's matrix W2 with one row for each token that DFlash's head can guess."""
        return replace(super().unembedding(depth), correction_VR=self.markov_w2)
