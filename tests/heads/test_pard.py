"""PARD against transformers: every depth is what the exported model says of a text that ends in mask tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headstart.heads import hub
from headstart.heads.errors import UserError
from headstart.heads.memory import Memory, Slots
from headstart.heads.unroll import unroll
from headstart.heads.visibility import CausalSees
from headstart.inference.speculator import open_speculator
from tests.drafters import make, random_tokens, roots_of
from tests.tiny_targets import tiny_target

TARGET, DEPTH, MASK = tiny_target(), 4, 90  # random texts hold it, too: a mask is known by its row, not by its token
SMALL: dict[str, Any] = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
MODELS: dict[str, dict[str, Any]] = {
    "llama": SMALL,
    "gemma3_text": SMALL
    | dict(head_dim=16, sliding_window=6, layer_types=["sliding_attention", "full_attention"], query_pre_attn_scalar=16),
    "gpt2": dict(n_embd=32, n_layer=2, n_head=2),  # learned positions
}  # fmt: skip


def drafter_of(architecture: str = "llama", **changes: Any) -> Any:
    config = MODELS[architecture] | {"model_type": architecture}
    return make("pard", TARGET, config=config, depth=DEPTH, mask_token=MASK, **changes)


def exported(drafter: Any, folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    hub.save(drafter, folder, TARGET.card, torch.float32)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def said(model: Any, known: list[int]) -> Tensor:
    """The logits [DEPTH, V] of all depths after these tokens, by one plain causal pass."""
    return model(torch.tensor([known + [MASK] * (DEPTH - 1)])).logits[0, -DEPTH:]


def logits_of(drafter: Any, drafts: list[Any], row: int, b: int = 0) -> Tensor:
    return torch.stack([drafter.unembedding(d).logits(draft.hidden_BNH)[b, row] for d, draft in enumerate(drafts, start=1)])


@torch.no_grad()
@pytest.mark.parametrize("architecture", MODELS)
def test_training_and_decoding_are_a_text_that_ends_in_masks(architecture: str, tmp_path: Path) -> None:
    """Which is how engines read it: masks at the next positions, each of which sees the text and the masks before it."""
    drafter, tokens = drafter_of(architecture), random_tokens(40, seed=1)
    model, roots = exported(drafter, tmp_path / "s"), roots_of(TARGET, drafter, torch.tensor([tokens]))
    drafts, memory = unroll(drafter, roots, None, DEPTH), Slots(64)
    for t in range(39):
        torch.testing.assert_close(logits_of(drafter, drafts, t), said(model, tokens[: t + 2]), rtol=0, atol=1e-4)
    for start, stop in ((0, 5), (5, 6), (6, 9), (9, 20)):  # what rounds accept
        kept = memory.rows()
        sees = CausalSees(stop - start, stop if kept == 0 else kept + stop - start)
        first = drafter.begin(roots[start:stop], memory, sees, torch.tensor([[stop - start - 1]]))
        assert memory.rows() == stop + 1  # x[0] and what the roots chose: the masks are forgotten
        found = [first]
        for d in range(2, DEPTH + 1):
            found.append(drafter.step(d, torch.tensor([[7]]), found[-1], torch.tensor([[stop + d - 2]]), memory, sees))
        torch.testing.assert_close(logits_of(drafter, found, 0), said(model, tokens[: stop + 1]), rtol=0, atol=1e-4)


@torch.no_grad()
def test_of_packed_documents_each_is_read_alone(tmp_path: Path) -> None:
    drafter = drafter_of()
    model, pieces = exported(drafter, tmp_path / "s"), [random_tokens(n, seed=n) for n in (7, 40, 9)]  # over 32 roots: more than one pass
    positions = torch.cat([torch.arange(len(piece)) for piece in pieces])[None]
    documents = torch.cat([torch.full((len(piece),), i) for i, piece in enumerate(pieces)])[None]
    roots = roots_of(TARGET, drafter, torch.tensor([[token for piece in pieces for token in piece]]), positions)
    drafts, start = unroll(drafter, roots, documents, DEPTH), 0
    for piece in pieces:
        for t in range(len(piece) - 1):
            torch.testing.assert_close(logits_of(drafter, drafts, start + t), said(model, piece[: t + 2]), rtol=0, atol=1e-4)
        start += len(piece)


@torch.no_grad()
def test_the_rule_is_a_dense_mask() -> None:
    """Over the rows [text, masks of depth 2, of depth 3, ..]: row (t, d) sees the text up to x[t+1], and (t, 2) to (t, d)."""
    drafter, T = drafter_of(), 12
    tokens = random_tokens(T, seed=5)
    roots = roots_of(TARGET, drafter, torch.tensor([tokens]))
    rows = [(i - 1, 1) for i in range(T)] + [(t, d) for d in range(2, DEPTH + 1) for t in range(T - 1)]
    sees = torch.tensor([[u <= t if e == 1 else (u == t and e <= d) for u, e in rows] for t, d in rows])
    ids, positions = tokens + [MASK] * (len(rows) - T), [t + d for t, d in rows]
    bias = torch.zeros(len(rows), len(rows)).masked_fill(~sees, torch.finfo(torch.float32).min)
    logits = drafter.lm(torch.tensor([ids]), position_ids=torch.tensor([positions]), attention_mask=bias[None, None]).logits[0]
    drafts = unroll(drafter, roots, None, DEPTH)
    for (t, d), expected in zip(rows[1:], logits[1:], strict=True):
        torch.testing.assert_close(logits_of(drafter, drafts, t)[d - 1], expected, rtol=0, atol=1e-4)


def test_only_the_mask_stands_for_what_is_not_known() -> None:
    """Its embedding has a gradient from the deeper depths alone."""
    drafter = drafter_of()
    roots = roots_of(TARGET, drafter, torch.tensor([random_tokens(12, seed=3, vocab_size=90)]))
    drafts = unroll(drafter, roots, None, DEPTH)
    for draft, learns in ((drafts[0], False), (drafts[1], True)):
        (grad,) = torch.autograd.grad(draft.hidden_BNH[:, 3].sum(), drafter.lm.get_input_embeddings().weight, retain_graph=True)
        assert bool(grad[MASK].any()) == learns


def test_the_folder_is_an_ordinary_model_that_names_its_mask(tmp_path: Path) -> None:
    for given, mask in ((MASK, MASK), (0, 0), (None, 95)):
        hub.save(make("pard", TARGET, mask_token=given), tmp_path / "s", TARGET.card, torch.float32)
        config = json.loads((tmp_path / "s" / "config.json").read_text())
        assert config["pard_token"] == mask and config["architectures"] == ["LlamaForCausalLM"] and config["model_type"] == "llama"
        loaded: Any = hub.load(tmp_path / "s", TARGET.shape, TARGET.card)
        assert (loaded.mask_token, loaded.max_depth, loaded.config["head"]) == (mask, 5, "pard")


def test_it_starts_as_the_targets_first_layers(tmp_path: Path) -> None:
    drafter = make("pard", TARGET, noise=0.0, config=None, layers=2)
    own, theirs = drafter.state_dict(), TARGET.model.state_dict()
    assert all(torch.equal(value, theirs[name.removeprefix("lm.")]) for name, value in own.items())
    hub.save(drafter, tmp_path / "s", TARGET.card, torch.float32)
    loaded: Any = hub.load(tmp_path / "s", TARGET.shape, TARGET.card)
    assert all(torch.equal(value, own[name]) for name, value in loaded.state_dict().items())


@torch.no_grad()
def test_a_model_that_others_wrote_is_pard_where_it_names_the_mask(tmp_path: Path) -> None:
    drafter, tokens = drafter_of(), torch.tensor([random_tokens(20, seed=2)])
    drafter.lm.save_pretrained(tmp_path / "s")
    assert open_speculator(tmp_path / "s", TARGET).config["head"] == "draft_lm"
    config = json.loads((tmp_path / "s" / "config.json").read_text())

    def opened(token: Any) -> Any:
        (tmp_path / "s" / "config.json").write_text(json.dumps(config | {"pard_token": token, "spd_type": "pard"}))
        return open_speculator(tmp_path / "s", TARGET)

    loaded = opened(MASK)
    assert (loaded.config["head"], loaded.mask_token, loaded.max_depth) == ("pard", MASK, 8)
    roots = roots_of(TARGET, drafter, tokens)
    for mine, theirs in zip(unroll(drafter, roots, None, DEPTH), unroll(loaded, roots, None, DEPTH), strict=True):
        torch.testing.assert_close(theirs.hidden_BNH, mine.hidden_BNH, rtol=0, atol=1e-5)
    hub.save(loaded, tmp_path / "ours", TARGET.card, torch.float32)
    assert hub.load(tmp_path / "ours", TARGET.shape, TARGET.card).config["mask_token"] == MASK
    for wrong in (-1, 96, "mask", True):
        with pytest.raises(UserError, match=r"head\.mask_token must be a"):
            opened(wrong)
    config["mask_token_id"] = 5  # which vLLM would read first
    with pytest.raises(UserError, match=r"the folder has mask_token_id=5, this drafter needs 90 or None$"):
        opened(MASK)


def test_a_training_that_starts_from_pard_goes_on_with_its_mask(tmp_path: Path) -> None:
    """From a folder of ours or of others; a setting goes before it."""
    drafter = drafter_of(noise=0.0)
    hub.save(drafter, tmp_path / "ours", TARGET.card, torch.float32)
    drafter.lm.config.pard_token = 7
    drafter.lm.save_pretrained(tmp_path / "theirs")
    for folder, given, mask in (("ours", None, MASK), ("theirs", None, 7), ("theirs", 9, 9)):
        started: Any = hub.build("pard", TARGET.shape, config=None, folder=str(tmp_path / folder), mask_token=given)
        assert started.mask_token == mask
        started.attach(TARGET.ends)
        hub.save(started, tmp_path / "again", TARGET.card, torch.float32)
        assert json.loads((tmp_path / "again" / "config.json").read_text())["pard_token"] == mask
        loaded: Any = hub.load(tmp_path / "again", TARGET.shape, TARGET.card)
        assert loaded.mask_token == mask and torch.equal(loaded.lm.lm_head.weight, drafter.lm.lm_head.weight)
    drafter.lm.config.pard_token = "mask"
    drafter.lm.save_pretrained(tmp_path / "wrong")
    with pytest.raises(UserError, match=r"^head\.mask_token must be a token of the target \(0\.\.95\), found 'mask'$"):
        hub.build("pard", TARGET.shape, config=None, folder=str(tmp_path / "wrong"))


def test_what_is_refused() -> None:
    for changes, message in (
        (dict(lora=dict(rank=2, alpha=4)), r"^head 'pard' has no setting 'lora'"),  # the mask's embedding would not learn
        (dict(mask_token=96), r"^head\.mask_token must be a token of the target \(0\.\.95\), found 96$"),
        (dict(depth=0), r"^head\.depth must be a whole number of at least 1"),
        (dict(layers=2), r"^the draft model is made from one of head\.config, head\.folder and head\.layers"),
    ):
        with pytest.raises(UserError, match=message):
            make("pard", TARGET, **changes)
    drafter, memory = drafter_of(), Memory()
    first = drafter.begin(roots_of(TARGET, drafter, torch.tensor([[5, 6, 7]])), memory, CausalSees(3, 3))
    none = torch.zeros(1, 3, dtype=torch.int64)
    with pytest.raises(UserError, match=r"^this drafter guesses 4 tokens, depth 5 was asked: lower it or train with head\.depth=5$"):
        drafter.step(5, none, first, none, memory, CausalSees(3, 3))
