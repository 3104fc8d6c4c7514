"""The target: teacher-forced states, trees in one pass, the cache cut to what was kept, and folders that are not whole."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headstart.heads.errors import UserError
from headstart.inference.decoding.context import Context
from headstart.inference.decoding.placement import check_folder
from headstart.inference.decoding.probe import check_driven
from headstart.inference.decoding.stored import StoredTarget
from headstart.inference.decoding.target import Target
from headstart.inference.decoding.tree import Tree
from tests.drafters import make, random_tokens
from tests.tiny_targets import ARCHITECTURES, OTHERS, tiny_target

# one more of each kind of window: for every layer alike without layer_types, and with capped logits; more indexers, and more layers
CHOOSING = OTHERS["glm_moe_dsa"] | dict(indexer_types=None)
MORE: dict[str, dict[str, Any]] = {
    "mistral": dict(sliding_window=16),
    "gemma2": dict(sliding_window=16, query_pre_attn_scalar=16),
    "deepseek_v32": CHOOSING | dict(n_group=1, topk_group=1),
    "axk2": CHOOSING | dict(gated_norm_rank=4),
    "longcat_flash": OTHERS["deepseek_v3"]
    | dict(  # two layers of attention in each of its six
        num_hidden_layers=12,
        ffn_hidden_size=48,
        expert_ffn_hidden_size=16,
        moe_topk=2,
        zero_expert_num=2,
    ),
}
ALL = [*ARCHITECTURES, *OTHERS, *MORE]
EXACT = dict(rtol=0, atol=5e-5)
# recurrent layers sum in fp32 over the whole text, in chunks whose borders depend on where a pass begins (in float64: test_recurrent.py)
LONG_SUMS = dict(rtol=0, atol=3e-3)


def exact(architecture: str) -> dict[str, float]:
    return LONG_SUMS if target_of(architecture).reader.mixers else EXACT


@functools.cache
def target_of(architecture: str) -> Target:
    return tiny_target(architecture, **MORE.get(architecture, {}))


@torch.no_grad()
def alone(target: Target, tokens: list[int]) -> tuple[Tensor, ...]:
    """HF's own hidden states of one document, [T, D] each: after 0..N-1 layers, then after the final norm."""
    return tuple(s[0] for s in target.body(input_ids=torch.tensor([tokens]), output_hidden_states=True).hidden_states)


@pytest.mark.parametrize("architecture", ALL)
def test_tapped_states_are_the_hidden_states(architecture: str) -> None:
    target = target_of(architecture)
    tokens = [random_tokens(40, 1), random_tokens(40, 2)]
    states, final = target.read(torch.tensor(tokens), torch.arange(40).expand(2, -1), range(7))
    assert sorted(states) == list(range(7))
    for b in (0, 1):
        for k, expected in enumerate(alone(target, tokens[b])):
            torch.testing.assert_close(states[k][b], expected, **exact(architecture))
        logits = target.model(torch.tensor([tokens[b]])).logits[0]
        torch.testing.assert_close(target.logits(final[b]), logits, rtol=0, atol=2 * exact(architecture)["atol"])
    assert torch.equal(states[6], final)
    few, again = target.read(torch.tensor(tokens), torch.arange(40).expand(2, -1), (4,))
    assert list(few) == [4] and torch.equal(few[4], states[4]) and torch.equal(again, final)


@pytest.mark.parametrize("architecture", ALL)
def test_packed_documents_are_read_as_if_alone(architecture: str) -> None:
    target = target_of(architecture)
    lengths = [[5, 1, 24, 10], [22, 18]]
    documents = [[random_tokens(n, seed=7 * b + i) for i, n in enumerate(row)] for b, row in enumerate(lengths)]
    tokens_BT = torch.tensor([[x for text in row for x in text] for row in documents])
    positions_BT = torch.tensor([[i for n in row for i in range(n)] for row in lengths])
    states, final = target.read(tokens_BT, positions_BT, (0, 2, 6))
    for b, row in enumerate(documents):
        start = 0
        for text in row:
            expected, rows = alone(target, text), slice(start, start + len(text))
            for k in (0, 2, 6):
                torch.testing.assert_close(states[k][b, rows], expected[k], **exact(architecture))
            torch.testing.assert_close(final[b, rows], expected[-1], **exact(architecture))
            start += len(text)


def random_tree(dice: random.Random, nodes: int) -> Tree:
    return Tree.of([dice.randrange(96) for _ in range(nodes)], [dice.randint(-1, i - 1) for i in range(nodes)])


def path_of(tree: Tree, node: int) -> list[int]:
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = int(tree.parents_BN[0, node])
    return path


@pytest.mark.parametrize("prefix", [3, 21])
@pytest.mark.parametrize("architecture", ALL)
def test_a_tree_in_one_pass_equals_its_paths_read_plainly(architecture: str, prefix: int) -> None:
    """Trees, one after another, of which some path is kept: every node sees what it would see alone, past the window too."""
    target, dice = target_of(architecture), random.Random(prefix)
    said = random_tokens(prefix, 3)
    context = Context(target, (0, 3, 6))
    context.read(torch.tensor(said))
    context.keep(prefix)
    for _ in range(3):
        root, tree = dice.randrange(96), random_tree(dice, 9)
        states, final = context.read(torch.tensor([root, *tree.tokens_BN[0]]), tree)
        for node in range(-1, len(tree)):
            expected = alone(target, [*said, root, *tree.tokens_BN[0, path_of(tree, node)].tolist()])
            torch.testing.assert_close(final[0, node + 1], expected[-1][-1], **exact(architecture))
            for k in (0, 3, 6):
                torch.testing.assert_close(states[k][0, node + 1], expected[k][-1], **exact(architecture))
        path = path_of(tree, dice.randrange(len(tree)))
        context.keep([0, *(node + 1 for node in path)])
        said += [root, *tree.tokens_BN[0, path].tolist()]
        assert context.length == len(said)
        assert set(context.memory.used.values()) == {len(said)}


@pytest.mark.parametrize("rows", [[0], [0, 1, 2, 3, 4], [0, 4], [1, 3], [4], [0, 2, 3], []])
def test_keep_gathers_exactly_these_rows(rows: list[int]) -> None:
    target = target_of("llama")
    context = Context(target, ())
    context.read(torch.tensor(random_tokens(6, 1)))
    context.keep(4)  # the first four
    context.read(torch.tensor(random_tokens(5, 2)))
    before = {layer: (k.clone(), v.clone()) for layer, [(k, v)] in context.memory.layers.items()}
    context.keep(rows)
    assert context.length == 4 + len(rows)
    wanted = [0, 1, 2, 3, *(4 + r for r in rows)]
    for layer, (k, v) in before.items():
        keys, values = (x[:, :, : context.memory.rows(layer)] for x in context.memory.layers[layer][0])
        assert torch.equal(keys, k[:, :, wanted]) and torch.equal(values, v[:, :, wanted])


@pytest.mark.parametrize("architecture", ["gemma3n_text", "hy_v4"])
def test_several_states_for_each_token_are_not_tapped(architecture: str) -> None:
    """As AltUp and hyper-connections have them. The final state is one, which some drafters read alone."""
    sizes = dict(num_kv_shared_layers=2, laurel_rank=8, hidden_size_per_layer_input=8, vocab_size_per_layer_input=96)
    sizes |= dict(
        intermediate_size=[48] * 6, activation_sparsity_pattern=[0.0] * 6, layer_types=["sliding_attention", "full_attention"] * 3
    )
    target = tiny_target(architecture, **(sizes if architecture == "gemma3n_text" else CHOOSING | dict(hc_mult=2)))
    tokens = torch.tensor([random_tokens(12, 1)])
    with pytest.raises(UserError, match=r"hand on several states for each token, which no drafter reads: take head\.taps=\[6\]"):
        target.read(tokens, torch.arange(12)[None], (2, 6))
    check_driven(target)
    states, final = target.read(tokens, torch.arange(12)[None], (6,))
    assert torch.equal(states[6], final)
    torch.testing.assert_close(final, target.body(tokens).last_hidden_state, **EXACT)


def test_no_drafter_is_made_of_layers_with_several_attentions() -> None:
    for head, how in (("exit_head", {}), ("draft_lm", dict(config=None, layers=2))):
        with pytest.raises(UserError, match="its layers have several layers of attention each, no drafter can be made of them"):
            make(head, target_of("longcat_flash"), **how)


def test_a_layer_that_is_not_there_cannot_be_tapped() -> None:
    for tap in (7, -1):
        with pytest.raises(UserError, match=f"llama has 6 layers, layer {tap} was tapped"):
            target_of("llama").read(torch.tensor([[1, 2]]), torch.tensor([[0, 1]]), (tap,))
    assert not any(layer._forward_pre_hooks for layer in target_of("llama").layers)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_target_is_frozen_and_its_shape_is_its_configs(architecture: str) -> None:
    target = target_of(architecture)
    assert not target.model.training and not any(p.requires_grad for p in target.model.parameters())
    s = target.shape
    assert (s.hidden_size, s.layers, s.heads, s.kv_heads, s.head_dim, s.vocab_size, s.max_positions) == (32, 6, 2, 1, 16, 96, 256)
    assert s.model_type == architecture and "rope_theta" in s.rope and s.dtype == "float32"
    json.dumps(target.card)


def test_an_output_head_with_a_bias_is_refused() -> None:
    with pytest.raises(UserError, match="an output head with a bias is not supported"):
        tiny_target("phi", partial_rotary_factor=0.5)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole target folder."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    target_of("llama").model.save_pretrained(tmp_path / "target")
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(96)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(tmp_path / "target")
    return tmp_path / "target"


def test_a_folder_loads_as_it_was_saved(folder: Path) -> None:
    target, tokens = Target.load(str(folder), device="cpu"), torch.tensor([random_tokens(9, 1)])
    for a, b in zip(
        target.read(tokens, torch.arange(9)[None], (3,)), target_of("llama").read(tokens, torch.arange(9)[None], (3,)), strict=True
    ):
        assert torch.equal(a[3], b[3]) if isinstance(a, dict) and isinstance(b, dict) else torch.equal(a, b)  # type: ignore[arg-type]
    assert target.name == str(folder) and len(target.tokenizer_sha) == 64
    assert target.card == target_of("llama").card | {"tokenizer": target.tokenizer_sha}
    (other := json.loads((folder / "tokenizer.json").read_text()))["model"]["vocab"]["w95"] = 94
    other["model"]["vocab"]["w94"] = 95
    (folder / "tokenizer.json").write_text(json.dumps(other))
    assert Target.load(str(folder), device="cpu").tokenizer_sha != target.tokenizer_sha  # same size, other words
    assert Target.load(str(folder), dtype="bfloat16", device="cpu").dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "has no config.json: expected config.json"),
        (lambda f: (f / "tokenizer.json").unlink(), "has no tokenizer: expected tokenizer.json or"),
        (lambda f: (f / "model.safetensors").unlink(), "has no model.safetensors or model.safetensors.index.json .nothing else is loaded."),
        (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "pytorch_model.bin is a pickled file, which is never loaded"),
        (lambda f: cut(f / "model.safetensors", 1000), "weights are damaged or truncated"),
        (lambda f: cut(f / "model.safetensors", -1), "weights are damaged or truncated"),
        (lambda f: (f / "model.safetensors").write_bytes(b""), "weights are damaged or truncated"),
        (lambda f: cut(f / "config.json", 30), "cannot be loaded"),
        (lambda f: (f / "config.json").write_text("{}"), "cannot be loaded"),
        (lambda f: cut(f / "tokenizer.json", 40), "cannot be loaded"),
    ],
)
def test_a_damaged_folder_is_one_clear_line(folder: Path, damage: Callable[[Path], Any], message: str) -> None:
    damage(folder)
    with pytest.raises(UserError, match=message) as e:
        Target.load(str(folder), device="cpu")
    assert str(folder) in str(e.value) and "\n" not in str(e.value)


def test_a_kind_without_a_language_model_is_refused_before_its_weights_are_read(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "clip"}))
    for opened in (Target.load, StoredTarget):
        with pytest.raises(UserError, match="transformers has no language model for models of kind clip: take") as e:
            opened(str(folder), device="cpu")
        assert "\n" not in str(e.value)


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def test_missing_weights_inside_a_whole_file_are_refused(folder: Path) -> None:
    """transformers would start them at random and only warn."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"model\.layers\.2\.mlp\.up_proj\.weight"):
        Target.load(str(folder), device="cpu")


@pytest.mark.parametrize(("native", "dtype", "warned"), [(False, "bfloat16", True), (False, "float32", False), (True, "bfloat16", False)])
def test_bf16_on_a_cpu_that_does_not_multiply_it(
    native: bool, dtype: str, warned: bool, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: native)
    assert Target.load(str(folder), device="cpu", dtype=dtype).dtype is getattr(torch, dtype)
    assert any("target.dtype=float32" in message for message in caplog.messages) is warned


def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    for path in (str(tmp_path / "nowhere"), "./nowhere", "nowhere", "a/b/c"):
        with pytest.raises(UserError, match=f"target folder {path} does not exist"):
            check_folder(path)
    check_folder("somebody/something")  # a hub id
