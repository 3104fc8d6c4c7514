from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headstart.inference.decoding.tree import Tree, Acceptance
from tests.inference.decoding.toys import side_by_side
from tests.inference.decoding.trees import validate


@st.composite
def parent_lists(draw: st.DrawFn, most: int = 20) -> list[int]:
    n = draw(st.integers(0, most))
    return [draw(st.integers(-1, i - 1)) for i in range(n)]


@settings(max_examples=100, deadline=None)
@given(st.lists(parent_lists(), min_size=1, max_size=3))
def test_rows_see_themselves_their_ancestors_and_the_root_row(batch: list[list[int]]) -> None:
    trees = [Tree.of([0] * len(parents), parents) for parents in batch]
    both = side_by_side(trees)
    assert len(both) == max(map(len, batch))
    for b, (parents, tree) in enumerate(zip(batch, trees, strict=True)):
        expected = [[True] + [False] * len(parents)]
        for i in range(len(parents)):
            row, node = [True] + [False] * len(parents), i
            while node >= 0:
                row[node + 1], node = True, parents[node]
            expected.append(row)
        assert tree.rows().tolist() == [expected]
        R = len(expected)
        assert both.rows()[b, :R, :R].tolist() == expected and not both.rows()[b, :R, R:].any()
        assert tree.depths_BN[0].tolist() == [sum(row) - 1 for row in expected[1:]]
        assert tree.depth == max((sum(row) - 1 for row in expected[1:]), default=0)
        validate(tree, 1)
    validate(both, 1)


def test_long_chain_and_empty_tree() -> None:
    assert torch.equal(Tree.of([0] * 70, list(range(-1, 69))).rows()[0], torch.ones(71, 71, dtype=torch.bool).tril())
    assert Tree.empty(batch=2).rows().tolist() == [[[True]]] * 2
    assert Tree.of([], []).rows().tolist() == [[[True]]]
    validate(Tree.empty(batch=2), 1)


def test_a_path_is_the_accepted_nodes_of_one_sequence() -> None:
    verdict = Acceptance(torch.tensor([[0, 0, 0], [0, 2, 5]]), torch.tensor([0, 2]), torch.tensor([7, 8]))
    assert verdict.path() == [] and verdict.path(1) == [1, 4]


DRAWN, ROW0 = torch.tensor([[True, False, False]]), torch.tensor([[[0.0, 0.25, 0.75]] + [[0.0] * 3] * 3])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens_BN": torch.tensor([[0, 9, 1]])}, "vocabulary of 3"),
        ({"tokens_BN": torch.tensor([[0, -1, 1]])}, "vocabulary of 3"),
        ({"tokens_BN": torch.tensor([[0.0, 1.0, 1.0]])}, "int64"),
        ({"parents_BN": torch.tensor([[-1, 1, 0]])}, "earlier node"),
        ({"parents_BN": torch.tensor([[-3, 0, 0]])}, "earlier node"),
        ({"parents_BN": torch.tensor([[-1, 0, -2]])}, "depth of a node"),  # a place without a node has no depth
        ({"depths_BN": torch.tensor([[1, 1, 2]])}, "depth of a node"),
        ({"depth": 1}, "none may exceed"),
        ({"depths_BN": torch.tensor([[1, 2]])}, r"int64 \[1, 3\]"),
        ({"drawn_BN": DRAWN}, "go together"),
        ({"drawn_BN": DRAWN, "q_BRV": torch.zeros(1, 4, 3)}, "distribution"),
        ({"drawn_BN": DRAWN, "q_BRV": -ROW0}, "distribution"),
        ({"drawn_BN": DRAWN, "q_BRV": ROW0}, "probability 0"),
        ({"drawn_BN": DRAWN, "q_BRV": torch.zeros(1, 3, 3)}, "booleans"),
        ({"drawn_BN": DRAWN.long(), "q_BRV": ROW0}, "booleans"),
    ],
)
def test_validate_says_what_is_wrong(change: dict[str, Any], message: str) -> None:
    tensors = {"tokens_BN": [0, 1, 2], "parents_BN": [-1, 0, 0], "depths_BN": [1, 2, 2]}
    fields = {name: torch.tensor([x]) for name, x in tensors.items()} | {"depth": 2}
    validate(Tree(**fields), 3)
    with pytest.raises(AssertionError, match=message):
        validate(Tree(**{**fields, **change}), 3)


def test_validate_overlooks_what_stands_in_places_without_a_node() -> None:
    tree = Tree(torch.tensor([[1, 99]]), torch.tensor([[-1, -2]]), torch.tensor([[1, 0]]), 1)
    validate(tree, 3)
    validate(Tree(*(x.flip(0) for x in (tree.tokens_BN, tree.parents_BN, tree.depths_BN)), 1, DRAWN[:, :2], ROW0[:, :3]), 3)
