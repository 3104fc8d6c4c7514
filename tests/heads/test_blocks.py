"""Drafters that guess a whole block at once, against their definitions written as loops: one root, one slot, one key at a time.

Shapes: [D] a row, [T, D] rows, [h, d] heads by head size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from headstart.heads import hub
from headstart.heads.base import Draft, Drafter, Roots
from headstart.heads.dflash import spread_taps
from headstart.heads.eagle import default_taps
from headstart.heads.errors import UserError
from headstart.heads.memory import Beside, Memory, Slots
from headstart.heads.unroll import unroll
from headstart.heads.visibility import BlockSees, CausalSees, ChainSees, MaskSees
from headstart.inference.decoding.counter_rng import CounterRNG
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.propose import Drafting
from headstart.inference.decoding.sampling import SamplingParams
from headstart.inference.decoding.target import Target
from tests.drafters import VARIANTS, fresh, make, random_tokens, roots_of
from tests.heads.reference import markov_bias
from tests.tiny_targets import tiny_target

TARGET = functools.cache(tiny_target)
BACKBONE = ["dflash", "jetspec", "dflare", "dflash2", "lilicorr", "xpress", "dspark", "domino"]
BLOCKS = [*BACKBONE, "peagle"]
SMALL: dict[str, dict[str, Any]] = {name: dict(layers=2, block=5) for name in BACKBONE} | {"peagle": dict(layers=2, depth=4)}
EXACT = dict(rtol=0, atol=1e-5)


def small(name: str, **changes: Any) -> Drafter:
    return make(name, TARGET(), **SMALL[name.partition(",")[0]] | changes)


Seen = Callable[[int, int], tuple[int, int]]


class Loops:
    """The arithmetic of decoder layers, row by row, from a drafter's weights alone."""

    def __init__(self, drafter: Drafter, target: Target) -> None:
        self.w = drafter.state_dict()
        self.embed, self.head, self.shape = target.model.model.embed_tokens.weight, target.model.lm_head.weight, drafter.shape

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.shape.norm_eps).sqrt() * self.w[name + ".weight"]

    def rotate(self, x: Tensor, position: int) -> Tensor:
        half = self.shape.head_dim // 2
        angle = position * self.shape.rope["rope_theta"] ** (-torch.arange(half) / half)
        a, b = x[:, :half], x[:, half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    def heads(self, x: Tensor, layer: str, kind: str, position: int | None) -> Tensor:
        found = (self.w[f"{layer}.self_attn.{kind}_proj.weight"] @ x).view(-1, self.shape.head_dim)
        if f"{layer}.self_attn.{kind}_norm.weight" in self.w:
            found = self.norm(found, f"{layer}.self_attn.{kind}_norm")
        return found if position is None else self.rotate(found, position)

    def key_value(self, x: Tensor, layer: str, position: int) -> tuple[Tensor, Tensor]:
        return self.heads(x, layer, "k", position), self.heads(x, layer, "v", None)

    def attend(self, into: Tensor, layer: str, position: int, seen: list[tuple[Tensor, Tensor]]) -> Tensor:
        q, out = self.heads(into, layer, "q", position), []
        for h in range(len(q)):
            g = h * len(seen[0][0]) // len(q)
            p = torch.stack([q[h] @ k[g] for k, _ in seen]).div(self.shape.head_dim**0.5).softmax(0)
            out.append(sum(weight * v[g] for weight, (_, v) in zip(p, seen, strict=True)))
        return self.w[f"{layer}.self_attn.o_proj.weight"] @ torch.cat(out)  # type: ignore[arg-type]

    def mlp(self, x: Tensor, layer: str) -> Tensor:
        return x + self.gated(self.norm(x, f"{layer}.post_attention_layernorm"), layer)

    def gated(self, y: Tensor, layer: str) -> Tensor:
        gate, up, down = (self.w[f"{layer}.mlp.{n}_proj.weight"] for n in ("gate", "up", "down"))
        return down @ (F.silu(gate @ y) * (up @ y))

    def convolve(self, rows: list[Tensor], name: str, which: int, normed: list[Tensor]) -> list[Tensor]:
        """DFlash 2's convolution over a block's slots, before (0) or after (1) a sublayer; without such weights the rows themselves."""
        if f"{name}.base_kernel" not in self.w:
            return rows
        base, out = self.w[f"{name}.base_kernel"][which], []
        for s in range(len(rows)):
            delta = (self.w[f"{name}.kernel_projection.weight"] @ normed[s]).view(2, len(base), -1)[which]
            kernel = [base[t] + delta[t].repeat_interleave(base.shape[1] // delta.shape[1]) for t in range(len(base))]
            out.append(torch.stack([rows[s - t] * kernel[t] for t in range(min(s + 1, len(base)))]).sum(0))
        return out

    def context(self, tapped: Tensor, i: int, position: int) -> tuple[Tensor, Tensor]:
        """A root's key and value in layer ``i``, from its tapped states, side by side. DFlare mixes them and has matrices of its own."""
        layer, own = f"layers.{i}", self.w.get("layer_fusion_weights")
        if own is None:
            return self.key_value(self.norm(self.w["fc.weight"] @ tapped, "hidden_norm"), layer, position)
        weights, states = own[i].exp() / own[i].exp().sum(), tapped.view(own.shape[1], -1)
        z = self.norm(sum(w * state for w, state in zip(weights, states, strict=True)), "hidden_norm")  # type: ignore[arg-type]
        k, v = ((self.w[f"{layer}.self_attn.{kind}_proj_target.weight"] @ z).view(-1, self.shape.head_dim) for kind in "kv")
        return self.rotate(self.norm(k, f"{layer}.self_attn.k_norm"), position), v

    def dflash(self, states: Tensor, anchor: int, t: int, slots: int, causal: bool = False, seen: Seen | None = None) -> Tensor:
        """The slots after the last norm. ``states``: the tapped ones of the roots, side by side. ``seen``: layer and slot -> the first
        root that it sees, and how many slots.
        """
        x = [self.embed[anchor], *[self.w["mask_embedding"]] * (slots - 1)]
        for i in range(2):
            layer = f"layers.{i}"
            context = [self.context(states[j], i, j) for j in range(t + 1)]
            normed = [self.norm(row, f"{layer}.input_layernorm") for row in x]
            into = self.convolve(normed, f"{layer}.attention_conv", 0, normed)
            own = [self.key_value(row, layer, t + 1 + k) for k, row in enumerate(into)]
            first, last = zip(*((0, k + 1 if causal else slots) if seen is None else seen(i, k) for k in range(slots)), strict=True)
            said = [self.attend(into[k], layer, t + 1 + k, context[first[k] :] + own[: last[k]]) for k in range(slots)]
            x = [a + b for a, b in zip(x, self.convolve(said, f"{layer}.attention_conv", 1, normed), strict=True)]
            normed = [self.norm(row, f"{layer}.post_attention_layernorm") for row in x]
            said = [self.gated(y, layer) for y in self.convolve(normed, f"{layer}.mlp_conv", 0, normed)]
            x = [a + b for a, b in zip(x, self.convolve(said, f"{layer}.mlp_conv", 1, normed), strict=True)]
        return torch.stack([self.norm(row, "norm") for row in x])

    def peagle(self, states: list[Tensor], tokens: list[int], t: int, depths: int) -> Tensor:
        """The rows that guess depths 1.. of root t. ``tokens``: the roots' chosen ones."""
        unknown = list(self.w["mask_hidden"].view(len(states), -1))
        rows = [([s[j] for s in states], self.embed[tokens[j]], j) for j in range(t + 1)]
        rows += [(unknown, self.w["mask_embedding"], t + d) for d in range(1, depths)]
        x = [self.w["fc.weight"] @ torch.cat([self.norm(s, f"fc_norm.{i}") for i, s in enumerate(tapped)]) for tapped, _, _ in rows]
        for i in range(2):
            layer = "layers.0" if i else "midlayer"
            into = [self.norm(row, f"{layer}.{'input_layernorm' if i else 'hidden_norm'}") for row in x]
            if i == 0:
                into = [torch.cat([self.norm(e, "midlayer.input_layernorm"), y]) for (_, e, _), y in zip(rows, into, strict=True)]
            own = [self.key_value(y, layer, position) for y, (_, _, position) in zip(into, rows, strict=True)]
            x = [
                self.mlp(row + self.attend(into[j], layer, rows[j][2], own[: j + 1]), layer)  # in this order, causal
                for j, row in enumerate(x)
            ]
        return torch.stack([self.norm(row, "norm") for row in x[t:]])


def logits_of(drafter: Drafter, drafts: list[Draft], row: int) -> list[Tensor]:
    return [drafter.unembedding(d).logits(draft.hidden_BNH)[0, row] for d, draft in enumerate(drafts, start=1)]


def case(name: str, **changes: Any) -> tuple[Drafter, Roots, list[int], Tensor]:
    drafter, tokens = small(name, **changes), random_tokens(14, seed=3)
    roots = roots_of(TARGET(), drafter, torch.tensor([tokens]))
    return drafter, roots, tokens, torch.cat([roots.states[tap][0] for tap in drafter.taps], dim=-1)


@torch.no_grad()
@pytest.mark.parametrize("t", [0, 6])
@pytest.mark.parametrize("name", ["dflash", "jetspec", "dflare"])
def test_a_block_is_its_definition(name: str, t: int) -> None:
    """Slot k of the block at anchor t+1 guesses x[t+1+k]."""
    drafter, roots, tokens, states = case(name)
    loops = Loops(drafter, TARGET())
    slots = loops.dflash(states, tokens[t + 1], t, 5, causal=name == "jetspec")
    assert drafter.max_depth == 4
    for d, found in enumerate(logits_of(drafter, unroll(drafter, roots, None, 4), t), start=1):
        torch.testing.assert_close(found, loops.head @ slots[d], **EXACT)


KINDS = ["vanilla", "gated", "rnn"]


@torch.no_grad()
@pytest.mark.parametrize("t", [0, 6])
@pytest.mark.parametrize("kind", KINDS)
def test_the_markov_head_is_its_definition(kind: str, t: int) -> None:
    """Slot k guesses x[t+2+k], knowing x[t+1+k], and with the rnn the tokens before from x[t+1] on."""
    drafter, roots, tokens, states = case("dspark", markov=kind)
    loops = Loops(drafter, TARGET())
    slots, w = loops.dflash(states, tokens[t + 1], t, 5, causal=False), loops.w
    bias, drafts = markov_bias(kind, w, slots, tokens[t + 1 : t + 6]), unroll(drafter, roots, None, 5)
    assert drafter.max_depth == 5
    for k, found in enumerate(logits_of(drafter, drafts, t)):
        torch.testing.assert_close(found.double(), (slots @ loops.head.T + bias)[k], **EXACT)
        sure = w["confidence.weight"][0] @ torch.cat([slots[k], w["markov_w1.weight"][tokens[t + 1 + k]]]) + w["confidence.bias"][0]
        confidence = drafts[k].confidence_BN
        assert confidence is not None
        torch.testing.assert_close(confidence[0, t], sure, **EXACT)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_each_node_of_a_tree_knows_its_own_path(kind: str) -> None:
    """A fixed tree, drafted as in decoding: the token of each node has the rank that the tree asks for, after the tokens of its path."""
    deep = ("000", "100", "110", "200", "201", "1100", "2010")
    paths = tuple(tuple(map(int, path)) for path in ("0", "1", "2", "00", "01", "10", "11", "20", *deep))
    drafter, roots, tokens, states = case("dspark", markov=kind)
    for name in ("markov_w1.weight", "markov_w2"):
        drafter.get_parameter(name).mul_(10)  # so that other tokens before make other guesses
    loops, t = Loops(drafter, TARGET()), len(tokens) - 2
    slots = loops.dflash(states[: t + 1], tokens[t + 1], t, 5, causal=False)
    proposer = Drafting(drafter)
    proposer.start(None, 40)
    proposer.absorb(roots[: t + 1])
    tree = proposer.propose(TreePolicy("fixed", paths=paths), CounterRNG.of(), SamplingParams())
    said: dict[tuple[int, ...], list[int]] = {}
    nodes: list[tuple[tuple[int, ...], list[int]]] = [((), [])]  # of each row of the tree: its path, and the tokens on it
    for token, parent in zip(tree.tokens_BN[0].tolist(), tree.parents_BN[0].tolist(), strict=True):
        path, before = nodes[parent + 1]
        rank = sum((*path, r) in said for r in range(3))
        logits = slots[len(before)] @ loops.head.T + markov_bias(kind, loops.w, slots, [tokens[t + 1], *before])[-1]
        assert logits.sort(descending=True).indices[rank] == token
        said[*path, rank] = [*before, token]
        nodes.append(((*path, rank), [*before, token]))
    assert said.keys() == {*paths}
    assert len({said[r, 0][1] for r in range(3)}) > 1, "the token before changed nothing"


@torch.no_grad()
@pytest.mark.parametrize("t", [0, 6])
def test_the_selector_is_its_definition(t: int) -> None:
    """Slot k guesses x[t+1+k] among the likeliest tokens of the backbone, knowing x[t+k]."""
    drafter, roots, tokens, states = case("dflash2")
    loops = Loops(drafter, TARGET())
    slots, w = loops.dflash(states, tokens[t + 1], t, 5, causal=False), loops.w
    assert drafter.max_depth == 4
    for d, found in enumerate(logits_of(drafter, unroll(drafter, roots, None, 4), t), start=1):
        logits, context = loops.head @ slots[d], w["predecessor.weight"][tokens[t + d]] * (w["slot_projection.weight"] @ slots[d])
        expected = torch.full_like(logits, -torch.inf)
        for c in logits.sort(descending=True).indices[:16].tolist():
            expected[c] = logits[c] + context @ w["successor"][c]
        torch.testing.assert_close(found, expected, **EXACT)


@torch.no_grad()
@pytest.mark.parametrize("name", ["dflash2", "xpress"])
def test_what_is_added_to_dflash_changes_nothing_at_the_start(name: str) -> None:
    """Convolutions, selector (among its candidates) and refiner."""
    plain, drafter = (make(each, TARGET(), noise=0.0, layers=2, block=5) for each in ("dflash", name))
    drafter.load_state_dict(plain.state_dict(), strict=False)
    roots = roots_of(TARGET(), drafter, torch.tensor([random_tokens(14, seed=3)]))
    for a, b in zip(*(logits_of(x, unroll(x, roots, None, 4), 6) for x in (plain, drafter)), strict=True):
        torch.testing.assert_close(b, a.masked_fill(a < a.topk(16).values[-1], -torch.inf) if name == "dflash2" else a)


@torch.no_grad()
@pytest.mark.parametrize("t", [0, 6])
def test_the_refiner_is_its_definition(t: int) -> None:
    """Slot k guesses x[t+1+k]; its logits are corrected by what the slots up to it and the tokens before each of them say."""
    drafter, roots, tokens, states = case("xpress")
    loops = Loops(drafter, TARGET())
    slots, w = loops.dflash(states, tokens[t + 1], t, 5, causal=False).double(), {k: v.double() for k, v in loops.w.items()}
    mean, latents = sum(slots) / 5, list[Tensor]()
    assert drafter.max_depth == 4 and w["mixer"].shape == (16, 5, 5)
    for k in range(5):
        before = tokens[t + k] if k else tokens[t + 1]  # of the anchor's slot: the anchor
        parts = [w["slot_latent.weight"] @ slots[k], w["mean_latent.weight"] @ mean, w["token_latent.weight"][before]]
        latents.append(w["fuse.weight"] @ torch.cat(parts))
    for k, found in enumerate(logits_of(drafter, unroll(drafter, roots, None, 4), t), start=1):
        u = latents[k].clone()
        for c in range(16):
            for j in range(k + 1):
                u[c] += w["mixer"][c, k, j] * latents[j][c]
        gate, up, down = (w[f"mlp.{n}_proj.weight"] for n in ("gate", "up", "down"))
        u = u + down @ (F.silu(gate @ u) * (up @ u))
        torch.testing.assert_close(found.double(), loops.head.double() @ slots[k] + w["readout"] @ u, **EXACT)


@torch.no_grad()
@pytest.mark.parametrize("t", [0, 6])
def test_the_gru_is_torchs(t: int) -> None:
    drafter, roots, tokens, states = case("domino")
    loops = Loops(drafter, TARGET())
    slots, w = loops.dflash(states, tokens[t + 1], t, 5, causal=False), loops.w
    cell = torch.nn.GRUCell(32, 32, bias=False)
    cell.weight_ih.copy_(w["gru_input.weight"])
    cell.weight_hh.copy_(w["gru_state.weight"])
    g = torch.zeros(32)
    for k, found in enumerate(logits_of(drafter, unroll(drafter, roots, None, 5), t)):
        g = cell(loops.embed[tokens[t + 1 + k]], g)
        expected = loops.head @ slots[k]
        if k:
            expected = expected + w["widen"] @ F.silu(w["narrow.weight"] @ torch.cat([slots[k], g]))
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


@torch.no_grad()
@pytest.mark.parametrize("t", [0, 6])
def test_parallel_eagle_is_its_definition(t: int) -> None:
    drafter, roots, tokens, _ = case("peagle")
    loops = Loops(drafter, TARGET())
    rows = loops.peagle([roots.states[tap][0] for tap in drafter.taps], tokens[1:], t, 4)
    found = logits_of(drafter, unroll(drafter, roots, None, 4), t)
    assert drafter.max_depth == len(found) == 4
    for logits, row in zip(found, rows, strict=True):
        torch.testing.assert_close(logits, loops.w["lm_head.weight"] @ row, **EXACT)


@torch.no_grad()
def test_parallel_eagle_of_depth_1_says_what_a_deeper_one_says_first() -> None:
    deep, roots, *_ = case("peagle")
    one = small("peagle", depth=1)
    one.load_state_dict(deep.state_dict())
    torch.testing.assert_close(unroll(one, roots, None, 1)[0].hidden_BNH, unroll(deep, roots, None, 4)[0].hidden_BNH, **EXACT)


@torch.no_grad()
@pytest.mark.parametrize("name", BLOCKS)
def test_asked_roots_are_the_same_as_all_of_them(name: str) -> None:
    """Anchors in any order, twice, near borders of documents; and more roots than are multiplied at a time."""
    drafter = small(name)
    tokens_BT = torch.tensor([random_tokens(70, seed=1), random_tokens(70, seed=2)])
    positions_BT = torch.tensor([[*range(40), *range(30)], [*range(70)]])
    documents_BT = torch.tensor([[0] * 40 + [1] * 30, [0] * 70])
    roots = roots_of(TARGET(), drafter, tokens_BT, positions_BT)
    depth = drafter.max_depth or 1
    ask_BA = torch.tensor([[3, 66, 41, 41, 39], [0, 68, 31, 32, 12]])
    every, asked = (unroll(drafter, roots, documents_BT, depth, ask_BA=ask) for ask in (None, ask_BA))
    for b in (0, 1):
        for whole, some in zip(every, asked, strict=True):
            torch.testing.assert_close(some.hidden_BNH[b], whole.hidden_BNH[b, ask_BA[b]], **EXACT)
            assert some.hidden_BNH.shape[1] == 5 and whole.hidden_BNH.shape[1] == 70


@torch.no_grad()
@pytest.mark.parametrize("name", [*BACKBONE, *VARIANTS])
def test_blocks_are_in_half_precision_under_autocast(name: str) -> None:
    """Although the states are in fp32: the residual stream of all slots is most of what training keeps."""
    drafter, roots, *_ = case(name)
    with torch.autocast("cpu", torch.bfloat16):
        drafts = unroll(drafter, roots, None, 3)
    assert {x.dtype for x in roots.states.values()} == {torch.float32} and {x.state.dtype for x in drafts} == {torch.bfloat16}


@torch.no_grad()
@pytest.mark.parametrize("name", BLOCKS)
def test_memory_keeps_roots_alone(name: str) -> None:
    drafter, roots, *_ = case(name)
    memory = Memory()
    drafter.begin(roots[:9], memory, CausalSees(9, 9), torch.tensor([[8]]))
    assert {memory.rows(layer) for layer in range(2)} == {9} and len(memory.layers) == 2
    drafter.begin(roots[9:11], memory, CausalSees(2, 11), torch.tensor([[1]]))
    assert {memory.rows(layer) for layer in range(2)} == {11}


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("kind", ["chain", "mask", "last"])
def test_who_sees_whom_counted_by_hand(kind: str, is_causal: bool, slots: int) -> None:
    """Root 2 and root 3 of six, where a document ends after root 2; or the only new root behind five others."""
    documents = [0, 0, 0, 1, 1, 1]
    roots: ChainSees | MaskSees = MaskSees()
    ask = [2, 3] if kind != "last" else [0]
    if kind == "chain":
        roots = ChainSees(torch.tensor([documents]))
    if kind == "mask":
        roots = MaskSees(torch.tensor([[[j <= i and documents[i] == documents[j] for j in range(6)] for i in range(6)]]))
    sees = BlockSees(roots, torch.tensor([ask]), slots, is_causal)
    rows = len(ask) * slots
    mask = sees.dense(rows, 6 + rows, "cpu")
    if mask is None:
        assert kind == "last" and (not is_causal)
        mask = torch.ones(1, 1, rows, 6 + rows, dtype=torch.bool)
    for i in range(rows):
        for j in range(6 + rows):
            root = ask[i // slots]
            if j < 6:
                expected = kind == "last" or (j <= root and documents[j] == documents[root])
            else:
                expected = (j - 6) // slots == i // slots and (not is_causal or j - 6 <= i)
            assert mask[0, 0, i, j] == expected, (i, j)
    with pytest.raises(TypeError, match="no roots"):
        sees.seen_by(torch.tensor([[0]]), 6)


def test_rows_beside_a_memory_are_forgotten() -> None:
    memory, x = Memory(), torch.randn(3, 1, 1, 2, 4)
    memory.write(0, x[0], x[0])
    beside = Beside(memory)
    assert len(beside.write(0, x[1], x[1])) == 2
    for _ in range(2):
        segments = beside.write(0, x[2], x[2])
        assert [torch.equal(k, row) for (k, _), row in zip(segments, x, strict=True)] == [True] * 3
    assert memory.rows() == 4


def test_rows_beside_one_sequence_use_slots_that_stay_free() -> None:
    memory, x = Slots(capacity=8), torch.randn(2, 1, 1, 2, 4)
    assert Beside(memory).room(0, 2) is None  # no buffers yet
    memory.write(0, x[0], x[0])
    beside = Beside(memory)
    roots = beside.room(0, 2)
    assert roots is not None and (roots.start, roots.stop) == (2, 4) and memory.rows() == 4
    roots.keys[:, :, 2:4] = roots.values[:, :, 2:4] = x[1]
    for _ in range(2):
        found = beside.room(0, 3)
        assert found is not None and (found.start, found.first, found.stop) == (4, 0, 7) and memory.rows() == 4
    assert beside.room(0, 5) is None and memory.rows() == 4
    before, own = beside.write(0, x[0], x[0])
    assert torch.equal(before[0], torch.cat([*x], dim=2)) and torch.equal(own[1], x[0]) and memory.rows() == 4


def test_gradients_reach_everything_that_is_trained() -> None:
    for name in BLOCKS:
        drafter = small(name).train()
        roots = roots_of(TARGET(), drafter, torch.tensor([random_tokens(12, 1)]))
        drafts = unroll(drafter, roots, None, drafter.max_depth or 1, ask_BA=torch.tensor([[2, 5]]))
        loss = sum((drafter.unembedding(d).logits(x.hidden_BNH) ** 2).mean() for d, x in enumerate(drafts, 1))
        for draft in drafts:
            if draft.confidence_BN is not None:
                loss = loss + draft.confidence_BN.sum()
        loss.backward()  # type: ignore[union-attr]
        still = [n for n, p in drafter.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
        assert still == [], name
        assert all(p.grad is None for p in TARGET().model.parameters())


@pytest.mark.parametrize("layers", range(2, 9))
@pytest.mark.parametrize("name", BLOCKS)
def test_small_targets_have_taps_too(name: str, layers: int) -> None:
    target = tiny_target(num_hidden_layers=layers, hidden_size=16, head_dim=8, intermediate_size=16)
    drafter = make(name, target)
    assert drafter.taps and drafter.taps[0] >= 0 and drafter.taps[-1] <= layers
    roots = roots_of(target, drafter, torch.tensor([random_tokens(5, 1)]))
    assert unroll(drafter, roots, None, 2)[1].hidden_BNH.isfinite().all()


def test_taps_are_the_published_ones() -> None:
    """As z-lab's folders name them (outputs of layers counted from 0): one less."""
    assert [k - 1 for k in spread_taps(36, 5)] == [1, 9, 17, 25, 33]
    assert [k - 1 for k in spread_taps(32, 1)] == [16]
    assert [default_taps(layers) for layers in (36, 7, 2, 1)] == [[2, 18, 33], [2, 3, 4], [0, 1], [0]]  # EAGLE-3's, as engines count


def test_what_cannot_be_is_refused() -> None:
    shape = TARGET().shape
    for name, wrong, message in [
        ("dflash", dict(taps=[2, 9]), r"head\.taps \(2, 9\) must ascend within 0..6"),
        *((head, dict(taps=[]), r"head\.taps \(\) must ascend within 0..6") for head in ("dflash", "dflare", "eagle", "peagle")),
        ("jetspec", dict(taps=[3, 2]), r"head\.taps"),
        ("eagle", dict(fc_norm=True, norm_before_fc=True), r"head\.norm_before_fc is one norm .* add head\.fc_norm=false"),
        ("dflash", dict(taps=[True, 3]), r"head\.taps must be a list of whole numbers or null"),
        ("peagle", dict(taps=[2, 9]), r"head\.taps"),
        ("dflash", dict(block=1), r"head\.block must be at least 2, found 1"),
        ("domino", dict(heads=3, kv_heads=2), r"head\.heads=3 must be a multiple"),
        ("dflash2", dict(candidates=97), r"head\.candidates must be from 1 to the target's 96 tokens, found 97"),
        ("dflash2", dict(block=3, conv_taps=4), r"head\.conv_taps must be from 1 to head\.block=3, found 4"),
        ("dflash2", dict(conv_group=5), r"head\.conv_group must divide the target's hidden size 32, found 5"),
    ]:
        with pytest.raises(UserError, match=message):
            fresh(name, shape, **wrong)
    for name in BLOCKS:
        drafter, roots, *_ = case(name)
        deepest = drafter.max_depth or 1
        with pytest.raises(UserError, match=f"guesses {deepest} tokens, depth {deepest + 1} was asked"):
            unroll(drafter, roots, None, deepest + 1)


@torch.no_grad()
def test_the_slots_before_know_nothing_of_those_behind_where_causal() -> None:
    """The first guess of a causal block does not depend on the block's length; that of a bidirectional one does."""
    for name, same in (("jetspec", True), ("dflash", False)):
        roots = roots_of(TARGET(), small(name), torch.tensor([random_tokens(9, 2)]))
        one, other = (unroll(small(name, block=n), roots, None, 1)[0].hidden_BNH for n in (2, 5))
        assert torch.allclose(one, other, atol=1e-5) == same


@pytest.mark.parametrize("mask_token", [None, 95])
@pytest.mark.parametrize("name", BACKBONE)
def test_where_engines_leave_out_the_scale_of_logits_nothing_corrects_them(name: str, mask_token: int | None) -> None:
    drafter, ends = fresh(name, TARGET().shape, **SMALL[name], mask_token=mask_token), replace(TARGET().ends, scaled=True)
    if mask_token is not None and name not in ("dflash", "dflare", "jetspec"):
        with pytest.raises(UserError, match=r"head\.mask_token: engines leave out the scale of this target's logits"):
            drafter.attach(ends)
    else:
        drafter.attach(ends)


def test_settings_are_handed_on_to_the_base() -> None:
    """What a constructor does not name itself is its base's: taken, recorded with the base's default, and refused where it has no place."""
    shape = TARGET().shape
    drafter = hub.build("domino", shape, layers=1, rank=4, anchors=3)
    assert (len(drafter.layers), drafter.anchors, drafter.block) == (1, 3, 7)  # type: ignore[arg-type]
    assert drafter.config["heads"] is None and drafter.config["block"] == 7 and drafter.config["anchors"] == 3
    assert "norm_output" in hub.build("eagle", shape).config and "norm_output" not in hub.build("peagle", shape).config
    for name, wrong in (("peagle", "norm_output"), ("dspark", "gru"), ("domino", "more")):
        with pytest.raises(UserError, match=f"head '{name}' has no setting '{wrong}'"):
            hub.build(name, shape, **{wrong: 1})
    with pytest.raises(UserError, match=r"head\.kv_heads must be a whole number of at least 1 or null, found 'two'"):
        hub.build("dspark", shape, kv_heads="two")
    with pytest.raises(UserError, match=r"head\.markov must be one of vanilla, gated, rnn, found 'lstm'"):
        hub.build("dspark", shape, markov="lstm")
    for name, key in (("dflash", "block"), ("peagle", "depth")):  # no tensor confirms them when the folder is read
        with pytest.raises(UserError, match=rf"^head\.{key} must be at most 256, found 257"):
            hub.build(name, shape, **{key: 257})
