"""The loss of a selector against its definition: one guess, one candidate at a time, in float64.

Shape suffixes as in trainers/losses.py.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headstart.heads.unembedding import Unembedding
from headstart.trainers.losses import fused_loss
from tests.trainers.test_objectives import ASK, DECAY, Case, H, K

C = 3  # candidates


def served(case: Case, k: int, b: int, t: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of one guess: the logits before the selector, those of all tokens after it, the candidates, and what the target says."""
    row = t if case.ask_BA is None else case.ask_BA[b].tolist().index(t)
    assert case.correction_VR is not None
    before = case.head_VH @ case.hidden[k][b, row, :H]
    after = before + case.correction_VR @ case.hidden[k][b, row, H:]
    return before, after, before.sort(descending=True).indices[:C], case.ends.head_VD @ case.batch.final_BTD[b, t + k + 1]


@pytest.mark.parametrize("weighting", ["decay", "dpace"])
@pytest.mark.parametrize("ask_BA", [None, ASK], ids=["all", "anchors"])
def test_the_selector_is_kl_among_its_candidates(ask_BA: Tensor | None, weighting: str) -> None:
    case = Case(correction=True, ask_BA=ask_BA)
    unembedding = Unembedding(case.head_VH, None, case.correction_VR, candidates=C)
    about = (case.batch.final_BTD, case.ends, case.batch.tokens_BT, case.supervised, {"kl": 1.0}, DECAY, 7, True, ask_BA, weighting)
    out = fused_loss(case.hidden, [unembedding] * K, *about, selector=0.6)
    whole = torch.zeros((), dtype=torch.float64)
    weight = dict.fromkeys(case.pairs(), 1.0) if weighting == "decay" else dpace(case)
    missing = 0
    for k, b, t in case.pairs():
        before, after, candidates, said = served(case, k, b, t)
        p, best, ids = said.softmax(0), int(said.argmax()), candidates.tolist()
        q = torch.zeros_like(p).index_copy(0, candidates, after[candidates].softmax(0))
        assert out.match_KBT[k, b, t] == (int(q.argmax()) == best)
        torch.testing.assert_close(out.alpha_KBT[k, b, t], torch.minimum(p, q).sum())
        torch.testing.assert_close(out.true_KBT[k, b, t], q[case.batch.tokens_BT[b, t + 2 + k]])
        if best not in ids:  # the weakest one makes room
            ids, missing = [*ids[:-1], best], missing + 1
        among = said[ids].softmax(0)
        selector = (among * (among.log() - after[ids].log_softmax(0))).sum()
        kl = (p * (p.log() - before.log_softmax(0))).sum()
        whole = whole + weight[k, b, t] * DECAY**k * (kl + 0.6 * selector)
    assert 0 < missing < len(case.pairs())
    torch.testing.assert_close(out.loss_sum, whole)
    torch.testing.assert_close(out.loss_K.sum(), whole)
    for x, y in zip(torch.autograd.grad(out.loss_sum, case.inputs), torch.autograd.grad(whole, case.inputs), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-10)
        assert y.any()


def dpace(case: Case) -> dict[tuple[int, int, int], float]:
    """D-PACE's weights, from the probabilities that the selector leaves."""
    weight = {}
    for k, b, t in case.pairs():
        weight[k, b, t] = 0.0
        for m in (m for m in range(k, K) if case.supervised[m][b, t]):
            product = 1.0
            for i in (i for i in range(m + 1) if case.supervised[i][b, t]):
                _, after, candidates, _ = served(case, i, b, t)
                of = dict(zip(candidates.tolist(), after[candidates].softmax(0).tolist(), strict=True))
                product *= 0.5 * of.get(int(case.batch.tokens_BT[b, t + 2 + i]), 0.0) + 0.5
            weight[k, b, t] += product
    mean = sum(weight.values()) / len(weight)
    return {key: w / mean for key, w in weight.items()}
