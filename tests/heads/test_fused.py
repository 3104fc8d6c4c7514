"""The fused kernels of a GPU, interpreted on a CPU, against transformers' modules: kernel by kernel, and a decoder as a whole.

Where triton is installed; a process of its own says TRITON_INTERPRET=1 where this one does not. (In bfloat16 the interpreter rounds towards
zero, a GPU to the nearest: half precision is shown in float16 here, and in bfloat16 by tests/test_gpu.py.)
"""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from headstart.heads import hub, layers, lean
from headstart.heads.base import Roots
from headstart.heads.errors import UserError
from headstart.heads.kernels.launch import launches, refused
from headstart.heads.layers import RMSNorm, Rope, rotate
from headstart.heads.memory import Memory, Passing, Slots
from headstart.heads.visibility import CausalSees, ChainSees, zeros
from headstart.inference.decoding import growth
from headstart.inference.decoding.decode import generate
from headstart.inference.decoding.engine import Engine
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.propose import Drafting
from headstart.inference.decoding.sampling import SamplingParams
from headstart.inference.decoding.target import Target
from headstart.trainers.terms import in_kernel, kernel_of
from tests.drafters import random_tokens
from tests.heads.test_lean import SHAPES, states
from tests.interpreted import INTERPRETED, in_its_own, interpreted
from tests.tiny_targets import tiny_target

DTYPES = [torch.float32, torch.float16]
test_all_of_this_interpreted = in_its_own(__file__)


def fused(target: Target, own: bool = True) -> Target:
    """With the passes that it would have on a GPU."""
    from headstart.heads.kernels.fused import Fused

    known = lean._known(target.body)
    assert known is not None
    target.reader.lean = Fused(target.body, *known, own)
    return target


def untrained(target: Target) -> Any:
    torch.manual_seed(1)
    drafter = hub.build("eagle", target.shape)
    drafter.attach(target.ends)
    return drafter.eval()


def same(found: Tensor, right: Tensor) -> None:
    """To the bit in half precision, whose roundings stand at the same places."""
    assert found.dtype == right.dtype and found.shape == right.shape
    torch.testing.assert_close(
        found, right, rtol=2e-6 if right.dtype == torch.float32 else 0, atol=2e-6 if right.dtype == torch.float32 else 0
    )


# Kernels ------------------------------------------------------------------------------------------------------------


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 100])
def test_sum_and_norm(dtype: torch.dtype, size: int) -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    from headstart.heads.kernels.operations import Norm, add_and_norm

    norm = LlamaRMSNorm(size, eps=1e-5).to(dtype)
    norm.weight.data.normal_()
    x, more = torch.randn(5, size, dtype=dtype), torch.randn(5, size, dtype=dtype)
    for added, right in ((None, x), (more, x + more)):
        total, normed = add_and_norm(x, added, Norm(norm))
        same(total, right)
        same(normed, norm(right).detach())


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_drafters_norm_is_rounded_once(dtype: torch.dtype) -> None:
    """As ``heads.layers.RMSNorm``: also of rows that lie apart."""
    from headstart.heads.kernels.operations import normed

    norm = RMSNorm(60, eps=1e-5).to(dtype)
    norm.weight.data.normal_()
    x = torch.randn(2, 3, 80, dtype=dtype)[..., 10:70]
    wide = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight.detach().double()
    found = normed(norm)(x)
    assert found.dtype == dtype and (found.double() - wide).abs().max() < (2e-6 if dtype == torch.float32 else 4e-3)
    same(found, norm(x).detach())


@interpreted
@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16])
@pytest.mark.parametrize("R, V, K", [(1, 5, 5), (3, 2048, 1), (7, 5000, 10), (2, 70001, 32)])
def test_best_tokens(dtype: torch.dtype, R: int, V: int, K: int) -> None:
    """Among equal logits the first token comes first. Rows lie apart; some logits are minus infinity, some zeros of both signs."""
    from headstart.heads.kernels.best_tokens import best_tokens

    logits = (4 * torch.randn(R, V + 3)).round(decimals=2).to(dtype)[:, 1:-2]
    logits[:, 1::7], logits[:, 2::7] = -0.0, 0.0
    logits[0, V // 2 :] = -torch.inf
    values, tokens = best_tokens(logits, K)
    log_p = logits.double().log_softmax(-1)
    assert torch.equal(tokens, logits.sort(dim=-1, descending=True, stable=True).indices[:, :K])
    got, seen = log_p.gather(1, tokens), values > -torch.inf
    assert torch.equal(seen, got > -torch.inf)
    torch.testing.assert_close(values[seen].double(), got[seen], rtol=1e-5, atol=1e-5)


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
def test_gate(dtype: torch.dtype) -> None:
    from headstart.heads.kernels.operations import GATED, gated

    both = torch.randn(3, 2 * (GATED + 40), dtype=dtype)  # parts of one product
    gate, up = both.chunk(2, dim=1)
    same(gated(gate, up), F.silu(gate) * up)


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("slots", ["fresh", "one start", "starts"])
@pytest.mark.parametrize("normed", [False, True])
def test_rotation_and_slots(dtype: torch.dtype, slots: str, normed: bool) -> None:
    """Queries, and where keys and values are written: nowhere else."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

    from headstart.heads.kernels.operations import Norm, turn

    B, N, h, g, d, S = 2, 3, 6, 2, 8, 9
    norms = [LlamaRMSNorm(d, eps=1e-5).to(dtype) for _ in range(2)]
    for norm in norms:
        norm.weight.data.normal_()
    q, k, v = (torch.randn(B * N, (h + 2 * g) * d, dtype=dtype)).split([h * d, g * d, g * d], dim=1)
    positions = torch.randint(50, (B, N))
    rope = Rope({"rope_type": "default", "rope_theta": 1e4}, d, 64)
    cos, sin = (x.to(dtype).reshape(B * N, d) for x in rope(positions))
    start: Any = {"fresh": 0, "one start": 4, "starts": torch.tensor([1, 5])}[slots]
    keys, values = (torch.full((B + 1, g, N if slots == "fresh" else S, d), 7.0, dtype=dtype) for _ in range(2))
    made = turn(q, k, v, (cos, sin), [Norm(x) for x in norms] if normed else [], (h, g, d), (B, N), keys, values, start)
    heads = [x.reshape(B, N, -1, d) for x in (q, k, v)]
    if normed:
        heads[:2] = [norm(x).detach() for norm, x in zip(norms, heads, strict=False)]
    half = d // 2
    signs = torch.cat([-torch.ones(half), torch.ones(half)]).to(dtype)
    right = apply_rotary_pos_emb(*(x.transpose(1, 2) for x in heads[:2]), cos.view(B, N, d), (sin * signs).view(B, N, d))
    same(made.transpose(1, 2), right[0])
    for found, written in ((keys, right[1]), (values, heads[2].transpose(1, 2))):
        wanted = torch.full_like(found, 7.0)
        for b in range(B):
            first = start if isinstance(start, int) else int(start[b])
            wanted[b, :, first : first + N] = written[b]
        same(found, wanted)


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_drafters_rotation_is_rounded_once(dtype: torch.dtype) -> None:
    from headstart.heads.kernels.operations import Norm, turn

    B, N, h, g, d = 1, 4, 6, 2, 20
    norms = [RMSNorm(d, eps=1e-5).to(dtype) for _ in range(2)]
    for norm in norms:
        norm.weight.data.normal_()
    q, k, v = (torch.randn(B * N, (h + 2 * g) * d, dtype=dtype)).split([h * d, g * d, g * d], dim=1)
    cos, sin = Rope({"rope_type": "default", "rope_theta": 1e4}, d, 64)(torch.randint(50, (B, N)))
    keys, values = (torch.empty(B, g, N, d, dtype=dtype) for _ in range(2))
    made = turn(q, k, v, (cos.view(N, d), sin.view(N, d)), [Norm(x) for x in norms], (h, g, d), (B, N), keys, values, 0)
    right = [
        rotate(norm(x.unflatten(-1, (-1, d))[None]).transpose(1, 2), (cos, sin)).detach() for norm, x in zip(norms, (q, k), strict=True)
    ]
    most = 2e-6 if dtype == torch.float32 else 1e-3  # fp32 products may be added in one operation
    torch.testing.assert_close(made.transpose(1, 2), right[0], rtol=most, atol=most)
    torch.testing.assert_close(keys, right[1], rtol=most, atol=most)


@interpreted
@pytest.mark.parametrize("B, N, h, g, d, M", [(1, 1, 8, 2, 32, 300), (2, 5, 4, 4, 20, 65), (3, 17, 12, 2, 16, 90), (1, 40, 4, 1, 8, 130)])
@pytest.mark.parametrize("masked", ["nothing", "alike", "each its own"])
def test_attention_in_parts(B: int, N: int, h: int, g: int, d: int, M: int, masked: str) -> None:
    """Over slices of buffers, with a part of the memory that nobody sees, and a row that sees nothing."""
    from headstart.heads.kernels.split_attention import attend

    q_BNhd = torch.randn(B, N, h, d, dtype=torch.float16)
    keys, values = (x[:B, :, 3 : 3 + M] for x in torch.randn(2, B + 1, g, M + 7, d, dtype=torch.float16))
    bias, seen = None, torch.rand(1 if masked == "alike" else B, 1, N, M) < 0.3
    if masked != "nothing":
        seen[..., :64], seen[..., 64], seen[:, :, N - 1] = False, True, N == 1
        bias = zeros(seen.shape, torch.float16, torch.device("cpu")).masked_fill_(~seen, -torch.inf)
    k, v = (x.double().repeat_interleave(h // g, 1) for x in (keys, values))
    right = F.scaled_dot_product_attention(q_BNhd.transpose(1, 2).double(), k, v, None if bias is None else bias.double())
    assert (attend(q_BNhd, keys, values, bias).transpose(1, 2) - right.nan_to_num()).abs().max() < 1e-3


@interpreted
@pytest.mark.parametrize("d, dtype, right", [(128, torch.float16, True), (136, torch.float16, False), (64, torch.float32, False)])
def test_what_attention_in_parts_takes(d: int, dtype: torch.dtype, right: bool) -> None:
    """A larger head does not fit every GPU: one of 256 would ask an RTX 4090 for 104 KB of shared memory, and it has 99."""
    from headstart.heads.kernels.split_attention import supports

    assert supports(torch.empty(1, 1, 2, d, dtype=dtype), torch.empty(1, 2, 3, d, dtype=dtype)) == right


# Decoders -----------------------------------------------------------------------------------------------------------


@interpreted
@pytest.mark.parametrize("shape, own, dtype", [*((name, True, torch.float32) for name in SHAPES), ("llama", False, torch.float16)])
@torch.inference_mode()
def test_a_decoder_says_what_its_modules_say(shape: str, own: bool, dtype: torch.dtype) -> None:
    """Prompts, chains and trees, taps and final states; its matrices joined, and left alone (``own``)."""
    name, changes = SHAPES[shape]
    target = tiny_target(name, **changes)
    target = Target(target.model.to(dtype), name=name)
    for bias in (p for n, p in target.model.named_parameters() if n.endswith("bias")):
        bias.data.normal_()
    before = states(target)
    most = 1e-4 if dtype == torch.float32 else 0.02
    for a, b in zip(before, states(fused(target, own)), strict=True):
        torch.testing.assert_close(b, a, rtol=most, atol=most)


@interpreted
@torch.inference_mode()
def test_joined_matrices_are_stored_once() -> None:
    target = tiny_target("llama")
    before = copy.deepcopy(target.model.state_dict())
    layer = fused(target).body.layers[0]
    assert layer.self_attn.q_proj.weight.untyped_storage().data_ptr() == layer.self_attn.v_proj.weight.untyped_storage().data_ptr()
    assert all(torch.equal(x, before[name]) for name, x in target.model.state_dict().items())


@interpreted
@torch.no_grad()
def test_packed_documents_and_a_memory_that_keeps_nothing() -> None:
    target, tokens = tiny_target("llama"), torch.tensor([random_tokens(12, seed=1)])
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]])
    right, final = target.read(tokens, positions, (0, 3, 6))
    lean = fused(target).reader.lean
    assert lean is not None
    documents = torch.tensor([[0] * 5 + [1] * 7])
    found, same = lean.read(tokens, positions, memory := Passing(), ChainSees(documents), (0, 3, 6))
    assert not memory.layers
    for a, b in zip([*right.values(), final], [*found.values(), same], strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-4)


@interpreted
@torch.no_grad()
def test_memories_of_every_kind_hold_the_same() -> None:
    target = fused(tiny_target("qwen3"))
    lean, tokens = target.reader.lean, torch.tensor([random_tokens(9, seed=1)])
    assert lean is not None
    found = []
    for memory in (Memory(), Slots(), Slots(32)):
        said = [lean.read(tokens[:, a:b], torch.arange(a, b)[None], memory, CausalSees(b - a, b))[1] for a, b in ((0, 5), (5, 6), (6, 9))]
        found.append([*said, *(torch.cat(x, dim=2)[:, :, :9] for x in zip(*memory.layers[2], strict=True))])
    for some in found[1:]:
        for a, b in zip(found[0], some, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5)


@interpreted
@pytest.mark.parametrize(
    "policy", [None, TreePolicy(depth=3, nodes=6, branch=2), TreePolicy("chain", depth=3)], ids=["plain", "tree", "chain"]
)
def test_many_sequences_decode_the_same(policy: TreePolicy | None) -> None:
    """Through the engine's memory of fixed shape, whose rows begin at another slot in each sequence."""
    target, prompts = tiny_target("llama"), [random_tokens(n, seed=n) for n in (11, 1, 4)]
    greedy = [SamplingParams()] * len(prompts)
    right = [generate(target, None, p, new_tokens=6, stop_ids=()).tokens for p in prompts]
    drafter = None if policy is None else untrained(target)
    engine = Engine(fused(target), drafter, sequences=2, max_length=40, plans=policy)
    assert [row.tokens for row in engine.run(prompts, new_tokens=6, sampling=greedy, stop_ids=())] == right


# Drafters -----------------------------------------------------------------------------------------------------------


def frozen(drafter: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A copy with the layers and the growth of trees that it would have on a GPU."""
    from headstart.heads.kernels import fused

    monkeypatch.setattr(layers, "_forms", lambda module: fused)
    monkeypatch.setattr(growth, "takes", lambda x: True)
    made = copy.deepcopy(drafter)
    layers.freeze(made)
    return made


HEADS: dict[str, dict[str, Any]] = {
    "eagle": {},
    "eagle, two layers": {"layers": 2, "norm_before_residual": True, "fc_norm": False, "norm_before_fc": True},
    "eagle1": {},
    "dflash": {},
    "lilicorr": {},
    "peagle": {},
    "mtp": {},
}


@interpreted
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_a_frozen_drafter_drafts_the_same(head: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Roots in two calls, then nodes behind them."""
    target = tiny_target("llama")
    torch.manual_seed(1)
    drafter = hub.build(head.partition(",")[0], target.shape, **HEADS[head])
    for p in drafter.parameters():
        p.data.add_(0.1 * torch.randn_like(p))
    drafter.attach(target.ends)
    drafter = drafter.to(dtype).eval()
    tokens = torch.tensor([random_tokens(9, seed=2)])
    states, _ = target.read(tokens, torch.arange(9)[None], drafter.taps)
    roots = Roots(tokens, tokens.roll(-1, 1), states, torch.arange(9)[None]).to(dtype)
    said = []
    for each in (drafter, frozen(drafter, monkeypatch)):
        memory, found = Slots(64), []
        for a, b in ((0, 6), (6, 9)):
            draft = each.begin(roots[a:b], memory, CausalSees(b - a, memory.rows() + b - a), torch.tensor([[b - a - 1]]))
            found.append(draft.hidden_BNH)
        for depth in range(2, 4 if each.max_depth is None else min(4, each.max_depth + 1)):
            own = torch.ones(1, 1, depth - 1, dtype=torch.bool)
            draft = each.step(depth, tokens[:, depth : depth + 1], draft, torch.tensor([[7 + depth]]), memory, memory.sees_nodes(own, True))
            found.append(draft.hidden_BNH)
        said.append(found)
    assert any(getattr(m, "frozen", None) is not None for m in each.modules())
    most = 2e-5 if dtype == torch.float32 else 0.01
    for a, b in zip(*said, strict=True):
        torch.testing.assert_close(b, a, rtol=most, atol=most)


@interpreted
@pytest.mark.parametrize("policy", [TreePolicy(depth=3, nodes=6, branch=2), TreePolicy("chain", depth=3)], ids=["tree", "chain"])
def test_frozen_drafters_grow_the_same_trees(policy: TreePolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the engine's memory and in that of one sequence."""
    target, prompts = tiny_target("llama"), [random_tokens(n, seed=n) for n in (11, 1, 4)]
    drafter, greedy, said = untrained(target), [SamplingParams()] * 3, []
    for each in (drafter, frozen(drafter, monkeypatch)):
        engine = Engine(target, each, sequences=2, max_length=40, plans=policy)
        rows = engine.run(prompts, new_tokens=6, sampling=greedy, stop_ids=())
        made = [generate(target, Drafting(each), p, new_tokens=6, policy=policy, stop_ids=()) for p in prompts]
        said.append([(row.tokens, row.emitted) for row in rows] + [(x.tokens, x.emitted) for x in made])
    assert said[0] == said[1]


@pytest.mark.skipif(INTERPRETED, reason="interpreted, they run anywhere")
def test_where_they_cannot_be_launched_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """And a decoder on such a device keeps its own modules."""
    launches.cache_clear()
    refused.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert not launches(torch.device("cpu")) and not launches(torch.device("cpu"))
    assert [m for m in caplog.messages if "cannot be launched on cpu" in m] == caplog.messages and len(caplog.messages) == 1
    assert kernel_of("auto", ["kl"], torch.device("meta"), ()) == kernel_of("auto", ["jsd"], torch.device("cuda"), ()) == "torch"
    assert in_kernel("auto", ["kl", "feature"], torch.device("cuda")) and not in_kernel("torch", ["kl"], torch.device("cuda"))


def test_they_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADSTART_KERNELS", "0")
    refused.cache_clear()
    assert refused(torch.device("cpu")) == "HEADSTART_KERNELS=0"
    refused.cache_clear()
    monkeypatch.setenv("HEADSTART_KERNELS", "false")
    with pytest.raises(UserError, match=r"^HEADSTART_KERNELS=false in the environment: 0 switches our kernels off, 1 leaves them on$"):
        refused(torch.device("cpu"))
    refused.cache_clear()
