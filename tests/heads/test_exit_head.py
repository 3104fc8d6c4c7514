"""A trained early exit: it is the target's first layers, shared and frozen, and what little it has of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from headstart.heads import hub
from headstart.heads.base import Drafter
from headstart.heads.errors import UserError
from headstart.heads.unroll import unroll
from headstart.inference.decoding.target import Target
from tests.drafters import learn_by_heart, make, random_tokens, roots_of
from tests.heads import test_parity as parity
from tests.heads.reference import Reference
from tests.tiny_targets import tiny_target

ARCHITECTURES = ["llama", "qwen3", "gemma3_text", "mixtral", "gpt_oss"]
TOKENS = random_tokens(40, 1)  # longer than a window of 16


def fresh(target: Target, **arguments: Any) -> Drafter:
    drafter = hub.build("exit_head", target.shape, **arguments)
    drafter.attach(target.ends)
    drafter.start_from(target.ends)
    return drafter.eval()


def stream(target: Target, layers: int) -> torch.Tensor:
    """The residual stream behind so many layers, as transformers reports it."""
    return target.model(torch.tensor([TOKENS]), output_hidden_states=True).hidden_states[layers]


@torch.no_grad()
@pytest.mark.parametrize("layers", [1, 2, 5, None])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_untrained_it_is_the_plain_early_exit(architecture: str, layers: int | None) -> None:
    target = tiny_target(architecture)
    drafter = fresh(target, layers=layers)
    states = stream(target, layers or 2)  # a third of six
    expected = target.model.get_output_embeddings()(target.model.get_decoder().norm(states))[0, 1:]
    (draft,) = unroll(drafter, roots_of(target, drafter, torch.tensor([TOKENS])), None, 1)
    found = drafter.unembedding(1).logits(draft.hidden_BNH)[0, :-1]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


class Exit(Reference):
    def __init__(self, drafter: Drafter, target: Target) -> None:
        self.h, self.g, self.d, self.eps = 2, 1, 16, target.config.rms_norm_eps
        self.frequency = drafter.shape.rope["rope_theta"] ** (-torch.arange(0, self.d, 2).float() / self.d)
        self.w = {k.replace("layer.", "layers.0.", 1): v for k, v in drafter.state_dict().items()}


@torch.no_grad()
@pytest.mark.parametrize("architecture", ["llama", "mixtral"])
def test_the_small_layer_reads_what_the_shared_ones_say(architecture: str) -> None:
    target = tiny_target(architecture)
    drafter = make("exit_head", target, layers=3)
    reference, x = Exit(drafter, target), stream(target, 3)[0]
    n = len(x)
    into = reference.norm(x, "layers.0.input_layernorm")
    x = reference.layer(0, into, x, torch.arange(n), torch.ones(n, n, dtype=torch.bool).tril())
    expected = (reference.norm(x, "norm") @ target.model.lm_head.weight.T)[1:]
    for depth, draft in enumerate(unroll(drafter, roots_of(target, drafter, torch.tensor([TOKENS])), None, 3), start=1):
        found = drafter.unembedding(depth).logits(draft.hidden_BNH)[0, : n - depth]
        torch.testing.assert_close(found, expected[depth - 1 :], rtol=0, atol=1e-4)


@pytest.mark.parametrize("architecture", ["gemma3_text", "gpt_oss"])
@pytest.mark.parametrize("head", ["exit_head", "draft_lm"])
def test_windows_hold_in_trees_and_packs_too(head: str, architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the target's own layers, some of which see the last 16 tokens alone."""
    target = tiny_target(architecture)
    own = {"layers": 2} if head == "exit_head" else {"layers": 2, "config": None}
    monkeypatch.setattr(parity, "TARGET", lambda: target)
    monkeypatch.setattr(parity, "make", lambda head, target: make(head, target, **own))
    monkeypatch.setattr(parity, "EXACT", dict(rtol=0, atol=1e-4))
    for memory_kind in ("slots", "growing"):
        parity.test_unroll_equals_tree_decoding(head, memory_kind)
    parity.test_packed_documents_equal_the_same_documents_alone(head, True)


def test_the_targets_layers_are_neither_trained_nor_saved(tmp_path: Path) -> None:
    target = tiny_target()
    before = {name: p.clone() for name, p in target.model.state_dict().items()}
    drafter = make("exit_head", target)
    theirs = {id(p) for p in target.model.parameters()}
    assert not any(id(p) in theirs for p in [*drafter.parameters(), *drafter.buffers()])
    assert all(name.split(".")[0] in ("layer", "norm") for name in drafter.state_dict())
    own = {name: p.clone() for name, p in drafter.state_dict().items()}
    learn_by_heart(drafter, target, [TOKENS], depth=1, steps=2)
    assert all(torch.equal(p, before[name]) for name, p in target.model.state_dict().items())
    assert not any(torch.equal(p, own[name]) for name, p in drafter.state_dict().items())
    assert not any(p.requires_grad or p.grad is not None for p in target.model.parameters())
    hub.save(drafter, tmp_path / "s", target.card, torch.float32)
    assert load_file(tmp_path / "s" / "model.safetensors").keys() == drafter.state_dict().keys()
    loaded = hub.load(tmp_path / "s", target.shape)
    loaded.attach(target.ends)
    roots = roots_of(target, drafter, torch.tensor([TOKENS]))
    (a,), (b,) = unroll(drafter, roots, None, 1), unroll(loaded.eval(), roots, None, 1)
    assert torch.equal(a.hidden_BNH, b.hidden_BNH)


def test_the_target_is_left_as_it_was() -> None:
    """Drafting with its layers changes nothing of what it says itself, nor how many layers it has."""
    target = tiny_target()
    ids = torch.tensor([TOKENS])
    before = target.model(ids).logits
    drafter = make("exit_head", target)
    unroll(drafter, roots_of(target, drafter, ids), None, 2)
    drafter.train()
    assert torch.equal(target.model(ids).logits, before) and len(target.layers) == 6 and not target.model.training


def test_what_does_not_fit_is_refused() -> None:
    target = tiny_target()
    for layers in (6, 7):
        with pytest.raises(UserError, match=rf"head\.layers={layers} must be fewer than the 6 of the target"):
            hub.build("exit_head", target.shape, layers=layers)
    drafter = hub.build("exit_head", target.shape)
    with pytest.raises(UserError, match="only its embedding and head are at hand here"):
        drafter.attach(replace(target.ends, whole=None))
    mean = tiny_target("cohere", logit_scale=1.0)  # whose final norm takes the mean away too
    drafter = hub.build("exit_head", mean.shape)
    drafter.attach(mean.ends)
    with pytest.raises(UserError, match=r"final norm \(CohereLayerNorm\) is no RMSNorm"):
        drafter.start_from(mean.ends)
    with pytest.raises(UserError, match="Gemma4TextModel has 2 norms outside its layers"):  # one is of its embedding for each layer
        make("exit_head", tiny_target("gemma4_text"))
    target.model.model.norm = torch.nn.Linear(32, 32)
    with pytest.raises(UserError, match="has 0 norms outside its layers"):
        drafter.attach(target.ends)
