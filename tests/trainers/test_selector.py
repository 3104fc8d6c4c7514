"""The loss of a selector against its definition: one guess, one candidate at a time, in float64.

Shape suffixes as in trainers/losses.py.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from headstart.data.live import look
from headstart.heads.errors import UserError, warn_once
from headstart.heads.unembedding import Unembedding, in_digits
from headstart.heads.unroll import unroll
from headstart.trainers.learner import Learner
from headstart.trainers.losses import fused_loss
from headstart.trainers.selector import Selection
from tests.drafters import make
from tests.tiny_targets import tiny_target
from tests.trainers.small import repetitive
from tests.trainers.test_losses import Largest
from tests.trainers.test_objectives import ASK, DECAY, Case, H, K, V

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
    out = fused_loss(case.hidden, [unembedding] * K, *about, ordering={"selector": 0.6})
    whole, plain_K = torch.zeros((), dtype=torch.float64), torch.zeros(K, dtype=torch.float64)
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
        plain_K[k] += (kl + 0.6 * selector).detach()
    assert 0 < missing < len(case.pairs())
    torch.testing.assert_close(out.loss_sum, whole)
    torch.testing.assert_close(out.loss_K.sum(), whole)
    torch.testing.assert_close(out.plain_K, plain_K)
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


@pytest.mark.parametrize("ask_BA", [None, ASK], ids=["all", "anchors"])
def test_listed_scores_are_judged_as_they_are_defined(ask_BA: Tensor | None) -> None:
    """Scores that the drafter lists beside its candidates: no other token has one. Some guesses lie behind a token that was none."""
    case, g = Case(ask_BA=ask_BA), torch.Generator().manual_seed(3)
    ids, scores, known, hidden = [], [], [], list[Tensor]()
    for h in case.hidden:
        ids.append(torch.rand(*h.shape[:2], V, generator=g).argsort(-1)[..., :C])
        scores.append(torch.randn(*h.shape[:2], C, generator=g, dtype=h.dtype).requires_grad_())
        known.append((torch.rand(*h.shape[:2], 1, generator=g) < 0.7).to(h.dtype))
        hidden.append(torch.cat([h, in_digits(ids[-1], h.dtype), known[-1], scores[-1]], -1))
    unembedding, weights = Unembedding(case.head_VH, candidates=C, listed=True), {"selector": 0.6, "choice": 0.3, "distractor": 0.2}
    about = (case.batch.final_BTD, case.ends, case.batch.tokens_BT, case.supervised, {"kl": 1.0}, DECAY, 7, True, ask_BA)
    out, whole, counts = fused_loss(hidden, [unembedding] * K, *about, ordering=weights), torch.zeros((), dtype=torch.float64), [0, 0]
    for k, b, t in case.pairs():
        row = t if ask_BA is None else ask_BA[b].tolist().index(t)
        before, said = case.head_VH @ case.hidden[k][b, row], case.ends.head_VD @ case.batch.final_BTD[b, t + k + 1]
        mine, q, right = ids[k][b, row].tolist(), scores[k][b, row].softmax(0), int(case.batch.tokens_BT[b, t + 2 + k])
        p, all_q = said.softmax(0), torch.zeros(V, dtype=torch.float64).index_copy(0, ids[k][b, row], q)
        assert out.match_KBT[k, b, t] == (int(all_q.argmax()) == int(p.argmax()))
        torch.testing.assert_close(out.alpha_KBT[k, b, t], torch.minimum(p, all_q).sum())
        torch.testing.assert_close(out.true_KBT[k, b, t], all_q[right])
        loss = (p * (p.log() - before.log_softmax(0))).sum()
        if known[k][b, row]:
            among = said[mine].softmax(0)
            loss, counts[0] = loss + 0.6 * (among * (among.log() - q.log())).sum(), counts[0] + 1
            if right in mine:
                gaps = torch.stack([(said[right] - said[i]).clamp(min=0) for i in mine])
                loss, counts[1] = loss - 0.3 * q[mine.index(right)].log() + 0.2 * (q * gaps).sum(), counts[1] + 1
        whole = whole + DECAY**k * loss
    assert 0 < counts[1] < counts[0] < len(case.pairs())
    torch.testing.assert_close(out.loss_sum, whole)
    inputs = [*case.inputs, *scores]
    for x, y in zip(torch.autograd.grad(out.loss_sum, inputs), torch.autograd.grad(whole, inputs), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-10)
        assert y.any()
    first = fused_loss(hidden, [unembedding] * K, *about[:4], {"kl": 1.0}, DECAY, 7, True, ask_BA, "dpace", ordering=weights)
    assert first.loss_sum.isfinite() and not torch.isclose(first.loss_sum, whole)


@pytest.mark.parametrize("listed", [False, True], ids=["corrected", "listed"])
def test_numbers_in_half_precision_are_judged_in_fp32(listed: bool) -> None:
    """In bfloat16 the logarithms would be wrong in the third digit."""
    g, rows, none = torch.Generator().manual_seed(5), 6, torch.zeros(6, 2).bfloat16()  # a correction of 0 adds nothing that is rounded
    drafted, said = (torch.randn(rows, V, generator=g).bfloat16() for _ in range(2))
    ids = drafted.topk(C).indices
    known = torch.ones(rows, 1).bfloat16()
    parts = [in_digits(ids, torch.bfloat16), known, drafted.gather(1, ids)] if listed else [none]
    data = said.argmax(-1)
    found = Selection.of(drafted, C, parts, None if listed else none.new_zeros(V, 2), said, torch.arange(rows), data, {"selector": 1.0})
    expected = []
    for r, mine in enumerate(ids.tolist()):
        some = mine if listed or int(data[r]) in mine else [*mine[:-1], int(data[r])]
        p, q = said[r, some].double().softmax(0), drafted[r, some].double().softmax(0)
        expected.append((p * (p / q).log()).sum())
    torch.testing.assert_close(found.loss_R.double(), torch.stack(expected), rtol=1e-5, atol=1e-6)


def test_figures_take_few_rows_of_the_targets_logits_at_a_time() -> None:
    """In fp32 they would take the memory that the chunks are there to spare."""
    g = torch.Generator().manual_seed(6)
    said, place, data = torch.randn(12, 50, generator=g).bfloat16(), torch.tensor([3, 11]), torch.tensor([4, 40])
    ids = torch.cat([torch.tensor([[4, 9, 2], [7, 40, 1]]), said.argmax(-1)[place, None]], 1)
    selection = Selection(ids, torch.randn(2, 4, generator=g), torch.zeros(2, 4), torch.zeros(2))
    with Largest() as seen:
        figures = selection.figures(said, place, data, 2)
    assert seen.elements == 2 * 50
    for few, all_at_once in zip(figures, selection.figures(said, place, data, 12), strict=True):
        torch.testing.assert_close(few, all_at_once)


def test_true_tokens_are_judged_as_long_as_all_before_are_candidates() -> None:
    """A whole drafter, in float64: which guesses the terms of the order count, and the gradients of all its weights."""
    target = tiny_target()
    drafter = make("lilicorr", target, candidates=48, layers=1).double().train()
    terms = {"kl": 1.0, "choice": 0.25, "distractor": 0.25}
    learner, D = Learner(drafter, depth=5, terms=terms, decay=0.8, chunk=16), target.shape.hidden_size
    batch = look(repetitive().batch(slice(0, 2)), target, drafter.taps)
    batch = replace(batch, states={tap: x.double() for tap, x in batch.states.items()}, final_BTD=batch.final_BTD.double())
    head_VD, expected, reached = target.ends.head_VD.double(), torch.zeros((), dtype=torch.float64), [0] * 5
    drafts = unroll(drafter, batch.roots(), batch.documents_BT, 5)
    within = {(b, t): True for b in range(2) for t in range(batch.tokens_BT.shape[1])}
    for d, draft in enumerate(drafts, start=1):
        logits = drafter.unembedding(d).logits(draft.hidden_BNH)
        for b, t in within:
            backbone = head_VD @ draft.hidden_BNH[b, t, :D]
            right = int(batch.tokens_BT[b, t + 1 + d]) if t + 1 + d < batch.tokens_BT.shape[1] else -1
            mine, counts = backbone.sort(descending=True).indices[:48], within[b, t]
            within[b, t] = counts and right in mine.tolist()
            if not batch.supervised(d)[b, t]:
                continue
            said = head_VD @ batch.final_BTD[b, t + d]
            p = said.softmax(0)
            loss = (p * (p.log() - backbone.log_softmax(0))).sum()
            if within[b, t]:
                log_q, reached[d - 1] = logits[b, t, mine].log_softmax(0), reached[d - 1] + 1
                loss = loss - 0.25 * log_q[mine.tolist().index(right)] + 0.25 * (log_q.exp() * (said[right] - said[mine]).relu()).sum()
            expected = expected + 0.8 ** (d - 1) * loss
    assert reached[0] > reached[1] > 0
    out = learner(batch)
    torch.testing.assert_close(out.loss_sum, expected)
    trained = [p for p in drafter.parameters() if p.requires_grad]
    found, wanted = (torch.autograd.grad(x, trained, retain_graph=True) for x in (out.loss_sum, expected))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_terms_of_listed_scores_need_a_list() -> None:
    target = tiny_target()
    batch = look(repetitive().batch(slice(0, 2)), target, make("dflash2", target).taps)
    for head, term, message in [
        ("dflash2", "choice", "choice needs a drafter that lists the scores of its candidates"),
        ("dflash", "distractor", "distractor needs a drafter that reorders candidates"),
        (
            "lilicorr",
            "base",
            "base is for drafters that correct the guesses of a backbone: this one learns its backbone by the divergences",
        ),
    ]:
        with pytest.raises(UserError, match=rf"loss\.terms\.{message}"):
            Learner(make(head, target), depth=3, terms={"kl": 1.0, term: 1.0}, decay=0.8, chunk=16)(batch)
    with pytest.raises(UserError, match=r"loss\.terms\.choice orders the candidates that a divergence finds: name a divergence too"):
        Learner(make("lilicorr", target), depth=3, terms={"choice": 1.0}, decay=0.8, chunk=16)


def test_it_warns_where_the_listed_scores_are_not_trained(caplog: pytest.LogCaptureFixture) -> None:
    """Their head would be exported as it started."""
    target = tiny_target()
    for terms, warned in [({"kl": 1.0}, True), ({"kl": 1.0, "choice": 0.25}, False), ({"kl": 1.0, "selector": 1.0}, False)]:
        drafter = make("lilicorr", target)
        warn_once.cache_clear()
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            Learner(drafter, depth=3, terms=terms, decay=0.8, chunk=16)(look(repetitive().batch(slice(0, 2)), target, drafter.taps))
        assert ("no term of the loss trains the order of this drafter's candidates" in caplog.text) == warned
