"""Prepacked matrices multiply as the dense ones do, never by a stale copy, and never where a gradient is wanted."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from headstart.heads import native, orders, prepack
from headstart.heads.base import TargetEnds
from headstart.heads.unroll import unroll
from headstart.heads.visibility import CausalSees
from headstart.inference.decoding.decode import generate
from headstart.inference.decoding.engine import Engine
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.propose import Drafting
from headstart.inference.decoding.sampling import SamplingParams
from headstart.inference.decoding.target import Target
from tests.drafters import FEW, MADE, depth_of, make, random_tokens, roots_of
from tests.orders import ORDERS, faster
from tests.tiny_targets import ARCHITECTURES, OTHERS, tiny_target

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
TREE = TreePolicy(depth=4, nodes=10, branch=3)
MEASURED = orders.measured


AS_SPECULATORS = {"fc_norm": False, "norm_before_fc": True, "norm_before_residual": True}  # trains an EAGLE-3


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Of the prepacked product: rows of x. No matrix is too small for it, and it is always faster (until a test says otherwise)."""
    made: list[int] = []
    own = orders.packed_product

    def counted(x: torch.Tensor, *rest: torch.Tensor | None) -> torch.Tensor:
        made.append(x.shape[:-1].numel())
        return own(x, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(orders, "packed_product", counted)
    faster(monkeypatch, "onednn")
    return made  # type: ignore[return-value]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_product_is_that_of_float64(
    dtype: torch.dtype, bias: bool, order: str, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    faster(monkeypatch, order)
    needed = [] if order == "dense" else [order]
    if not set(needed) <= set(orders.packers(torch.zeros(32, 40, dtype=dtype))):
        pytest.skip(f"no {order} products of {dtype} on this machine")
    torch.manual_seed(0)
    layer = nn.Linear(40, 32, bias=bias).to(dtype).requires_grad_(False)
    dense = copy.deepcopy(layer).double()
    prepack.prepack(layer)
    assert layer.weight.is_mkldnn == (order == "onednn") and orders.is_packed(layer.weight) == (order in ("onednn", "panels"))
    x_BTH = torch.randn(3, 5, 40).to(dtype)
    for x in (x_BTH, x_BTH[:, 1:4], x_BTH[:, ::2], x_BTH.transpose(0, 1), x_BTH[0], x_BTH[0, :2], x_BTH[:0]):
        torch.testing.assert_close(layer(x).double(), dense(x.double()), rtol=0, atol=1e-5 if dtype == torch.float32 else 2e-2)
    assert calls == ([15, 9, 9, 15, 5, 2, 0] if needed else [])


@pytest.mark.parametrize(
    ("dense", "onednn", "panels", "kept"),
    [(2.0, 1.0, 3.0, "onednn"), (1.0, 4.0, 3.0, "dense"), (2.0, 1.0, 1.1, "panels"), (1.0, 4.0, 1.1, "panels"), (1.0, 2.0, None, "dense")],
)
def test_a_matrix_is_kept_in_one_order(
    dense: float, onednn: float, panels: float | None, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that is faster on the whole; panels although they are a little slower, for whole layers gain by them."""
    if panels is not None and native.library() is None:
        pytest.skip("no panels on this machine")
    times = {"dense": dense, "onednn": onednn} | ({"panels": panels} if panels is not None else {})
    times["dense"] *= 1.5  # but for one row dense is the fastest of all
    monkeypatch.setattr(
        orders, "measured", lambda *_: {o: {n: 0.9 if (n, o) == (1, "dense") else t for n in orders.ROWS} for o, t in times.items()}
    )
    monkeypatch.setattr(orders, "TIMES", {})
    layer = nn.Linear(40, 32).requires_grad_(False)
    prepack.prepack(layer)
    assert isinstance(layer, prepack.Prepacked)
    assert kept == ("onednn" if layer.weight.is_mkldnn else "panels" if layer.weight.dim() == 3 else "dense")


@pytest.mark.parametrize("order", ORDERS)
def test_autocast_multiplies_as_without(order: str, calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Autocast turns the input of a dense layer into its own dtype, and knows none of the others."""
    faster(monkeypatch, order)
    if "onednn" not in orders.packers(torch.zeros(32, 40, dtype=torch.bfloat16)):
        pytest.skip("no oneDNN products of bfloat16 on this machine")
    torch.manual_seed(0)
    layer, x = nn.Linear(40, 32).bfloat16().requires_grad_(False), torch.randn(5, 40)
    dense = copy.deepcopy(layer).double()
    prepack.prepack(layer)
    with torch.autocast("cpu", torch.bfloat16):
        found = layer(x)
    assert found.dtype == torch.bfloat16 and len(calls) == (order != "dense")
    torch.testing.assert_close(found.double(), dense(x.double()), rtol=0, atol=2e-2)


def in_what(weight: torch.Tensor, monkeypatch: pytest.MonkeyPatch, measured: orders.Times) -> str:
    """The order that a matrix is kept in, by what products are found to take."""
    monkeypatch.setattr(orders, "measured", lambda _: measured)
    monkeypatch.setattr(orders, "packers", lambda _: {order: lambda weight: weight for order in measured if order != "dense"})
    return "dense" if orders.in_order(weight) is None else "onednn"


def test_what_is_found_for_a_dtype_says_nothing_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders, "TIMES", {})
    slower = {"dense": dict.fromkeys(orders.ROWS, 2.0), "onednn": dict.fromkeys(orders.ROWS, 1.0)}
    faster = {"dense": dict.fromkeys(orders.ROWS, 1.0), "onednn": dict.fromkeys(orders.ROWS, 2.0)}
    matrix = torch.randn(32, 40)
    assert in_what(matrix, monkeypatch, slower) == "onednn" and in_what(matrix.half(), monkeypatch, faster) == "dense"
    assert in_what(matrix, monkeypatch, faster) == "onednn"  # it is measured once


def test_times_are_compared_by_their_ratios(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice as fast for four numbers of rows outweighs eight times as slow for one, although the sum of the seconds is larger."""
    monkeypatch.setattr(orders, "TIMES", {})
    times = {"dense": dict.fromkeys(orders.ROWS, 2.0), "onednn": dict.fromkeys(orders.ROWS, 1.0) | {16: 16.0}}
    assert in_what(torch.randn(32, 40), monkeypatch, times) == "onednn"


@pytest.mark.skipif(native.library() is None, reason="no panels on this machine")
@pytest.mark.parametrize(("disturbed", "kept"), [(2, "panels"), (3, "another")])
def test_panels_are_given_up_only_if_they_are_slow_every_time(disturbed: int, kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []

    def measured(weight: torch.Tensor) -> orders.Times:
        looks.append(len(looks) + 1)
        slow = looks[-1] <= disturbed
        return {order: dict.fromkeys(orders.ROWS, 4.0 if order == "panels" and slow else 1.0) for order in ("dense", "onednn", "panels")}

    monkeypatch.setattr(orders, "measured", measured)
    monkeypatch.setattr(orders, "TIMES", {})
    for _ in range(2):  # what was found once stays
        packed = orders.in_order(torch.randn(32, 40))
        assert ("panels" if packed is not None and packed.dim() == 3 else "another") == kept and looks == [1, 2, 3]


@pytest.mark.skipif(native.library() is None, reason="no panels on this machine")
@pytest.mark.parametrize(("called", "judged"), [(2.0, 3.0), (4.9, 0.5)])
def test_panels_are_judged_without_what_calling_them_takes(called: float, judged: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer in panels is one call for all its products. Noise cannot make a product free: a tenth of what was measured is left."""
    asked: list[int] = []

    def seconds(*calls: object) -> list[float]:
        asked.append(len(calls))
        return [5.0] * (len(calls) - 1) + [called]  # the last is the product of next to nothing

    monkeypatch.setattr(orders, "_seconds", seconds)
    found = MEASURED(torch.randn(32, 64))
    assert asked == [len(found) + 1] * len(orders.ROWS)
    assert found == {order: dict.fromkeys(orders.ROWS, pytest.approx(judged if order == "panels" else 5.0)) for order in found}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_measured_says_which_is_faster(dtype: torch.dtype) -> None:
    weight = torch.randn(64, 64).to(dtype)
    found = MEASURED(weight)
    assert list(found) == ["dense", *orders.packers(weight)]
    assert all(list(times) == list(orders.ROWS) and all(0 < t < 1 for t in times.values()) for times in found.values())


@pytest.mark.skipif(native.library() is None, reason="no panels on this machine")
@pytest.mark.parametrize("rows", [24, 20])  # of keys, and of values: with 48 of queries they fill panels, or do not
def test_layers_too_small_for_a_panel_are_joined_if_all_fill_some(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a processor has no other order: oneDNN has none for bfloat16 without AVX-512."""
    monkeypatch.setattr(orders, "packers", lambda weight: {"panels": native.pack} if native.packable(weight) else {})
    faster(monkeypatch, "panels")
    owner = nn.ModuleDict({name: nn.Linear(40, size) for name, size in (("q_proj", 48), ("k_proj", rows), ("v_proj", rows))})
    dense, x = copy.deepcopy(owner.requires_grad_(False)), torch.randn(3, 40)
    prepack.prepack(owner)
    assert (prepack.joint(owner, ("q_proj", "k_proj", "v_proj")) is not None) == (rows == 24)
    for name in owner:
        torch.testing.assert_close(owner[name](x), dense[name](x), rtol=0, atol=1e-5)


@pytest.mark.parametrize("order", ORDERS)
def test_layers_that_read_the_same_are_one_product(order: str, calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    faster(monkeypatch, order)
    torch.manual_seed(0)
    owner = nn.ModuleDict({name: nn.Linear(40, size) for name, size in (("q_proj", 24), ("k_proj", 4), ("v_proj", 4))}).requires_grad_(
        False
    )
    dense, x, y = copy.deepcopy(owner), torch.randn(2, 3, 40), torch.randn(2, 3, 40)
    prepack.prepack(owner)
    assert (prepack.joint(owner, ("q_proj", "k_proj", "v_proj")) is not None) == (order != "dense")
    assert prepack.joint(owner, ("q_proj", "o_proj")) is None
    for name in ("q_proj", "k_proj", "v_proj"):  # one after the other, as attention reads
        torch.testing.assert_close(owner[name](x), dense[name](x), rtol=0, atol=1e-5)
    assert calls == ([6] if order in ("onednn", "panels") else [])
    for name in ("k_proj", "q_proj", "v_proj", "v_proj"):  # and in any other order, over other tensors
        for z in (y, x):
            torch.testing.assert_close(owner[name](z), dense[name](z), rtol=0, atol=1e-5)


@pytest.mark.parametrize("order", [pytest.param("onednn", marks=pytest.mark.slow), "panels"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", [*ARCHITECTURES, *OTHERS])
def test_a_target_says_the_same(family: str, tied: bool, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    faster(monkeypatch, order)
    target, tokens = tiny_target(family), torch.tensor([random_tokens(20, 1)])
    if tied:
        target.model.get_output_embeddings().weight = target.model.get_input_embeddings().weight
        target = Target(target.model)
    read = (tokens, torch.arange(20)[None], range(target.shape.layers + 1))
    (states, final), logits = target.read(*read), target.model(tokens).logits
    target.prepack()
    assert any(map(orders.is_packed, target.model.parameters()))
    found, found_final = target.read(*read)
    rows, rows_final = target.read_rows(*read[:2], target.new_memory(), CausalSees(20, 20), read[2])
    atol = 1e-3 if target.reader.mixers else 1e-4  # recurrent layers sum over the whole text
    for tap, state in states.items():
        torch.testing.assert_close(found[tap], state, rtol=1e-4, atol=atol)
        torch.testing.assert_close(rows[tap], state, rtol=1e-4, atol=atol)
    for said in (found_final, rows_final):
        torch.testing.assert_close(target.logits(said), target.logits(final), rtol=1e-4, atol=10 * atol)
    torch.testing.assert_close(target.model(tokens).logits, logits, rtol=1e-4, atol=10 * atol)


@pytest.mark.parametrize(
    ("head", "order", "settings"),
    [
        *(pytest.param(head, order, {}, marks=() if head in FEW else pytest.mark.slow) for head in MADE for order in ("dense", "onednn")),
        *((head, "panels", {}) for head in MADE),
        *(("eagle", order, AS_SPECULATORS) for order in ("onednn", "panels")),
    ],
)
def test_a_drafter_guesses_the_same_and_stays_lossless(
    head: str, order: str, settings: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    faster(monkeypatch, order)
    target, prompt = tiny_target(), random_tokens(12, 2)
    drafter, depth = make(head, target, **settings), 3
    depth = depth_of(drafter, depth)
    roots, said = roots_of(target, drafter, torch.tensor([prompt])), generate(target, None, prompt, new_tokens=12).tokens
    with torch.no_grad():
        before = [drafter.unembedding(d).logits(draft.hidden_BNH) for d, draft in enumerate(unroll(drafter, roots, None, depth), 1)]
        size = drafter.size
        drafter.prepack()
        assert drafter.size == size and target.ends.head_VD not in prepack.TWINS  # the target's head is not the drafter's to change
        target.prepack()
        for d, draft in enumerate(unroll(drafter, roots, None, depth), 1):
            torch.testing.assert_close(drafter.unembedding(d).logits(draft.hidden_BNH), before[d - 1], rtol=1e-4, atol=1e-3)
    assert generate(target, Drafting(drafter), prompt, new_tokens=12, policy=TREE.at_most(depth)).tokens == said
    engine = Engine(target, drafter, sequences=1, max_length=40, plans=TREE.at_most(depth))
    assert engine.run([prompt], new_tokens=12, sampling=[SamplingParams()])[0].tokens == said


def test_a_matrix_that_was_changed_is_not_multiplied_by_its_old_twin(calls: list[int]) -> None:
    ends = TargetEnds(nn.Embedding(8, 4), torch.randn(8, 4))
    x = torch.randn(3, 4)
    prepack.prepack_beside(ends.head_VD)
    torch.testing.assert_close(ends.logits(x), x @ ends.head_VD.T)
    assert calls == [3]
    ends.head_VD.mul_(2)
    torch.testing.assert_close(ends.logits(x), x @ ends.head_VD.T)
    prepack.prepack_beside(other := torch.randn(8, 4))
    other.data = torch.randn(8, 4)
    torch.testing.assert_close(prepack.product(x, other), x @ other.T)
    assert calls == [3]


def test_gradients_go_by_the_dense_matrix_or_are_refused(calls: list[int]) -> None:
    head, x = torch.randn(8, 4), torch.randn(3, 4, requires_grad=True)
    (expected,) = torch.autograd.grad(prepack.product(x, head).square().sum(), x)
    prepack.prepack_beside(head)
    (found,) = torch.autograd.grad(prepack.product(x, head).square().sum(), x)
    assert torch.equal(found, expected) and not calls
    layer = nn.Linear(4, 8)
    prepack.prepack(layer)
    with pytest.raises(RuntimeError, match="prepacked for decoding cannot be trained"):
        layer(x)
    with torch.no_grad():
        layer(x)


def test_in_inference_mode() -> None:
    torch.manual_seed(0)
    with torch.inference_mode():
        weight, x = nn.Parameter(torch.randn(8, 4), requires_grad=False), torch.randn(3, 4)
        prepack.prepack_beside(weight)
        torch.testing.assert_close(prepack.product(x, weight), x @ weight.T)


def test_what_the_weights_are_can_still_be_told() -> None:
    """The fingerprint of a target, and how many weights of a drafter are trained."""
    target = tiny_target()
    drafter = make("eagle", target)
    before = target.fingerprint, drafter.size
    target.prepack()
    drafter.prepack()
    assert (target.fingerprint, drafter.size) == before


def test_what_is_not_a_dense_matrix_of_the_cpu_stays_as_it_is() -> None:
    class Own(nn.Linear):
        pass

    own, wide, meta, hooked = Own(4, 8), nn.Linear(4, 8, dtype=torch.float64), nn.Linear(4, 8, device="meta"), nn.Linear(4, 8)
    hooked.forward = functools.partial(nn.Linear.forward, hooked)  # type: ignore[method-assign]
    for layer in (own, wide, meta, hooked):
        weight, kind = layer.weight, type(layer)
        prepack.prepack(layer)
        assert layer.weight is weight and type(layer) is kind
    orders.LEAST = 33
    small = nn.Linear(4, 8)
    prepack.prepack(small)
    assert type(small) is nn.Linear
