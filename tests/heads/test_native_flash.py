"""Training's attention in C++ against a softmax in float64."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor

from headstart.heads import native, native_flash
from headstart.heads.flash import cuts_of, flash, flash_backward
from headstart.heads.visibility import ChainSees
from headstart.trainers.operations import Operations
from tests.heads.test_flash import attended, leaves, packed, written_out
from tests.tiny_targets import tiny_target

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C++ compiler")


def tensors(dtype: torch.dtype, rows: int, size: int, heads: int = 4, kv_heads: int = 2) -> list[Tensor]:
    """Queries, keys, values and a gradient of the output, as projections lay them out."""
    torch.manual_seed(0)
    return [torch.randn(2, rows, n, size).to(dtype).transpose(1, 2) for n in (heads, kv_heads, kv_heads, heads)]


def exactly(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, documents_BT: Tensor, scale: float) -> list[Tensor]:
    """Output, log-sum-exp and gradients of q, k and v, in float64."""
    q, k, v = exact = [x.double().requires_grad_() for x in (q, k, v)]
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    seen = (documents_BT[:, :, None] == documents_BT[:, None]).tril()[:, None]
    scores = (scale * q @ k.mT).masked_fill(~seen, -torch.inf)
    out = scores.softmax(-1) @ v
    return [out.detach(), scores.detach().logsumexp(-1), *torch.autograd.grad(out, exact, grad.double())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "size", "heads", "kv_heads"), [(5, 16, 4, 2), (63, 20, 3, 1), (130, 32, 4, 4), (70, 64, 4, 2), (1100, 40, 2, 1)]
)
@pytest.mark.parametrize("documents", [False, True])
def test_output_and_gradients_are_those_of_float64(
    dtype: torch.dtype, rows: int, size: int, heads: int, kv_heads: int, documents: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few rows, tiles that end within a document, sizes that fill no vector, heads that share keys, more keys than are read at a time."""
    q, k, v, grad = tensors(dtype, rows, size, heads, kv_heads)
    documents_BT = (torch.rand(2, rows) < 0.05).cumsum(1) if documents else torch.zeros(2, rows)
    monkeypatch.setattr(torch.ops, "aten", None)  # it is not torch's
    out, lse = flash(q, k, v, cuts_of(documents_BT), scale=0.3)
    found = [out, lse, *flash_backward(grad, q, k, v, out, lse, cuts_of(documents_BT), scale=0.3)]
    for a, b in zip(found, exactly(q, k, v, grad, documents_BT, 0.3), strict=True):
        assert a.shape == b.shape and a.dtype == (torch.float32 if a is lse else dtype)
        assert float((a.double() - b).norm() / b.norm()) < (2e-6 if dtype == torch.float32 else 6e-3)
    assert out.transpose(1, 2).is_contiguous()  # as the output matrix reads it


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("documents", [False, True])
def test_the_closed_form_of_training_by_it(dtype: torch.dtype, documents: bool) -> None:
    """Merged with the diagonals of later depths, whose keys belong to the softmax, too."""
    q, kv = leaves(3, dtype)
    sees = ChainSees(packed() if documents else None)
    found, expected = attended(sees, q, kv), written_out(sees, q, kv)
    for a, b in zip([found[0].detach(), *found[1]], [expected[0].detach(), *expected[1]], strict=True):
        assert float((a.double() - b).norm() / b.norm()) < (2e-6 if dtype == torch.float32 else 1e-2)


def test_numbers_do_not_depend_on_threads() -> None:
    """More threads than heads share a head's queries."""
    q, k, v, grad = tensors(torch.float32, 300, 32, 1, 1)
    kept, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            out, lse = flash(q, k, v)
            found.append([out, lse, *flash_backward(grad, q, k, v, out, lse)])
    finally:
        torch.set_num_threads(kept)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_tensors_with_gaps() -> None:
    """Rows of a wider tensor, and a last dimension with gaps."""
    q, k, v, grad = tensors(torch.float32, 50, 32)
    wide = torch.zeros(2, 4, 50, 100)
    wide[..., 3:35] = q
    turned = grad.mT.contiguous().mT
    out, lse = flash(wide[..., 3:35], k, v)
    assert torch.equal(out, flash(q, k, v)[0])
    assert all(
        torch.equal(a, b) for a, b in zip(flash_backward(turned, q, k, v, out, lse), flash_backward(grad, q, k, v, out, lse), strict=True)
    )


def test_what_is_left_to_torch() -> None:
    half = torch.zeros(1, 2, 3, 64, dtype=torch.bfloat16)
    assert native_flash.takes(half) and native_flash.takes(half.float())
    assert not any(map(native_flash.takes, (half.double(), half.half(), half.to("meta"), torch.zeros(1, 2, 3, 128, dtype=torch.bfloat16))))


def test_operations_are_counted_by_document() -> None:
    """As of torch's operation, which is called for each document."""
    q, k, v, grad = tensors(torch.float32, 64, 16)
    counted = []
    for cuts in ((0, 64, 128), (0, 16, 32, 48, 64, 80, 96, 112, 128)):
        with Operations() as found:
            out, lse = flash(q, k, v, cuts)
        with Operations() as more:
            flash_backward(grad, q, k, v, out, lse, cuts)
        counted += [found.count, more.count]
    products = 2 * 4 * 2 * 64 * 64 * 16  # rows of the batch, heads, operations of a product
    assert counted == [2 * products, 5 * products, 2 * products / 4, 5 * products / 4]


def test_shapes_that_do_not_fit_are_refused_and_empty_ones_are_empty() -> None:
    q, k, v, _ = tensors(torch.float32, 10, 16)
    with pytest.raises(RuntimeError, match="attention of"):
        native_flash.attend(q, k[:, :, :9], v[:, :, :9], (0, 10, 20), 1.0)
    assert flash(q[:0], k[:0], v[:0])[0].shape == (0, 4, 10, 16)


def test_it_can_be_asked_for_first_anywhere() -> None:
    """Where nothing has gradients, and where operations and what is saved are counted: the comparison is not."""
    kept = list[torch.Tensor]()
    with torch.inference_mode():
        assert native_flash._right.__wrapped__()
    with Operations() as counts, torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x), lambda x: x):
        assert native_flash._right.__wrapped__()
    assert not counts.count and not kept


def test_a_wrong_library_is_not_taken(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    rightly = native_flash.attend_backward
    monkeypatch.setattr(native_flash, "attend_backward", lambda *given: [1.001 * x for x in rightly(*given)])
    with caplog.at_level(logging.WARNING):
        assert not native_flash._right.__wrapped__()
    assert "computes wrongly" in caplog.text
    monkeypatch.setattr(native, "library", lambda: None)
    assert not native_flash._right.__wrapped__()


def test_a_target_is_read_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its states are those that transformers computes."""
    target = tiny_target()
    tokens = torch.randint(0, target.shape.vocab_size, (2, 40))
    assert native_flash.takes(torch.zeros(1, 1, 1, 16)) and target.reader.follows  # both are tried now, not while calls are counted
    called, attend = list[int](), native_flash.attend
    monkeypatch.setattr(native_flash, "attend", lambda *given: (called.append(1), attend(*given))[1])
    with torch.no_grad():
        tapped, final = target.read(tokens, torch.arange(40).expand(2, -1), [1])
        states = target.model(tokens, output_hidden_states=True).hidden_states
    assert len(called) == target.shape.layers
    torch.testing.assert_close(tapped[1], states[1], rtol=0, atol=1e-5)
    torch.testing.assert_close(final, states[-1], rtol=0, atol=1e-5)
