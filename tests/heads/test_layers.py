"""The closed form of the unroll's attention against the dense mask, and the rope against transformers."""

import pytest
import torch
import torch.nn.functional as F

from headstart.heads import chain_attention
from headstart.heads.errors import UserError
from headstart.heads.layers import RMSNorm, Rope, rotate
from headstart.heads.memory import AsCache, Memory, Slots
from headstart.heads.visibility import CausalSees, ChainSees


def documents(kind: str, batch: int, length: int) -> torch.Tensor | None:
    if kind == "none":
        return None
    numbers = torch.zeros(batch, length, dtype=torch.long)
    if kind == "packed":
        numbers[0, 11:], numbers[0, 30:], numbers[1, 1:] = 1, 2, 5
    return numbers


@pytest.mark.parametrize("kind", ["none", "one", "packed"])
@pytest.mark.parametrize(("depth", "rows"), [(1, 128), (4, 128), (4, 16)])  # rows that a CPU multiplies at a time: all, or three times some
def test_closed_form_equals_dense_mask_with_gradients(kind: str, depth: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_attention, "ROWS", rows)
    torch.manual_seed(0)
    B, h, g, T, d = 2, 4, 2, 37, 16

    def leaf(heads: int) -> torch.Tensor:
        return torch.randn(B, heads, T, d, dtype=torch.float64, requires_grad=True)

    q, kv = [leaf(h) for _ in range(depth)], [(leaf(g), leaf(g)) for _ in range(depth)]
    weights = torch.randn(depth, B, h, T, d, dtype=torch.float64)
    results = []
    for closed_form in (True, False):
        sees, memory, out = ChainSees(documents(kind, B, T), closed_form=closed_form), Memory(), []
        for i in range(depth):
            out.append(sees.attend(q[i], memory.write(0, *kv[i])))
            sees = sees.deeper()
        loss = (torch.stack(out) * weights).sum()
        results.append((torch.stack(out), torch.autograd.grad(loss, q + [x for pair in kv for x in pair])))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=0, atol=1e-12)
    for a, b in zip(results[0][1], results[1][1], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_dense_mask_is_the_rule_written_out() -> None:
    """Row t sees roots up to t of its document, and row t of every later segment: counted by hand."""
    docs = torch.tensor([[0, 0, 1, 1]])
    mask = ChainSees(docs, depth=3, closed_form=False).dense(4, 12, "cpu")[0, 0]
    for t in range(4):
        for m in range(12):
            segment, row = divmod(m, 4)
            expected = (row <= t and docs[0, row] == docs[0, t]) if segment == 0 else row == t
            assert mask[t, m] == expected


@pytest.mark.parametrize(("depth", "found"), [(2, 1), (1, 2)])
def test_a_segment_for_each_depth(depth: int, found: int) -> None:
    q = torch.zeros(1, 1, 2, 4)
    with pytest.raises(RuntimeError, match=f"depth {depth} needs {depth} segments in memory, found {found}"):
        ChainSees(depth=depth).attend(q, [(q, q)] * found)


def test_slots_equal_growing_memory() -> None:
    torch.manual_seed(0)
    growing, slots = Memory(), Slots(12)
    for n, keep in ((5, 5), (3, 6), (4, 10)):
        k, v = torch.randn(1, 2, n, 4), torch.randn(1, 2, n, 4)
        a, b = growing.write(0, k, v), slots.write(0, k, v)
        for i in (0, 1):
            assert torch.equal(torch.cat([s[i] for s in a], dim=2), b[0][i])
        growing.rewind(keep)
        slots.rewind(keep)
        assert growing.rows() == slots.rows() == keep
    for memory in (growing, slots):  # another layer, which has not read as much
        memory.write(1, *torch.randn(2, 1, 2, 3, 4))
        memory.rewind(7)
        assert memory.rows(0) == 7 and memory.rows(1) == 3
    more = torch.randn(2, 1, 2, 300, 4)  # the buffers grow
    a, b = growing.write(0, *more), slots.write(0, *more)
    assert all(torch.equal(torch.cat([s[i] for s in a], dim=2), b[0][i]) for i in (0, 1))


def test_causal_rows_at_the_end_of_memory() -> None:
    assert CausalSees(1, 9).dense(1, 9, "cpu") is None
    expected = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]], dtype=torch.bool)
    assert torch.equal(CausalSees(2, 4).dense(2, 4, "cpu")[0, 0], expected)


@pytest.mark.parametrize("memory", [Memory(), Slots(20)])
def test_nodes_see_all_roots_and_of_each_other_what_they_are_told(memory: Memory) -> None:
    own = torch.tensor([[[1, 1, 0], [1, 0, 1]], [[0, 1, 0], [1, 0, 1]]], dtype=torch.bool)  # two read now, one before
    memory.write(0, *torch.zeros(2, 2, 1, 5, 4))  # five roots
    assert memory.sees_nodes(own[:, :1, :1], chain=True).dense(1, 6, "cpu") is None
    memory.write(0, *torch.zeros(2, 2, 1, 1, 4))
    sees, chain = memory.sees_nodes(own, chain=False), memory.sees_nodes(torch.ones_like(own[:, :1]), chain=True)
    mask = sees.dense(2, 8, "cpu")
    assert mask.shape == (2, 1, 2, 8) and bool(mask[..., :5].all()) and torch.equal(mask[:, 0, :, 5:], own)
    assert [*range(8)][sees.nodes(2)] == [*range(8)][chain.nodes(1)] == [5, 6, 7], "those read before are no roots, which a window hides"


def test_a_drafter_without_memory_needs_no_rule() -> None:
    assert Memory().sees_nodes(torch.ones(1, 3, 3, dtype=torch.bool), chain=False).dense(3, 0, "cpu").shape[:3] == (1, 1, 3)


def test_a_memory_is_a_cache_of_transformers() -> None:
    parts = torch.randn(2, 2, 1, 2, 3, 4)  # two calls; keys and values
    for memory in (Memory(), Slots(9)):
        cache = AsCache(memory)
        for layer in (0, 1):
            assert cache.get_seq_length(layer) == 0
            cache.update(*parts[0], layer)
            k, v = cache.update(*parts[1], layer)
            assert torch.equal(k, torch.cat([*parts[:, 0]], 2)) and torch.equal(v, torch.cat([*parts[:, 1]], 2))
            assert cache.get_seq_length(layer) == 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_is_in_the_dtype_of_what_it_norms(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's autocast (not a CPU's) would compute it in fp32 and return that: it is not asked."""
    norm, x, asked = RMSNorm(8, eps=1e-6), torch.randn(3, 8, dtype=dtype, requires_grad=True), []
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.5)
    own = F.rms_norm
    monkeypatch.setattr(F, "rms_norm", lambda *args: (asked.append(torch.is_autocast_enabled("cpu")), own(*args))[1])
    with torch.autocast("cpu", torch.bfloat16):
        found = norm(x)
        assert torch.is_autocast_enabled("cpu")
    found.sum().backward()
    assert asked == [False] and found.dtype is dtype and norm.weight.grad is not None and x.grad is not None
    exact = x.detach().double() * (x.detach().double().pow(2).mean(-1, keepdim=True) + norm.eps).rsqrt() * norm.weight.detach().double()
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=2e-6 if dtype == torch.float32 else 0.03)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 10000.0},
        {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 64},
        {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64},  # also scales cos and sin
    ],
)  # fmt: skip
def test_rope_equals_transformers(rope: dict) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    config = LlamaConfig(hidden_size=32, num_attention_heads=2, head_dim=16, max_position_embeddings=512, rope_parameters=dict(rope))
    x, positions = torch.randn(2, 2, 7, 16), torch.randint(0, 500, (2, 7))
    cos, sin = LlamaRotaryEmbedding(config)(x, positions)
    expected, _ = apply_rotary_pos_emb(x, x, cos, sin)
    torch.testing.assert_close(rotate(x, Rope(rope, 16, 512)(positions)), expected)


def test_heads_that_no_rotation_turns() -> None:
    with pytest.raises(UserError, match=r"heads have an odd size \(5\), which RoPE cannot turn"):
        Rope({}, 5, 64)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotations_that_change_with_the_length_are_refused(kind: str) -> None:
    with pytest.raises(UserError, match=f"rope_type '{kind}' changes with the length"):
        Rope({"rope_type": kind, "factor": 2.0}, 16, 64)
