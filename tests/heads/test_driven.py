"""Models of transformers under our visibility rule: packed rows and drafters that are language models need no mask of all by all."""

from __future__ import annotations

import copy
import gc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.integrations import sdpa_attention

from headstart.heads import driven
from headstart.heads.memory import Memory
from headstart.heads.unroll import unroll
from headstart.heads.visibility import CausalSees, ChainSees
from headstart.inference.decoding.context import Context
from headstart.inference.decoding.probe import check_driven
from headstart.inference.decoding.target import Target
from headstart.inference.decoding.tree import Tree
from tests.drafters import make, random_tokens, roots_of
from tests.tiny_targets import tiny_target

FULL = ["llama", "qwen3", "mixtral", "granite"]  # granite scales its scores in a way of its own
LENGTHS = (9, 20, 1, 14)
TOKENS = torch.tensor([random_tokens(sum(LENGTHS), 1), random_tokens(sum(LENGTHS), 2)])
POSITIONS = torch.cat([torch.arange(n) for n in LENGTHS]).expand(2, -1)
DOCUMENTS = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)).expand(2, -1)


def each_document(target: Target, tokens_BT: Tensor = TOKENS, lengths: tuple[int, ...] = LENGTHS) -> Tensor:
    """By transformers itself."""
    parts = [target.body(input_ids=part, use_cache=False).last_hidden_state for part in tokens_BT.split(lengths, 1)]
    return torch.cat(parts, 1)


@torch.no_grad()
@pytest.mark.parametrize("architecture", FULL)
def test_packed_documents_cost_no_mask(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target(architecture, **({"attention_multiplier": 0.4} if architecture == "granite" else {}))
    assert target.reader.follows
    monkeypatch.setattr(ChainSees, "dense", None)
    torch.testing.assert_close(target.read(TOKENS, POSITIONS, ())[1], each_document(target), rtol=0, atol=1e-4)
    assert target.config._attn_implementation == "sdpa"


def test_which_attention_follows_a_rule() -> None:
    """One with keys and values of different sizes, by a mask; one with sinks does not."""
    assert tiny_target("deepseek_v3").reader.follows and not tiny_target("gpt_oss").reader.follows


def needs_a_mask(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """For all but plain texts."""
    assert kwargs["attention_mask"] is not None or bool((kwargs["position_ids"].diff() == 1).all())


@torch.no_grad()
@pytest.mark.parametrize("quickened", [False, True])
@pytest.mark.parametrize("leak", ["its own config", "an error"])
def test_an_architecture_that_leaks_takes_dense_masks(leak: str, quickened: bool) -> None:
    """It says that it looks its attention up, and then does not. Its own modules are asked, also where our layers decode for it."""
    target = tiny_target()
    for layer in target.layers:
        if leak == "its own config":
            layer.self_attn.config = copy.copy(layer.self_attn.config)
        else:
            layer.register_forward_pre_hook(needs_a_mask, with_kwargs=True)
    check_driven(target)
    if quickened:
        target.prepack()
        target.reader._follows = None  # not yet asked
    assert not target.reader.follows
    assert torch.allclose(target.read(TOKENS, POSITIONS, ())[1], each_document(target), atol=1e-4)


def test_asking_draws_no_random_number_and_is_not_disturbed_by_autocast() -> None:
    target = tiny_target()
    before = torch.get_rng_state()
    with torch.autocast("cpu", torch.bfloat16):
        assert target.reader.follows
    assert torch.equal(before, torch.get_rng_state())


@torch.no_grad()
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_trees_copy_no_keys(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of heads that share them, whatever kind of layer."""
    target, tree = tiny_target(architecture), Tree.of([5, 6, 7], [-1, -1, 0])
    context, plain = Context(target, ()), Context(target, ())
    for each in (context, plain):
        each.read_prompt(TOKENS[0, :30])
        each.keep(30)
    plain.target.reader._follows = False
    expected = plain.read(TOKENS[0, 30:34], tree)[1]
    target.reader._follows = True
    monkeypatch.setattr(sdpa_attention, "repeat_kv", None)
    torch.testing.assert_close(context.read(TOKENS[0, 30:34], tree)[1], expected, rtol=0, atol=1e-4)


@torch.no_grad()
def test_long_pieces_of_prompts_cost_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    target, n = tiny_target(), 100
    tokens = torch.tensor([random_tokens(2 * n, 3)])
    whole = target.body(input_ids=tokens, use_cache=False).last_hidden_state
    memory, positions = Memory(), torch.arange(2 * n)[None]
    target.read_rows(tokens[:, :n], positions[:, :n], memory, CausalSees(n, n))
    rule = CausalSees(n, 2 * n)
    monkeypatch.setattr(type(rule), "dense", None)
    torch.testing.assert_close(target.read_rows(tokens[:, n:], positions[:, n:], memory, rule)[1], whole[:, n:], rtol=0, atol=1e-4)


LM: list[tuple[str, dict[str, Any]]] = [("draft_lm", {}), ("draft_lm", {"layers": 2, "config": None}), ("exit_head", {})]


@pytest.mark.parametrize(("head", "own"), LM)
def test_drafters_that_are_language_models_train_without_a_mask(head: str, own: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    drafter = make(head, target, **own)
    roots, found = roots_of(target, drafter, TOKENS, POSITIONS), []
    for closed_form in (False, True):
        if closed_form:
            monkeypatch.setattr(ChainSees, "dense", None)
        drafter.zero_grad()
        (draft,) = unroll(drafter, roots, DOCUMENTS, 1, closed_form)
        own_BT = torch.cat([DOCUMENTS[:, 1:] == DOCUMENTS[:, :-1], torch.zeros(2, 1, dtype=torch.bool)], dim=1)  # chosen in the document
        (draft.hidden_BNH[own_BT] ** 2).sum().backward()
        found.append([draft.hidden_BNH[own_BT], *(p.grad for p in drafter.parameters() if p.grad is not None)])
    assert len(found[0]) > 5
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("head", "own"), LM)
def test_nor_do_they_in_half_precision(head: str, own: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Autocast leaves rotated queries and keys in fp32, beside values in bf16: no kernel takes that."""
    target = tiny_target()
    drafter = make(head, target, **own)
    roots, found = roots_of(target, drafter, TOKENS, POSITIONS), list[torch.Tensor]()
    for half in (False, True):
        if half:
            monkeypatch.setattr(ChainSees, "dense", None)
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            found.append(unroll(drafter, roots, DOCUMENTS, 1)[0].hidden_BNH.detach().float())
    assert float((found[1] - found[0]).norm() / found[0].norm()) < 0.05


@torch.no_grad()
def test_the_name_of_the_attention_is_put_back_whatever_happens() -> None:
    target = tiny_target()
    assert target.reader.follows
    target.layers[3].register_forward_pre_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        target.read(TOKENS, POSITIONS, ())
    assert target.config._attn_implementation == "sdpa"


def test_a_config_that_is_gone_leaves_no_lock_to_another_one() -> None:
    config = LlamaConfig()
    assert driven.alone(config) is driven.alone(config) is not driven.alone(LlamaConfig())
    place = id(config)
    del config
    gc.collect()
    assert place not in driven._LOCKS


def test_behind_a_rule_within_a_rule_the_outer_one_holds_again() -> None:
    outer, inner = LlamaConfig(attn_implementation="sdpa"), LlamaConfig(attn_implementation="sdpa")
    with driven.by_rule(outer, sees := CausalSees(2, 2), {"full": CausalSees(1, 1)}):
        marked = driven._PASS.marked
        with driven.by_rule(inner, CausalSees(3, 3)):
            assert driven._PASS.sees is not sees and not driven._PASS.marked
        assert driven._PASS.sees is sees and driven._PASS.marked is marked and len(marked) == 1
    assert driven._PASS.sees is None and not driven._PASS.marked


def test_two_threads_may_read_by_the_same_layers() -> None:
    """A bet that still runs, and the next sequence: one without a mask of its own, one by a rule."""
    target = tiny_target("llama")
    tokens = torch.arange(8)[None] % target.shape.vocab_size
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1]])
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])

    def plain() -> torch.Tensor:
        return target.reader.read(tokens, torch.arange(8)[None], Memory(), CausalSees(8, 8))[1]

    def packed() -> torch.Tensor:
        return target.reader.read(tokens, positions, Memory(), ChainSees(documents))[1]

    with torch.inference_mode():
        wanted = plain(), packed()
    with ThreadPoolExecutor(2) as workers:
        for _ in range(30):
            both = [workers.submit(torch.inference_mode()(each)) for each in (plain, packed)]
            assert all(torch.equal(each.result(), want) for each, want in zip(both, wanted, strict=True))
