from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heads.errors import UserError
from inference.tree import Tree


def make(parents: list[int], tokens: list[int] | None = None) -> Tree:
    depths: list[int] = []
    for p in parents:
        depths.append(1 if p < 0 else depths[p] + 1)
    tokens = tokens if tokens is not None else [0] * len(parents)
    return Tree(*(torch.tensor(x, dtype=torch.int64) for x in (tokens, parents, depths)))


@st.composite
def parent_lists(draw: st.DrawFn, most: int = 20) -> list[int]:
    n = draw(st.integers(0, most))
    return [draw(st.integers(-1, i - 1)) for i in range(n)]


@settings(max_examples=100, deadline=None)
@given(parent_lists())
def test_rows_see_themselves_their_ancestors_and_the_root_row(parents: list[int]) -> None:
    tree = make(parents)
    expected = [[True] + [False] * len(parents)]
    for i in range(len(parents)):
        row, node = [True] + [False] * len(parents), i
        while node >= 0:
            row[node + 1], node = True, parents[node]
        expected.append(row)
    assert tree.rows().tolist() == expected
    for row in range(len(parents) + 1):
        assert tree.children(row) == [i for i, p in enumerate(parents) if p == row - 1]
    tree.validate(vocab_size=1)


def test_long_chain_and_empty_tree() -> None:
    assert torch.equal(make(list(range(-1, 69))).rows(), torch.ones(71, 71, dtype=torch.bool).tril())
    assert Tree.empty().rows().tolist() == [[True]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens_N": torch.tensor([0, 9, 1])}, "vocabulary"),
        ({"tokens_N": torch.tensor([0, -1, 1])}, "vocabulary"),
        ({"tokens_N": torch.tensor([0.0, 1.0, 1.0])}, "int64"),
        ({"parents_N": torch.tensor([-1, 1, 0])}, "earlier node"),
        ({"parents_N": torch.tensor([-2, 0, 0])}, "earlier node"),
        ({"depths_N": torch.tensor([1, 1, 2])}, "depth"),
        ({"depths_N": torch.tensor([1, 2])}, "3 int64"),
        ({"drawn_N": torch.tensor([True, False, False])}, "go together"),
        ({"drawn_N": torch.tensor([True, False, False]), "q_RV": torch.zeros(4, 3)}, "distribution"),
        ({"drawn_N": torch.tensor([True, False, False]), "q_RV": torch.tensor([[0.0, 1, 0]] + [[0.0] * 3] * 3)}, "probability 0"),
        ({"drawn_N": torch.tensor([True, False, False]), "q_RV": torch.zeros(3, 3)}, "booleans"),
    ],
)
def test_validate_says_what_is_wrong(change: dict[str, torch.Tensor], message: str) -> None:
    fields = {"tokens_N": torch.tensor([0, 1, 2]), "parents_N": torch.tensor([-1, 0, 0]), "depths_N": torch.tensor([1, 2, 2])}
    Tree(**fields).validate(vocab_size=3)
    with pytest.raises(UserError, match=message):
        Tree(**{**fields, **change}).validate(vocab_size=3)
