"""The kernels of training, interpreted on a CPU: the attention's diagonals, against torch's operations and against float64 attention by a
dense mask; RoPE; and the MLP's SwiGLU.

Where triton is installed; a process of its own says TRITON_INTERPRET=1 where this one does not. (In bfloat16 the interpreter rounds towards
zero, a GPU to the nearest: that is shown by tests/heads/test_flash.py on a GPU.)
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from headstart.heads import chain_attention, layers
from headstart.heads.chain_attention import mergeable
from headstart.heads.layers import MLP, Rope, rotatable, rotate
from headstart.heads.visibility import ChainSees
from tests.heads.test_flash import attended, written_out
from tests.interpreted import in_its_own, interpreted

B, G, T = 2, 2, 5
test_all_of_this_interpreted = in_its_own(__file__)


def test_on_a_cpu_torch_is_taken() -> None:
    q, kv = leaves(2, 2, 16, torch.float32)
    assert mergeable(q[0], kv[0]) and not chain_attention.takes(q[0])


def leaves(depth: int, group: int, size: int, dtype: torch.dtype) -> tuple[list[Tensor], list[Any]]:
    """Queries and (keys, values) of every depth, as projections lay them out."""
    torch.manual_seed(0)

    def leaf(heads: int) -> Tensor:
        return (3 * torch.rand(B, T, heads, size) - 1.5).to(dtype).transpose(1, 2).requires_grad_()

    return [leaf(group * G) for _ in range(depth)], [(leaf(G), leaf(G)) for _ in range(depth)]


def packed() -> Tensor:
    return torch.tensor([[0, 0, 0, 1, 1], [0, 2, 2, 2, 2]])


def both_ways(monkeypatch: pytest.MonkeyPatch, q: list[Tensor], kv: list[Any]) -> list[list[Tensor]]:
    """What every depth finds and all gradients: of torch's operations, and of the kernels."""
    found = []
    for fuses in (False, True):
        monkeypatch.setattr(chain_attention, "takes", lambda q, fuses=fuses: fuses)
        out, grads = attended(ChainSees(packed()), q, kv)
        found.append([out, *grads])
    return found


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("group, size, depth", [(1, 16, 2), (4, 16, 4), (3, 24, 3), (4, 8, 1), (16, 16, 2)])
def test_what_torch_and_a_dense_mask_say(group: int, size: int, depth: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    q, kv = leaves(depth, group, size, dtype)
    torch_says, kernels_say = both_ways(monkeypatch, q, kv)
    out, grads = written_out(ChainSees(packed()), q, kv)
    for own, torchs, right in zip(kernels_say, torch_says, [out.detach(), *grads], strict=True):
        assert own.dtype == dtype and own.shape == torchs.shape
        off = [float((x.detach().double() - right).norm() / right.norm() / torch.finfo(dtype).eps) for x in (own, torchs)]
        assert off[0] < 1.05 * off[1] + 0.05 if dtype == torch.float16 else off[0] < 8


@interpreted
@pytest.mark.parametrize("scale", [0.7, 30.0])
def test_log_sum_exps_and_other_layouts(scale: float) -> None:
    """Of great scores as well; of tensors that lie apart, in reverse order, and each in another layout."""
    from headstart.heads.kernels.diagonals import merge, merge_backward

    torch.manual_seed(0)
    h, g, d = 4, 2, 8
    q, grad = torch.randn(B, h, d, T).transpose(2, 3), torch.randn(B, h, 1, 1).expand(B, h, T, d)
    dq = torch.randn(T, B, h, 2 * d)[..., :d].movedim(0, 2)
    roots, roots_lse = torch.randn(B, h, T, d), torch.randn(T, B, h).movedim(0, 2)
    keys = torch.randn(B, T, g, 4 * d).transpose(1, 2).chunk(4, 3)[:3]
    values = [torch.randn(B, g, T, d), torch.randn(B, T, g, d).transpose(1, 2), torch.randn(B, g, T, d)]
    assert mergeable(q, [*keys, *values])
    leaf = [x.detach().double().clone().requires_grad_() for x in (q, *keys, *values)]
    whole = [x.repeat_interleave(h // g, 1) for x in leaf[1:]]
    scores = torch.stack([roots_lse.double(), *((leaf[0] * k).sum(-1) * scale for k in whole[:3])])
    p = scores.softmax(0)[..., None]
    right, total = (p * torch.stack([roots.double(), *whole[3:]])).sum(0), scores.logsumexp(0)
    out, lse = merge(q, roots, roots_lse, keys, values, scale)
    torch.testing.assert_close(out.double(), right, rtol=0, atol=2e-5)
    torch.testing.assert_close(lse.double(), total, rtol=2e-6, atol=2e-6)
    # the roots' part of the queries' gradient is given: here their scores do not depend on the queries
    wanted = torch.autograd.grad(right, leaf, grad.double())
    found, more = merge_backward(grad, q, out, lse, dq, keys, values, scale)
    assert len(more) == 6
    for a, b in zip([found - dq, *more[::2], *more[1::2]], wanted, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4 * max(1.0, scale))


def test_what_the_kernels_take() -> None:
    q, k = torch.zeros(1, 16, 3, 64), torch.zeros(1, 1, 3, 64)
    assert mergeable(q, [k, k.bfloat16()]) and not mergeable(q.double(), [k]) and not mergeable(q, [k, k.double()])
    assert not mergeable(torch.zeros(1, 17, 3, 64), [k]) and not mergeable(q[..., :20], [k[..., :20]])
    assert not mergeable(torch.zeros(1, 1, 3, 264), [torch.zeros(1, 1, 3, 264)])


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("heads, size, batch", [(4, 16, 1), (3, 20, 2), (40, 128, 1)])
def test_rotation(heads: int, size: int, batch: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of positions for each row of the batch or for all; the result to the bit in half precision, the gradient is rounded less often."""
    torch.manual_seed(0)
    x = torch.randn(B, 3, heads, size).to(dtype).transpose(1, 2).requires_grad_()
    cos_sin = Rope({"rope_type": "default", "rope_theta": 1e4}, size, 64)(torch.randint(50, (batch, 3)))
    grad = torch.randn(B, heads, 3, size).to(dtype)
    exact = x.detach().double().requires_grad_()
    right = rotate(exact, cos_sin)
    (of_exact,) = torch.autograd.grad(right, exact, grad.double())
    torchs = rotate(x, cos_sin).detach()
    monkeypatch.setattr(layers, "takes", lambda x: True)
    found = rotate(x, cos_sin)
    (of_x,) = torch.autograd.grad(found, x, grad)
    assert found.dtype == of_x.dtype == dtype and found.stride() == torchs.stride()
    least = torch.finfo(dtype).eps
    torch.testing.assert_close(found, torchs, rtol=0 if dtype == torch.float16 else 1e-6, atol=0 if dtype == torch.float16 else 1e-6)
    torch.testing.assert_close(of_x.double(), of_exact, rtol=least, atol=least)


def test_what_the_rotation_takes() -> None:
    x, cos = torch.zeros(2, 4, 3, 20), torch.zeros(1, 1, 3, 20)
    assert rotatable(x, cos, cos) and rotatable(x.bfloat16(), cos.expand(2, -1, -1, -1), cos)
    assert not rotatable(x, cos, cos.half()) and not rotatable(x.double(), cos, cos) and not rotatable(x[:, :, :2], cos, cos)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("width", [24, 1100])
@pytest.mark.parametrize("layout", ["one piece", "one product", "by column"])
def test_swiglu(dtype: torch.dtype, width: int, layout: str) -> None:
    """The result and both gradients, also where rows lie apart. In half precision to the bit, but where exp's last one matters."""
    from headstart.heads.kernels.operations import Gated

    torch.manual_seed(0)
    gate, up = (4 * torch.randn(B, T, 2 * width)).to(dtype).chunk(2, dim=2)
    gate[0, 0, :4] = torch.tensor([-100.0, 100.0, 0.0, -9e3])
    if layout != "one product":
        gate, up = (x.contiguous() if layout == "one piece" else x.mT.contiguous().mT for x in (gate, up))
    grads = torch.randn(B, T, width), torch.randn(T, B, 2 * width)[..., :width].transpose(0, 1), torch.randn(B, T, 1), torch.randn(1)
    for grad in (x.to(dtype).expand(B, T, width) for x in grads):
        found, torchs = (both_gradients(how, gate, up, grad) for how in (Gated.apply, silu_mul))
        right = both_gradients(silu_mul, gate.double(), up.double(), grad.double())
        for own, theirs, exact in zip(found, torchs, right, strict=True):
            assert own.dtype == dtype and own.shape == exact.shape
            if dtype == torch.float16:
                assert (own != theirs).float().mean() < 0.01
                torch.testing.assert_close(own, theirs, rtol=2e-3, atol=1e-3)
            else:
                torch.testing.assert_close(own.double(), exact, rtol=2e-6, atol=5e-6)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def both_gradients(how: Any, gate: Tensor, up: Tensor, grad: Tensor) -> list[Tensor]:
    gate, up = gate.detach().requires_grad_(), up.detach().requires_grad_()
    found = how(gate, up)
    return [found.detach(), *torch.autograd.grad(found, [gate, up], grad)]


@interpreted
def test_the_mlp_takes_it_in_training_and_keeps_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tensors of its width, and their product for the next one; torch's operations keep silu(gate) too. Not in float64."""
    torch.manual_seed(0)
    mlp, x, widths, found = MLP(16, 40), torch.randn(B, T, 16), [], []

    def keep(x: Tensor) -> Tensor:
        widths.append(x.shape[-1])
        return x

    for taken in (False, True):
        monkeypatch.setattr(layers, "takes", lambda x, taken=taken: taken)
        widths.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            out = mlp(x, x)
        assert widths.count(40) == (3 if taken else 4)
        found.append([out, *torch.autograd.grad(out.square().sum(), mlp.parameters())])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    with monkeypatch.context() as m:
        m.setattr("headstart.heads.kernels.operations.gated", None)
        with torch.no_grad():
            assert torch.equal(mlp(x, x), found[0][0])
        assert mlp.double()(x.double(), x.double()).dtype == torch.float64
