from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from heads.errors import UserError
from inference.propose import MOST_READS, TreePolicy
from inference.verify import Chance, Sampling
from tests.inference.toys import ROOTS, ToyDrafter, drafting, heap_size

V, DEPTH = 7, 4
PATHS = ((0,), (0, 0), (1,), (0, 1), (0, 0, 0), (1, 0), (2,), (0, 0, 0, 0), (1, 0, 0), (1, 0, 1))


def toy(seed: int, ids: list[int] | None = None) -> ToyDrafter:
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(heap_size(V, DEPTH), len(ids) if ids else V, generator=g, dtype=torch.float64) * 2
    return ToyDrafter(logits, V, torch.tensor(ids) if ids else None)


def guesses(drafter: ToyDrafter, prefix: tuple[int, ...]) -> list[tuple[float, int]]:
    """(log probability, target token), best first, in plain Python."""
    index = 0
    for x in prefix:
        index = index * V + x + 1
    logits = drafter.logits_PV[index].tolist()
    total = math.log(sum(math.exp(x) for x in logits))
    ids = list(range(V)) if drafter.ids_V is None else drafter.ids_V.tolist()
    return sorted(((x - total, ids[i]) for i, x in enumerate(logits)), reverse=True)


def naive_dynamic(drafter: ToyDrafter, policy: TreePolicy) -> dict[tuple[int, ...], float]:
    values: dict[tuple[int, ...], float] = {}
    level: dict[tuple[int, ...], float] = {(): 0.0}
    for _ in range(policy.depth):
        children = {
            (*prefix, token): value + logp for prefix, value in level.items() for logp, token in guesses(drafter, prefix)[: policy.branch]
        }
        values |= children
        level = dict(sorted(children.items(), key=lambda kv: -kv[1])[: policy.expand])
        level = {path: value for path, value in level.items() if value >= math.log(max(policy.least, 1e-300))}
    return dict(sorted(values.items(), key=lambda kv: -kv[1])[: policy.nodes])


def prefixes(tree: Any) -> list[tuple[int, ...]]:
    out: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens_N.tolist(), tree.parents_N.tolist(), strict=True):
        out.append((*(out[parent] if parent >= 0 else ()), token))
    return out


@pytest.mark.parametrize("ids", [None, [6, 0, 3, 2]])
@pytest.mark.parametrize(
    "policy",
    [
        TreePolicy(depth=4, nodes=9, branch=3),
        TreePolicy(depth=3, nodes=20, branch=4, expand=2),
        TreePolicy(depth=4, nodes=1000, branch=2, expand=5),
        TreePolicy(depth=1, nodes=3, branch=4),
        TreePolicy(depth=4, nodes=6, branch=4, expand=1),
        TreePolicy(depth=4, nodes=12, branch=3, least=0.2),
        TreePolicy(depth=4, nodes=12, branch=3, least=0.99),
    ],
)
def test_dynamic_tree_equals_a_naive_one(policy: TreePolicy, ids: list[int] | None) -> None:
    for seed in range(8):
        drafter = toy(seed, ids)
        proposer = drafting(drafter)
        tree = proposer.propose(policy, Chance(), Sampling())
        tree.validate(V)
        assert tree.drawn_N is None and tree.q_RV is None
        assert len(set(prefixes(tree))) == len(tree)
        assert set(prefixes(tree)) == set(naive_dynamic(drafter, policy))
        assert len(drafter.steps) <= policy.depth - 1 and (policy.least or len(drafter.steps) == policy.depth - 1)
        assert sum(n for _, n in drafter.steps) <= policy.reads
        assert proposer.memory.rows() == ROOTS  # nodes are forgotten


@pytest.mark.parametrize("ids", [None, [6, 0, 3, 2]])
def test_chain_and_fixed_tree_follow_their_ranks(ids: list[int] | None) -> None:
    for policy in (TreePolicy("chain", depth=4), TreePolicy("fixed", paths=PATHS)):
        for seed in range(8):
            drafter = toy(seed, ids)
            tree = drafting(drafter).propose(policy, Chance(), Sampling())
            tree.validate(V)
            expected = []
            for path in policy.paths or [(0,) * d for d in range(1, 5)]:
                prefix: tuple[int, ...] = ()
                for rank in path:
                    prefix = (*prefix, guesses(drafter, prefix)[rank][1])
                expected.append(prefix)
            assert prefixes(tree) == expected
            assert len(drafter.steps) == 3 and sum(n for _, n in drafter.steps) == policy.reads


@pytest.mark.parametrize("rule", ["top_plus_one", "multi_round", "without_replacement"])
@pytest.mark.parametrize("ids", [None, [6, 0, 3, 2]])
def test_sampled_trees_are_valid_and_repeat_with_the_seed(rule: str, ids: list[int] | None) -> None:
    kinds = [TreePolicy("chain", depth=4), TreePolicy("fixed", paths=PATHS)]
    for policy in [*kinds, TreePolicy(depth=4, nodes=9, branch=3)] if rule == "top_plus_one" else kinds:
        sampling = Sampling(0.9, top_k=3, top_p=0.9, rule=rule)
        for seed in range(8):
            proposer = drafting(toy(seed, ids))
            tree, again, other = (
                proposer.propose(policy, Chance(torch.Generator().manual_seed(s)), sampling) for s in (seed, seed, seed + 100)
            )
            for t in (tree, again, other):
                t.validate(V)
            assert torch.equal(tree.tokens_N, again.tokens_N)
            if policy.kind != "dynamic":
                assert len(tree) == policy.nodes
                assert torch.equal(tree.parents_N, other.parents_N)
                assert policy.kind == "fixed" or bool(tree.drawn_N.all())


def test_the_deterministic_children_are_the_top_ones_and_the_drawn_one_is_another() -> None:
    drafter = toy(3)
    for seed in range(20):
        tree = drafting(drafter).propose(TreePolicy(depth=1, nodes=3, branch=3), Chance(torch.Generator().manual_seed(seed)), Sampling(1.0))
        assert tree.tokens_N[:2].tolist() == [token for _, token in guesses(drafter, ())[:2]]
        assert tree.drawn_N.tolist() == [False, False, True] and int(tree.tokens_N[2]) not in tree.tokens_N[:2].tolist()
        q = drafter.logits_PV[0].softmax(-1)
        q[tree.tokens_N[:2]] = 0
        assert torch.allclose(tree.q_RV[0], q / q.sum(), atol=1e-15) and not tree.q_RV[1:].any()


def test_at_most_and_reads() -> None:
    assert TreePolicy("chain", depth=5).at_most(2) == TreePolicy("chain", depth=2)
    assert TreePolicy("fixed", paths=PATHS).at_most(2).paths == tuple(sorted((p for p in PATHS if len(p) < 3), key=lambda p: (len(p), p)))
    dynamic = TreePolicy(depth=6, expand=3)
    assert dynamic.at_most(9) is dynamic and dynamic.at_most(4).depth == 4 and dynamic.at_most(4).reads == 9
    fixed = TreePolicy("fixed", paths=PATHS)
    assert (fixed.depth, fixed.nodes, fixed.branch, fixed.reads) == (4, 10, 3, 5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "bush"}, "kind"),
        ({"depth": 0}, "depth"),
        ({"nodes": -1}, "nodes"),
        ({"branch": 2.5}, "branch"),
        ({"expand": 0}, "expand"),
        ({"least": 1}, "least"),
        ({"kind": "fixed"}, "paths"),
        ({"paths": [(0,)]}, "paths"),
        ({"kind": "fixed", "paths": [(0,), (0, 0, 0)]}, r"\[0, 0, 0\]"),
        ({"kind": "fixed", "paths": [(1,)]}, "elder sibling"),
        ({"kind": "fixed", "paths": [()]}, "parent"),
        ({"kind": "fixed", "paths": [(0,), (0,)]}, "twice"),
        ({"depth": 100, "expand": MOST_READS}, "reads?"),
    ],
)
def test_a_wrong_policy_is_one_clear_line(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        TreePolicy(**arguments)


def test_a_rule_that_does_not_go_with_the_tree_is_refused() -> None:
    for rule, policy in [("token", TreePolicy()), ("block", TreePolicy("fixed", paths=PATHS)), ("multi_round", TreePolicy())]:
        with pytest.raises(UserError, match=rule):
            drafting(toy(0)).propose(policy, Chance(), Sampling(1.0, rule=rule))
        drafting(toy(0)).propose(policy, Chance(), Sampling(0.0, rule=rule))  # all rules coincide at temperature 0
    with pytest.raises(UserError, match="knows 2 tokens"):
        drafting(toy(0, [1, 2])).propose(TreePolicy(branch=3), Chance(), Sampling())
