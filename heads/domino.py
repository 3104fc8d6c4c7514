"""Domino (2605.29707): DFlash's backbone, corrected by a small GRU that reads the guesses of the block from left to right.

Slot k guesses x[a+k+1]. The GRU reads the target's embeddings: g_1 = GRU(0, x[a]), g_d = GRU(g_{d-1}, the guess of depth d-1). From depth
2 on, logits += W_out silu(W [slot; g_d]). W_out is zero at the start. Depth 1 is the backbone's own guess. The loss of the uncorrected
backbone is added in training (``loss.base_until``).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headstart.heads.base import Draft, TargetShape
from headstart.heads.dflash import Dflash
from headstart.heads.memory import Memory
from headstart.heads.unembedding import Unembedding
from headstart.heads.visibility import Sees


class Domino(Dflash, without=("draft_vocab",)):
    """``gru``: width of the GRU's state; None: the target's hidden size. ``rank``: rank of the correction."""

    first_slot = 0

    def __init__(self, shape: TargetShape, *, block: int = 7, gru: int | None = None, rank: int = 256, **more: Any) -> None:
        super().__init__(shape, block=block, **more)
        D, G = shape.hidden_size, gru or shape.hidden_size
        self.gru = G
        self.narrow = nn.Linear(D + G, rank, bias=False)
        self.widen = nn.Parameter(torch.zeros(shape.vocab_size, rank))
        self.gru_input = nn.Linear(D, 3 * G, bias=False)
        self.gru_state = nn.Linear(G, 3 * G, bias=False)

    def _first(self, state: Tensor, tokens_BA: Tensor) -> Draft:
        slot = self.slot(1, state)
        state = torch.cat([state, self._read(tokens_BA, slot.new_zeros(*tokens_BA.shape, self.gru))], dim=-1)
        return Draft(F.pad(slot, (0, self.narrow.out_features)), state)

    def step(self, depth: int, tokens_BN: Tensor, parent: Draft, positions_BN: Tensor, memory: Memory, sees: Sees) -> Draft:
        """The slot of this depth, corrected by the GRU, which has read the guesses before it."""
        slots, g = parent.state.split([parent.state.shape[-1] - self.gru, self.gru], dim=-1)
        slot, g = self.slot(depth, slots), self._read(tokens_BN, g)
        correction = F.silu(self.narrow(torch.cat([slot, g], dim=-1)))
        return Draft(torch.cat([slot, correction], dim=-1), torch.cat([slots, g], dim=-1))

    def _read(self, tokens_BN: Tensor, g: Tensor) -> Tensor:
        """One step of the GRU, written out because torch's GRU cell does not support mixed precision."""
        reset_x, update_x, new_x = self.gru_input(self.ends.embed(tokens_BN).to(g.dtype)).chunk(3, dim=-1)
        reset_g, update_g, new_g = self.gru_state(g).chunk(3, dim=-1)
        update = torch.sigmoid(update_x + update_g)
        new = torch.tanh(new_x + torch.sigmoid(reset_x + reset_g) * new_g)
        return (1 - update) * new + update * g

    def unembedding(self, depth: int) -> Unembedding:
        """The target's own head, and the correction's matrix W_out."""
        return Unembedding(self.ends.head_VD, correction_VR=self.widen)
