"""Attention without copies and without masks of all by all: training's closed form with grouped heads, and long prompts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig

from headstart.heads import chain_attention, layers, visibility
from headstart.heads.chain_attention import ChainAttention
from headstart.heads.flash import cuts_of, flash, flash_backward, has_flash
from headstart.heads.kernels.launch import launches
from headstart.heads.kinds import masks
from headstart.heads.layers import MLP, Rope, rotate
from headstart.heads.memory import Memory
from headstart.heads.visibility import KEPT, CausalSees, ChainSees, LaterSees, MaskSees, Sees, _stairs

B, H, G, T, D = 2, 8, 2, 48, 16


def leaves(
    depth: int, dtype: torch.dtype = torch.float64, device: str = "cpu", size: int = D, kv_heads: int = G
) -> tuple[list[Tensor], list[Any]]:
    """Queries and (keys, values) of every depth, as projections lay them out."""
    torch.manual_seed(0)

    def leaf(heads: int) -> Tensor:
        return (3 * torch.rand(B, T, heads, size, dtype=torch.float64) - 1.5).to(device, dtype).transpose(1, 2).requires_grad_()

    return [leaf(H) for _ in range(depth)], [(leaf(kv_heads), leaf(kv_heads)) for _ in range(depth)]


def packed(device: str = "cpu") -> Tensor:
    documents = torch.zeros(B, T, dtype=torch.long, device=device)
    documents[0, 11:], documents[0, 30:], documents[1, 1:] = 1, 2, 5
    return documents


def attended(sees: ChainSees, q: list[Tensor], kv: list[Any]) -> tuple[Tensor, list[Tensor]]:
    """What every depth finds, and the gradients of all."""
    memory, out = Memory(), []
    for q_d, kv_d in zip(q, kv, strict=True):
        out.append(sees.attend(q_d, memory.write(0, *kv_d)))
        sees = sees.deeper()
    weight = torch.linspace(-1, 1, out[0].numel(), dtype=torch.float64, device=out[0].device).view_as(out[0])
    loss = sum(((d + 1) * weight * x.double()).sum() for d, x in enumerate(out))
    assert isinstance(loss, Tensor)
    return torch.stack(out), list(torch.autograd.grad(loss, [*q, *(x for pair in kv for x in pair)]))


def written_out(sees: ChainSees, q: list[Tensor], kv: list[Any]) -> tuple[Tensor, list[Tensor]]:
    """The same in float64: softmax over a dense mask, keys repeated."""
    exact = [x.detach().double().requires_grad_() for x in q], [tuple(x.detach().double().requires_grad_() for x in p) for p in kv]
    return attended(ChainSees(sees.documents_BT, closed_form=False), exact[0], exact[1])


def test_keys_and_values_of_grouped_heads_are_saved_once() -> None:
    """Over all depths: of queries and outputs one each, of keys and values one each as they were written."""
    q, kv = leaves(depth := 7)
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        memory, sees, out = Memory(), ChainSees(packed()), []
        for d in range(depth):
            out.append(sees.attend(q[d], memory.write(0, *kv[d])))
            sees = sees.deeper()
    one = q[0].numel() * q[0].element_size()
    small = depth * (depth + 1) // 2 * one // D  # log-sum-exps and scores, a number a row
    assert sum(kept.values()) <= depth * (2 * one + 2 * one * G // H) + small


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_accumulates_as_the_kernel_does(dtype: torch.dtype) -> None:
    """Gradients of the diagonals are no further off than those of the kernel; with products rounded one by one they are by half."""
    q, kv = leaves(4, dtype, size=64)
    found, expected = attended(ChainSees(packed()), q, kv)[1], written_out(ChainSees(packed()), q, kv)[1]
    off = [float((a.double() - b).norm() / b.norm() / torch.finfo(dtype).eps) for a, b in zip(found, expected, strict=True)]
    roots, diagonals = [off[0], off[4], off[5]], [*off[1:4], *off[6:]]
    assert max(diagonals) < max(roots) and max(diagonals) < 0.5


@pytest.mark.parametrize("size", [D, 20])
def test_where_the_kernel_cannot_the_dense_mask_says_the_same(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    q, kv = leaves(3, size=size)
    own = attended(ChainSees(packed()), q, kv)
    monkeypatch.setattr(visibility, "has_flash", lambda q, k, v: False)
    monkeypatch.setattr(ChainAttention, "apply", None)
    for a, b in zip(own[1], attended(ChainSees(packed()), q, kv)[1], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


def test_what_the_kernel_takes() -> None:
    q = torch.zeros(1, 4, 3, 16)
    half, short, meta = q.bfloat16(), q[..., :8], q.to("meta")
    assert has_flash(q, q[:, :2], q[:, :2]) and has_flash(half, half, half)
    assert not has_flash(q, half, half) and not has_flash(q, q, short) and not has_flash(meta, meta, meta)


def test_documents_are_cut_at_their_borders() -> None:
    assert cuts_of(packed()) == (0, 11, 30, 48, 49, 96) and cuts_of(torch.zeros(3, 5)) == (0, 5, 10, 15)


@torch.no_grad()
def test_another_scale_of_the_scores() -> None:
    q, kv = leaves(2)
    memory, sees = Memory(), ChainSees(packed()).deeper()
    memory.write(0, *kv[0])
    segments = memory.write(0, *kv[1])
    found = sees.attend(q[1], segments, scale=0.7)
    torch.testing.assert_close(found, sees.attend(q[1] * 0.7 * D**0.5, segments), rtol=0, atol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("kv_heads", [G, H])
@pytest.mark.parametrize("rows", [3, KEPT + 6])
def test_another_scale_of_the_scores_under_every_rule(rows: int, kv_heads: int) -> None:
    torch.manual_seed(0)
    seen = torch.ones(1, rows, rows + 30, dtype=torch.bool).tril(30)
    every: list[tuple[int, Sees]] = [(0, CausalSees(rows, rows)), (30, CausalSees(rows, rows + 30)), (30, LaterSees([30], rows))]
    for before, sees in [*every, (30, MaskSees(seen))]:
        q, k, v = torch.randn(1, H, rows, D), *torch.randn(2, 1, kv_heads, before + rows, D)
        torch.testing.assert_close(sees.attend(q, [(k, v)], scale=0.7), sees.attend(q * 0.7 * D**0.5, [(k, v)]))


# ---- prompts ----


def dense_only(sees: Sees, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Three lines of float64."""
    seen = sees.dense(q.shape[2], k.shape[2], "cpu")
    k, v = (x.double().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q.double() @ k.transpose(2, 3) / q.shape[3] ** 0.5
    return (scores if seen is None else scores.masked_fill(~seen, -torch.inf)).softmax(-1) @ v


@torch.no_grad()
@pytest.mark.parametrize("rule", ["causal", "later"])
@pytest.mark.parametrize("rows", [3, KEPT, KEPT + 1, 200])
def test_rows_behind_others_in_closed_form(rule: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    kept = [150, 40] if rule == "later" else [150, 150]
    sees = LaterSees(kept, rows) if rule == "later" else CausalSees(rows, 150 + rows)
    q, k, v = torch.randn(2, H, rows, D), *torch.randn(2, 2, G, 150 + rows, D)
    expected = dense_only(sees, q, k, v)
    if rows > KEPT:
        monkeypatch.setattr(type(sees), "dense", None)
    torch.testing.assert_close(sees.attend(q, [(k, v)]).double(), expected, rtol=0, atol=2e-6)


@torch.no_grad()
def test_rows_of_padding_beyond_memory_harm_nobody() -> None:
    """A piece that is padded to more rows than the memory has slots for."""
    torch.manual_seed(0)
    rows, kept = 80, [30, 10]
    q, k, v = torch.randn(2, H, rows, D), *torch.randn(2, 2, G, 100, D)
    found = LaterSees(kept, rows).attend(q, [(k, v)])
    expected = dense_only(LaterSees(kept, rows), q, k, v)
    assert found.isfinite().all()
    torch.testing.assert_close(found[0, :, :70].double(), expected[0, :, :70], rtol=0, atol=2e-6)
    torch.testing.assert_close(found[1].double(), expected[1], rtol=0, atol=2e-6)


@torch.no_grad()
def test_a_sequence_without_earlier_rows_beside_one_with_them() -> None:
    torch.manual_seed(0)
    sees, q, (k, v) = LaterSees([0, 40], KEPT + 6), torch.randn(2, H, KEPT + 6, D), torch.randn(2, 2, G, KEPT + 46, D)
    torch.testing.assert_close(sees.attend(q, [(k, v)]).double(), dense_only(sees, q, k, v), rtol=0, atol=2e-6)


@pytest.mark.parametrize("rows", [5, KEPT + 6])
@pytest.mark.parametrize("trained", ["queries", "keys"])
def test_what_is_trained_through_keeps_its_gradients(trained: str, rows: int) -> None:
    """Also after a decoding has made and cached the mask of so many rows."""
    q, k = torch.randn(1, H, rows, D), torch.randn(1, G, rows + 24, D)
    _stairs.cache_clear()
    with torch.inference_mode():
        CausalSees(rows, rows + 24).attend(q, [(k, k)])
    sees, leaf, weights = CausalSees(rows, rows + 24), (q if trained == "queries" else k).requires_grad_(), torch.randn_like(q)
    found, expected = (torch.autograd.grad((out * weights).sum(), leaf)[0] for out in (sees.attend(q, [(k, k)]), dense_only(sees, q, k, k)))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("kept", [torch.float32, torch.float64])
@pytest.mark.parametrize("asked", [torch.float32, torch.float64])
def test_one_rule_serves_layers_of_several_shapes_and_dtypes(asked: torch.dtype, kept: torch.dtype) -> None:
    """Computed in the dtype of memory, whose later rows may be of another one; returned in that of the queries."""
    torch.manual_seed(0)
    other = torch.float32 if kept == torch.float64 else torch.float64
    sees = MaskSees((torch.rand(2, 5, 9) < 0.5).index_fill(2, torch.tensor([0]), True))
    for kv_heads in (1, 2, 8, 1):
        q, k, v = torch.randn(2, H, 5, D, dtype=asked), *torch.randn(2, 2, kv_heads, 9, D)
        first, later = ((k[:, :, rows].to(dtype), v[:, :, rows].to(dtype)) for rows, dtype in ((slice(6), kept), (slice(6, 9), other)))
        found = sees.attend(q, [first, later])
        assert found.dtype == asked
        torch.testing.assert_close(found.double(), dense_only(sees, q, k, v), rtol=0, atol=2e-6)
    for dtype in (torch.float32, torch.float64):
        mask = sees.bias(5, 9, 1, dtype, torch.device("cpu"))
        assert mask is not None and mask.dtype == dtype and mask is sees.bias(5, 9, 1, dtype, torch.device("cpu")), "made once"


# ---- on a GPU ----


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("memory", [9, 64, 199])
def test_masks_lie_as_a_gpu_wants_them(memory: int, group: int) -> None:
    """Rows at multiples of eight numbers, from where their memory begins: torch looks at strides alone, its kernels at that too."""
    meta, seen = torch.device("meta"), torch.ones(2, 5, memory, dtype=torch.bool, device="meta")
    positions = torch.arange(memory, device="meta").expand(2, -1)
    sliding = AutoConfig.for_model("mistral", sliding_window=3)
    for mask in (
        CausalSees(5, memory).bias(5, memory, group, torch.bfloat16, meta),
        MaskSees(seen).bias(5, memory, group, torch.bfloat16, meta),
        LaterSees([3, memory - 5], 5).bias(5, memory, group, torch.bfloat16, meta),
        masks(sliding, torch.bfloat16, seen, positions[:, -5:], positions),
    ):
        assert isinstance(mask, Tensor) and mask.shape[-1] == memory and mask.shape[-2] in (5, 5 * group)
        assert mask.storage_offset() == 0 and mask.stride(-1) == 1 and all(step % 8 == 0 for step in mask.stride()[:-1])
    # as on a CPU
    mask = CausalSees(5, memory).bias(5, memory, group, torch.float32, torch.device("cpu"))
    assert mask is not None and torch.equal(mask == 0, CausalSees(5, memory).dense(5, memory, "cpu").repeat(1, 1, group, 1))


def test_long_prompts_behind_others_take_the_kernels_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch describes it without a device: it refuses causal attention of other shapes, of which there is none in the closed form."""
    asked = []

    def takes(params: Any) -> bool:
        asked.append((params.is_causal, params.query.shape[2] == params.key.shape[2]))
        return not params.is_causal or params.query.shape[2] == params.key.shape[2]

    monkeypatch.setattr(torch.backends.cuda, "can_use_flash_attention", takes)
    with FakeTensorMode():
        q, k, v = (torch.empty(1, heads, n, 64, dtype=torch.bfloat16, device="cuda") for heads, n in ((H, 100), (G, 300), (G, 300)))
        assert has_flash(q, k, v) and has_flash(k, k, v)
    assert asked == [(False, False), (True, True)]


@torch.no_grad()
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("rows", [1, 3, KEPT, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_behind_others_on_a_gpu(rows: int, dtype: torch.dtype) -> None:
    """By masks of every alignment, and in closed form."""
    torch.manual_seed(0)
    for before in range(145, 154):
        q, k, v = torch.randn(2, H, rows, 64), *torch.randn(2, 2, G, before + rows, 64)
        expected = dense_only(CausalSees(rows, before + rows), q, k, v)
        found = CausalSees(rows, before + rows).attend(q.to("cuda", dtype), [(k.to("cuda", dtype), v.to("cuda", dtype))])
        assert float((found.cpu().double() - expected).norm() / expected.norm()) < (0.01 if dtype == torch.bfloat16 else 1e-5)


def test_shapes_of_the_variable_length_kernels() -> None:
    """As torch describes them without a device: what goes in is a view of what projections make, what comes out is laid out alike."""
    q, k = (torch.empty(B, T, heads, D, device="meta", dtype=torch.bfloat16).transpose(1, 2) for heads in (H, G))
    out, lse = flash(q, k, k, cuts := cuts_of(packed()))
    assert out.shape == q.shape and out.stride() == q.stride() and lse.shape == q.shape[:-1]
    assert [x.shape for x in flash_backward(out, q, k, k, out, lse, cuts)] == [q.shape, k.shape, k.shape]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("documents", [False, True])
def test_one_launch_of_variable_length_says_what_a_cpu_says(documents: bool) -> None:
    q, kv = leaves(3, torch.bfloat16, "cuda", size=64)
    sees = ChainSees(packed("cuda") if documents else None)
    assert has_flash(q[0], *kv[0])
    found, expected = attended(sees, q, kv), written_out(sees, q, kv)
    for a, b in zip([found[0], *found[1]], [expected[0], *expected[1]], strict=True):
        assert float((a.double() - b).norm() / b.norm()) < 0.01


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kv_heads, size, depth", [(2, 128, 4), (8, 64, 2), (1, 256, 3), (2, 72, 7)])
def test_kernels_of_the_diagonals(kv_heads: int, size: int, depth: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are taken, and no further off than torch's operations."""
    q, kv = leaves(depth, dtype, "cuda", size, kv_heads)
    if not launches(q[0].device):
        pytest.skip("our kernels cannot be launched here")
    assert chain_attention.takes(q[0].detach()) and chain_attention.mergeable(q[0], [x for pair in kv for x in pair])
    sees = ChainSees(packed("cuda"))
    found, right = attended(sees, q, kv), written_out(sees, q, kv)
    monkeypatch.setattr(chain_attention, "takes", lambda q: False)
    for own, torchs, exact in zip(*([x[0], *x[1]] for x in (found, attended(sees, q, kv), right)), strict=True):
        off = [float((x.detach().double() - exact).norm() / exact.norm()) for x in (own, torchs)]
        assert off[0] < (0.01 if dtype == torch.bfloat16 else 0.002) and off[0] < 1.1 * off[1] + 1e-4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("heads, size, batch", [(H, 128, B), (G, 128, 1), (3, 20, 1), (40, 64, B)])
def test_the_kernel_of_the_rotation(heads: int, size: int, batch: int) -> None:
    """It is taken where gradients are wanted. Torch's operations without them, in float64 on a CPU."""
    torch.manual_seed(0)
    x, grad = (torch.randn(B, T, heads, size, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(2))
    cos_sin = Rope({"rope_type": "default", "rope_theta": 1e4}, size, 64).cuda()(torch.randint(50, (batch, T), device="cuda"))
    if not launches(x.device):
        pytest.skip("our kernels cannot be launched here")
    found = rotate(x.requires_grad_(), cos_sin)
    assert type(found.grad_fn).__name__ == "RotationBackward"
    exact = x.detach().double().cpu().requires_grad_()
    right = rotate(exact, (cos_sin[0].cpu(), cos_sin[1].cpu()))
    wanted = torch.autograd.grad(right, exact, grad.double().cpu())
    for a, b in zip([found, *torch.autograd.grad(found, x, grad)], [right, *wanted], strict=True):
        assert float((a.detach().double().cpu() - b.detach()).norm() / b.detach().norm()) < 0.003


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("width", [1536, 2056])
def test_the_kernels_of_the_mlp(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are taken where gradients are wanted, and are no further off than torch's operations."""
    torch.manual_seed(0)
    mlp = MLP(64, width).cuda().bfloat16()
    x, grad = (torch.randn(B, T, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    if not launches(x.device):
        pytest.skip("our kernels cannot be launched here")
    gate, up = (p(4 * x).detach().requires_grad_() for p in (mlp.gate_proj, mlp.up_proj))
    assert type(layers.swiglu(gate, up).grad_fn).__name__ == "GatedBackward"
    of = [x.requires_grad_(), *mlp.parameters()]
    found = [y := mlp(x, x), *torch.autograd.grad(y, of, grad)]
    monkeypatch.setattr(layers, "takes", lambda x: False)
    torchs = [y := mlp(x, x), *torch.autograd.grad(y, of, grad)]
    exact = copy.deepcopy(mlp).double()
    wide = x.detach().double().requires_grad_()
    right = [y := exact(wide, wide), *torch.autograd.grad(y, [wide, *exact.parameters()], grad.double())]
    for own, theirs, wanted in zip(found, torchs, right, strict=True):
        off = [float((a.detach().double() - wanted).norm() / wanted.norm()) for a in (own, theirs)]
        assert off[0] < 0.01 and off[0] < 1.1 * off[1] + 1e-4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_head_sizes_that_a_gpu_does_not_take_fall_back() -> None:
    q, kv = leaves(2, torch.bfloat16, "cuda", size=20)
    assert not has_flash(q[0], *kv[0]) and not has_flash(*(x.float() for x in (q[0], *kv[0])))
    assert attended(ChainSees(packed("cuda")), q, kv)[0].isfinite().all()


def test_the_log_sum_exp_is_of_the_natural_logarithm() -> None:
    q, kv = leaves(1)
    out, lse = flash(q[0], *kv[0], cuts=cuts_of(packed()))
    scores = (q[0] @ kv[0][0].repeat_interleave(H // G, 1).transpose(2, 3)) / D**0.5
    expected = scores.masked_fill(~ChainSees(packed()).dense(T, T, "cpu"), -torch.inf).logsumexp(-1)
    torch.testing.assert_close(lse, expected, rtol=0, atol=1e-12)
    assert [x.shape for x in flash_backward(out, q[0], *kv[0], out, lse, cuts_of(packed()))] == [q[0].shape, kv[0][0].shape, kv[0][1].shape]
