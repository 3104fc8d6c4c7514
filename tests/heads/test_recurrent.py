"""Layers with a state: packed documents, trees and batches are read as each text alone, and kept rows are not read again.

(Lossless decoding and training with them: test_lossless.py, test_other_targets.py, test_target.py.)
"""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch

from headstart.heads import kinds, recurrent
from headstart.heads.errors import UserError
from headstart.heads.memory import Memory
from headstart.heads.recurrent import Call, paths_of
from headstart.inference.decoding import engine
from headstart.inference.decoding.context import Context
from headstart.inference.decoding.decode import generate
from headstart.inference.decoding.decoder import generate_batch
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.probe import check_driven
from headstart.inference.decoding.sampling import SamplingParams
from headstart.inference.decoding.target import Target
from headstart.inference.decoding.tree import Tree
from headstart.inference.proposers.early_exit import EarlyExit
from headstart.inference.proposers.swift import Swift
from tests.drafters import make, random_tokens
from tests.tiny_targets import DELTA, MAMBA, OTHERS, tiny_target

EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
MORE: dict[str, dict[str, Any]] = {
    "qwen3_next": DELTA | EXPERTS | dict(shared_expert_intermediate_size=16),
    "qwen3_5_moe_text": DELTA | EXPERTS | dict(shared_expert_intermediate_size=16),
    "lfm2_moe": OTHERS["lfm2"] | EXPERTS | dict(num_dense_layers=1),
    "granitemoehybrid": MAMBA | dict(
        layer_types=["linear_attention", "linear_attention", "full_attention"] * 2, shared_intermediate_size=32, num_local_experts=2,
        num_experts_per_tok=1,
    ),
    "bamba": MAMBA | dict(attn_layer_indices=[1, 4]),
    "kimi_linear": EXPERTS | dict(
        linear_num_heads=2, linear_head_dim=8, layer_types=["linear_attention", "linear_attention", "full_attention"] * 2,
        num_key_value_heads=2, num_experts_per_token=2, kv_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16,
    ),
    "olmo_hybrid": DELTA | dict(layer_types=["linear_attention", "linear_attention", "full_attention"] * 2),
}  # fmt: skip
TARGET = functools.cache(tiny_target)
RECURRENT = ("qwen3_5_text", "lfm2", "nemotron_h", "falcon_h1")


@pytest.mark.parametrize("architecture", MORE)
def test_more_architectures_are_driven(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the probe of every loading, which reads a tree and packed documents. It would notice layers that ran on as they are."""
    target = tiny_target(architecture, **MORE[architecture])
    check_driven(target)
    assert target.reader.mixers and target.reader.follows
    one_text = torch.arange(11).expand(1, 11, 11) <= torch.arange(11)[:, None]
    monkeypatch.setattr(recurrent, "packed", lambda sees, positions: recurrent.planned(one_text, torch.arange(11)[None], Memory())[0])
    with pytest.raises(UserError, match="several documents in one row is read"):
        check_driven(target)


def test_what_cannot_continue_a_text_by_several_rows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """MiniMax has a cache of its own; transformers' Jamba forgets its state whenever it reads several rows. The probe finds it, too."""
    minimax = dict(layer_types=["linear_attention", "full_attention"] * 3, num_local_experts=2)
    jamba = dict(attn_layer_period=2, attn_layer_offset=1, num_experts=2, num_experts_per_tok=1, mamba_d_state=8)
    for kind, settings in (("minimax", minimax), ("jamba", jamba)):
        with pytest.raises(UserError, match=f"{kind}: models of kind {kind} cannot continue a text by several tokens at once"):
            tiny_target(kind, **settings)
    monkeypatch.setattr(kinds, "STUCK", ())
    with pytest.raises(UserError, match="minimax: its decoder cannot be driven from outside"):
        check_driven(tiny_target("minimax", **minimax))
    with pytest.raises(UserError, match=r"jamba: its attention cannot be driven from outside .a tree of guesses is read \d+% off"):
        check_driven(tiny_target("jamba", **jamba))


def test_a_drafter_made_of_such_layers_is_refused() -> None:
    target, refused = TARGET("lfm2"), "layers of kind conv keep a state, which guesses would change: draft with something else"
    with pytest.raises(UserError, match=f"the target: {refused}"):
        make("exit_head", target)
    for proposer in (EarlyExit, Swift):
        with pytest.raises(UserError, match=f"proposer (early_exit|swift): lfm2: {refused}"):
            proposer(target)


def path_of(tree: Tree, node: int) -> list[int]:
    return [] if node < 0 else [*path_of(tree, int(tree.parents_BN[0, node])), node]


def test_trees_and_packed_documents_in_float64() -> None:
    """LFM2, whose layers compute in any dtype: what is left is no rounding of long sums, so a row too many would be seen."""
    target, dice, said = Target(tiny_target("lfm2").model.double(), name="lfm2"), random.Random(0), random_tokens(5, 0)
    context = Context(target, ())

    def alone(tokens: list[int]) -> torch.Tensor:
        found: torch.Tensor = target.body(input_ids=torch.tensor([tokens])).last_hidden_state[0]
        return found

    context.read(torch.tensor(said))
    context.keep(len(said))
    with torch.no_grad():
        for kept in (None, [], [0], None, [0, 1], None, None):
            nodes = dice.randint(2, 9)
            tree = Tree.of([dice.randrange(96) for _ in range(nodes)], [dice.randint(-1, i - 1) for i in range(nodes)])
            root, tokens = dice.randrange(96), tree.tokens_BN[0].tolist()
            final = context.read(torch.tensor([root, *tokens]), tree)[1][0]
            for node in range(-1, nodes):
                expected = alone([*said, root, *(tokens[i] for i in path_of(tree, node))])[-1]
                torch.testing.assert_close(final[node + 1], expected, rtol=0, atol=1e-12)
            path = path_of(tree, dice.randrange(nodes)) if kept is None else kept if kept == path_of(tree, len(kept) - 1) else []
            context.keep([0, *(node + 1 for node in path)])
            said += [root, *(tokens[i] for i in path)]
        lengths = ([46], [1, 9, 4, 2, 30])  # of the documents in each row; the first of a row does not go on from the row before
        documents = [[random_tokens(n, seed=n) for n in row] for row in lengths]
        positions = torch.tensor([[i for n in row for i in range(n)] for row in lengths])
        final = target.read(torch.tensor([[x for text in row for x in text] for row in documents]), positions, ())[1]
        for found, row in zip(final, documents, strict=True):
            torch.testing.assert_close(found, torch.cat([alone(text) for text in row]), rtol=0, atol=1e-12)


def test_gradients_stay_in_their_document() -> None:
    """As in training an adapter that is part of the target."""
    model = tiny_target("lfm2").model.double().requires_grad_(True)
    target = Target(model, name="lfm2", frozen=False)
    documents = [random_tokens(n, seed=n) for n in (3, 11, 6)]

    def gradient(tokens: list[list[int]], positions: list[int]) -> torch.Tensor:
        model.zero_grad()
        for text in tokens:
            here = torch.tensor([positions or list(range(len(text)))])
            target.read_with_grad(torch.tensor([text]), here, ())[1].square().sum().backward()
        found: torch.Tensor = model.model.layers[0].conv.in_proj.weight.grad.clone()
        return found

    packed = gradient([[x for text in documents for x in text]], [i for text in documents for i in range(len(text))])
    torch.testing.assert_close(packed, gradient(documents, []), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("architecture", RECURRENT)
def test_batches_with_prompts_in_pieces_and_shared_beginnings(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences enter while others decode, prompts are read in pieces of 8 between rounds, and a common beginning is copied."""
    monkeypatch.setattr(engine, "CHUNK", 8)
    target, common = TARGET(architecture), random_tokens(70, 9)
    prompts = [random_tokens(n, seed=n) for n in (11, 1, 25)] + [[*common, *random_tokens(n, seed=n)] for n in (3, 5, 2)]
    drafter, policy = make("eagle", target), TreePolicy(depth=3, nodes=7, branch=3, least=0.0)
    for sampling in (SamplingParams(), SamplingParams(temperature=1.0, seed=5)):
        expected = [generate(target, None, prompt, new_tokens=9, sampling=sampling).tokens for prompt in prompts]
        found = generate_batch(target, None, prompts, new_tokens=9, sequences=3, sampling=sampling)
        assert [row.tokens for row in found] == expected
    found = generate_batch(target, drafter, prompts, new_tokens=9, sequences=3, policy=policy)
    assert [row.tokens for row in found] == [generate(target, None, prompt, new_tokens=9).tokens for prompt in prompts]


@pytest.mark.parametrize("architecture", ["qwen3_5_text", "nemotron_h"])
def test_a_long_prompt_waits_while_a_short_text_decodes(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rounds of the short one see fewer rows than the long one has. They must not touch what was saved of it."""
    monkeypatch.setattr(engine, "CHUNK", 66)
    target, prompts = TARGET(architecture), [random_tokens(140, 1), random_tokens(20, 2)]
    made = engine.Engine(target, None, sequences=2, max_length=180)
    rows = [made.add_request(prompt, new_tokens=20, stop_ids=()) for prompt in prompts]
    while made.active:
        made.step()
    for row, prompt in zip(rows, prompts, strict=True):
        assert row.tokens == generate(target, None, prompt, new_tokens=20, stop_ids=()).tokens


def test_the_last_piece_of_a_prompt_may_end_where_the_memory_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is padded beyond the end of the buffers, where several rows of padding share one place."""
    monkeypatch.setattr(engine, "CHUNK", 66)
    target, prompt = TARGET("lfm2"), random_tokens(99, 1)
    found = engine.Engine(target, None, sequences=1, max_length=109).run([prompt], new_tokens=10, sampling=[SamplingParams()], stop_ids=())
    assert [row.tokens for row in found] == [generate(target, None, prompt, new_tokens=10, stop_ids=()).tokens]


def test_kept_rows_are_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round reads the rows that were kept since the last root row, its own root row, and its nodes."""
    target, rows = TARGET("lfm2"), list[int]()
    assert target.reader.follows  # found out by reading, before anything is counted
    planned = recurrent.planned

    def counted(*args: Any) -> tuple[list[Call], Any]:
        calls, states = planned(*args)
        rows.append(sum(call.reads_CL.numel() for call in calls))
        return calls, states

    monkeypatch.setattr(recurrent, "planned", counted)
    context = Context(target, ())
    context.read(torch.tensor(random_tokens(40, 1)))
    context.keep(40)
    chain = Tree.of([5, 6, 7], [-1, 0, 1])
    for kept in (1, 4, 2, 4):
        context.read(torch.tensor([3, 5, 6, 7]), chain)
        context.keep(kept)
    context.read(torch.tensor([3, 5, 6, 7]), Tree.of([5, 6, 7], [-1, -1, 1]))
    context.keep([0, 2, 3])  # they move in memory; the state after the root row stays
    context.read(torch.tensor([3]))
    assert rows == [40, 1 + 3, 0 + 1 + 3, 3 + 1 + 3, 1 + 1 + 3, 3 + 1 + 2 * 2, 2 + 1]
    rows.clear()
    generate(target, None, random_tokens(40, 1), new_tokens=4)
    assert rows == [40, 1, 1, 1]  # plain decoding: each row once


@pytest.mark.parametrize(("architecture", "own"), [("qwen3_5_text", None), ("nemotron_h", 8)])
def test_short_texts_are_one_small_chunk(architecture: str, own: int | None) -> None:
    """transformers pads every text to whole chunks, which on a CPU would cost more than the text. (The same tokens: test_lossless.py.)"""
    target, sizes = tiny_target(architecture), list[int | None]()
    layer = target.reader.mixers[0].module
    assert target.reader.follows  # found out by reading, before anything is noted
    forward = layer.forward

    def noting(x: torch.Tensor, *, chunk_size: int | None = None, **more: Any) -> torch.Tensor:
        sizes.append(chunk_size or getattr(layer, "chunk_size", None))
        found: torch.Tensor = forward(x, **more)
        return found

    layer.forward = noting
    context = Context(target, ())
    context.read(torch.tensor(random_tokens(70, 1)))
    context.keep(70)
    context.read(torch.tensor(random_tokens(4, 2)), Tree.of([5, 6, 7], [-1, 0, 1]))
    assert sizes == [own, 1, 4] and getattr(layer, "chunk_size", None) == own


def test_layers_on_several_devices_keep_their_hooks() -> None:
    """accelerate's wrapper, which moves a layer's inputs, is called inside and stays afterwards; also after an error."""
    from accelerate.hooks import ModelHook, add_hook_to_module

    class Counts(ModelHook):
        calls = 0

        def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return args, kwargs

    target, hook = tiny_target("lfm2"), Counts()
    expected = generate(target, None, random_tokens(9, 1), new_tokens=5).tokens
    layer = target.reader.mixers[0].module
    add_hook_to_module(layer, hook)
    wrapper = layer.forward
    assert generate(target, None, random_tokens(9, 1), new_tokens=5).tokens == expected
    assert hook.calls == 5 and layer.forward is wrapper
    with pytest.raises(IndexError):
        target.read(torch.tensor([[96, 1]]), torch.tensor([[0, 0]]), ())
    assert layer.forward is wrapper


def test_the_paths_of_a_tree_in_any_order_of_memory() -> None:
    dice = random.Random(3)
    for _ in range(50):
        kept, nodes = dice.randint(0, 6), dice.randint(0, 8)
        parents = [dice.randint(-1, i - 1) for i in range(nodes)]
        above: list[list[int]] = [[0]]  # of the root row and each node: the rows of the pass on its way
        for i, parent in enumerate(parents):
            above.append([*above[parent + 1], i + 1])
        places = dice.sample(range(20), kept + 1 + nodes)  # in memory, which has other rows too
        keys, seen = torch.full((20,), 3), torch.zeros(1 + nodes, 20, dtype=torch.bool)
        keys[places] = torch.tensor([*range(kept), *(kept + len(way) - 1 for way in above)])
        for n, way in enumerate(above):
            seen[n, places[:kept] + [places[kept + i] for i in way]] = True
        leaves = [n for n in range(1 + nodes) if not any(n in way[:-1] for way in above)]
        found = paths_of(seen, keys)
        assert found[:2] == (places[:kept], places[kept:])
        assert found[2] == [above[n] for n in leaves]
