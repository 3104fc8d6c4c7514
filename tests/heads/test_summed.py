"""Gradients that are added up within products against those that autograd adds."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headstart.heads import hub, products, summed
from headstart.heads.base import Drafter, Roots
from headstart.heads.unroll import unroll
from tests.drafters import random_tokens
from tests.tiny_targets import tiny_target

HEADS: dict[str, dict[str, Any]] = {"eagle": {"layers": 2}, "mtp": {}, "dflash": {}, "medusa": {}, "peagle": {}, "draft_lm": {"layers": 2}}


@pytest.fixture(autouse=True)
def every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summed, "LARGE", 1)


@pytest.fixture(params=[False, True], ids=["mkl", "onednn"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library of fp32 products."""
    if request.param and not torch.backends.mkldnn.is_available():
        pytest.skip("oneDNN is not there")
    monkeypatch.setattr(products, "slow_mkl", lambda: request.param)


def setting(head: str, dtype: torch.dtype) -> tuple[Drafter, Roots, Tensor]:
    target = tiny_target("llama")
    torch.manual_seed(1)
    drafter = hub.build(head, target.shape, **HEADS[head])
    drafter.attach(target.ends)
    tokens = torch.tensor([random_tokens(12, seed=i) for i in range(2)])
    positions, documents = torch.arange(12).expand(2, -1), torch.zeros(2, 12, dtype=torch.int64)
    states, _ = target.read(tokens, positions, drafter.taps)
    roots = Roots(tokens, tokens.roll(-1, 1), {tap: x.detach() for tap, x in states.items()}, positions)
    return drafter.to(dtype), roots.to(dtype), documents


def gradients(drafter: Drafter, roots: Roots, documents: Tensor, times: int = 1, **how: bool) -> dict[str, Tensor]:
    """Of a sum over all drafts, whose weights are random."""
    drafter.zero_grad(set_to_none=True)
    drafts = unroll(drafter, roots, documents, drafter.max_depth or 4, **how)
    generator = torch.Generator().manual_seed(2)
    loss = sum((d.hidden_BNH * torch.randn(d.hidden_BNH.shape, generator=generator)).sum() for d in drafts)
    assert isinstance(loss, Tensor)
    for i in range(times):
        loss.backward(retain_graph=i + 1 < times)  # type: ignore[no-untyped-call]
    return {name: p.grad for name, p in drafter.named_parameters() if p.grad is not None}


def plainly(monkeypatch: pytest.MonkeyPatch, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
    with monkeypatch.context() as only_here:
        only_here.setattr(summed, "LARGE", 1 << 60)
        return gradients(*args, **kwargs)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("how", ["detach", "checkpointing", ""])
def test_they_are_the_same(head: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under checkpointing autograd adds them, because depths are computed again outside the unroll."""
    drafter, roots, documents = setting(head, torch.float64)
    settings = {how: True} if how == "checkpointing" or (how and drafter.unrolls and not drafter.anchors) else {}
    right = plainly(monkeypatch, drafter, roots, documents, **settings)
    add, sums = summed._Gradient.add, list[Any]()
    monkeypatch.setattr(summed._Gradient, "add", lambda self, *rows: sums.append(self) or add(self, *rows))
    begin, calls = drafter.begin, list[Any]()
    monkeypatch.setattr(drafter, "begin", lambda *args, **more: calls.append(args) or begin(*args, **more))
    found = gradients(drafter, roots, documents, **settings)
    assert found.keys() == right.keys() and len(found) > 1
    assert (len(calls), bool(sums)) == ((2, False) if how == "checkpointing" else (1, True))
    for name, x in right.items():
        torch.testing.assert_close(found[name], x, rtol=1e-10, atol=1e-12)
    assert not any("forward" in vars(m) for m in drafter.modules())


@pytest.mark.parametrize("head", HEADS)
def test_in_fp32(head: str, library: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As near to the exact ones as autograd's."""
    exact = plainly(monkeypatch, *setting(head, torch.float64))
    found = gradients(*setting(head, torch.float32))
    assert found.keys() == exact.keys()
    for name, x in exact.items():
        assert (found[name] - x).norm() <= 1e-5 * x.norm() + 1e-7, name


@pytest.mark.parametrize("autocast", [False, True])
def test_small_weights_where_products_are_faster_here(autocast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not under autocast, whose products are in half precision."""
    monkeypatch.setattr(summed, "LARGE", 32)
    monkeypatch.setattr(summed, "SMALL", 4)
    monkeypatch.setattr(products, "slow_mkl", lambda: True)
    layers = nn.ModuleDict({"large": nn.Linear(8, 4), "small": nn.Linear(2, 2), "tiny": nn.Linear(1, 1)})
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), summed.summed(layers):
        assert [name for name, m in layers.items() if "forward" in vars(m)] == ["large", *([] if autocast else ["small"])]


def test_under_autocast_they_are_as_near_to_the_exact_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights stay fp32, products are bf16, and so are the sums, as autograd's."""
    exact = plainly(monkeypatch, *setting("eagle", torch.float64))
    drafter, roots, documents = setting("eagle", torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        theirs = {name: x.clone() for name, x in plainly(monkeypatch, drafter, roots, documents).items()}
        ours = gradients(drafter, roots, documents)
    assert ours.keys() == theirs.keys()
    for name, x in exact.items():
        assert ours[name].dtype == torch.float32
        assert (ours[name] - x).norm() <= 1.2 * (theirs[name] - x).norm() + 1e-3 * x.norm(), name


def test_a_second_backward_pass_starts_from_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, roots, documents = setting("eagle", torch.float64)
    once = {name: x.clone() for name, x in gradients(drafter, roots, documents).items()}
    for name, x in gradients(drafter, roots, documents, times=2).items():
        torch.testing.assert_close(x, 2 * once[name])


def test_what_is_left_as_it_is() -> None:
    """Small or frozen weights, subclasses, layers with hooks or a forward of others; and everything behind the scope."""
    layers = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("plain", "frozen", "hooked", "changed", "subclass", "small")})
    layers["frozen"].requires_grad_(False)
    layers["hooked"].register_forward_hook(lambda *_: None)
    own = vars(layers["changed"])["forward"] = lambda x: x
    layers["subclass"].__class__ = type("Own", (nn.Linear,), {})
    layers["small"] = nn.Linear(1, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(summed, "LARGE", 2)
        with summed.summed(layers):
            assert [name for name, m in layers.items() if isinstance(vars(m).get("forward"), summed._Linear)] == ["plain"]
            out = layers["plain"](torch.ones(2, 3, 4, requires_grad=True))
    assert vars(layers["changed"])["forward"] is own and "forward" not in vars(layers["plain"])
    out.sum().backward()
    torch.testing.assert_close(layers["plain"].weight.grad, torch.full((4, 4), 6.0))
    torch.testing.assert_close(layers["plain"].bias.grad, torch.full((4,), 6.0))


def test_a_call_without_gradients_comes_first() -> None:
    """As the probe of a model of transformers that is read for the first time."""
    layer, x = nn.Linear(3, 2), torch.ones(4, 3)
    with summed.summed(nn.ModuleList([layer])):
        with torch.no_grad():
            assert not layer(x).requires_grad
        layer(x).sum().backward()
    torch.testing.assert_close(layer.weight.grad, torch.full((2, 3), 4.0))


def test_products_of_two_dtypes() -> None:
    layer, x = nn.Linear(3, 2, bias=False), torch.ones(4, 3)
    with summed.summed(nn.ModuleList([layer])):
        with torch.autocast("cpu", torch.bfloat16):
            a = layer(x)
        b = layer(x)
    assert (a.dtype, b.dtype) == (torch.bfloat16, torch.float32)
    (a.float() + b).sum().backward()
    torch.testing.assert_close(layer.weight.grad, torch.full((2, 3), 8.0))


def test_second_derivatives_are_refused() -> None:
    layer, x = nn.Linear(3, 2), torch.ones(4, 3, requires_grad=True)
    with summed.summed(nn.ModuleList([layer])):
        (grad,) = torch.autograd.grad(layer(x).square().sum(), [x], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("scope", [True, False])
def test_a_weight_whose_products_are_not_asked_for(scope: bool) -> None:
    a, b = nn.Linear(3, 3), nn.Linear(3, 3)
    with summed.summed(nn.ModuleList([copy.deepcopy(a), b])) if scope else nullcontext():
        out = b(a(torch.ones(1, 3)))
    (grad,) = torch.autograd.grad(out.sum(), [a.weight])
    torch.testing.assert_close(grad, (b.weight.sum(0)[:, None]).expand(3, 3))
