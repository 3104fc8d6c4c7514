from __future__ import annotations

import heapq
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from headstart.heads.errors import UserError
from headstart.inference.decoding.counter_rng import SLOTS, CounterRNG
from headstart.inference.decoding.growth import draw_children
from headstart.inference.decoding.policy import AUTO, MOST_READS, TreePolicy, caterpillar, shapes_of
from headstart.inference.decoding.sampling import SHARPER, LogitsWarper, SamplingParams
from headstart.inference.decoding.tree import Tree
from tests.inference.decoding.toys import ROOTS, ToyDrafter, drafting, grower, heap_size, prefixes
from tests.inference.decoding.trees import validate

V, DEPTH = 7, 4
COLD = CounterRNG.of()
PATHS = ((0,), (0, 0), (1,), (0, 1), (0, 0, 0), (1, 0), (2,), (0, 0, 0, 0), (1, 0, 0), (1, 0, 1))


def toy(seed: int, ids: list[int] | None = None) -> ToyDrafter:
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(heap_size(V, DEPTH), len(ids) if ids else V, generator=g, dtype=torch.float64) * 2
    return ToyDrafter(logits, V, torch.tensor(ids) if ids else None)


def guesses(drafter: ToyDrafter, prefix: tuple[int, ...]) -> list[tuple[float, int]]:
    """(log probability, sharpened as at temperature 0, and target token), best first, in plain Python."""
    index = 0
    for x in prefix:
        index = index * V + x + 1
    logits = [SHARPER * x for x in drafter.logits_BPV[0, index].tolist()]
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


def rows_read(drafter: ToyDrafter, policy: TreePolicy) -> list[tuple[int, int]]:
    """The steps of a dynamic tree (depth, rows) that are needed: of its level's best nodes those that are probable enough, and still among
    the best of all levels.
    """
    best: list[float] = []
    level, steps = {(): 0.0}, list[tuple[int, int]]()
    for depth in range(2, policy.depth + 1):
        children = {(*path, x): value + logp for path, value in level.items() for logp, x in guesses(drafter, path)[: policy.branch]}
        best = sorted([*best, *children.values()], reverse=True)[: policy.nodes]
        least = max(best[-1], math.log(max(policy.least, 1e-300)))
        level = {path: value for path, value in sorted(children.items(), key=lambda kv: -kv[1])[: policy.expand] if value >= least}
        if level:
            steps.append((depth, len(level)))
    return steps


def naive_best_first(drafter: ToyDrafter, policy: TreePolicy) -> dict[tuple[int, ...], float]:
    """The best node that is not in the tree yet, again and again; then its children are candidates too."""
    chosen: dict[tuple[int, ...], float] = {}
    heap: list[tuple[float, tuple[int, ...]]] = [(-0.0, ())]
    while heap and len(chosen) <= policy.nodes:
        cost, path = heapq.heappop(heap)
        chosen[path] = -cost
        if len(path) < policy.depth and -cost >= math.log(max(policy.least, 1e-300)):
            for logp, token in guesses(drafter, path)[: policy.branch]:
                heapq.heappush(heap, (cost - logp, (*path, token)))
    return {path: value for path, value in chosen.items() if path}


def test_a_caterpillar_is_a_chain_with_siblings_beside_its_first_guesses() -> None:
    shape = caterpillar(8, 15, 4)
    assert [sum(len(p) == d for p in shape.paths) for d in range(1, 9)] == [4, 3, 2, 2, 1, 1, 1, 1] and shape.reads == 7
    assert all(not any(p[:-1]) for p in shape.paths)  # only the chain's guesses have children
    assert caterpillar(8, 3, 4) == TreePolicy("chain", depth=3) and caterpillar(8, 15, 1) == TreePolicy("chain", depth=8)
    assert caterpillar(2, 99, 3).nodes == 6
    assert AUTO.own_shape("auto", heat=2) == shape and {AUTO.own_shape("auto", heat).kind for heat in (0, 1)} == {"dynamic"}
    assert AUTO.own_shape("block", heat=2) == TreePolicy("chain", depth=8)
    assert AUTO.own_shape("top_plus_one", heat=2).kind == "dynamic"
    warm, cold, cool = (shapes_of(AUTO, "auto", heat) for heat in (2, 0, 1))
    assert (
        warm[-1] == shape
        and {s.kind for s in warm} == {"chain", "fixed"}
        and {s.kind for s in cold} == {"chain", "dynamic"}
        and cool == cold
    )
    assert [(tree.depth, tree.nodes) for tree in warm[-2:]] == [(3, 6), (8, 15)], "as many nodes a level"
    assert shapes_of(shape, "auto", 2) == [shape] and shapes_of(AUTO, "top_plus_one", 2) == cold


@pytest.mark.parametrize("rule", ["traversal", "without_replacement", "multi_round"])
def test_rules_that_need_a_tree_fixed_beforehand_name_those_that_do_not(rule: str) -> None:
    for policy in (AUTO, TreePolicy(), TreePolicy("best_first")):
        with pytest.raises(UserError, match=f"the rule {rule} needs a tree fixed beforehand: .* or the rule auto or top_plus_one"):
            policy.check(rule)


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
        tree = proposer.propose(policy, COLD, SamplingParams())
        validate(tree, V)
        assert tree.drawn_BN is None and tree.q_BRV is None
        assert len(set(prefixes(tree))) == len(tree)
        assert set(prefixes(tree)) == set(naive_dynamic(drafter, policy))
        assert drafter.steps == rows_read(drafter, policy) and sum(n for _, n in drafter.steps) <= policy.reads
        assert proposer.memory.rows() == ROOTS  # nodes are forgotten


@pytest.mark.parametrize("ids", [None, [6, 0, 3, 2]])
@pytest.mark.parametrize("nodes", [1, 2, 7, 20, 60])
@pytest.mark.parametrize(("depth", "branch", "least"), [(4, 3, 0.0), (2, 4, 0.0), (4, 4, 0.15), (3, 1, 0.0)])
def test_best_first_equals_a_heap(depth: int, branch: int, least: float, nodes: int, ids: list[int] | None) -> None:
    policy = TreePolicy("best_first", depth=depth, nodes=nodes, branch=branch, least=least)
    for seed in range(4):
        drafter = toy(seed, ids)
        tree = drafting(drafter).propose(policy, COLD, SamplingParams())
        validate(tree, V)
        assert len(set(prefixes(tree))) == len(tree) <= nodes
        assert set(prefixes(tree)) == set(naive_best_first(drafter, policy))


@pytest.mark.parametrize("ids", [None, [6, 0, 3, 2]])
def test_chain_and_fixed_tree_follow_their_ranks(ids: list[int] | None) -> None:
    for policy in (TreePolicy("chain", depth=4), TreePolicy("fixed", paths=PATHS)):
        for seed in range(8):
            drafter = toy(seed, ids)
            tree = drafting(drafter).propose(policy, COLD, SamplingParams())
            validate(tree, V)
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
        sampling = SamplingParams(0.9, top_k=3, top_p=0.9, rule=rule)
        for seed in range(8):
            proposer = drafting(toy(seed, ids))
            tree, again, other = (proposer.propose(policy, CounterRNG.of(s), sampling) for s in (seed, seed, seed + 100))
            for t in (tree, again, other):
                validate(t, V)
            assert torch.equal(tree.tokens_BN, again.tokens_BN)
            if policy.planned:
                assert len(tree) == policy.nodes
                assert torch.equal(tree.parents_BN, other.parents_BN)
                assert policy.kind == "fixed" or bool(tree.drawn_BN.all())
                worked_out = Tree(tree.tokens_BN, tree.parents_BN, tree.depths_BN, tree.depth).rows()
                assert tree._rows_BRR is not None and torch.equal(tree._rows_BRR, worked_out), "its plan has them ready"


def test_the_deterministic_children_are_the_top_ones_and_the_drawn_one_is_another() -> None:
    drafter = toy(3)
    for seed in range(20):
        tree = drafting(drafter).propose(TreePolicy(depth=1, nodes=3, branch=3), CounterRNG.of(seed), SamplingParams(1.0))
        top, last = tree.tokens_BN[0, :2].tolist(), int(tree.tokens_BN[0, 2])
        assert top == [token for _, token in guesses(drafter, ())[:2]] and last not in top
        assert tree.drawn_BN.tolist() == [[False, False, True]] and tree.draws == 1  # verification tries as many children of each row
        q = drafter.logits_BPV[0, 0].softmax(-1)
        q[top] = 0
        assert torch.allclose(tree.q_BRV[0, 0], q / q.sum(), atol=1e-15) and not tree.q_BRV[0, 1:].any()


def test_in_a_fixed_tree_the_last_child_of_every_row_is_the_drawn_one() -> None:
    """However many children the row has: an only child is drawn from all of q. Were it none, the text would stay exact, and shorter."""
    policy = TreePolicy("fixed", paths=PATHS)
    last = {row: max(path[-1] for path in PATHS if path[:-1] == row) for row in {path[:-1] for path in PATHS}}
    tree = drafting(toy(3)).propose(policy, CounterRNG.of(1), SamplingParams(1.0, rule="top_plus_one"))
    assert tree.drawn_BN is not None
    assert tree.drawn_BN[0].tolist() == [path[-1] == last[path[:-1]] for path in policy.paths]
    assert {*last.values()} == {0, 1, 2}


def test_a_drawn_child_is_not_more_probable_than_its_parent() -> None:
    """Rounded probabilities of a row may sum to more than 1. A tree cut by value would then keep a child without its parent."""
    logits = torch.randn(1, 100, 50, generator=torch.Generator().manual_seed(0))
    level = draw_children(LogitsWarper.of([SamplingParams(1.0)]), logits, 1, COLD, 1, "top_plus_one", value_BE=torch.zeros(1, 100))
    assert bool((logits.softmax(-1).sum(-1) > 1).any()) and level.values_BEK is not None and bool((level.values_BEK <= 0).all())


# ---------------------------------------------------------------- many sequences, and growth that looks


def contents(tree: Tree, b: int = 0) -> list[tuple[Any, ...]]:
    """Every node of a sequence: its path, and if it was drawn, from what."""
    out: list[tuple[Any, ...]] = []
    for n, path in enumerate(prefixes(tree, b)):
        assert int(tree.depths_BN[b, n]) == len(path) <= tree.depth
        drawn = tree.drawn_BN is not None and bool(tree.drawn_BN[b, n])
        out.append((path, tree.q_BRV[b, int(tree.parents_BN[b, n]) + 1].tolist() if drawn else None))
    if tree.drawn_BN is not None and tree.q_BRV is not None:  # and nothing else was drawn
        assert not tree.drawn_BN[b, len(out) :].any()
        rows = {int(tree.parents_BN[b, n]) + 1 for n, (_, q) in enumerate(out) if q}
        assert {r for r in range(len(tree) + 1) if tree.q_BRV[b, r].any()} == rows
    return out


SHAPES = [
    TreePolicy("chain", depth=4),
    TreePolicy("fixed", paths=PATHS),
    TreePolicy(depth=4, nodes=9, branch=3),
    TreePolicy(depth=4, nodes=40, branch=2, least=0.2),
    TreePolicy(depth=3, nodes=50, branch=2),
    TreePolicy("best_first", depth=3, nodes=8, branch=3, least=0.1),
]
ROUGH = {"top_k": 2, "top_p": 0.8}  # leaves rows with fewer tokens than children
MIXES = {
    "greedy": [SamplingParams()] * 3,
    "sampled": [SamplingParams(1.0), SamplingParams(0.7, min_p=0.1), SamplingParams(1.5, **ROUGH)],
    "mixed": [SamplingParams(0.9, **ROUGH), SamplingParams(), SamplingParams(0.6, top_k=4)],
}
CASES = [
    (policy, rule)
    for policy in SHAPES
    for rule in ("top_plus_one", "multi_round", "without_replacement")
    if policy.planned or rule == "top_plus_one"
]


@pytest.mark.parametrize("ids", [None, [6, 0, 3, 2]])
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize(("policy", "rule"), CASES)
def test_a_batch_grows_the_trees_of_its_sequences_alone(policy: TreePolicy, rule: str, mix: str, ids: list[int] | None) -> None:
    """Also: hasty growth leaves out places without a node, and nothing else."""
    samplings = [replace(s, rule=rule) for s in MIXES[mix]]
    toys = [toy(seed, ids) for seed in range(3)]
    together = grower(ToyDrafter(torch.cat([t.logits_BPV for t in toys]), V, toys[0].ids_V))
    alone = [grower(t) for t in toys]
    sizes = set()
    for trial in range(2):
        seeds, positions = torch.tensor([5, 6, 5]) + trial, torch.tensor([0, 7, 30])
        for hasty in (False, True):
            tree = together(policy, samplings, CounterRNG(seeds, positions), hasty)
            validate(tree, V)
            for b, sampling in enumerate(samplings):
                for hasty_alone in (False, True):
                    rng = CounterRNG.of(int(seeds[b]), int(positions[b]))
                    one = alone[b](policy, [sampling], rng, hasty_alone)
                    validate(one, V)
                    assert contents(tree, b) == contents(one)
                    assert not hasty_alone or len(one) == len(contents(one)) or policy.planned
                    sizes.add((len(one), one.depth) if hasty_alone else policy.nodes)
    assert policy.planned or mix == "greedy" or len(sizes) > 1, "trees of one size test nothing"


def test_at_most_and_reads() -> None:
    assert TreePolicy("chain", depth=5).at_most(2) == TreePolicy("chain", depth=2)
    assert TreePolicy("fixed", paths=PATHS).at_most(2).paths == tuple(sorted((p for p in PATHS if len(p) < 3), key=lambda p: (len(p), p)))
    dynamic = TreePolicy(depth=6, expand=3)
    assert dynamic.at_most(9) is dynamic and dynamic.at_most(4).depth == 4 and dynamic.at_most(4).reads == 9
    assert TreePolicy(depth=3, expand=MOST_READS // 2).reads == MOST_READS
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
        ({"branch": SLOTS, "expand": 1}, f"branch must be below {SLOTS}"),
        ({"least": 1}, "least"),
        ({"kind": "fixed"}, "paths"),
        ({"paths": [(0,)]}, "paths"),
        ({"kind": "fixed", "paths": [(0,), (0, 0, 0)]}, r"\[0, 0, 0\]"),
        ({"kind": "fixed", "paths": [(1,)]}, "elder sibling"),
        ({"kind": "fixed", "paths": [()]}, "parent"),
        ({"kind": "fixed", "paths": [(0,), (-1,)]}, r"path \[-1\] must follow its parent and its elder sibling"),
        ({"kind": "fixed", "paths": [(0,), (0,)]}, "twice"),
        ({"depth": 100, "expand": MOST_READS}, "reads?"),
    ],
)
def test_a_wrong_policy_is_one_clear_line(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        TreePolicy(**arguments)


def test_chains_are_those_whose_every_node_has_one_child() -> None:
    """A tree that follows the drafter's probabilities is none, even with as many nodes as levels."""
    line, beside = TreePolicy("fixed", paths=((0,), (0, 0))), TreePolicy("fixed", paths=((0,), (1,)))
    alike = TreePolicy("dynamic", depth=4, nodes=4)
    assert [policy.is_chain for policy in (TreePolicy("chain", depth=4), line, beside, alike)] == [True, True, False, False]


@pytest.mark.parametrize("rule", ["auto", "top_plus_one"])
@pytest.mark.parametrize("heat", [0, 1, 2])
def test_an_auto_policy_without_room_for_a_tree_is_of_chains(heat: int, rule: str) -> None:
    """One node, or one level, has no siblings beside a chain that any other shape could hold."""
    narrow, flat = TreePolicy("auto", depth=5, nodes=1), TreePolicy("auto", depth=1, nodes=9)
    assert narrow.own_shape(rule, heat) == TreePolicy("chain", depth=5)
    assert shapes_of(narrow, rule, heat) == [TreePolicy("chain", depth=d) for d in range(1, 6)]
    assert shapes_of(flat, rule, heat) == [TreePolicy("chain", depth=1)]


def test_a_rule_that_does_not_go_with_the_tree_is_refused() -> None:
    for rule, policy in [("token", TreePolicy()), ("block", TreePolicy("fixed", paths=PATHS)), ("multi_round", TreePolicy())]:
        with pytest.raises(UserError, match=rule):
            drafting(toy(0)).propose(policy, COLD, SamplingParams(1.0, rule=rule))
        drafting(toy(0)).propose(policy, COLD, SamplingParams(0.0, rule=rule))  # all rules coincide at temperature 0
    assert TreePolicy("auto", nodes=1).check("block") == "block"
    with pytest.raises(UserError, match=r"with kind auto set nodes=1"):
        TreePolicy("auto", nodes=2).check("block")
    with pytest.raises(UserError, match="knows 2 tokens"):
        drafting(toy(0, [1, 2])).propose(TreePolicy(branch=3), COLD, SamplingParams())
