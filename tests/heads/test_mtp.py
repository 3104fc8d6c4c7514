"""Multi-token prediction: against the formula, with one module and several; and what is taken over from the target's own files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from headstart.heads import hub
from headstart.heads.base import Drafter
from headstart.heads.errors import UserError
from headstart.heads.unroll import unroll
from headstart.inference.decoding.decode import generate
from headstart.inference.decoding.decoder import generate_batch
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.propose import Drafting
from headstart.inference.decoding.target import Target
from tests.drafters import learn_by_heart, make, random_tokens, roots_of
from tests.heads import test_parity as parity
from tests.heads.reference import Reference
from tests.tiny_targets import tiny_target


class Modules(Reference):
    """Written from the paper: every guess by itself, its own root and ancestors read anew."""

    def __init__(self, drafter: Drafter, target: Target) -> None:
        self.h, self.g, self.d, self.eps = 2, 1, 16, target.config.rms_norm_eps
        self.frequency = drafter.shape.rope["rope_theta"] ** (-torch.arange(0, self.d, 2).float() / self.d)
        self.w = {k.replace("stages.", "layers.").replace(".layer.", "."): v for k, v in drafter.state_dict().items()}
        self.embed, self.head = target.model.model.embed_tokens.weight, target.model.lm_head.weight
        self.count = len({name.split(".")[1] for name in self.w})

    def guess(self, tokens: Tensor, states: Tensor, t: int, depth: int) -> Tensor:
        """Logits of depth ``depth`` from root t."""
        line = states[: t + 1]  # the state beside each token: of the target, then the drafter's own
        for d in range(1, depth + 1):
            i = min(d, self.count) - 1
            read = tokens[1 : t + 1 + d]
            e, s = self.norm(self.embed[read], f"layers.{i}.enorm"), self.norm(line, f"layers.{i}.hnorm")
            x = self.linear(torch.cat([e, s], -1), f"layers.{i}.eh_proj")
            n = len(read)
            x = self.layer(i, self.norm(x, f"layers.{i}.input_layernorm"), x, torch.arange(n), torch.ones(n, n, dtype=torch.bool).tril())
            out = self.norm(x[-1:], f"layers.{i}.norm")
            line = torch.cat([line, out])
        return (out @ self.head.T)[0]


@torch.no_grad()
@pytest.mark.parametrize("modules", [1, 3])
def test_every_guess_is_the_formulas(modules: int) -> None:
    target, tokens = tiny_target(), torch.tensor(random_tokens(14, 1))
    drafter = make("mtp", target, modules=modules)
    assert drafter.max_depth == (3 if modules == 3 else None)
    states = target.model(tokens[None], output_hidden_states=True).hidden_states[-1][0]
    reference = Modules(drafter, target)
    for depth, draft in enumerate(unroll(drafter, roots_of(target, drafter, tokens[None]), None, 3), start=1):
        for t in range(14 - depth):
            found = drafter.unembedding(depth).logits(draft.hidden_BNH)[0, t]
            torch.testing.assert_close(found, reference.guess(tokens, states, t, depth), rtol=0, atol=1e-4)


@pytest.mark.parametrize("memory_kind", ["slots", "growing"])
def test_several_modules_decode_as_they_train(memory_kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "make", lambda head, target: make(head, target, modules=4))
    parity.test_unroll_equals_tree_decoding("mtp", memory_kind)
    parity.test_packed_documents_equal_the_same_documents_alone("mtp", True)
    parity.test_a_draft_depends_on_the_past_and_its_chain_only("mtp")


def test_several_modules_decode_many_sequences_at_once() -> None:
    """The static path accepts in every round what the dynamic path accepts, so it drafts the same."""
    target, policy = tiny_target(), TreePolicy(depth=3, nodes=8, branch=2)
    prompts = [random_tokens(n, seed=n) for n in (11, 4, 9)]
    said = [generate(target, None, prompt, new_tokens=24).tokens for prompt in prompts]
    texts = [(prompt + tokens)[:24] for prompt, tokens in zip(prompts, said, strict=True)]
    drafter = learn_by_heart(make("mtp", target, modules=3), target, texts, depth=3, steps=15)
    together = generate_batch(target, drafter, prompts, new_tokens=24, policy=policy, sequences=2)
    for prompt, tokens, row in zip(prompts, said, together, strict=True):
        alone = generate(target, Drafting(drafter), prompt, new_tokens=24, policy=policy)
        assert row.tokens == alone.tokens == tokens
        assert row.emitted[:4] == alone.emitted[:4] and max(row.emitted) > 2


def test_too_deep_or_too_many_is_refused() -> None:
    target = tiny_target()
    drafter = make("mtp", target, modules=2)
    with pytest.raises(UserError, match=r"has 2 modules, depth 3 was asked: lower it or train with head\.modules=3"):
        unroll(drafter, roots_of(target, drafter, torch.tensor([random_tokens(8, 1)])), None, 3)
    with pytest.raises(UserError, match=r"head\.modules=65 must be within 1\.\.64"):
        make("mtp", target, modules=65)


@torch.no_grad()
def test_a_cut_vocabulary_is_rows_of_the_targets_head(tmp_path: Path) -> None:
    target, ids = tiny_target(), [1, 5, 6, 50, 95]
    whole, cut = make("mtp", target), make("mtp", target, draft_vocab=ids)
    assert {k: v.shape for k, v in whole.state_dict().items()} == {k: v.shape for k, v in cut.state_dict().items()}
    hub.save(cut, tmp_path / "s", target.card, torch.float32)
    loaded = hub.load(tmp_path / "s", target.shape)
    loaded.attach(target.ends)
    for drafter in (cut, loaded.eval()):
        head = drafter.unembedding(1)
        assert head.ids_V is not None and head.ids_V.tolist() == ids and torch.equal(head.weight_VH, target.ends.head_VD[ids])
        assert head.weight_VH is drafter.unembedding(2).weight_VH  # cut once, not at every call
        roots = roots_of(target, drafter, torch.tensor([random_tokens(8, 1)]))
        whole.load_state_dict(drafter.state_dict())
        (draft,), (other,) = unroll(drafter, roots, None, 1), unroll(whole, roots, None, 1)
        torch.testing.assert_close(head.logits(draft.hidden_BNH), whole.unembedding(1).logits(other.hidden_BNH)[..., ids])
    with pytest.raises(UserError, match="strictly ascending"):
        make("mtp", target, draft_vocab=[5, 1])
    with pytest.raises(RuntimeError, match="attach"):
        hub.build("mtp", target.shape, draft_vocab=ids).unembedding(1)


# A target's own weights ------------------------------------------------------------------------------------------------


def stored(layout: str, target: Target, modules: int, **changes: Tensor | None) -> dict[str, Tensor]:
    """Random MTP weights of the sizes of a tiny target, named as in its file; ``changes`` by our names of the first (None: absent)."""
    generator = torch.Generator().manual_seed(1)
    sizes = {k: v.shape for k, v in hub.build("mtp", target.shape).state_dict().items()}
    tensors = {}
    for i in range(modules):
        for name, size in sizes.items():
            part, drawn = name.removeprefix("stages.0."), torch.randn(size, generator=generator)
            value = changes.get(part, drawn) if i == 0 else drawn
            if value is not None:
                tensors[place(layout, part, i)] = value
    extra = {k: v for k, v in changes.items() if f"stages.0.{k}" not in sizes and v is not None}
    return tensors | {place(layout, part, 0): v for part, v in extra.items()}


def place(layout: str, part: str, i: int) -> str:
    if layout == "behind":
        return f"model.layers.{6 + i}." + ("shared_head.norm.weight" if part == "norm.weight" else part.removeprefix("layer."))
    inside = {"enorm.weight": "pre_fc_norm_embedding.weight", "hnorm.weight": "pre_fc_norm_hidden.weight", "eh_proj.weight": "fc.weight"}
    return "mtp." + (f"layers.{i}.{part.removeprefix('layer.')}" if part.startswith("layer.") else inside.get(part, part))


def folder_with(tmp_path: Path, tensors: dict[str, Tensor], architecture: str = "llama", **changes: Any) -> Target:
    """A tiny target, read from a folder whose second file holds ``tensors``."""
    from transformers import AutoModelForCausalLM

    tiny_target(architecture, **changes).model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "model-1.safetensors")
    save_file(tensors, tmp_path / "model-2.safetensors", metadata={"format": "pt"})
    with_file = {name: f"model-{i}.safetensors" for i, names in ((1, first_names(tmp_path)), (2, tensors)) for name in names}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": with_file}))
    return Target(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32))


def first_names(folder: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(folder / "model-1.safetensors", framework="pt") as file:
        return list(file.keys())


@pytest.mark.parametrize("modules", [1, 2])
@pytest.mark.parametrize(("layout", "architecture"), [("behind", "llama"), ("inside", "llama"), ("inside", "gemma3_text")])
def test_it_starts_as_the_targets_own(layout: str, architecture: str, modules: int, tmp_path: Path) -> None:
    tensors = stored(layout, tiny_target(architecture), 2)
    if layout == "behind":  # copies of the target's ends, which are its own
        tensors |= {
            "model.layers.6.embed_tokens.weight": torch.zeros(96, 32),
            "model.layers.6.shared_head.head.weight": torch.zeros(96, 32),
        }
    target = folder_with(tmp_path, tensors, architecture)
    drafter = hub.build("mtp", target.shape, modules=modules, from_target=True)
    drafter.attach(target.ends)
    drafter.start_from(target.ends)
    less = 1.0 if architecture == "gemma3_text" else 0.0  # its family stores norms less one
    for name, value in drafter.state_dict().items():
        _, i, part = name.split(".", 2)
        expected = tensors[place(layout, part, int(i))]
        torch.testing.assert_close(value, expected + less if value.ndim == 1 else expected, rtol=0, atol=1e-6, msg=name)
    hub.save(drafter, tmp_path / "s", target.card, torch.float32)
    for name in ("model-1.safetensors", "model-2.safetensors"):
        (tmp_path / name).unlink()
    hub.load(tmp_path / "s", target.shape)  # a saved drafter stands alone


def test_weights_that_cannot_be_taken_are_refused(tmp_path: Path) -> None:
    base = tiny_target()
    one, zeros = torch.ones(1), torch.zeros
    cases: list[tuple[dict[str, Tensor], dict[str, Any], str]] = [
        ({}, {}, "has no MTP weights in a layout known here"),
        ({"model.mtp_layers.0.input_proj.weight": one}, {}, "has no MTP weights in a layout known here"),
        (stored("behind", base, 1), {"modules": 2}, r"head\.modules=2, but .* has 1 of its own: lower it"),
        (stored("behind", base, 1, **{"layer.mlp.experts.0.up_proj.weight": one}), {}, "experts.0.up_proj.weight: a mixture of experts"),
        (stored("behind", base, 1, **{"layer.self_attn.kv_a_proj_with_mqa.weight": one}), {}, r"latent attention \(MLA\)"),
        (stored("inside", base, 1, **{"layer.self_attn.q_norm.weight": one}), {}, "norms on queries and keys"),
        (stored("inside", base, 1, **{"layer.self_attn.q_proj.bias": one}), {}, "biases"),
        (stored("inside", base, 1, **{"layer.mlp.up_proj.weight": None}), {}, r"lacks layer\.mlp\.up_proj\.weight"),
        (stored("inside", base, 1, **{"hnorm.weight": None}), {}, r"lacks mtp\.pre_fc_norm_hidden\.weight"),
        (stored("inside", base, 1, **{"layer.self_attn.q_proj.weight": zeros(64, 32)}), {}, r"is \[64, 32\], ours \[32, 32\]"),
        (stored("inside", base, 1), {"intermediate_size": 40}, r"ours \[40, 32\]: set head\.heads"),
    ]  # fmt: skip
    for i, (tensors, arguments, message) in enumerate(cases):
        target = folder_with(tmp_path / str(i), {"unrelated": zeros(1)} | tensors)
        drafter = hub.build("mtp", target.shape, from_target=True, **arguments)
        drafter.attach(target.ends)
        with pytest.raises(UserError, match=message) as e:
            drafter.start_from(target.ends)
        assert "\n" not in str(e.value) and "head.from_target=false trains a fresh module" in str(e.value)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    target = folder_with(tmp_path, stored("inside", tiny_target(), 1))
    drafter = hub.build("mtp", target.shape, from_target=True)
    index, second = tmp_path / "model.safetensors.index.json", tmp_path / "model-2.safetensors"
    whole, text = second.read_bytes(), index.read_text()

    def refused(ends: Any, message: str) -> None:
        drafter.attach(ends)
        with pytest.raises(UserError, match=message) as e:
            drafter.start_from(ends)
        assert "\n" not in str(e.value)

    second.write_bytes(whole[:-1])
    refused(target.ends, r"model-2\.safetensors is damaged or truncated")
    second.unlink()
    refused(target.ends, r"model-2\.safetensors is damaged or truncated")
    index.write_text(text.replace("model-2", "../model-2"))
    refused(target.ends, "weight_map must name safetensors files in the same folder")
    index.unlink()
    refused(target.ends, "there are no safetensors files of")
    target.model.config._name_or_path = str(tmp_path / "gone")
    refused(target.ends, "there are no safetensors files of")
    refused(tiny_target().ends, "which was not read from a folder")
    refused(replace(target.ends, whole=None), "only its embedding and head are at hand")
