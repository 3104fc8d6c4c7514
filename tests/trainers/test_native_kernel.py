"""The divergences in C++ on a CPU, against full logits in float64, as those in Triton (tests/trainers/test_kernel.py)."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor

from headstart.heads import native
from headstart.heads.errors import UserError
from headstart.trainers import native_kernel, terms
from headstart.trainers.terms import IN_KERNEL, Weights, check_kernel, kernel_of
from tests.trainers.test_kernel import ALL, as_written_out, edges, in_kernel, learns_the_same, rounds_once
from tests.trainers.test_losses import IDS, Case

needs_library = pytest.mark.skipif(native.library() is None, reason="no C++ compiler")


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a.double(), b.double(), rtol=1e-4, atol=1e-5)


@needs_library
@pytest.mark.parametrize("ids", [None, IDS], ids=["full", "trimmed"])
@pytest.mark.parametrize("name", [*IN_KERNEL, "all"])
def test_each_divergence_and_its_gradient(name: str, ids: Tensor | None) -> None:
    case, exact, terms = Case(ids=ids, dtype=torch.float32), Case(ids=ids), ALL if name == "all" else {name: 1.5}
    as_written_out(in_kernel(case, terms, 7, kernel="native"), case, exact, terms, close)


@needs_library
@pytest.mark.parametrize(("heads", "weighting"), [("own", "chain"), ("frozen", "dpace")])
def test_heads_and_weightings(heads: str, weighting: str) -> None:
    terms = {"tv": 1.0, "kl": 0.5}
    case, other = Case(heads=heads, softcap=1.5, dtype=torch.float32), Case(heads=heads, softcap=1.5)
    found, wanted = in_kernel(case, terms, 9, weighting=weighting, kernel="native"), other.fused(terms, 9, weighting=weighting)
    close(found.loss_sum, wanted.loss_sum)
    for a, b in zip(case.grads(found.loss_sum), other.grads(wanted.loss_sum), strict=True):
        close(a, b)


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("said_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("trimmed", [False, True])
def test_lower_precision_rounds_no_more_than_the_chunked_form(dtype: torch.dtype, said_dtype: torch.dtype, trimmed: bool) -> None:
    rounds_once(native_kernel, dtype, said_dtype, trimmed)


@needs_library
def test_constants_and_edges() -> None:
    edges(native_kernel, torch.float32)


@needs_library
def test_of_equal_logits_the_first_is_the_best() -> None:
    """As torch's argmax. Logits in bfloat16 are often equal."""
    said_CV, logits_RV = torch.zeros(1, 50), torch.zeros(1, 50, dtype=torch.bfloat16)
    said_CV[0, [20, 33]], logits_RV[0, [20, 41]] = 2.0, 2.0
    said = native_kernel.Said.of(said_CV, torch.tensor([7]), None)
    assert said.best_C.tolist() == [20]
    assert native_kernel.judge(logits_RV, said, torch.tensor([0]), torch.ones(1), Weights(kl=1.0), False).match_R.tolist() == [True]


@needs_library
@pytest.mark.parametrize("spoiled", ["one", "last", "all", "infinite"])
@pytest.mark.parametrize("ids", [None, IDS], ids=["full", "trimmed"])
def test_numbers_that_are_none_stay_none(spoiled: str, ids: Tensor | None) -> None:
    """In the target's logits, as in torch: no finite loss, acceptance or gradient is made of them, and nothing is written elsewhere."""
    torch.manual_seed(0)
    said_CW, V = torch.randn(2, 11), 11 if ids is None else len(ids)
    said_CW[0, {"one": 3, "last": 10, "all": slice(None), "infinite": 0}[spoiled]] = torch.inf if spoiled == "infinite" else torch.nan
    for grad in (False, True):
        logits_RV = torch.randn(2, V)
        said = native_kernel.Said.of(said_CW, torch.tensor([3, 3]), ids)
        assert bool((said.best_C < V).all())
        made = native_kernel.judge(logits_RV, said, torch.arange(2), torch.ones(2), Weights(kl=1.0, tv=1.0, ce=1.0), grad)
        assert made.loss_R.isnan().tolist() == made.alpha_R.isnan().tolist() == [True, False]
        assert logits_RV.isfinite().all(1).tolist() == [not grad, True]


@needs_library
def test_terms_that_nobody_asks_for_may_be_infinite() -> None:
    """A draft logit of -inf makes KL infinite, and nothing of the total variation."""
    logits_RV = torch.tensor([[0.0, 1.0, -torch.inf]])
    said = native_kernel.Said.of(torch.tensor([[0.0, 0.5, 1.0]]), torch.tensor([0]), None)
    found = native_kernel.judge(logits_RV, said, torch.tensor([0]), torch.ones(1), Weights(tv=1.0), False)
    p, q = torch.tensor([0.0, 0.5, 1.0]).softmax(0), torch.tensor([0.0, 1.0, -torch.inf]).softmax(0)
    torch.testing.assert_close(found.loss_R, (p - q).abs().sum()[None] / 2)


@needs_library
def test_what_does_not_fit_is_refused() -> None:
    said = native_kernel.Said.of(torch.zeros(1, 5), torch.tensor([9]), None)  # a token of the data beyond the vocabulary: it is no guess
    given = (said, torch.tensor([0]), torch.ones(1), Weights(data_ce=1.0), True)
    assert native_kernel.judge(torch.zeros(1, 5), *given).true_R.tolist() == [0.0]
    with pytest.raises(RuntimeError, match="draft logits of 4 tokens, and the target's of 5"):
        native_kernel.judge(torch.zeros(1, 4), *given)
    with pytest.raises(UserError, match=r"loss\.kernel=native reads float32 and bfloat16, not torch.float16"):
        kernel_of("native", {"kl": 1.0}, torch.device("cpu"), (torch.float16,))


@needs_library
@pytest.mark.parametrize("name", ["eagle", "medusa"])
def test_a_learner_with_it_is_the_one_without(name: str) -> None:
    learns_the_same(name, "native")


def test_which_computes_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, meta, both = torch.device("cpu"), torch.device("meta"), (torch.bfloat16, torch.float32)
    monkeypatch.setattr(native_kernel, "right", lambda: True)
    assert kernel_of("auto", {"kl": 1.0}, cpu, both) == "native" and kernel_of("torch", {"kl": 1.0}, cpu, both) == "torch"
    assert kernel_of("auto", {"kl": 1.0}, cpu, (torch.float64,)) == kernel_of("auto", {"jsd": 1.0}, cpu, both) == "torch"
    assert kernel_of("auto", {"kl": 1.0}, meta, both) == "torch"
    for launched, by in ((True, "triton"), (False, "torch")):
        monkeypatch.setattr(terms, "launches", lambda device, launched=launched: launched)
        assert kernel_of("auto", {"kl": 1.0}, torch.device("cuda"), both) == by
    check_kernel("native", {"kl": 1.0, "feature": 1.0}, cpu)
    with pytest.raises(UserError, match=r"loss\.kernel=native knows kl, tv, .*, not jsd: take loss\.kernel=torch"):
        check_kernel("native", {"jsd": 1.0})
    with pytest.raises(UserError, match="is for CPUs, the drafter is on cuda"):
        check_kernel("native", {"kl": 1.0}, torch.device("cuda"))


def test_without_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "searched", lambda: native.Unavailable("there is no C++ compiler"))
    monkeypatch.setattr(native_kernel, "right", native_kernel.right.__wrapped__)
    assert kernel_of("auto", {"kl": 1.0}, torch.device("cpu"), ()) == "torch"
    with pytest.raises(UserError, match=r"cannot be had \(there is no C\+\+ compiler\): take loss\.kernel=torch"):
        check_kernel("native", {"kl": 1.0})


@needs_library
def test_it_can_be_asked_for_first_where_nothing_has_gradients() -> None:
    with torch.inference_mode():
        assert native_kernel.right.__wrapped__()


@needs_library
def test_a_wrong_library_is_not_taken(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    rightly = native_kernel.judge
    monkeypatch.setattr(native_kernel, "judge", lambda logits, *given: rightly(logits, *given)._replace(loss_R=torch.zeros(1)))
    with caplog.at_level(logging.WARNING):
        assert not native_kernel.right.__wrapped__()
    assert "computes wrongly" in caplog.text
