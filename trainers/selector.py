"""The loss of a selector (``Unembedding.candidates``): KL to the target's distribution among the candidates of a guess.

Where the target's likeliest token is no candidate it takes the place of the weakest one, so that every guess has a right answer; matches
and acceptance are those of the real candidates. The token before is the true one, as in every other loss. (Published is cross-entropy to
the likeliest token alone, which is accepted less at temperature 0 and above: EXPERIMENTS.md, 2026-11-26.)

Shape suffixes: R guesses, C candidates, D = C + 1, V vocabulary, X columns of the correction, M positions of the target.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headstart.heads.unembedding import selected
from headstart.inference.decoding.sampling import wide


@dataclass
class Selection:
    """The candidates of R guesses, and the loss of their order."""

    ids_RD: Tensor  # the candidates, the likeliest first, then the target's own token
    scores_RD: Tensor  # their corrected logits
    grad_RD: Tensor  # of the unweighted loss by these
    loss_R: Tensor

    @classmethod
    def of(cls, logits_RV: Tensor, part_RX: Tensor, matrix_VX: Tensor, candidates: int, said_MV: Tensor, place_R: Tensor) -> Selection:
        """``logits_RV``: the backbone's own, over the target's vocabulary. ``part_RX`` times the matrix corrects them. ``said_MV``: the
        target's logits; ``place_R``: each guess's place among them.
        """
        best_R1 = said_MV.argmax(-1)[place_R, None]
        ids_RD = torch.cat([logits_RV.topk(candidates).indices, best_R1], 1)
        scores_RD = wide(selected(logits_RV, part_RX, matrix_VX, ids_RD))
        found_R1 = (ids_RD[:, :-1] == best_R1).any(1, keepdim=True)
        # trained: the candidates and not the further column, or that column and not the weakest candidate
        left_out_RD = torch.arange(candidates + 1, device=ids_RD.device) == torch.where(found_R1, candidates, candidates - 1)
        said_RD = wide(said_MV[place_R[:, None], ids_RD])
        log_q_RD, log_p_RD = (x.masked_fill(left_out_RD, -torch.inf).log_softmax(1) for x in (scores_RD, said_RD))
        p_RD = log_p_RD.exp()
        loss_R = (p_RD * (log_p_RD - log_q_RD).masked_fill(left_out_RD, 0.0)).sum(1)
        return cls(ids_RD, scores_RD, log_q_RD.exp() - p_RD, loss_R)

    def figures(self, said_MV: Tensor, place_R: Tensor, data_R: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of each guess as it is served, [R] each: whether its likeliest candidate is the target's token, the acceptance probability at
        temperature 1, and the probability of the token in the data, ``data_R``. ``said_MV``: the target's logits; ``place_R``: each guess's
        place among them. ``rows``: of these, how many to add up at a time.
        """
        ids_RC, q_RC = self.ids_RD[:, :-1], self.scores_RD[:, :-1].softmax(1)
        normalizer_M = torch.cat([wide(strip).logsumexp(-1) for strip in said_MV.split(rows)])
        p_RC = (wide(said_MV[place_R[:, None], ids_RC]) - normalizer_M[place_R][:, None]).exp()
        match_R = ids_RC.gather(1, q_RC.argmax(1, keepdim=True))[:, 0] == self.ids_RD[:, -1]
        return match_R, torch.minimum(p_RC, q_RC).sum(1), (q_RC * (ids_RC == data_R[:, None])).sum(1)

    def backward(self, weight_R: Tensor, grad_RV: Tensor, part_RX: Tensor, matrix_VX: Tensor, grad_VX: Tensor | None) -> Tensor:
        """Backpropagate ``weight_R`` times the loss: into the logits' gradient ``grad_RV`` and the matrix's ``grad_VX`` (None: frozen), in
        place. Returns the gradient of ``part_RX``.
        """
        grad_RD = self.grad_RD * weight_R[:, None]
        grad_RV.scatter_add_(1, self.ids_RD, grad_RD.to(grad_RV.dtype))
        if grad_VX is not None:  # as torch adds up the gradient of an embedding: in the same order each time, on a GPU too
            rows_RDX = grad_RD[..., None] * part_RX[:, None].to(grad_RD.dtype)
            grad_VX += torch.ops.aten.embedding_dense_backward(rows_RDX, self.ids_RD, len(grad_VX), -1, False)
        return (grad_RD.to(matrix_VX.dtype)[:, None] @ matrix_VX[self.ids_RD])[:, 0]
