"""What goes beyond one divergence of one matrix: anchors, corrections, weights that hang on the whole chain, confidence.

Shape suffixes as in trainers/losses.py.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from headstart.data.batch import TargetBatch
from headstart.data.live import look
from headstart.heads.base import TargetEnds
from headstart.heads.errors import UserError
from headstart.heads.unembedding import Unembedding
from headstart.heads.unroll import unroll
from headstart.trainers.beside import confidence_loss
from headstart.trainers.learner import Learner
from headstart.trainers.losses import LossOut, fused_loss
from tests.drafters import make
from tests.tiny_targets import tiny_target
from tests.trainers.small import LOSS, repetitive

B, T, K, H, R, D, V = 2, 15, 3, 5, 2, 6, 11
DECAY = 0.7


class Case:
    def __init__(self, correction: bool = False, ask_BA: Tensor | None = None) -> None:
        g = torch.Generator().manual_seed(1)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g, dtype=torch.float64)

        self.ask_BA = ask_BA
        width = H + R if correction else H
        self.whole = [randn(B, T, width) for _ in range(K)]  # of every root
        self.hidden = [h if ask_BA is None else h.gather(1, ask_BA[..., None].expand(-1, -1, width)) for h in self.whole]
        self.hidden = [h.clone().requires_grad_() for h in self.hidden]
        self.head_VH, self.correction_VR = randn(V, H), randn(V, R).requires_grad_() if correction else None
        tokens, mask = torch.randint(V, (B, T), generator=g), torch.rand(B, T, generator=g) < 0.8
        self.ends = TargetEnds(nn.Identity(), randn(V, D))
        self.batch = TargetBatch(tokens, mask, torch.zeros_like(tokens), torch.zeros_like(tokens), {}, randn(B, T, D))
        self.supervised = [self.batch.supervised(d) for d in range(1, K + 1)]
        if ask_BA is not None:
            asked_BT = torch.zeros(B, T, dtype=torch.bool).scatter(1, ask_BA, True)
            self.supervised = [m & asked_BT for m in self.supervised]
        self.inputs = [*self.hidden, *([] if self.correction_VR is None else [self.correction_VR])]

    def fused(self, terms: dict[str, float], weighting: str = "decay", decay: float = DECAY) -> LossOut:
        unembedding, batch = Unembedding(self.head_VH, None, self.correction_VR), self.batch
        about = (batch.final_BTD, self.ends, batch.tokens_BT, self.supervised, terms, decay, 7, True, self.ask_BA, weighting)
        return fused_loss(self.hidden, [unembedding] * K, *about)

    def q_p(self, k: int, b: int, t: int) -> tuple[Tensor, Tensor]:
        """Draft and target distributions of root t at depth k + 1."""
        row = t if self.ask_BA is None else self.ask_BA[b].tolist().index(t)
        matrix = self.head_VH if self.correction_VR is None else torch.cat([self.head_VH, self.correction_VR], dim=1)
        return (matrix @ self.hidden[k][b, row]).softmax(0), (self.ends.head_VD @ self.batch.final_BTD[b, t + k + 1]).softmax(0)

    def pairs(self) -> list[tuple[int, int, int]]:
        return [(k, b, t) for k in range(K) for b, t in self.supervised[k].nonzero().tolist()]


def same_gradients(case: Case, a: Tensor, b: Tensor) -> None:
    for x, y in zip(torch.autograd.grad(a, case.inputs), torch.autograd.grad(b, case.inputs), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-10)
        assert y.any()


ASK = torch.tensor([[4, 0, 9, 2], [11, 3, 5, 1]])


@pytest.mark.parametrize("correction", [False, True], ids=["plain", "corrected"])
@pytest.mark.parametrize("ask_BA", [None, ASK], ids=["all", "anchors"])
def test_anchors_and_corrections(ask_BA: Tensor | None, correction: bool) -> None:
    case = Case(correction, ask_BA)
    out = case.fused({"kl": 1.0})
    expected = torch.zeros((), dtype=torch.float64)
    for k, b, t in case.pairs():
        q, p = case.q_p(k, b, t)
        expected = expected + DECAY**k * (p * (p.log() - q.log())).sum()
        assert out.match_KBT[k, b, t] == (q.argmax() == p.argmax())
        torch.testing.assert_close(out.alpha_KBT[k, b, t], torch.minimum(p, q).sum())
    torch.testing.assert_close(out.loss_sum, expected)
    same_gradients(case, out.loss_sum, expected)
    assert out.count_K.tolist() == [int(m.sum()) for m in case.supervised]


def test_a_corrected_head_may_have_a_trimmed_vocabulary() -> None:
    """What it cannot guess has the probability 0."""
    case, ids = Case(True, ASK), torch.tensor([0, 2, 3, 7, 10])
    correction_VR = case.correction_VR
    assert correction_VR is not None
    rows_VR = correction_VR[ids].detach().requires_grad_()
    unembedding, batch = Unembedding(case.head_VH[ids], ids, rows_VR), case.batch
    about = (batch.final_BTD, case.ends, batch.tokens_BT, case.supervised, {"tv": 1.0}, DECAY, 7, True, ASK)
    out = fused_loss(case.hidden, [unembedding] * K, *about)
    expected = torch.zeros((), dtype=torch.float64)
    for k, b, t in case.pairs():
        matrix = torch.cat([case.head_VH[ids], rows_VR], dim=1)
        q = (matrix @ case.hidden[k][b, ASK[b].tolist().index(t)]).softmax(0)
        p = (case.ends.head_VD @ batch.final_BTD[b, t + k + 1]).softmax(0)
        expected = expected + DECAY**k * (1 - torch.minimum(p[ids], q).sum())
    torch.testing.assert_close(out.loss_sum, expected)
    for x, y in zip(torch.autograd.grad(out.loss_sum, [*case.hidden, rows_VR]),
                    torch.autograd.grad(expected, [*case.hidden, rows_VR]), strict=True):  # fmt: skip
        torch.testing.assert_close(x, y, rtol=0, atol=1e-10)


def test_anchors_are_some_of_all_roots() -> None:
    """Asking for every root, in any order, is asking for none in particular."""
    everywhere = torch.stack([torch.randperm(T), torch.randperm(T)])
    a, b = Case(ask_BA=everywhere).fused({"tv": 1.0}), Case().fused({"tv": 1.0})
    torch.testing.assert_close(a.loss_sum, b.loss_sum)
    torch.testing.assert_close(a.alpha_KBT, b.alpha_KBT)
    assert a.match_KBT.equal(b.match_KBT)


@pytest.mark.parametrize("correction", [False, True])
@pytest.mark.parametrize("ask_BA", [None, ASK], ids=["all", "anchors"])
def test_chain_weighting_is_the_gradient_of_end_to_end_total_variation(ask_BA: Tensor | None, correction: bool) -> None:
    """L = sum over roots and k of 1 - prod_(i<=k) alpha_i, by autograd through the product (2606.12370)."""
    case = Case(correction, ask_BA)
    alpha = {key: torch.minimum(*case.q_p(*key)).sum() for key in case.pairs()}
    expected = torch.zeros((), dtype=torch.float64)
    for k, b, t in case.pairs():
        product = torch.ones((), dtype=torch.float64)
        for i in range(k + 1):
            product = product * alpha.get((i, b, t), torch.ones(()))
        expected = expected + 1 - product
    same_gradients(case, case.fused({"tv": 1.0}, "chain", decay=1.0).loss_sum, expected)


def test_dpace_weights_follow_the_probability_of_the_true_prefix() -> None:
    case = Case()
    weight = {}
    for k, b, t in case.pairs():
        weight[k, b, t] = torch.zeros(())
        for m in range(k, K):  # sum over later depths of the product up to them
            if not case.supervised[m][b, t]:
                continue
            product = 1.0
            for i in range(m + 1):
                if case.supervised[i][b, t]:
                    product *= 0.5 * case.q_p(i, b, t)[0][case.batch.tokens_BT[b, t + 2 + i]].item() + 0.5
            weight[k, b, t] = weight[k, b, t] + product
    mean = sum(weight.values()) / len(weight)
    expected = sum((w / mean * -case.q_p(*key)[0][case.q_p(*key)[1].argmax()].log() for key, w in weight.items()), torch.zeros(()))
    out = case.fused({"ce": 1.0}, "dpace", decay=1.0)
    torch.testing.assert_close(out.loss_sum, expected, rtol=1e-6, atol=1e-6, check_dtype=False)


@pytest.mark.parametrize("weighting", ["dpace", "chain"])
@torch.no_grad()
def test_a_loss_that_is_not_trained_is_not_weighted(weighting: str) -> None:
    """That over held-out text can be compared with the one of any other weighting."""
    torch.testing.assert_close(Case().fused({"kl": 1.0}, weighting).loss_sum, Case().fused({"kl": 1.0}).loss_sum)


def test_confidence_learns_the_chance_of_acceptance() -> None:
    case = Case(ask_BA=ASK)
    out = case.fused({"kl": 1.0})
    logits = [torch.randn(B, ASK.shape[1], dtype=torch.float64, requires_grad=True) for _ in range(K)]
    expected = torch.zeros((), dtype=torch.float64)
    for k, b, t in case.pairs():
        c, alpha = logits[k][b, ASK[b].tolist().index(t)].sigmoid(), out.alpha_KBT[k, b, t]
        expected = expected - DECAY**k * (alpha * c.log() + (1 - alpha) * (1 - c).log())
    loss = confidence_loss(logits, out.alpha_KBT, case.supervised, DECAY, ASK)
    torch.testing.assert_close(loss, expected, check_dtype=False, rtol=1e-6, atol=1e-6)
    (grad,) = torch.autograd.grad(loss, logits[1:2])
    assert grad.any()


@torch.no_grad()
@pytest.mark.parametrize(("name", "term", "off"), [("dspark", "confidence", "feature"), ("eagle", "feature", "confidence")])
def test_what_is_judged_beside_the_divergences_has_its_weight(name: str, term: str, off: str) -> None:
    """Each guess written out. A term of weight 0 asks nothing of the drafter."""
    target = tiny_target()
    drafter = make(name, target)
    batch = look(repetitive().batch(slice(0, 2)), target, drafter.taps)
    loss = LOSS | {"kernel": "torch"}  # which computes the acceptance only if it is told to
    plain, more = (Learner(drafter, **loss | {"terms": {"kl": 1.0} | terms}) for terms in ({}, {term: 0.5, off: 0.0}))
    teacher_BTV, expected = target.ends.logits(batch.final_BTD).double(), 0.0
    for d, draft in enumerate(unroll(drafter, batch.roots(), batch.documents_BT, plain.depth), start=1):
        b, t = batch.supervised(d).nonzero(as_tuple=True)
        if term == "confidence":
            q_RV = drafter.unembedding(d).logits(draft.hidden_BNH).double()[b, t].softmax(-1)
            alpha_R = torch.minimum(teacher_BTV[b, t + d].softmax(-1), q_RV).sum(-1)
            sure_R = draft.confidence_BN[b, t].double().sigmoid()
            loss_R = -(alpha_R * sure_R.log() + (1 - alpha_R) * (1 - sure_R).log())
        else:
            far_RD = (draft.state_BNH[b, t] - batch.final_BTD[b, t + d]).double().abs()
            loss_R = torch.where(far_RD < 1, far_RD**2 / 2, far_RD - 0.5).mean(-1)
        expected += LOSS["decay"] ** (d - 1) * float(loss_R.sum())
    found = float(more(batch, figures=False).loss_sum - plain(batch, figures=False).loss_sum)
    assert found == pytest.approx(0.5 * expected, rel=1e-4) and expected > 1


def test_an_unknown_weighting_is_refused() -> None:
    with pytest.raises(UserError, match=r"'dpce'.*decay, dpace, chain|decay, dpace, chain.*'dpce'"):
        Case().fused({"kl": 1.0}, "dpce")
