"""The loss of a selector (``Unembedding.candidates``): cross-entropy to the target's likeliest token among the candidates of a guess.

Where that token is no candidate it takes the place of the weakest one, so that every guess has a right answer; matches and acceptance
are those of the real candidates. The token before is the true one, as in every other loss.

Shape suffixes: R guesses, C candidates, V vocabulary, X columns of the correction, M positions of the target.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headstart.heads.unembedding import selected
from headstart.inference.decoding.sampling import wide


@dataclass
class Said:
    """What the target says at the M positions of a chunk."""

    logits_MV: Tensor
    normalizer_M: Tensor  # log of the sum of exp of the logits
    best_M: Tensor  # its likeliest tokens
    data_M: Tensor  # the tokens in the data

    @classmethod
    def of(cls, logits_MV: Tensor, data_M: Tensor) -> Said:
        return cls(logits_MV, wide(logits_MV).logsumexp(-1), logits_MV.argmax(-1), data_M)


@dataclass
class Selection:
    """The candidates of R guesses, judged by what the target says."""

    ids_RD: Tensor  # the candidates, the likeliest first, then the target's own token: D = C + 1
    grad_RD: Tensor  # of the weighted loss by their corrected logits
    loss_R: Tensor
    match_R: Tensor  # the likeliest candidate is the target's token
    alpha_R: Tensor  # acceptance probability at temperature 1
    true_R: Tensor  # probability of the token in the data

    @classmethod
    def of(cls, logits_RV: Tensor, part_RX: Tensor, matrix_VX: Tensor, candidates: int, said: Said, place_R: Tensor) -> Selection:
        """``logits_RV``: the backbone's own. ``part_RX`` times the matrix corrects them. ``place_R``: each guess's place among the
        positions of ``said``.
        """
        best_R1 = said.best_M[place_R][:, None]
        ids_RD = torch.cat([logits_RV.topk(candidates).indices, best_R1], 1)
        scores_RD = wide(selected(logits_RV, part_RX, matrix_VX, ids_RD))
        right_RC = ids_RD[:, :-1] == best_R1
        found_R1 = right_RC.any(1, keepdim=True)
        # trained: the candidates and not the further column, or that column and not the weakest candidate
        place_D = torch.arange(candidates + 1, device=ids_RD.device)
        left_out_RD = place_D == torch.where(found_R1, candidates, candidates - 1)
        log_q_RD = scores_RD.masked_fill(left_out_RD, -torch.inf).log_softmax(1)
        label_R1 = torch.where(found_R1, right_RC.int().argmax(1, keepdim=True), candidates)
        grad_RD = log_q_RD.exp().scatter_add_(1, label_R1, scores_RD.new_full(label_R1.shape, -1.0))

        q_RC = scores_RD[:, :-1].softmax(1)
        said_RC = wide(said.logits_MV[place_R[:, None], ids_RD[:, :-1]])
        p_RC = (said_RC - said.normalizer_M[place_R][:, None]).exp()
        match_R = right_RC.gather(1, q_RC.argmax(1, keepdim=True))[:, 0]
        true_R = (q_RC * (ids_RD[:, :-1] == said.data_M[place_R][:, None])).sum(1)
        return cls(ids_RD, grad_RD, -log_q_RD.gather(1, label_R1)[:, 0], match_R, torch.minimum(p_RC, q_RC).sum(1), true_R)

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
