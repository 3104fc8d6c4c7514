"""The drafter's own vocabulary: from frequencies to ids, to the maps in files, and back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from headstart.heads.base import Draft, Drafter, Roots
from headstart.heads.errors import UserError
from headstart.heads.memory import Memory
from headstart.heads.unembedding import Unembedding
from headstart.heads.visibility import Sees
from headstart.heads.vocab import OutputHead, check_ids, ids_of, maps_of, most_frequent
from tests.tiny_targets import tiny_target


@settings(max_examples=100, deadline=None)
@given(st.sets(st.integers(0, 49), min_size=1, max_size=50))
def test_maps_there_and_back(chosen: set[int]) -> None:
    ids = sorted(chosen)
    maps = maps_of(torch.tensor(ids), 50)
    d2t, t2d = maps["d2t"], maps["t2d"]
    assert d2t.dtype == torch.int64 and t2d.dtype == torch.bool and t2d.shape == (50,)
    for row, offset in enumerate(d2t.tolist()):  # the formats' own words: target id = draft id + d2t[draft id]
        assert row + offset == ids[row] and bool(t2d[row + offset])
    assert int(t2d.sum()) == len(ids) and maps_of(None, 50) == {}
    for stored in (maps, {"d2t": d2t.int()}):
        back = ids_of(stored, 50)
        assert back is None and not stored if len(ids) == 50 else back == ids and stored
        assert check_ids(back, 50) is None if len(ids) == 50 else check_ids(back, 50).tolist() == ids  # type: ignore[union-attr]


@pytest.mark.parametrize("wrong", [[], [3, 2], [1, 1], [-1, 4], [0, 10], list(range(11)), [[1, 2]], 5])
def test_ids_that_are_no_vocabulary_are_refused(wrong: object) -> None:
    with pytest.raises(UserError, match="the draft vocabulary must be"):
        check_ids(wrong, 10)  # type: ignore[arg-type]


def test_the_whole_vocabulary_is_no_trimmed_one() -> None:
    assert check_ids(None, 10) is None and check_ids(range(10), 10) is None
    ids = check_ids([0, 9], 10)
    assert ids is not None and ids.tolist() == [0, 9] and ids.dtype == torch.int64


def test_most_frequent() -> None:
    counts = torch.tensor([5, 0, 9, 5, 1, 5])
    assert most_frequent(counts, 1) == [2] and most_frequent(counts, 3) == [0, 2, 3]  # of equals, the lower id
    assert most_frequent(counts, 6) == [0, 1, 2, 3, 4, 5]
    for size in (0, -1, 7):
        with pytest.raises(UserError, match=rf"within 1\.\.6 .* got {size}"):
            most_frequent(counts, size)


def test_logits_are_spread_over_the_targets_vocabulary() -> None:
    unembedding = Unembedding(torch.randn(3, 4), torch.tensor([1, 4, 5]))
    hidden = torch.randn(2, 6, 4)
    full = unembedding.to_target(unembedding.logits(hidden), 7)
    assert full.shape == (2, 6, 7) and torch.equal(full[..., [1, 4, 5]], hidden @ unembedding.weight_VH.T)
    assert bool((full[..., [0, 2, 3, 6]] == -torch.inf).all())
    whole = Unembedding(torch.randn(7, 4))
    assert torch.equal(whole.to_target(whole.logits(hidden), 7), hidden @ whole.weight_VH.T)


class Bare(Drafter):
    """A drafter that writes no more than it must."""

    def begin(self, roots: Roots, memory: Memory, sees: Sees, ask: Tensor | None = None) -> Draft:
        raise NotImplementedError

    def step(self, depth: int, tokens_BN: Tensor, parent: Draft, positions_BN: Tensor, memory: Memory, sees: Sees) -> Draft:
        raise NotImplementedError


@pytest.mark.parametrize("ids", [None, [1, 4, 5]])
def test_a_drafter_without_methods_of_its_own_for_logits(ids: list[int] | None) -> None:
    """Its output heads start as the target's, and ``lm_head`` makes the logits; without one, the target's head does."""
    target = tiny_target()
    head_VD, (V, D) = target.ends.head_VD, target.ends.head_VD.shape
    drafter = Bare(target.shape)
    drafter.attach(target.ends)
    drafter.start_from(target.ends)
    assert drafter.unembedding(1).weight_VH is head_VD and drafter.unembedding(1).ids_V is None

    drafter.lm_head, drafter.others = OutputHead(D + 8, V, ids), nn.ModuleList([OutputHead(D, V, None)])
    drafter.start_from(target.ends)
    unembedding, rows = drafter.unembedding(2), slice(None) if ids is None else ids
    assert unembedding.weight_VH is drafter.lm_head.weight
    assert (unembedding.ids_V if ids is None else unembedding.ids_V.tolist()) == ids  # type: ignore[union-attr]
    assert unembedding.weight_VH[:, :D].equal(head_VD[rows]) and not unembedding.weight_VH[:, D:].any()
    assert drafter.others[0].get_parameter("weight").equal(head_VD)
