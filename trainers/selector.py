"""The loss of a selector (``Unembedding.candidates``): KL to the target's distribution among the candidates of a guess.

If the target's most likely token is not a candidate, it replaces the weakest one in the loss, so that every guess has a right answer.
Matches and acceptance count the real candidates. As in every other loss, the drafter is fed true tokens. (The published loss is
cross-entropy to the most likely token alone. Drafters trained with it are accepted less at all temperatures: EXPERIMENTS.md, 2026-11-26.)

Where the drafter lists the scores of its candidates, no other token has one. Then two more terms can judge them (2608.20530, as NVIDIA's
Model Optimizer has them): ``choice`` and ``distractor``. Guesses behind a token that was no candidate are left out, and by
these two terms also those whose token in the data is no candidate. (Published too: a hinge, in a variant of that loss.)

Shape suffixes: R guesses, C candidates, D = C + 1, V vocabulary, X columns of the correction, M positions of the target.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from headstart.heads.unembedding import of_digits, selected
from headstart.inference.decoding.sampling import wide


def choice(log_q_RC: Tensor, said_RC: Tensor, right_RC: Tensor) -> Tensor:
    """Cross-entropy to the token in the data, among the candidates. ``said_RC``: the target's logits; ``right_RC``: which token that is."""
    return -log_q_RC.masked_fill(~right_RC, 0.0).sum(1)


def distractor(log_q_RC: Tensor, said_RC: Tensor, right_RC: Tensor) -> Tensor:
    """By how much the target's logits of the guessed candidates are below that of the token in the data, in expectation."""
    return (log_q_RC.exp() * ((said_RC * right_RC).sum(1, keepdim=True) - said_RC).relu()).sum(1)


LISTED = {"choice": choice, "distractor": distractor}


@dataclass
class Selection:
    """The candidates of R guesses, and the loss of their order."""

    ids_RD: Tensor  # the candidates, the most likely first, then the target's most likely token
    scores_RD: Tensor  # their corrected logits; in a list, that of the last column means nothing
    grad_RD: Tensor  # gradient of the loss with respect to the scores
    loss_R: Tensor

    @classmethod
    def of(
        cls,
        logits_RV: Tensor,
        candidates: int,
        parts: list[Tensor],
        matrix_VX: Tensor | None,
        said_MV: Tensor,
        place_R: Tensor,
        data_R: Tensor,
        weights: Mapping[str, float],
    ) -> Selection:
        """``logits_RV``: logits of the uncorrected guesses, over the target's vocabulary. ``parts``: what hidden holds behind the part that
        the matrix of these logits multiplies (``matrix_VX``: the one of the correction, if there is one). ``said_MV``: the target's logits;
        ``place_R``: the position that judges each guess, an index into M; ``data_R``: the tokens in the data. ``weights``: those of
        ``selector`` and, in a list, of ``LISTED``.
        """
        if matrix_VX is None:
            return cls._of_list(parts, said_MV, place_R, data_R, weights)
        found = cls._corrected(logits_RV, parts[0], matrix_VX, candidates, said_MV, place_R)
        weight = weights.get("selector", 0.0)
        return cls(found.ids_RD, found.scores_RD, weight * found.grad_RD, weight * found.loss_R)

    @classmethod
    def _of_list(cls, parts: list[Tensor], said_MV: Tensor, place_R: Tensor, data_R: Tensor, weights: Mapping[str, float]) -> Selection:
        ids_RC, known_R, scores_RC = of_digits(parts[0]), parts[1][:, 0] > 0, parts[2]
        said_RC, right_RC = wide(said_MV[place_R[:, None], ids_RC]), ids_RC == data_R[:, None]
        log_p_RC = said_RC.log_softmax(1)
        with torch.enable_grad():
            leaf_RC = wide(scores_RC.detach()).requires_grad_()
            log_q_RC = leaf_RC.log_softmax(1)
            loss_R = weights.get("selector", 0.0) * (log_p_RC.exp() * (log_p_RC - log_q_RC)).sum(1) * known_R
            for name, judge in LISTED.items():
                loss_R = loss_R + weights.get(name, 0.0) * judge(log_q_RC, said_RC, right_RC) * (known_R & right_RC.any(1))
            (grad_RC,) = torch.autograd.grad(loss_R.sum(), leaf_RC)
        ids_RD = torch.cat([ids_RC, said_MV.argmax(-1)[place_R, None]], 1)
        none_R1 = grad_RC.new_zeros(len(grad_RC), 1)
        return cls(ids_RD, torch.cat([leaf_RC.detach(), none_R1], 1), torch.cat([grad_RC, none_R1], 1), loss_R.detach())

    @classmethod
    def _corrected(
        cls, logits_RV: Tensor, part_RX: Tensor, matrix_VX: Tensor, candidates: int, said_MV: Tensor, place_R: Tensor
    ) -> Selection:
        """With the unweighted loss: KL."""
        best_R1 = said_MV.argmax(-1)[place_R, None]
        ids_RD = torch.cat([logits_RV.topk(candidates).indices, best_R1], 1)
        scores_RD = wide(selected(logits_RV, part_RX, matrix_VX, ids_RD))
        found_R1 = (ids_RD[:, :-1] == best_R1).any(1, keepdim=True)
        # the loss leaves out the last column if it is among the candidates, else the weakest candidate
        left_out_RD = torch.arange(candidates + 1, device=ids_RD.device) == torch.where(found_R1, candidates, candidates - 1)
        said_RD = wide(said_MV[place_R[:, None], ids_RD])
        log_q_RD, log_p_RD = (x.masked_fill(left_out_RD, -torch.inf).log_softmax(1) for x in (scores_RD, said_RD))
        p_RD = log_p_RD.exp()
        loss_R = (p_RD * (log_p_RD - log_q_RD).masked_fill(left_out_RD, 0.0)).sum(1)
        return cls(ids_RD, scores_RD, log_q_RD.exp() - p_RD, loss_R)

    def figures(self, said_MV: Tensor, place_R: Tensor, data_R: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Figures of each guess as it is served, [R] each: whether its most likely candidate is the target's token, the acceptance
        probability at temperature 1, and the probability of the token in the data, ``data_R``. ``said_MV`` and ``place_R``: as in ``of``.
        ``rows``: how many rows of ``said_MV`` are summed at a time.
        """
        ids_RC, q_RC = self.ids_RD[:, :-1], self.scores_RD[:, :-1].softmax(1)
        normalizer_M = torch.cat([wide(strip).logsumexp(-1) for strip in said_MV.split(rows)])
        p_RC = (wide(said_MV[place_R[:, None], ids_RC]) - normalizer_M[place_R][:, None]).exp()
        match_R = ids_RC.gather(1, q_RC.argmax(1, keepdim=True))[:, 0] == self.ids_RD[:, -1]
        return match_R, torch.minimum(p_RC, q_RC).sum(1), (q_RC * (ids_RC == data_R[:, None])).sum(1)

    def backward(
        self, weight_R: Tensor, grad_RV: Tensor, parts: list[Tensor], matrix_VX: Tensor | None, grad_VX: Tensor | None
    ) -> list[Tensor]:
        """Backpropagate ``weight_R`` times the loss: into the logits' gradient ``grad_RV`` and the matrix's ``grad_VX`` (None: frozen), in
        place. Returns the gradients of ``parts``.
        """
        grad_RD = self.grad_RD * weight_R[:, None]
        if matrix_VX is None:
            return [*map(torch.zeros_like, parts[:2]), grad_RD[:, :-1].to(parts[2].dtype)]
        (part_RX,) = parts
        grad_RV.scatter_add_(1, self.ids_RD, grad_RD.to(grad_RV.dtype))
        if grad_VX is not None:  # summed as the gradient of an embedding is: in the same order each time, on a GPU too
            rows_RDX = grad_RD[..., None] * part_RX[:, None].to(grad_RD.dtype)
            grad_VX += torch.ops.aten.embedding_dense_backward(rows_RDX, self.ids_RD, len(grad_VX), -1, False)
        return [(grad_RD.to(matrix_VX.dtype)[:, None] @ matrix_VX[self.ids_RD])[:, 0]]
