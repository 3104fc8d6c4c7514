"""Products by either library beside float64, alone and in linear layers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from headstart.heads import products
from tests.tiny_targets import tiny_target

R, W, V = 7, 5, 33


@pytest.fixture(params=[False, True], ids=["mkl", "onednn"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param and not torch.backends.mkldnn.is_available():
        pytest.skip("oneDNN is not there")
    monkeypatch.setattr(products, "slow_mkl", lambda: request.param)
    monkeypatch.setattr(products, "BLOCK", 2 * R)  # two rows of the matrix at a time
    return bool(request.param)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_products(library: bool, dtype: torch.dtype, turned: bool) -> None:
    """Beside float64. ``turned``: factors that lie in memory the other way round, as those of a matrix's gradient do."""
    g = torch.Generator().manual_seed(0)
    x, weight, before = (torch.randn(n, m, generator=g).to(dtype) for n, m in ((R, W), (V, W), (R, V)))
    if turned:
        x, weight = x.T.contiguous().T, weight.T.contiguous().T
    exact, near = x.double() @ weight.double().T, 2e-2 if dtype == torch.bfloat16 else 1e-6
    room = torch.empty(R + 1, V, dtype=dtype)  # one row too many
    room[R] = 0
    products.fill(room[:R], x, weight)
    sums = before.to(torch.promote_types(dtype, torch.float32))
    wanted = sums.double() + exact
    products.add(sums, x, weight, 2 * V)
    for found, right in ((products.times(x, weight), exact), (room[:R], exact), (sums, wanted)):
        torch.testing.assert_close(found.double(), right, rtol=near, atol=near)
    assert not room[R].any()


def test_layers_of_a_frozen_target(library: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A teacher-forced pass computes the states of its modules, and leaves them as they were."""
    target = tiny_target("qwen2")  # has biases
    tokens, positions = torch.arange(12).view(2, 6), torch.arange(6).expand(2, -1)
    states, final = target.read(tokens, positions, (1,))
    with torch.no_grad(), monkeypatch.context() as patch:
        patch.setattr(products, "by_onednn", lambda x: False)
        right, last = target.read(tokens, positions, (1,))
    torch.testing.assert_close((states[1], final), (right[1], last), rtol=1e-5, atol=1e-6)
    assert not any("forward" in vars(m) for m in target.model.modules())


def test_which_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of torch in fp32; not under autocast, whose products are in half precision."""
    monkeypatch.setattr(products, "slow_mkl", lambda: True)
    layers = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("own", "narrow", "hooked")})
    layers["narrow"].bfloat16()
    layers["hooked"].register_forward_hook(lambda *_: None)
    with products.frozen_layers(layers):
        assert [name for name, m in layers.items() if "forward" in vars(m)] == ["own"]
    with torch.autocast("cpu", torch.bfloat16), products.frozen_layers(layers):
        assert not any("forward" in vars(m) for m in layers.values())
