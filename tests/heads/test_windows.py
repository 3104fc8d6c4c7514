"""Windows and pieces over packed documents: read as each document alone, with no mask of all by all, and nothing from one to another."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headstart.heads.kinds import kinds_of, rules
from headstart.heads.visibility import ChainSees
from headstart.heads.windows import WindowSees
from tests.drafters import random_tokens
from tests.heads.test_driven import each_document
from tests.tiny_targets import tiny_target

LENGTHS = (30, 5, 1, 44)  # windows and pieces are of 16
TOKENS = torch.tensor([random_tokens(sum(LENGTHS), 1), random_tokens(sum(LENGTHS), 2)])
POSITIONS = torch.cat([torch.arange(n) for n in LENGTHS]).expand(2, -1)
WINDOWED: dict[str, dict[str, Any]] = {
    "gemma3_text": {},  # two kinds of layers
    "gemma2": dict(sliding_window=16, query_pre_attn_scalar=16),
    "mistral": dict(sliding_window=16),  # one, without layer_types
    "llama4_text": {},  # pieces
}
FOLLOWS = [name for name in WINDOWED if name != "gemma2"]  # it caps its scores, which is not for every kernel


def without_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    for rule in (ChainSees, WindowSees):
        monkeypatch.setattr(rule, "dense", None)


@torch.no_grad()
@pytest.mark.parametrize("architecture", WINDOWED)
def test_packed_rows_of_a_windowed_target_are_read_as_each_alone(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target(architecture, **WINDOWED[architecture])
    assert kinds_of(target.config) != {"full_attention"}
    follows = target.reader.follows
    assert follows or architecture not in FOLLOWS
    if follows:
        without_masks(monkeypatch)
    found = target.read(TOKENS, POSITIONS, ())[1]
    torch.testing.assert_close(found, each_document(target, TOKENS, LENGTHS), rtol=0, atol=1e-4)
    whole = target.read(TOKENS, torch.arange(80).expand(2, -1), ())[1]  # one document a row
    torch.testing.assert_close(whole, target.body(input_ids=TOKENS, use_cache=False).last_hidden_state, rtol=0, atol=1e-4)
    assert (whole - found).abs().max() > 0.1


@torch.no_grad()
@pytest.mark.parametrize("architecture", FOLLOWS)
def test_nothing_leaks_from_one_document_to_another(architecture: str) -> None:
    """Other tokens in all documents but one: the states of that one are the same to the bit."""
    target = tiny_target(architecture, **WINDOWED[architecture])
    before, start = target.read(TOKENS, POSITIONS, ())[1], 0
    for length in LENGTHS:
        own, others = slice(start, start + length), (TOKENS + 1) % 96
        others[:, own] = TOKENS[:, own]
        after = target.read(others, POSITIONS, ())[1]
        assert torch.equal(after[:, own], before[:, own])
        assert not torch.equal(after, before)
        start += length


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("window", [1, 2, 7, 100, 130])
def test_strips_are_the_mask_written_out(window: int, documents: bool) -> None:
    """Forward and backward, grouped heads, more rows than a strip."""
    N, generator = 300, torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, N, 8, generator=generator, dtype=torch.float64).requires_grad_() for heads in (4, 2, 2))
    documents_BN = torch.arange(N)[None] // torch.tensor([[250], [40]]) if documents else None
    seen = torch.ones(N, N, dtype=torch.bool).tril() & ~torch.ones(N, N, dtype=torch.bool).tril(-window)
    seen_BNM = seen[None] if documents_BN is None else seen & (documents_BN[:, :, None] == documents_BN[:, None])
    scores = (q @ k.repeat_interleave(2, 1).mT) * 0.3
    expected = scores.masked_fill(~seen_BNM[:, None], -torch.inf).softmax(-1) @ v.repeat_interleave(2, 1)
    rule = WindowSees(ChainSees(documents_BN), window)
    found = rule.attend(q, [(k, v)], 0.3)
    torch.testing.assert_close(found, expected)
    assert rule.dense(N, N, "cpu").expand(2, 1, N, N)[:, 0].equal(seen_BNM.expand(2, N, N))
    grad = torch.randn(found.shape, generator=generator, dtype=torch.float64)
    for a, b in zip(torch.autograd.grad(found, (q, k, v), grad), torch.autograd.grad(expected, (q, k, v), grad), strict=True):
        torch.testing.assert_close(a, b)


def test_documents_within_the_window_have_the_rule_of_full_attention() -> None:
    target = tiny_target("gemma3_text")
    short, long = (torch.arange(80)[None] // n for n in (16, 17))
    for documents, same in ((short, True), (long, False)):
        sees = ChainSees(documents)
        found = rules(target.config, sees, torch.arange(80)[None])
        assert found is not None and (found["sliding_attention"] is sees) == same and found["full_attention"] is sees
