"""The divergences in one Triton kernel, interpreted on a CPU, against full logits in float64 (formulas: tests/trainers/test_losses.py).

Where triton is installed; a process of its own says TRITON_INTERPRET=1 where this one does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from headstart.data.live import look
from headstart.heads.errors import UserError
from headstart.trainers.divergences import Teacher, find, overlap
from headstart.trainers.learner import Learner
from headstart.trainers.losses import LossOut
from headstart.trainers.terms import IN_KERNEL, Weights, check_kernel
from tests.drafters import make
from tests.interpreted import INTERPRETED, TRITON, in_its_own, interpreted
from tests.tiny_targets import tiny_target
from tests.trainers.small import LOSS, repetitive
from tests.trainers.test_losses import IDS, Case, close

ALL = {"kl": 0.7, "tv": 0.9, "lk_alpha": 0.3, "lk_hybrid": 1.1, "ce": 0.6, "data_ce": 0.45}
test_all_of_this_interpreted = in_its_own(__file__)


def test_where_it_cannot_be_had_it_is_said() -> None:
    for terms, device, words in (
        ({"jsd": 1.0}, "cuda", r"loss\.kernel=triton knows kl, tv, .*, not jsd: take loss\.kernel=torch"),
        ({"kl": 1.0}, "cpu", r"is for GPUs, the drafter is on cpu" if TRITON else r"needs `pip install triton`"),
    ):
        if TRITON and INTERPRETED and device == "cpu":
            check_kernel("triton", terms, torch.device(device))
            continue
        with pytest.raises(UserError, match=words):
            check_kernel("triton", terms, torch.device(device))
    check_kernel("torch", {"jsd": 1.0}, torch.device("cpu"))
    assert set(ALL) == set(IN_KERNEL)


def in_kernel(case: Case, terms: dict[str, float], chunk: int, weighting: str = "decay", kernel: str = "triton") -> LossOut:
    return case.fused(terms, chunk, weighting=weighting, kernel=kernel)


@interpreted
@pytest.mark.parametrize("ids", [None, IDS], ids=["full", "trimmed"])
@pytest.mark.parametrize("name", [*IN_KERNEL, "all", "all in pieces"])
def test_each_divergence_and_its_gradient(name: str, ids: Tensor | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "all in pieces":
        monkeypatch.setattr("headstart.trainers.kernel.BLOCK", 4)
    case, terms = Case(ids=ids), ALL if name.startswith("all") else {name: 1.5}
    as_written_out(in_kernel(case, terms, 7), case, case, terms, close)


def as_written_out(found: LossOut, case: Case, exact: Case, terms: dict[str, float], close: Callable[[Tensor, Tensor], None]) -> None:
    """``found`` from ``case`` is what the formulas say of the same in float64, ``exact``, root by root."""
    naive = exact.naive(terms)
    close(found.loss_sum, naive.loss_sum)
    close(found.alpha_KBT, naive.alpha_KBT)
    close(found.true_KBT, naive.true_KBT)
    assert found.match_KBT.equal(naive.match_KBT) and found.match_KBT.any() and found.count_K.equal(naive.count_K)
    for a, b in zip(case.grads(found.loss_sum), exact.grads(naive.loss_sum), strict=True):
        close(a, b)
        assert b.any()


@interpreted
@pytest.mark.parametrize(("heads", "weighting"), [("own", "chain"), ("frozen", "dpace")])
def test_heads_and_weightings(heads: str, weighting: str) -> None:
    """Against the chunked form, which has tests of its own for these."""
    terms = {"tv": 1.0, "kl": 0.5}
    case, other = Case(heads=heads, softcap=1.5), Case(heads=heads, softcap=1.5)
    found, wanted = in_kernel(case, terms, 9, weighting=weighting), other.fused(terms, 9, weighting=weighting)
    close(found.loss_sum, wanted.loss_sum)
    for a, b in zip(case.grads(found.loss_sum), other.grads(wanted.loss_sum), strict=True):
        close(a, b)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("trimmed", [False, True])
def test_lower_precision_rounds_no_more_than_the_chunked_form(dtype: torch.dtype, trimmed: bool) -> None:
    from headstart.trainers import kernel

    rounds_once(kernel, dtype, dtype, trimmed)


def rounds_once(kernel: Any, dtype: torch.dtype, said_dtype: torch.dtype, trimmed: bool) -> None:
    """``kernel`` on logits in ``dtype`` and the target's in ``said_dtype``, against float64 made from the same logits."""
    generator, R, W = torch.Generator().manual_seed(0), 12, 700
    ids_V = torch.arange(0, W, 3) if trimmed else None
    V = W if ids_V is None else len(ids_V)
    logits_RV, said_CW = ((4 * torch.randn(n, m, generator=generator)).to(dtype) for n, m in ((R, V), (5, W)))
    said_CW = said_CW.to(said_dtype)
    place_R, data_C, weight_R = torch.arange(R) % 5, torch.arange(5) * 30, torch.rand(R, generator=generator)
    exact = logits_RV.double().requires_grad_()
    teacher = Teacher.of(said_CW.double().log_softmax(-1), data_C, ids_V).at(place_R)
    log_q = exact.log_softmax(-1)
    loss_R = weight_R.double() * sum(weight * find(name)(log_q, teacher) for name, weight in ALL.items())
    (grad,) = torch.autograd.grad(loss_R.sum(), exact)
    made = kernel.judge(logits_RV, kernel.Said.of(said_CW, data_C, ids_V), place_R, weight_R, Weights.of(ALL, None), True)
    torch.testing.assert_close(made.loss_R.double(), loss_R.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(made.alpha_R.double(), overlap(log_q.detach(), teacher), rtol=1e-5, atol=1e-6)
    assert made.match_R.equal(exact.argmax(-1) == teacher.best_C)
    torch.testing.assert_close(logits_RV.double(), grad, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


@interpreted
def test_constants_and_edges() -> None:
    from headstart.trainers import kernel

    edges(kernel, torch.float64)


def edges(kernel: Any, dtype: torch.dtype) -> None:
    """Probabilities that are 0, and far from each other; another constant; no row at all."""
    logits_RV = torch.tensor([[0.0, 0.0, -torch.inf], [800.0, 0.0, -800.0], [1.0, 1.0, 1.0]], dtype=dtype)
    said_CW = torch.tensor([[0.0, 0.0, -torch.inf], [-800.0, 0.0, 800.0], [2.0, -torch.inf, 2.0]], dtype=dtype)
    data_C, rows = torch.tensor([0, 1, 2]), torch.arange(3)
    exact = logits_RV.clone().requires_grad_()
    loss_R = find("lk_hybrid")(
        exact.log_softmax(-1).clamp(min=torch.finfo(dtype).min / 2), Teacher.of(said_CW.log_softmax(-1), data_C, None), eta=0.5
    )
    (grad,) = torch.autograd.grad(loss_R.sum(), exact)
    weights = Weights.of({"lk_hybrid": 1.0}, {"lk_hybrid": {"eta": 0.5}})
    made = kernel.judge(logits_RV, kernel.Said.of(said_CW, data_C, None), rows, torch.ones(3, dtype=dtype), weights, True)
    torch.testing.assert_close(made.loss_R, loss_R.detach())
    assert logits_RV.isfinite().all()
    torch.testing.assert_close(logits_RV[2], grad[2])
    nothing = kernel.Said.of(said_CW[:0], data_C[:0], None)
    assert len(kernel.judge(logits_RV[:0], nothing, rows[:0], torch.zeros(0), weights, True).loss_R) == 0


@interpreted
@pytest.mark.parametrize("name", ["eagle", "medusa"])
def test_a_learner_with_it_is_the_one_without(name: str) -> None:
    learns_the_same(name, "triton")


def learns_the_same(name: str, other: str) -> None:
    """A drafter's gradients, its loss and its figures."""
    target, made = tiny_target(), []
    for kernel in ("torch", other):
        drafter = make(name, target).train()
        learner = Learner(drafter, **LOSS | {"kernel": kernel, "terms": {"kl": 1.0, "tv": 0.5}})
        batch = look(repetitive().batch(slice(0, 1)), target, drafter.taps)
        batch.loss_mask_BT[:, ::2] = False
        torch.manual_seed(3)
        wanted = learner.wanted(batch)
        out = learner(batch, wanted=wanted)
        out.loss_sum.backward()
        made.append((learner.figures(out, wanted), [p.grad for p in drafter.parameters() if p.grad is not None]))
    assert made[0][0] == pytest.approx(made[1][0], rel=1e-4) and len(made[0][1]) == len(made[1][1]) > 3
    for a, b in zip(made[0][1], made[1][1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
