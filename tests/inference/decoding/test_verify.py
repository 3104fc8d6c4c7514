"""Every rule is exact: the law of the emitted tokens is computed over all outcomes and compared with the target's own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headstart.heads.errors import UserError
from headstart.inference.decoding import growth
from headstart.inference.decoding.counter_rng import VERIFYING, CounterRNG
from headstart.inference.decoding.policy import TreePolicy, caterpillar
from headstart.inference.decoding.sampling import LogitsWarper, SamplingParams
from headstart.inference.decoding.tree import Tree
from headstart.inference.decoding.verify import RULES, Rule, choose, choose_alone, greedy, greedy_alone, rule_of, seen_rows, traversal_alone
from tests.inference.decoding.test_tree import parent_lists
from tests.inference.decoding.toys import ToyDrafter, grower, heap_size, outcomes, row_index, side_by_side, transformers_law
from tests.inference.decoding.trees import validate

# ---------------------------------------------------------------- a target and a drafter as tables


@dataclass
class Pair:
    target_PV: Tensor  # logits by prefix
    drafter: ToyDrafter
    V: int


def pair(kind: str, seed: int, V: int, depth: int) -> Pair:
    """Random tables; ``kind`` says how the two differ."""
    g = torch.Generator().manual_seed(seed)
    p, q = (torch.randn(heap_size(V, depth), V, generator=g, dtype=torch.float64) * 1.5 for _ in range(2))
    ids = None
    if kind == "equal":
        q = p.clone()
    if kind == "alike":
        q = p + 0.5 * q
    if kind == "zeros":  # each has tokens that the other never says
        p, q = (x.masked_fill(torch.rand(x.shape, generator=g) < 0.4, -1e4) for x in (p, q))
        p[:, 0], q[:, 1] = 0.0, 0.0  # but always one of its own
    if kind == "trimmed":
        ids = torch.tensor([V - 1, *range(V - 2)])
        q = q[:, : V - 1]
    if kind == "near_one_hot":
        p, q = p * 8, q * 8
    return Pair(p, ToyDrafter(q, V, ids), V)


PROMPT, ROOT = [2, 0], 1  # tokens that were seen before the tree, for the repetition penalty


def by_prefix(world: Pair, sampling: SamplingParams, depth: int) -> Tensor:
    """The target's own distribution after each prefix, by transformers."""
    seen = [[*PROMPT, ROOT, *prefix] for d in range(depth + 1) for prefix in product(range(world.V), repeat=d)]
    return transformers_law(world.target_PV[: len(seen)], sampling, seen)


def law(world: Pair, sampling: SamplingParams, depth: int) -> Tensor:
    """The target's own law of depth + 1 tokens, [V, .., V]."""
    p_PV = by_prefix(world, sampling, depth)
    joint, level = torch.ones(1, dtype=torch.float64), 0
    for d in range(depth + 1):
        joint = (joint[:, None] * p_PV[level : level + world.V**d]).flatten()
        level = level * world.V + 1
    return joint.view([world.V] * (depth + 1))


Mutation = Callable[[Tensor], Tensor]


def verified(rule: str, tree: Tree, p_BRV: Tensor, rng: CounterRNG, hasty: bool) -> tuple[list[int], int]:
    """Accepted nodes and the target's token, as one sequence alone is verified, or by the operations of a batch."""
    rule = rule_of(rule, tree)
    if hasty and rule in ("block", "traversal"):
        rows, token = traversal_alone(tree, p_BRV, rng)
        return [row - 1 for row in rows[1:]], token
    found = RULES[rule].verify(tree, p_BRV, rng, hasty)
    return found.path(), int(found.token_B)


def emitted_law(
    world: Pair, policy: TreePolicy, sampling: SamplingParams, wrong_p: Mutation | None = None, hasty: bool = False
) -> tuple[Tensor, float]:
    """Law of the tokens of one round, continued by the target where they are fewer; and the mean number accepted."""
    true, warp, grow = law(world, sampling, policy.depth), LogitsWarper.of([sampling]), grower(world.drafter)
    seen_1V = torch.zeros(1, world.V, dtype=torch.bool).index_fill_(1, torch.tensor(PROMPT), True)

    trees: dict[str, Tree] = {}  # many draws lead to the same one
    drafted: Counter[str] = Counter()
    for weight, tree in outcomes(lambda rng: grow(policy, [sampling], rng, hasty)):
        fields = (tree.tokens_BN, tree.parents_BN, tree.drawn_BN, tree.q_BRV)
        trees[key := repr([x.tolist() for x in fields if x is not None])] = tree
        drafted[key] += weight  # type: ignore[assignment]
    emitted: Counter[tuple[int, ...]] = Counter()
    for key, tree in trees.items():
        p_BRV = warp.target(world.target_PV[row_index(tree, world.V)][None], seen_rows(seen_1V, torch.tensor([ROOT]), tree))
        if wrong_p is not None:
            p_BRV = wrong_p(p_BRV)
        tokens_N = tree.tokens_BN[0].tolist()
        for weight, (nodes, token) in outcomes(lambda rng, t=tree, p=p_BRV: verified(sampling.rule, t, p, rng, hasty)):
            tokens = (*(tokens_N[node] for node in nodes), token)
            emitted[tokens] += weight * drafted[key]  # type: ignore[assignment]
    return continued(emitted, true), sum(w * (len(tokens) - 1) for tokens, w in emitted.items())


def continued(emitted: Counter[tuple[int, ...]], true: Tensor) -> Tensor:
    """The law of as many tokens as ``true`` has, those that were not emitted drawn from the target."""
    found = torch.zeros_like(true)
    for tokens, weight in emitted.items():
        assert true[tokens].sum() > 0, f"{tokens} cannot come from the target"
        found[tokens] += weight * true[tokens] / true[tokens].sum()
    return found


def variation(world: Pair, policy: TreePolicy, sampling: SamplingParams, wrong_p: Mutation | None = None, hasty: bool = False) -> float:
    found, _ = emitted_law(world, policy, sampling, wrong_p, hasty)
    return float((found - law(world, sampling, policy.depth)).abs().sum() / 2)


# ---------------------------------------------------------------- exactness

KINDS = ["random", "equal", "alike", "zeros", "trimmed", "near_one_hot"]
CHAIN = TreePolicy("chain", depth=3)
FIXED = TreePolicy("fixed", paths=((0,), (1,), (0, 0), (0, 1), (1, 0)))
WIDE = TreePolicy("fixed", paths=((0,), (1,), (2,)))
DEEP = TreePolicy("fixed", paths=((0,), (1,), (1, 0), (1, 0, 0), (1, 0, 1)))
LINE = TreePolicy("fixed", paths=((0,), (0, 0), (0, 0, 0)))  # a chain by its paths
PRUNED = TreePolicy(depth=3, nodes=4, branch=2)
PRUNED_WIDE = TreePolicy(depth=2, nodes=5, branch=3, expand=2)
FULL = TreePolicy(depth=2, nodes=99, branch=2)
DOUBTFUL = TreePolicy(depth=3, nodes=6, branch=2, least=0.3)
BEST_FIRST = TreePolicy("best_first", depth=3, nodes=3, branch=2)
CATERPILLAR = caterpillar(3, 5, 2)
WARPS = [
    {"temperature": 0.6, "top_k": 3},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.3},
    ALL_OF_THEM := {"temperature": 0.8, "top_k": 3, "top_p": 0.95, "min_p": 0.2, "repetition_penalty": 1.6},
    {"temperature": 1.0, "repetition_penalty": 2.0},  # the target's distribution depends on the path, the drafter's does not
    {"temperature": 1.0, "repetition_penalty": 0.6},
]
CASES = [(rule, CHAIN) for rule in RULES]
CASES += [(rule, policy) for rule in ("traversal", "multi_round", "without_replacement", "top_plus_one") for policy in (FIXED, WIDE, DEEP)]
CASES += [("top_plus_one", policy) for policy in (PRUNED, PRUNED_WIDE, FULL, DOUBTFUL, BEST_FIRST)]
CASES += [("auto", policy) for policy in (CHAIN, LINE, FIXED, WIDE, DEEP, CATERPILLAR, PRUNED)]


def vocab(rule: str, policy: TreePolicy) -> int:
    """Many draws a row make many outcomes."""
    return 3 if RULES[rule_of(rule, policy)].draw != "top_plus_one" and policy in (FIXED, DEEP, CATERPILLAR) else 4


def some(name: str, values: list[Any], enough: list[Any]) -> pytest.MarkDecorator:
    """Every case with every value. What has many outcomes, and chains under the rules for trees, are slow with others than ``enough``."""
    dear = [(rule, policy) for rule, policy in CASES if policy in (FIXED, DEEP, CATERPILLAR, FULL, DOUBTFUL, BEST_FIRST) or policy == CHAIN]
    dear = [(rule, policy) for rule, policy in dear if rule_of(rule, policy) not in ("block", "token")]
    all_of_them = [
        pytest.param(rule, policy, value, marks=pytest.mark.slow if (rule, policy) in dear and value not in enough else ())
        for rule, policy in CASES
        for value in values
    ]
    return pytest.mark.parametrize(("rule", "policy", name), all_of_them)


@some("kind", KINDS, enough=["zeros"])
def test_exact(rule: str, policy: TreePolicy, kind: str) -> None:
    assert variation(pair(kind, 1, vocab(rule, policy), 3), policy, SamplingParams(1.0, rule=rule)) < 1e-9


@some("kind", ["alike"], enough=[])
def test_exact_where_it_looks(rule: str, policy: TreePolicy, kind: str) -> None:
    assert variation(pair(kind, 1, vocab(rule, policy), 3), policy, SamplingParams(1.0, rule=rule), hasty=True) < 1e-9


@some("warp", WARPS, enough=[ALL_OF_THEM])
def test_exact_under_warping(rule: str, policy: TreePolicy, warp: dict[str, float]) -> None:
    assert variation(pair("alike", 2, vocab(rule, policy), 3), policy, SamplingParams(rule=rule, **warp)) < 1e-9


@pytest.mark.slow
def test_exact_on_larger_vocabulary() -> None:
    for rule in RULES:
        assert variation(pair("random", 5, 6, 2), TreePolicy("chain", depth=2), SamplingParams(1.0, rule=rule)) < 1e-9
    for seed in range(3):
        assert variation(pair("alike", seed, 6, 2), TreePolicy(depth=2, nodes=3, branch=2), SamplingParams(1.0)) < 1e-9


@pytest.mark.parametrize("rule", RULES)
def test_deterministic_trees_are_exact_under_every_rule(rule: str) -> None:
    """A proposer that draws nothing (n-grams, say) may be verified by any rule."""
    world = pair("random", 3, 4, 2)
    p_PV, true = world.target_PV.softmax(-1), law(world, SamplingParams(1.0), 2)
    tree = Tree.of([1, 2], [-1, 0]) if RULES[rule].chain_only else Tree.of([1, 2, 2, 3, 0], [-1, -1, 0, 0, 1])
    for hasty in (False, True):
        emitted: Counter[tuple[int, ...]] = Counter()
        for weight, verdict in outcomes(lambda c, h=hasty: RULES[rule].verify(tree, p_PV[None, row_index(tree, 4)], c, h)):
            emitted[(*tree.tokens_BN[0, verdict.path()].tolist(), int(verdict.token_B))] += weight  # type: ignore[assignment]
        assert (continued(emitted, true) - true).abs().sum() < 1e-9
        alone = list(outcomes(lambda c, h=hasty: RULES[rule].verify(Tree.empty(), p_PV[None, :1], c, h)))
        assert all(v.path() == [] for _, v in alone)
        assert torch.allclose(torch.tensor([w for w, _ in alone], dtype=torch.float64), p_PV[0], atol=1e-12)


@pytest.mark.parametrize("hasty", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_what_only_rounding_rejects_is_drawn_anew(rule: str, hasty: bool) -> None:
    """The target's probabilities are the drafter's, but sum to a little less than 1: nothing is left of them."""
    q_V, found = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), Counter[int]()
    for x in range(3):
        tree = Tree.of([x], [-1])
        tree.drawn_BN, tree.q_BRV = torch.ones(1, 1, dtype=torch.bool), torch.stack([q_V, torch.zeros(3, dtype=torch.float64)])[None]
        p_1RV = torch.stack([0.999 * q_V, q_V])[None]
        for weight, (path, token) in outcomes(lambda rng, t=tree, p=p_1RV: verified(rule, t, p, rng, hasty)):
            found[x if path else token] += float(q_V[x]) * weight  # type: ignore[assignment]
    assert [found[x] for x in range(3)] == pytest.approx(q_V.tolist(), abs=1e-12)


# ---------------------------------------------------------------- the test has teeth


def test_ranking_the_drawn_child_by_its_own_probability_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = growth.draw_children

    def wrong(warp: LogitsWarper, logits_BEV: Tensor, *args: Any) -> Any:
        level, value_BE = right(warp, logits_BEV, *args), args[-1]
        own = value_BE[..., None] + warp.drafter(logits_BEV).gather(2, level.tokens_BEK).log()
        return level._replace(values_BEK=torch.where(level.drawn_BEK, own, level.values_BEK))

    worst_right = max(variation(pair("random", s, 4, 3), PRUNED, SamplingParams(1.0)) for s in range(3))
    monkeypatch.setattr(growth, "draw_children", wrong)
    worst_wrong = max(variation(pair("random", s, 4, 3), PRUNED, SamplingParams(1.0)) for s in range(3))
    assert worst_right < 1e-9 and worst_wrong > 1e-3


def test_keeping_q_of_a_cut_child_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calling the last kept child of a row drawn when the drawn one was cut."""
    right = growth._cut

    def wrong(policy: TreePolicy, plan: Any, levels: Any, *args: Any) -> Tree:
        tree = right(policy, plan, levels, *args)
        last = max(i for i, p in enumerate(tree.parents_BN[0].tolist()) if p == -1)
        tree.q_BRV[0, 0], tree.drawn_BN[0, last] = levels[0].q_BEV[0, 0], True
        return tree

    world = pair("near_one_hot", 0, 4, 3)
    one = TreePolicy(depth=1, nodes=1, branch=2)
    assert variation(world, one, SamplingParams(1.0)) < 1e-9
    monkeypatch.setattr(growth, "_cut", wrong)
    assert variation(world, one, SamplingParams(1.0)) > 1e-3


@pytest.mark.parametrize(("rule", "policy"), CASES)
def test_renormalising_the_target_is_caught(rule: str, policy: TreePolicy) -> None:
    """The target's distribution restricted to the drafter's vocabulary."""
    world = pair("trimmed", 1, vocab(rule, policy), 3)

    def renormalised(p_BRV: Tensor) -> Tensor:
        ids_V = world.drafter.ids_V
        kept = torch.zeros_like(p_BRV).index_copy(2, ids_V, p_BRV[..., ids_V])
        return kept / kept.sum(-1, keepdim=True)

    assert variation(world, policy, SamplingParams(1.0, rule=rule), renormalised) > 1e-2


@pytest.mark.parametrize(("draws", "verify"), [("multi_round", "without_replacement"), ("without_replacement", "multi_round")])
def test_verifying_with_the_wrong_rule_is_caught(draws: str, verify: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, draws, Rule(RULES[verify].verify, RULES[draws].draw))
    assert variation(pair("random", 1, 3, 3), FIXED, SamplingParams(1.0, rule=draws)) > 1e-3


def test_traversal_of_trees_whose_nodes_compete_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """There what is drawn in one subtree decides which nodes another one keeps. (In one of a hundred worlds: this one was searched.)"""
    generator = torch.Generator().manual_seed(261)
    q_PV = pair("random", 261, 3, 3).drafter.logits_BPV[0] * (1 + 6 * torch.rand(1, generator=generator).double())
    p_PV = q_PV + 2 * torch.randn(q_PV.shape, generator=generator, dtype=torch.float64)
    world, policy = Pair(p_PV, ToyDrafter(q_PV, 3, None), 3), TreePolicy(depth=3, nodes=3, branch=2)
    assert variation(world, policy, SamplingParams(1.0)) < 1e-9
    monkeypatch.setitem(RULES, "top_plus_one", Rule(RULES["traversal"].verify))
    assert variation(world, policy, SamplingParams(1.0)) > 1e-2


@pytest.mark.parametrize("policy", [CHAIN, PRUNED])
def test_penalising_every_row_alike_is_caught(policy: TreePolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the tokens of the sequence and the root row's alone, without those of the path."""
    how = SamplingParams(1.0, repetition_penalty=2.0)
    assert variation(pair("random", 1, 4, 3), policy, how) < 1e-9
    right = seen_rows
    monkeypatch.setitem(globals(), "seen_rows", lambda *args: right(*args)[:, :1].expand(-1, len(args[2]) + 1, -1))
    assert variation(pair("random", 1, 4, 3), policy, how) > 1e-2


# ---------------------------------------------------------------- orderings


@pytest.mark.slow
def test_known_orderings() -> None:
    """Block verification accepts at least as much as the token rule; top plus one at least as much as multi-round
    at one node, and without replacement at least as much as with; traversal at least as much as a walk from the root."""
    star = TreePolicy("fixed", paths=((0,), (1,), (2,)))
    gains = []
    for kind, seed in product(("random", "alike"), range(2)):
        world = pair(kind, seed, 4, 3)
        mean = {rule: emitted_law(world, CHAIN, SamplingParams(1.0, rule=rule))[1] for rule in ("token", "block")}
        assert mean["block"] >= mean["token"] - 1e-12
        node = {
            rule: emitted_law(world, star, SamplingParams(1.0, rule=rule))[1]
            for rule in ("multi_round", "without_replacement", "top_plus_one")
        }
        assert node["top_plus_one"] >= node["multi_round"] - 1e-12
        assert node["without_replacement"] >= node["multi_round"] - 1e-12
        how = {
            rule: emitted_law(pair(kind, seed, 3, 2), caterpillar(2, 3, 2), SamplingParams(1.0, rule=rule))[1]
            for rule in ("traversal", "without_replacement")
        }
        assert how["traversal"] >= how["without_replacement"] - 1e-12
        gains.append(
            (mean["block"] - mean["token"], node["top_plus_one"] - node["multi_round"], how["traversal"] - how["without_replacement"])
        )
    assert min(max(g) for g in zip(*gains, strict=True)) > 1e-3  # and somewhere strictly more


def accepted(chain: Tree, p_1RV: Tensor, rng: CounterRNG, alone: bool) -> int:
    return len(traversal_alone(chain, p_1RV, rng)[0]) - 1 if alone else int(RULES["block"].verify(chain, p_1RV, rng, False).count_B)


def test_a_chain_is_accepted_as_block_verification_says() -> None:
    """Algorithm 2 of 2403.10444: how probable each number of accepted guesses is."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(5):
        p_RV, q_NV = (torch.randn(n, 5, generator=generator, dtype=torch.float64).mul(2).softmax(-1) for n in (4, 3))
        x, w = [int(torch.multinomial(q_V, 1, generator=generator)) for q_V in q_NV], [1.0]
        for i in range(3):
            w.append(min(1.0, w[i] * float(p_RV[i, x[i]] / q_NV[i, x[i]])))
        s = [float((w[i] * p_RV[i] - q_NV[i]).clamp(min=0).sum()) for i in range(3)]
        passes, closed, wanted = [*(s[i] / (s[i] + 1 - w[i]) for i in range(3)), w[3]], 1.0, []
        for i in (3, 2, 1, 0):
            wanted.insert(0, closed * passes[i])
            closed *= 1 - passes[i]
        tree = Tree.of(x, [-1, 0, 1])
        tree.drawn_BN, tree.q_BRV = torch.ones(1, 3, dtype=torch.bool), torch.cat([q_NV, torch.zeros(1, 5, dtype=torch.float64)])[None]
        for alone in (False, True):
            found = [0.0] * 4
            for weight, count in outcomes(lambda rng, t=tree, p=p_RV[None], alone=alone: accepted(t, p, rng, alone)):
                found[count] += weight
            assert found == pytest.approx(wanted, abs=1e-12)


def test_auto_is_the_rule_of_the_shape_for_policies_and_their_trees_alike() -> None:
    """Also where a fixed tree is cut to one level."""
    world = pair("alike", 0, 4, 3)
    for policy in (CHAIN, LINE, FIXED, WIDE, DEEP, FIXED.at_most(1), DEEP.at_most(1), PRUNED, BEST_FIRST):
        tree = grower(world.drafter)(policy, [SamplingParams(1.0)], CounterRNG.of(1), False)
        wanted = "block" if policy in (CHAIN, LINE) else "traversal" if policy.kind == "fixed" else "top_plus_one"
        assert rule_of("auto", policy) == rule_of("auto", tree) == policy.check("auto") == wanted
        assert rule_of("token", policy) == rule_of("token", tree) == "token"


def test_equal_drafter_is_always_accepted_on_a_chain() -> None:
    for rule in RULES:
        assert abs(emitted_law(pair("equal", 0, 4, 3), CHAIN, SamplingParams(1.0, rule=rule))[1] - 3) < 1e-9


# ---------------------------------------------------------------- random numbers


@pytest.mark.parametrize(("rule", "policy"), CASES)
def test_drafting_and_verifying_share_no_slot(rule: str, policy: TreePolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    slots: list[int] = []
    right = CounterRNG.uniform
    monkeypatch.setattr(CounterRNG, "uniform", lambda self, slot, *shape: slots.append(slot) or right(self, slot, *shape))
    world, rng = pair("random", 1, 4, 3), CounterRNG.of(1)
    tree = grower(world.drafter)(policy, [SamplingParams(1.0, rule=rule)], rng, False)
    drafting, slots = slots, []
    RULES[rule_of(rule, tree)].verify(tree, world.target_PV[row_index(tree, 4)].softmax(-1)[None], rng, False)
    assert drafting and slots and max(drafting) < VERIFYING <= min(slots)
    assert len({*drafting, *slots}) == len(drafting) + len(slots)


# ---------------------------------------------------------------- greedy


@settings(max_examples=200, deadline=None)
@given(st.lists(parent_lists(), min_size=1, max_size=3), st.randoms(use_true_random=False))
def test_greedy_equals_a_naive_walk(batch: list[list[int]], random: Any) -> None:
    trees, choices, expected = [], [], []
    for parents in batch:
        siblings: dict[int, list[int]] = {}
        tokens = []
        for p in parents:  # siblings differ
            taken = siblings.setdefault(p, [])
            taken.append(random.choice([t for t in range(25) if t not in taken][:3]))
            tokens.append(taken[-1])
        choice = [random.randrange(3) for _ in range(21)]
        row, path = 0, []
        while step := [i for i, p in enumerate(parents) if p == row - 1 and tokens[i] == choice[row]]:
            path.append(step[0])
            row = step[0] + 1
        trees.append(Tree.of(tokens, parents))
        choices.append(choice)
        expected.append((path, choice[row]))
    alone = [greedy_alone(tree, choice) for tree, choice in zip(trees, choices, strict=True)]
    assert [([row - 1 for row in rows[1:]], token) for rows, token in alone] == expected
    tree = side_by_side(trees)
    choice_BR = torch.tensor(choices)[:, : len(tree) + 1]
    walked = torch.nn.functional.one_hot(choice_BR, 25).double()
    # walking over certainties is the same: greedy sequences among sampled ones
    rng = CounterRNG(torch.arange(len(batch)), torch.arange(len(batch)))
    for verdict in (greedy(tree, choice_BR), RULES["multi_round"].verify(tree, walked, rng, False)):
        assert [(verdict.path(b), int(verdict.token_B[b])) for b in range(len(batch))] == expected
        assert verdict.rows_BA.shape == (len(batch), tree.depth + 1)
        assert all(not row[1 + int(n) :].any() for row, n in zip(verdict.rows_BA, verdict.count_B, strict=True))


# ---------------------------------------------------------------- many sequences


SIZES = {
    True: [CHAIN, TreePolicy("chain", depth=1), CHAIN, TreePolicy("chain", depth=2)],
    False: [FIXED, WIDE, DEEP, TreePolicy("fixed", paths=((0,), (0, 0)))],
}


@pytest.mark.parametrize("penalty", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_a_batch_gets_the_verdicts_of_its_sequences_alone(rule: str, penalty: bool) -> None:
    """Trees of several shapes, one sequence that guesses nothing, one that is greedy; settings differ."""
    hows = [
        SamplingParams(1.0),
        SamplingParams(0.7, top_k=3),
        SamplingParams(1.3, top_p=0.9, min_p=0.05),
        SamplingParams(),
        SamplingParams(0.9, min_p=0.1),
    ]
    hows = [replace(how, rule=rule, repetition_penalty=1.0 + 0.2 * b if penalty else 1.0) for b, how in enumerate(hows)]
    worlds = [pair("alike", seed, 4, 3) for seed in range(5)]
    growers = [grower(w.drafter) for w in worlds]
    seen_BV = torch.tensor([[b == v for v in range(4)] for b in range(5)])
    counts = Counter[int]()
    for trial in range(20):
        seeds_B, positions_B = torch.arange(5) % 3 + 100 * trial, torch.arange(5) ** 2
        chances = [CounterRNG.of(int(s), int(p)) for s, p in zip(seeds_B, positions_B, strict=True)]
        trees = [g(p, [how], c, True) for g, p, how, c in zip(growers, SIZES[RULES[rule].chain_only], hows, chances, strict=False)]
        trees.append(Tree.empty())
        tree, roots_B = side_by_side(trees), torch.arange(5) % 4
        validate(tree, 4)
        logits_BRV = torch.zeros(5, len(tree) + 1, 4, dtype=torch.float64)
        alone = []
        for b, one in enumerate(trees):
            logits_BRV[b, : len(one) + 1] = worlds[b].target_PV[row_index(one, 4)]
            seen = seen_rows(seen_BV[b : b + 1], roots_B[b : b + 1], one) if penalty else None
            alone.append(
                choose(logits_BRV[b : b + 1, : len(one) + 1], one, LogitsWarper.of([hows[b]]), rule, chances[b], seen, hasty=b > 2)
            )
        for hasty in (False, True):
            rng, seen = CounterRNG(seeds_B, positions_B), seen_rows(seen_BV, roots_B, tree) if penalty else None
            both = choose(logits_BRV, tree, LogitsWarper.of(hows), rule, rng, seen, hasty)
            for b, one in enumerate(alone):
                assert (both.path(b), int(both.token_B[b]), int(both.count_B[b])) == (one.path(), int(one.token_B), int(one.count_B))
        counts.update(both.count_B.tolist())
    assert len(counts) > 2, "rounds that are all alike test nothing"


def test_block_refuses_trees() -> None:
    """Of many sequences as of one."""
    for verify in (choose, choose_alone):
        with pytest.raises(UserError, match="chain"):
            verify(torch.zeros(1, 3, 2), Tree.of([0, 0], [-1, -1]), LogitsWarper.of([SamplingParams(1.0)]), "block", CounterRNG.of())
