"""Which logits exist together: full products, nothing twice, small strips, and no wait for the device while they are worked on.

Shape suffixes as in trainers/chunks.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from headstart.heads.base import TargetEnds
from headstart.heads.unembedding import Unembedding
from headstart.trainers import chunks as chunking
from headstart.trainers.chunks import chunks
from headstart.trainers.losses import _Sums, fused_loss
from tests.trainers.test_losses import IDS, MIX, Case, D, H, K, T, V, close, same

CPU = torch.device("cpu")


@contextmanager
def strips_of(positions: int) -> Iterator[None]:
    """On these vocabularies of eleven tokens every strip would be the whole chunk."""
    whole, chunking.CACHED = chunking.CACHED, positions * V
    try:
        yield
    finally:
        chunking.CACHED = whole


def test_a_gpu_judges_a_strip_at_a_time_at_least() -> None:
    cuda = torch.device("cuda")
    assert chunking.guesses_of(512, 7, 128_256, CPU) == 512 and chunking.guesses_of(1 << 20, 7, 128_256, cuda) == 1 << 20
    assert chunking.guesses_of(512, 7, 128_256, cuda) == 7 * (chunking.strip_of(cuda) // 128_256) > 3000


@pytest.mark.parametrize("most", [1, 5, 64, 10_000])
@pytest.mark.parametrize("strip", [1, 3, 1000])
@pytest.mark.parametrize("share", [0.1, 0.6, 1.0])
def test_every_guess_is_judged_once(share: float, strip: int, most: int) -> None:
    depths, places = 4, 60
    at_KP = torch.rand(depths, places, generator=torch.Generator().manual_seed(1)) < share
    seen: list[tuple[int, int]] = []
    for chunk in chunks(at_KP, most, strip, CPU):
        depth_R = torch.arange(depths).repeat_interleave(torch.tensor(chunk.counts_K))
        place_R = chunk.positions_C[chunk.said_R]
        assert chunk.root_R.equal(place_R - depth_R - 1)
        seen += zip(depth_R.tolist(), place_R.tolist(), strict=True)
        assert len(depth_R) <= most or len(chunk.positions_C) == 1
        done_K = [0] * depths  # the strips go through each depth's rows in order
        for positions, counts_K in chunk.strips:
            assert 0 < positions.stop - positions.start <= strip
            for k, rows in enumerate(chunk.said_R.split(chunk.counts_K)):
                part = rows[done_K[k] : done_K[k] + counts_K[k]]
                assert all(positions.start <= row < positions.stop for row in part.tolist())
                done_K[k] += counts_K[k]
        assert done_K == chunk.counts_K
    assert sorted(seen) == [(k, p) for k, p in at_KP.nonzero().tolist()]


def test_nothing_is_judged() -> None:
    assert chunks(torch.zeros(3, 8, dtype=torch.bool), 4, 2, CPU) == []


class Calls(TorchDispatchMode):
    """Every operation, by name, and what came of it."""

    def __init__(self, each: Callable[[str, Any, Any], None]) -> None:
        super().__init__()
        self.each = each

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.each(func._schema.name.removeprefix("aten::"), args, out)
        return out


def products(case: Case, chunk: int, ask_BA: Tensor | None = None) -> list[int]:
    """Rows of draft logits of every product that makes them."""
    rows: list[int] = []

    def each(name: str, args: Any, out: Any) -> None:
        if name == "mm" and out.shape[1] == V and args[0].shape[1] == H:
            rows.append(len(out))

    hidden, supervised = case.hidden, case.supervised
    if ask_BA is not None:
        asked = torch.zeros_like(supervised[0]).scatter(1, ask_BA, True)
        hidden = [h.gather(1, ask_BA[..., None].expand(-1, -1, H)) for h in hidden]
        supervised = [m & asked for m in supervised]
    with Calls(each):
        about = (case.batch.final_BTD, case.ends, case.batch.tokens_BT, supervised, {"kl": 1.0}, 0.7, chunk)
        fused_loss(hidden, [Unembedding(case.weights[0])] * K, *about, ask_BA=ask_BA)
    assert sum(rows) == sum(int(m.sum()) for m in supervised)
    return rows


def test_products_are_as_large_as_a_chunk_where_few_roots_are_asked() -> None:
    """Roots so far apart that each position judges one depth: a chunk by depths would hold a third of the rows."""
    case, chunk = Case(), 6
    case.supervised = [torch.ones_like(m) & (torch.arange(T) + d + 1 < T) for d, m in enumerate(case.supervised, start=1)]
    apart = torch.tensor([[0, 4, 8, 12], [1, 5, 9, 13]])
    assert products(case, chunk, apart) == [6] * 4
    assert all(rows == 6 for rows in products(case, chunk)[2:-5])


@pytest.mark.parametrize("positions", [1, 2, 5])
@pytest.mark.parametrize("ids", [None, IDS], ids=["full", "trimmed"])
@pytest.mark.parametrize("heads", ["shared", "own"])
def test_strips_change_nothing(heads: str, ids: Tensor | None, positions: int) -> None:
    with strips_of(positions):
        same(Case(heads=heads, ids=ids), MIX, 20)


@pytest.mark.parametrize("autocast", [False, True])
def test_a_head_in_half_precision_adds_up_in_blocks(autocast: bool) -> None:
    """As one product of the whole, bit for bit; the fp32 sums are not rounded between chunks."""

    def gradients() -> list[Tensor]:
        case = Case(dtype=torch.float32 if autocast else torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return case.grads(case.fused(MIX, 20).loss_sum)

    whole = gradients()
    with strips_of(1):
        blocks = gradients()
    for a, b in zip(whole, blocks, strict=True):
        close(a, b, 1e-7)


def test_a_gradient_in_half_precision_is_rounded_once() -> None:
    """Many equal guesses, each in a chunk of its own: a sum in bfloat16 would stop to grow at 256 times one of them."""
    g, times = torch.Generator().manual_seed(2), 600

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g).bfloat16()

    root, state, weight, ends = randn(H), randn(D), randn(V, H).requires_grad_(), TargetEnds(nn.Identity(), randn(V, D))

    def gradient(guesses: int) -> Tensor:
        hidden, final, tokens = (
            root.expand(1, guesses + 2, H),
            state.expand(1, guesses + 2, D),
            torch.zeros(1, guesses + 2, dtype=torch.int64),
        )
        supervised = [torch.arange(guesses + 2)[None] < guesses]
        out = fused_loss([hidden], [Unembedding(weight)], final, ends, tokens, supervised, {"kl": 1.0}, 1.0, 1)
        return torch.autograd.grad(out.loss_sum, weight)[0].float()

    torch.testing.assert_close(gradient(times), times * gradient(1), rtol=0.01, atol=0.01)


@pytest.mark.parametrize("kernel", ["torch", "auto"])
def test_large_memory_is_taken_once(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside one buffer for the logits of all chunks, and what the teacher says of each, nothing holds more of them than a strip."""
    strip, judge, parts, large = 2, _Sums.judge, [], list[Tensor]()  # kept, so that no address is used again

    def counted(self: _Sums, *arguments: Any) -> None:
        parts.append(1)
        judge(self, *arguments)

    def each(name: str, args: Any, out: Any) -> None:
        if name not in ("t", "permute") and isinstance(out, Tensor) and out.shape[-1:] == (V,) and out.numel() > strip * V:
            large.append(out)

    monkeypatch.setattr(_Sums, "judge", counted)
    with strips_of(strip), Calls(each):
        Case(dtype=torch.bfloat16).fused({"kl": 1.0}, 30, kernel=kernel)
    assert len({x.untyped_storage().data_ptr() for x in large}) == 1 + len(parts) > 2


def test_no_chunk_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU would be waited for: values that Python asks for, and shapes that hang on values."""
    waits: list[str] = []

    def each(name: str, args: Any, out: Any) -> None:
        masks = name.startswith("index") and any(isinstance(i, Tensor) and i.dtype == torch.bool for i in args[1] or ())
        if masks or name in ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "unique", "_unique2", "equal"):
            waits.append(name)

    judge, calls = _Sums.judge, []

    def watched(self: _Sums, *arguments: Any) -> None:
        calls.append(1)
        with Calls(each):
            judge(self, *arguments)

    monkeypatch.setattr(_Sums, "judge", watched)
    case = Case(ids=IDS)
    case.fused(MIX, 6).loss_sum.backward()
    assert len(calls) > 5 and waits == []
