"""What is trained is what is decoded: the unroll's drafts equal those of tree decoding for the same tokens."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from headstart.heads.base import Draft, Drafter, Roots
from headstart.heads.memory import Memory, Slots
from headstart.heads.unroll import unroll
from headstart.heads.visibility import CausalSees, MaskSees
from tests.drafters import MADE, depth_of, fresh, make, random_tokens, roots_of
from tests.tiny_targets import tiny_target

TARGET = functools.cache(tiny_target)
EXACT = dict(rtol=0, atol=2e-5)


def logits(drafter: Drafter, depth: int, draft: Draft) -> Tensor:
    return drafter.unembedding(depth).logits(draft.hidden_BNH)


def trained(drafter: Drafter, roots: Roots, documents_BT: Tensor | None, depth: int, closed_form: bool) -> list[Tensor]:
    return [logits(drafter, d, draft) for d, draft in enumerate(unroll(drafter, roots, documents_BT, depth, closed_form), start=1)]


def absorb(drafter: Drafter, roots: Roots, memory: Memory, start: int, stop: int) -> Draft:
    rows = stop - start
    return drafter.begin(roots[start:stop], memory, CausalSees(rows, memory.rows() + rows), ask=torch.tensor([[rows - 1]]))


def grow(drafter: Drafter, draft: Draft, root: int, true: list[int], memory: Memory) -> list[Tensor]:
    """Logits of the true path, depth 2 on, each read beside a decoy that hangs on the same true parent.

    ``draft`` is the last root's; ``true`` the tokens after the one it chose. The decoy stands first, so that the true
    row is never found by luck.
    """
    before, found = memory.rows(), []
    true_columns: list[int] = []  # rows of the true path in memory, behind those of the roots
    for depth, token in enumerate(true, start=2):
        parent = draft.at(torch.tensor([[0, 0] if depth == 2 else [1, 1]]))
        width = 2 * (depth - 1)
        own = torch.zeros(2, width, dtype=torch.bool)
        own[:, true_columns] = True
        own[0, -2] = own[1, -1] = True
        mask = torch.cat([torch.ones(2, before, dtype=torch.bool), own], dim=1)
        sees = MaskSees(mask[None], among=slice(before, None))
        positions = torch.full((1, 2), root + depth - 1)
        draft = drafter.step(depth, torch.tensor([[(token + 17) % 96, token]]), parent, positions, memory, sees)
        true_columns.append(width - 1)
        found.append(logits(drafter, depth, draft)[0, 1])
    return found


@torch.no_grad()
@pytest.mark.parametrize("memory_kind", ["slots", "growing"])
@pytest.mark.parametrize("head", MADE)
def test_unroll_equals_tree_decoding(head: str, memory_kind: str) -> None:
    target = TARGET()
    drafter = make(head, target)
    depth, tokens = depth_of(drafter), random_tokens(30, seed=1)
    roots = roots_of(target, drafter, torch.tensor([tokens]))
    expected = {form: trained(drafter, roots, None, depth, form) for form in (True, False)}
    memory = Slots(30 + 2 * depth) if memory_kind == "slots" else Memory()
    stop = 0
    for piece in (7, 1, 5, 2, 1):
        start, stop = stop, stop + piece
        draft = absorb(drafter, roots, memory, start, stop)
        rows, root = memory.rows(), stop - 1
        found = [logits(drafter, 1, draft)[0, 0], *grow(drafter, draft, root, tokens[root + 2 : root + 1 + depth], memory)]
        assert len(found) == depth
        for form, unrolled in expected.items():
            for d, (a, b) in enumerate(zip(found, unrolled, strict=True), start=1):
                torch.testing.assert_close(a, b[0, root], **EXACT, msg=lambda m, d=d, form=form: f"depth {d}, closed form {form}: {m}")
        memory.rewind(rows)
        assert memory.rows() == rows


@torch.no_grad()
@pytest.mark.parametrize("head", MADE)
def test_what_a_draft_is_asked_for_does_not_change_it(head: str) -> None:
    target = TARGET()
    drafter = make(head, target)
    roots = roots_of(target, drafter, torch.tensor([random_tokens(12, 1), random_tokens(12, 2)]))
    ask = torch.tensor([[3, 11, 4], [0, 5, 10]])
    all_rows, asked = (drafter.begin(roots, Memory(), CausalSees(12, 12), ask=a) for a in (None, ask))
    for b in (0, 1):
        torch.testing.assert_close(asked.hidden_BNH[b], all_rows.hidden_BNH[b, ask[b]], **EXACT)
        if asked.state_BNH is not None:
            torch.testing.assert_close(asked.state_BNH[b], all_rows.state_BNH[b, ask[b]], **EXACT)


@torch.no_grad()
@pytest.mark.parametrize("closed_form", [True, False])
@pytest.mark.parametrize("head", MADE)
def test_packed_documents_equal_the_same_documents_alone(head: str, closed_form: bool) -> None:
    target = TARGET()
    drafter = make(head, target)
    depth, lengths = depth_of(drafter), [[9, 1, 14, 6], [2, 20, 8]]
    documents = [[random_tokens(n, seed=10 * b + i) for i, n in enumerate(row)] for b, row in enumerate(lengths)]
    tokens_BT = torch.tensor([[x for text in row for x in text] for row in documents])
    positions_BT = torch.tensor([[i for n in row for i in range(n)] for row in lengths])
    documents_BT = torch.tensor([[i for i, n in enumerate(row) for _ in range(n)] for row in lengths])
    packed = trained(drafter, roots_of(target, drafter, tokens_BT, positions_BT), documents_BT, depth, closed_form)
    compared = 0
    for b, row in enumerate(documents):
        start = 0
        for text in row:
            alone = trained(drafter, roots_of(target, drafter, torch.tensor([text])), None, depth, closed_form)
            for d, (a, p) in enumerate(zip(alone, packed, strict=True), start=1):
                n = max(len(text) - d, 0)  # roots whose chain stays in the document
                torch.testing.assert_close(p[b, start : start + n], a[0, :n], **EXACT)
                compared += n
            start += len(text)
    assert compared > 150


@torch.no_grad()
@pytest.mark.parametrize("head", MADE)
def test_documents_do_not_see_each_other(head: str) -> None:
    """Other tokens in one document change every later document by nothing at all."""
    target = TARGET()
    drafter = make(head, target)
    depth = depth_of(drafter)
    positions_BT, documents_BT = torch.tensor([[*range(8), *range(10)]]), torch.tensor([[0] * 8 + [1] * 10])
    results = []
    for seed in (1, 2):
        tokens_BT = torch.tensor([[*random_tokens(8, seed), *random_tokens(10, 3)]])
        results.append(trained(drafter, roots_of(target, drafter, tokens_BT, positions_BT), documents_BT, depth, True))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a[:, 8:], b[:, 8:]) and not torch.equal(a[:, :7], b[:, :7])


@torch.no_grad()
@pytest.mark.parametrize("head", MADE)
def test_a_draft_depends_on_the_past_and_its_chain_only(head: str) -> None:
    """A later token changes no draft that does not read it: the offsets of every depth, checked by disturbing one token."""
    target = TARGET()
    drafter = make(head, target)
    depth, changed = depth_of(drafter), 15
    tokens = random_tokens(24, seed=4)
    other = [*tokens[:changed], (tokens[changed] + 5) % 96, *tokens[changed + 1 :]]
    a, b = (trained(drafter, roots_of(target, drafter, torch.tensor([x])), None, depth, True) for x in (tokens, other))
    for d, (x, y) in enumerate(zip(a, b, strict=True), start=1):
        # depth d of root t reads tokens up to x[t+d]
        torch.testing.assert_close(x[0, : changed - d], y[0, : changed - d], rtol=0, atol=1e-6)
        assert not torch.allclose(x[0, changed], y[0, changed], atol=1e-3)


@pytest.mark.parametrize("head", MADE)
def test_unknown_settings_are_refused(head: str) -> None:
    with pytest.raises(ValueError, match="no setting 'colour'"):
        fresh(head, TARGET().shape, colour="red")


@torch.no_grad()
@pytest.mark.parametrize("head", MADE)
def test_half_precision_does_not_round_positions(head: str) -> None:
    """A drafter cast to bf16 and back keeps its tables (RoPE frequencies): only its weights were rounded."""
    target = TARGET()
    drafter, rounded = make(head, target), make(head, target)
    rounded.to(torch.bfloat16).float()
    for p in drafter.parameters():
        p.copy_(p.bfloat16().float())
    roots = roots_of(target, drafter, torch.tensor([random_tokens(40, 5)]))
    roots.positions_BT += 200
    depth = depth_of(drafter)
    for a, b in zip(trained(drafter, roots, None, depth, True), trained(rounded, roots, None, depth, True), strict=True):
        assert torch.equal(a, b)
