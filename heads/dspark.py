"""DSpark (2607.05147): DFlash's backbone, a bias that depends on the tokens before, and an estimate of whether the guess is accepted.

The anchor's slot guesses too: slot k guesses x[a+k+1]. The Markov head of rank r adds logits += W2 m to the guess of slot h, with
e = W1[prev]. prev is x[a] at depth 1 and the previous guess afterwards, so that the tokens of a chain agree with each other.

    vanilla   m = e
    gated     m = sigmoid(G [h; e] + b) * e
    rnn       [g; c; o] = J [s; e; h] + b,  m = tanh(o),  s = sigmoid(g) * s + (1 - sigmoid(g)) * tanh(c)

The state s of the rnn is 0 at depth 1. m reads s as the depth before left it, so only the rnn knows more than one token before. W2 is
zero at the start. The confidence is a logit, linear in [h; e] with every head, which is trained on the acceptance (loss term
``confidence``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headstart.heads.base import Draft, TargetShape
from headstart.heads.dflash import Dflash
from headstart.heads.errors import UserError
from headstart.heads.unembedding import Unembedding

MARKOV = ("vanilla", "gated", "rnn")


class Dspark(Dflash):
    """``markov``: the kind of Markov head, one of ``MARKOV``; ``rank``: its rank. Raises UserError for another kind."""

    first_slot = 0

    def __init__(self, shape: TargetShape, *, block: int = 7, markov: str = "vanilla", rank: int = 256, **more: Any) -> None:
        super().__init__(shape, block=block, **more)
        if markov not in MARKOV:
            raise UserError(f"head.markov must be one of {', '.join(MARKOV)}, found {markov!r}")
        self.markov, self.rank = markov, rank
        self.markov_w1 = nn.Embedding(shape.vocab_size, rank)
        nn.init.normal_(self.markov_w1.weight, std=0.02)
        guessed = shape.vocab_size if self.draft_ids is None else len(self.draft_ids)  # tokens that it can guess
        self.markov_w2 = nn.Parameter(torch.zeros(guessed, rank))
        self.confidence = nn.Linear(shape.hidden_size + rank, 1)
        if markov == "gated":
            self.gate = nn.Linear(shape.hidden_size + rank, rank)
        if markov == "rnn":
            self.joint = nn.Linear(rank + rank + shape.hidden_size, 3 * rank)

    def _state(self, slots_BASD: Tensor) -> Tensor:
        """The slots, and behind them the state s of the rnn."""
        return F.pad(super()._state(slots_BASD), (0, self.rank if self.markov == "rnn" else 0))

    def _after(self, depth: int, tokens_BN: Tensor, state: Tensor) -> Draft:
        h = self.slot(depth, state)
        m = e = self.markov_w1(tokens_BN).to(h.dtype)
        both = torch.cat([h, e], dim=-1)
        if self.markov == "gated":
            m = torch.sigmoid(self.gate(both)) * e
        if self.markov == "rnn":
            slots, s = state.split([state.shape[-1] - self.rank, self.rank], dim=-1)
            gate, candidate, out = self.joint(torch.cat([s, e, h], dim=-1)).chunk(3, dim=-1)
            gate, m = torch.sigmoid(gate), torch.tanh(out)
            state = torch.cat([slots, gate * s + (1 - gate) * torch.tanh(candidate)], dim=-1)
        return Draft(torch.cat([h, m], dim=-1), state, self.confidence(both).squeeze(-1))

    def unembedding(self, depth: int) -> Unembedding:
        """DFlash's head, and the Markov head's matrix W2 with one row for each token that DFlash's head can guess."""
        return replace(super().unembedding(depth), correction_VR=self.markov_w2)
