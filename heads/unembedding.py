"""How a drafter's vectors become logits: they are linear in ``Draft.hidden_BNH``, so that a loss can be fused with the matrix and decoding
computes logits only where it needs them.

Shape suffixes: B batch, N drafts, H width of the vectors, V vocabulary (also a trimmed one), R columns of a correction, C candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headstart.heads.prepack import product

DIGITS, BASE = 3, 256  # of a token's id, where it is carried among numbers in half precision: bfloat16 has no larger whole numbers


@dataclass
class Unembedding:
    """The matrix that turns ``Draft.hidden_BNH`` into logits, and the target id of each of its rows.

    ``correction_VR`` adds R columns, for the last R numbers of hidden: a low-rank bias that depends on the tokens before
    (DSpark's, Domino's). It is kept apart because the matrix is mostly the target's own, which is never copied.

    ``candidates``: the correction only reranks this number of tokens, the likeliest ones without it (DFlash 2's selector). All others
    are never guessed: their logits are -inf. None: the correction is added to the logits of all tokens.

    ``listed``: hidden ends with the ids of the candidates (``in_digits``), a 1 if the tokens before were candidates too, else a 0, and the
    candidates' scores (LiLiCorr's), which are their logits. The matrix alone gives the logits before.
    """

    weight_VH: Tensor
    ids_V: Tensor | None = None  # None: row i is target token i
    correction_VR: Tensor | None = None
    candidates: int | None = None
    listed: bool = False

    def logits(self, hidden_BNH: Tensor) -> Tensor:
        """Logits [B, N, V] from ``Draft.hidden_BNH`` [B, N, H]."""
        own_BNW, *others = self.parts(hidden_BNH)
        if self.listed:
            ids_BNX, _, scores_BNC = others
            nothing_BNV = scores_BNC.new_full((*own_BNW.shape[:-1], len(self.weight_VH)), -torch.inf)
            return nothing_BNV.scatter(-1, of_digits(ids_BNX), scores_BNC)
        logits_BNV = product(own_BNW, self.weight_VH.to(hidden_BNH.dtype))
        if self.correction_VR is None:
            return logits_BNV
        if self.candidates is None:
            return logits_BNV + product(others[0], self.correction_VR.to(hidden_BNH.dtype))
        ids_BNC = logits_BNV.topk(self.candidates).indices
        scores_BNC = selected(logits_BNV, others[0], self.correction_VR, ids_BNC)
        return torch.full_like(logits_BNV, -torch.inf).scatter_(-1, ids_BNC, scores_BNC)

    @property
    def blocks(self) -> list[Tensor]:
        """The matrix, then the correction if there is one."""
        return [self.weight_VH] if self.correction_VR is None else [self.weight_VH, self.correction_VR]

    def parts(self, hidden_BNH: Tensor) -> list[Tensor]:
        """``hidden_BNH`` split by columns: one part for each of ``blocks``, then the three parts that ``listed`` adds."""
        listed = [self.candidates * DIGITS, 1, self.candidates] if self.listed and self.candidates else []
        return list(hidden_BNH.split([*(block.shape[1] for block in self.blocks), *listed], dim=-1))

    @property
    def corrects(self) -> bool:
        """Whether the logits are not those of the matrix alone."""
        return self.correction_VR is not None or self.listed

    def uncorrected(self) -> Unembedding:
        """The same without the correction: its logits do not depend on the guesses before."""
        return Unembedding(self.weight_VH, self.ids_V)

    def to_target(self, logits_BNV: Tensor, vocab_size: int) -> Tensor:
        """Logits spread over the target's vocabulary, [.., vocab_size]. Tokens that the drafter cannot guess get -inf."""
        if self.ids_V is None:
            return logits_BNV
        full = logits_BNV.new_full((*logits_BNV.shape[:-1], vocab_size), -torch.inf)
        return full.index_copy_(-1, self.ids_V, logits_BNV)


def selected(logits_BNV: Tensor, part_BNR: Tensor, correction_VR: Tensor, ids_BNC: Tensor) -> Tensor:
    """The corrected logits of some tokens, [B, N, C]: only their rows of the correction are read."""
    rows_BNCR = correction_VR[ids_BNC].to(part_BNR.dtype)
    return logits_BNV.gather(-1, ids_BNC) + (rows_BNCR @ part_BNR[..., None]).squeeze(-1)


def in_digits(ids_NC: Tensor, dtype: torch.dtype) -> Tensor:
    """Token ids [.., C] as numbers [.., C * DIGITS] that ``dtype`` holds exactly."""
    return torch.stack([ids_NC // BASE**i % BASE for i in range(DIGITS)], dim=-1).flatten(-2).to(dtype)


def of_digits(digits_NX: Tensor) -> Tensor:
    """The ids [.., C] that ``in_digits`` turned into these numbers."""
    digits_NCX = digits_NX.long().unflatten(-1, (-1, DIGITS))
    return sum((digits_NCX[..., i] * BASE**i for i in range(DIGITS)), torch.zeros_like(digits_NCX[..., 0]))
