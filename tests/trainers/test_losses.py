"""The fused loss against full logits in float64, written out per root and depth.

Shape suffixes: B batch, T positions, K depths, H drafter hidden, D target hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from headstart.data.batch import TargetBatch
from headstart.heads.base import TargetEnds
from headstart.heads.errors import UserError
from headstart.heads.unembedding import Unembedding
from headstart.trainers.beside import feature_loss
from headstart.trainers.divergences import Teacher, find, names
from headstart.trainers.losses import LossOut, fused_loss
from headstart.trainers.terms import WEIGHTINGS

B, T, K, H, D, V = 2, 19, 3, 5, 6, 11
IDS = torch.tensor([0, 2, 3, 5, 8, 10])  # a trimmed vocabulary
DECAY = 0.7
MIX = {"kl": 0.5, "tv": 2.0, "data_ce": 0.25}

# p and q over the target's whole vocabulary (q is 0 outside the drafter's); best and data are target ids
FORMULAS: dict[str, Callable[[Tensor, Tensor, int, int], Tensor]] = {
    "kl": lambda p, q, best, data: sum(p[v] * (p[v].log() - q[v].log()) for v in range(V) if q[v] > 0),
    "reverse_kl": lambda p, q, best, data: sum(q[v] * (q[v].log() - p[v].log()) for v in range(V) if q[v] > 0),
    "jsd": lambda p, q, best, data: sum(
        (p[v] * (2 * p[v] / (p[v] + q[v])).log() + (q[v] * (2 * q[v] / (p[v] + q[v])).log() if q[v] > 0 else 0)) / 2 for v in range(V)
    ),
    "top_k": lambda p, q, best, data: -sum(p[v] * q[v].log() for v in [v for v in p.argsort(descending=True).tolist() if q[v] > 0][:10]),
    "ce": lambda p, q, best, data: -q[best].log() if q[best] > 0 else 0 * q.sum(),
    "data_ce": lambda p, q, best, data: -q[data].log() if q[data] > 0 else 0 * q.sum(),
    "tv": lambda p, q, best, data: (p - q).abs().sum() / 2,
    "lk_alpha": lambda p, q, best, data: -(1 - (p - q).abs().sum() / 2).log(),
    "lk_hybrid": lambda p, q, best, data: (
        (e := torch.exp(-3 * (1 - (p - q).abs().sum() / 2)).detach()) * FORMULAS["kl"](p, q, best, data) + (1 - e) * (p - q).abs().sum() / 2
    ),
}  # fmt: skip


@dataclass
class Case:
    """Inputs of the loss. ``heads``: shared by all depths, own ones, or shared and frozen."""

    heads: str = "shared"
    ids: Tensor | None = None
    softcap: float | None = None
    dtype: torch.dtype = torch.float64
    seed: int = 0
    hidden: list[Tensor] = field(init=False)
    weights: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        g = torch.Generator().manual_seed(self.seed)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g, dtype=torch.float64).to(self.dtype)

        rows = V if self.ids is None else len(self.ids)
        self.hidden = [randn(B, T, H).requires_grad_() for _ in range(K)]
        self.weights = [randn(rows, H).requires_grad_(self.heads != "frozen") for _ in range(K if self.heads == "own" else 1)]
        documents = torch.tensor([[0] * 8 + [1] * 2 + [2] * 9, [5] * T])  # one shorter than the chain
        mask = torch.rand(B, T, generator=g) < 0.7
        tokens = torch.randint(V, (B, T), generator=g)
        self.ends = TargetEnds(nn.Identity(), randn(V, D), self.softcap)
        self.batch = TargetBatch(tokens, mask, torch.zeros_like(tokens), documents, {}, randn(B, T, D))
        self.supervised = [self.batch.supervised(d) for d in range(1, K + 1)]

    def fused(
        self, terms: dict[str, float], chunk: int = 7, rows: slice = slice(None), weighting: str = "decay", kernel: str = "auto"
    ) -> LossOut:
        unembeddings = [Unembedding(self.weights[k % len(self.weights)], self.ids) for k in range(K)]
        supervised = [m[rows] for m in self.supervised]
        hidden = [h[rows] for h in self.hidden]
        target = (self.batch.final_BTD[rows], self.ends, self.batch.tokens_BT[rows])
        return fused_loss(hidden, unembeddings, *target, supervised, terms, DECAY, chunk, weighting=weighting, kernel=kernel)

    def naive(self, terms: dict[str, float]) -> LossOut:
        loss, weight_sum = torch.zeros((), dtype=torch.float64), 0.0
        match, count = torch.zeros(K, B, T, dtype=torch.bool), torch.zeros(K, dtype=torch.int64)
        alpha, true = (torch.zeros(K, B, T, dtype=torch.float64) for _ in range(2))
        ids = torch.arange(V) if self.ids is None else self.ids
        for k in range(K):
            d = k + 1
            for b, t in self.supervised[k].nonzero().tolist():
                logits = self.ends.head_VD.double() @ self.batch.final_BTD[b, t + d].double()  # the teacher at t+d predicts x[t+d+1]
                if self.softcap:
                    logits = self.softcap * torch.tanh(logits / self.softcap)
                p = logits.softmax(0)
                some = (self.weights[k % len(self.weights)].double() @ self.hidden[k][b, t].double()).softmax(0)
                q = torch.zeros(V, dtype=torch.float64).index_copy(0, ids, some)
                best, data = int(p.argmax()), int(self.batch.tokens_BT[b, t + 1 + d])
                loss = loss + DECAY**k * sum(w * FORMULAS[name](p, q, best, data) for name, w in terms.items())
                weight_sum += DECAY**k
                match[k, b, t], count[k] = int(q.argmax()) == best, count[k] + 1
                alpha[k, b, t], true[k, b, t] = torch.minimum(p, q.detach()).sum(), q[data].detach()
        return LossOut(loss, torch.tensor(weight_sum), match, count, alpha, true)

    def grads(self, loss: Tensor) -> list[Tensor]:
        inputs = [x for x in [*self.hidden, *self.weights] if x.requires_grad]
        return list(torch.autograd.grad(loss, inputs))


def close(a: Tensor, b: Tensor, atol: float = 1e-10) -> None:
    torch.testing.assert_close(a.double(), b.double(), atol=atol, rtol=1e-5 if atol < 1e-6 else 0.05)


def same(case: Case, terms: dict[str, float], chunk: int) -> None:
    fused, naive = case.fused(terms, chunk), case.naive(terms)
    close(fused.loss_sum, naive.loss_sum)
    close(fused.weight_sum, naive.weight_sum, 1e-5)
    close(fused.alpha_KBT, naive.alpha_KBT)
    close(fused.true_KBT, naive.true_KBT)
    assert fused.match_KBT.equal(naive.match_KBT) and 0 < fused.match_KBT.sum() < naive.count_K.sum()
    assert fused.count_K.equal(naive.count_K) and (naive.count_K > 0).all()
    for a, b in zip(case.grads(fused.loss_sum), case.grads(naive.loss_sum), strict=True):
        close(a, b)
        assert b.any()


def test_every_loss_has_a_formula() -> None:
    assert FORMULAS.keys() == set(names())


@pytest.mark.parametrize("ids", [None, IDS], ids=["full", "trimmed"])
@pytest.mark.parametrize("name", [*names(), "mix"])
def test_each_loss_and_its_gradient(name: str, ids: Tensor | None) -> None:
    same(Case(ids=ids), MIX if name == "mix" else {name: 1.5}, chunk=7)


@pytest.mark.parametrize("chunk", [1, 8, 30, 10_000])
@pytest.mark.parametrize("ids", [None, IDS], ids=["full", "trimmed"])
@pytest.mark.parametrize("heads", ["shared", "own", "frozen"])
def test_each_kind_of_head_in_chunks(heads: str, ids: Tensor | None, chunk: int) -> None:
    same(Case(heads=heads, ids=ids, seed=chunk), MIX, chunk)


def test_depths_may_share_a_matrix_and_name_its_rows_differently() -> None:
    case, other = Case(ids=IDS), IDS.roll(2)
    unembeddings = [Unembedding(case.weights[0], ids) for ids in (IDS, other, IDS)]
    about = (case.batch.final_BTD, case.ends, case.batch.tokens_BT)
    out = fused_loss(case.hidden, unembeddings, *about, case.supervised, MIX, DECAY, 7)
    parts = [
        fused_loss(case.hidden, [Unembedding(case.weights[0], ids)] * K, *about, case.supervised, MIX, DECAY, 7) for ids in (IDS, other)
    ]
    close(out.loss_K, torch.stack([parts[k % 2].loss_K[k] for k in range(K)]))
    assert not torch.isclose(parts[0].loss_K, parts[1].loss_K).any()


def test_softcap() -> None:
    capped, free = Case(softcap=1.5), Case()
    same(capped, {"kl": 1.0}, 7)
    assert (capped.naive({"kl": 1.0}).loss_sum - free.naive({"kl": 1.0}).loss_sum).abs() > 1  # it matters in this case


def test_finite_differences() -> None:
    case, step = Case(heads="own", ids=IDS), 1e-6
    inputs = [*case.hidden, *case.weights]
    analytic = case.grads(case.fused(MIX).loss_sum)
    with torch.no_grad():
        for x, grad in zip(inputs, analytic, strict=True):
            direction = torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(1))
            x += step * direction
            up = case.fused(MIX).loss_sum
            x -= 2 * step * direction
            down = case.fused(MIX).loss_sum
            x += step * direction
            close((up - down) / (2 * step), (grad * direction).sum(), 1e-7)


def test_half_batches_add_up_to_the_whole() -> None:
    case = Case()
    whole = case.fused(MIX)
    divisor = whole.weight_sum
    expected = case.grads(whole.loss_sum / divisor)
    halves = [case.fused(MIX, rows=slice(i, i + 1)) for i in range(B)]
    close(torch.stack([h.weight_sum for h in halves]).sum(), divisor, 1e-6)
    for half in halves:
        (half.loss_sum / divisor).backward()
    for x, grad in zip([*case.hidden, *case.weights], expected, strict=True):
        assert x.grad is not None
        close(x.grad, grad)


@pytest.mark.parametrize("name", ["kl", "reverse_kl", "jsd", "tv", "lk_alpha", "lk_hybrid"])
def test_nothing_to_learn_where_drafter_and_target_agree(name: str) -> None:
    case = Case()
    case.weights = [case.ends.head_VD.clone().requires_grad_()]
    final = case.batch.final_BTD
    case.hidden = [torch.cat([final[:, d:], final[:, :d]], dim=1).requires_grad_() for d in range(1, K + 1)]
    out = case.fused({name: 1.0})
    close(out.loss_sum, torch.zeros(()))
    assert all(out.match_KBT[k].equal(case.supervised[k]) for k in range(K))
    close(out.alpha_KBT.sum((1, 2)), out.count_K)
    if name in ("kl", "reverse_kl"):  # min(p, q) has a corner there
        for grad in case.grads(out.loss_sum):
            close(grad, torch.zeros_like(grad))


def test_a_target_token_outside_the_vocabulary_is_a_rejection() -> None:
    case = Case(ids=IDS)
    case.ends = TargetEnds(nn.Identity(), torch.zeros(V, D, dtype=torch.float64))
    case.ends.head_VD[1, 0] = 50.0  # the target always says token 1, or any other one: never certain of one of ours
    case.batch.final_BTD[..., 0] = 1.0
    out = case.fused({"ce": 1.0})
    assert not out.match_KBT.any() and out.count_K.sum() > 0
    close(out.loss_sum, torch.zeros(()))
    assert not out.alpha_KBT.any() or float(out.alpha_KBT.max()) < 1e-15
    assert case.fused({"tv": 1.0}).loss_sum.isclose(out.weight_sum.double())


def test_without_gradients_the_figures_are_the_same() -> None:
    case = Case(ids=IDS)
    trained = case.fused(MIX)
    with torch.no_grad():
        out = case.fused(MIX)
    assert trained.loss_sum.requires_grad and not out.loss_sum.requires_grad
    close(out.loss_sum, trained.loss_sum)
    assert out.match_KBT.equal(trained.match_KBT) and out.alpha_KBT.equal(trained.alpha_KBT)


def test_no_terms_give_figures_without_a_gradient() -> None:
    out = Case().fused({})
    assert float(out.loss_sum) == 0 and not out.loss_sum.requires_grad
    assert out.match_KBT.any() and out.weight_sum > 0


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("ids", [None, IDS], ids=["full", "trimmed"])
def test_nothing_supervised(ids: Tensor | None, weighting: str) -> None:
    case = Case(ids=ids)
    case.supervised = [torch.zeros_like(m) for m in case.supervised]
    out = case.fused(MIX, weighting=weighting)
    out.loss_sum.backward()
    assert out.loss_sum.item() == out.weight_sum.item() == 0 and not out.count_K.any() and not out.match_KBT.any()
    for x in (*case.hidden, *case.weights):  # DistributedDataParallel waits for each
        assert x.grad is not None and not x.grad.any()


def test_values_of_unsupervised_rows_do_not_matter() -> None:
    case = Case()
    before = case.fused(MIX).loss_sum
    with torch.no_grad():
        for h, m in zip(case.hidden, case.supervised, strict=True):
            h[~m] = torch.nan
    after = case.fused(MIX).loss_sum
    close(before, after)
    assert all(g.isfinite().all() for g in case.grads(after))


@pytest.mark.parametrize("autocast", [False, True])
def test_bf16(autocast: bool) -> None:
    """bf16 vectors, or fp32 ones under autocast: gradients in the inputs' types, the numbers near those of fp32."""
    exact = Case(dtype=torch.float32)
    case = Case(dtype=torch.float32 if autocast else torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = case.fused(MIX)
    assert out.loss_sum.dtype == torch.float32
    expected = exact.fused(MIX)
    assert out.loss_sum.item() == pytest.approx(expected.loss_sum.item(), rel=0.01) and out.loss_sum.item() != expected.loss_sum.item()
    for x, a, b in zip([*case.hidden, *case.weights], case.grads(out.loss_sum), exact.grads(expected.loss_sum), strict=True):
        assert a.dtype == x.dtype
        close(a, b, 0.05)


def test_frozen_heads_get_no_gradient() -> None:
    case = Case(heads="frozen")
    case.fused(MIX).loss_sum.backward()
    assert case.weights[0].grad is None and case.hidden[0].grad is not None


def test_only_the_head_learns() -> None:
    """Vectors without a gradient (a drafter that reads the target's states directly)."""
    case, expected = Case(), Case()
    case.hidden = [h.detach() for h in case.hidden]
    case.fused(MIX).loss_sum.backward()
    expected.fused(MIX).loss_sum.backward()
    assert case.weights[0].grad is not None and expected.weights[0].grad is not None
    close(case.weights[0].grad, expected.weights[0].grad)


def test_gradients_are_handed_over_once() -> None:
    loss = Case().fused(MIX).loss_sum
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="handed over"):
        loss.backward()


def test_unknown_term() -> None:
    with pytest.raises(UserError, match="'kll': there are base, ce, choice, confidence, data_ce, distractor, feature, jsd, kl"):
        Case().fused({"kll": 1.0})


def test_a_teacher_without_some_token() -> None:
    """Targets whose padded vocabulary has logits of -inf."""
    log_p = torch.tensor([[0.5, 0.5, 0.0]]).log()
    teacher = Teacher.of(log_p, torch.tensor([0]), None)
    log_q = torch.tensor([[0.5, 0.25, 0.25]]).log()
    assert find("kl")(log_q, teacher).item() == pytest.approx(0.5 * 0.6931472)


class Largest(TorchDispatchMode):
    """The most elements any tensor had."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.numel())
        return out


@pytest.mark.parametrize("heads", ["shared", "own"])
def test_no_tensor_holds_more_logits_than_a_chunk(heads: str) -> None:
    case, chunk = Case(heads=heads), 9
    with Largest() as seen:
        case.fused(MIX, chunk).loss_sum.backward()
    assert seen.elements <= max(chunk * V, K * B * T, B * T * D)  # the others are inputs and figures
    assert seen.elements < B * T * V
    with Largest() as seen:
        case.fused(MIX, 10_000)
    assert seen.elements > B * T * V or heads == "own"  # the mode does see them


def test_the_teacher_speaks_once_per_position() -> None:
    rows: list[int] = []

    class Counting(TargetEnds):
        def logits(self, final_ND: Tensor) -> Tensor:
            rows.append(len(final_ND))
            return super().logits(final_ND)

    case = Case()
    case.ends = Counting(nn.Identity(), case.ends.head_VD)
    case.fused(MIX)
    positions = {(b, t + d) for d, m in enumerate(case.supervised, start=1) for b, t in m.nonzero().tolist()}
    assert sum(rows) == len(positions) < sum(int(m.sum()) for m in case.supervised)


def test_feature_loss() -> None:
    case = Case()
    states = [(2 * torch.randn(B, T, D, dtype=torch.float64)).requires_grad_() for _ in range(K)]
    expected = torch.zeros((), dtype=torch.float64)
    for k, state in enumerate(states):
        for b, t in case.supervised[k].nonzero().tolist():
            x = (state[b, t] - case.batch.final_BTD[b, t + k + 1]).abs()
            expected = expected + DECAY**k * torch.where(x < 1, x**2 / 2, x - 0.5).mean()
    loss = feature_loss(states, case.batch.final_BTD, case.supervised, DECAY)
    close(loss, expected)
    for a, b in zip(torch.autograd.grad(loss, states), torch.autograd.grad(expected, states), strict=True):
        close(a, b)
