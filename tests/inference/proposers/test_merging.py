"""Unions and hybrids: merged by prefix within the nodes allowed, exact where something is drawn; a hybrid's drafter misses nothing."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from headstart.heads.base import Roots
from headstart.heads.errors import UserError
from headstart.inference.decoding.context import Context
from headstart.inference.decoding.counter_rng import CounterRNG
from headstart.inference.decoding.decode import generate
from headstart.inference.decoding.policy import TreePolicy, caterpillar
from headstart.inference.decoding.propose import Proposer
from headstart.inference.decoding.sampling import LogitsWarper, SamplingParams
from headstart.inference.decoding.tree import Tree
from headstart.inference.decoding.verify import RULES, rule_of
from headstart.inference.proposers.base import Trie
from headstart.inference.proposers.hybrid import Hybrid
from headstart.inference.proposers.ngram import Ngram
from headstart.inference.proposers.union import Union, _at_most
from tests.inference.decoding.test_lossless import NEW, POLICIES, PROMPTS, TARGET, Oracle, plain
from tests.inference.decoding.test_verify import Pair, continued, law, pair
from tests.inference.decoding.toys import ToyDrafter, drafting, outcomes, prefixes, row_index
from tests.inference.decoding.trees import validate
from tests.inference.proposers.common import Knowing

Path = tuple[int, ...]


@dataclass
class Paths:
    """Guesses these paths, as many nodes of them as it may."""

    paths: Sequence[Path]
    taps: tuple[int, ...] = ()
    asked: int = 0

    def start(self, context: Context, tokens: int) -> None: ...

    def absorb(self, roots: Roots) -> None: ...

    def propose(self, policy: TreePolicy, rng: CounterRNG, sampling: SamplingParams) -> Tree:
        self.asked, self.sampling = policy.nodes, sampling
        trie = Trie(policy.nodes, policy.nodes)
        for path in self.paths:
            node: int | None = -1
            for token in path[: policy.depth]:
                node = None if node is None else trie.add(node, token)
        return trie.tree(torch.device("cpu"))


def closed(paths: Sequence[Path]) -> set[Path]:
    return {path[:i] for path in paths for i in range(1, len(path) + 1)}


ONE, TWO, THREE = ((0, 1, 2), (0, 3)), ((0, 1, 4), (5,)), ((0, 3, 1, 1), (5, 5), (6,))


def test_a_union_has_every_prefix_once() -> None:
    for parts in itertools.permutations((ONE, TWO, THREE)):
        tree = Union([Paths(p) for p in parts]).propose(TreePolicy(depth=9, nodes=40), CounterRNG.of(), SamplingParams())
        assert Counter(prefixes(tree)) == Counter(closed([*ONE, *TWO, *THREE]))
        validate(tree, 7)


def test_roots_carry_what_any_part_reads() -> None:
    """Not only the last one."""
    assert Union([Paths((), taps=(5, 1)), Paths(()), Paths((), taps=(1, 3))]).taps == (1, 3, 5)


def test_nodes_that_one_leaves_go_to_those_behind_it() -> None:
    one, two, three = Paths(((0, 1, 2, 3, 4, 5),)), Paths(()), Paths(((0, 1, 6, 6, 6, 6, 6), (2,)))
    tree = Union([one, two, three]).propose(TreePolicy(depth=9, nodes=9), CounterRNG.of(), SamplingParams())
    assert (one.asked, two.asked, three.asked) == (3, 3, 6)
    assert prefixes(tree) == [*[(0, 1, 6, 6, 6, 6)[:i] for i in range(1, 7)], (0, 1, 2)]
    for nodes in range(1, 6):
        tree = Union([Paths(ONE), Paths(TWO), Paths(THREE)]).propose(TreePolicy(depth=2, nodes=nodes), CounterRNG.of(), SamplingParams())
        assert 1 <= len(tree) <= nodes and set(prefixes(tree)) <= {p[:2] for p in closed([*ONE, *TWO, *THREE])}


def test_under_a_chain_policy_it_stays_a_chain() -> None:
    policy = TreePolicy("chain", depth=3)
    for parts, wanted in (((ONE[:1], TWO[:1]), (0, 1, 4)), ((((5, 6, 7),), ((5, 6),)), (5, 6, 7)), ((((5, 6, 7),), ()), (5, 6, 7))):
        tree = Union([Paths(p) for p in parts]).propose(policy, CounterRNG.of(), SamplingParams())
        assert prefixes(tree)[-1] == wanted and len(tree) == 3


def test_a_fixed_tree_is_shared_path_by_path() -> None:
    one, two = Paths(ONE), Paths(TWO)
    policy = POLICIES["fixed"]
    tree = Union([one, two]).propose(policy, CounterRNG.of(), SamplingParams())
    assert (one.asked, two.asked) == (5, 6)  # it has used four
    assert sorted(prefixes(tree)) == [(0,), (0, 1), (0, 1, 2), (0, 1, 4), (0, 3), (5,)]


def test_a_fixed_tree_keeps_its_first_guesses_when_it_is_cut() -> None:
    """The other nodes stand beside them: by level its chain would end where theirs begin."""
    one, two, policy = Paths(((1, 2, 3, 4, 5, 6),)), Paths(((6, 5, 4, 3, 2, 1),)), caterpillar(6, 10, 3)
    tree = Union([one, two]).propose(policy, CounterRNG.of(), SamplingParams())
    assert (one.asked, two.asked) == (5, 5) and {(1, 2, 3, 4, 5), (6, 5, 4, 3, 2)} <= set(prefixes(tree))
    for whole in (policy, POLICIES["fixed"], FIXED, LINE):
        for nodes in range(1, whole.nodes + 1):
            cut = _at_most(whole, nodes)  # raises where a path has lost its parent or elder sibling
            assert cut.nodes == nodes and set(cut.paths) <= set(whole.paths) and (0,) * min(nodes, whole.depth) in cut.paths


# ---------------------------------------------------------------- exactness where something is drawn


def emitted(union: Proposer, world: Pair, policy: TreePolicy, sampling: SamplingParams) -> tuple[torch.Tensor, Counter[str], float]:
    """The law of one round's tokens over all outcomes, the kinds of nodes seen, the mean number accepted."""
    warp, found, seen, accepted = LogitsWarper.of([sampling]), Counter[tuple[int, ...]](), Counter[str](), 0.0
    for weight, tree in outcomes(lambda rng: union.propose(policy, rng, sampling)):
        validate(tree, world.V)
        assert len(tree) <= policy.nodes and tree.drawn_BN is not None
        seen.update("drawn" if drawn else "deterministic" for drawn in tree.drawn_BN[0].tolist())
        p_BRV = warp.target(world.target_PV[row_index(tree, world.V)][None])
        for chosen, verdict in outcomes(lambda rng, t=tree, p=p_BRV: RULES[rule_of(sampling.rule, t)].verify(t, p, rng, True)):
            tokens = (*(int(tree.tokens_BN[0, node]) for node in verdict.path()), int(verdict.token_B))
            found[tokens] += weight * chosen  # type: ignore[assignment]
            accepted += weight * chosen * (len(tokens) - 1)
    return continued(found, law(world, sampling, policy.depth)), seen, accepted


FIXED = TreePolicy("fixed", paths=((0,), (1,), (0, 0), (0, 1), (1, 0)))  # three for the part that draws, two of them beside each other
DYNAMIC = TreePolicy(depth=2, nodes=9, branch=2)
LINE = TreePolicy("fixed", paths=((0,), (1,), (0, 0), (0, 0, 0)))  # the part that draws gets a chain
STRAIGHT = TreePolicy("fixed", paths=((0,), (0, 0), (0, 0, 0)))
DRAWN = [
    (DYNAMIC, "top_plus_one"),
    (TreePolicy("best_first", depth=2, nodes=12, branch=2), "top_plus_one"),
    (FIXED, "top_plus_one"),
    (FIXED, "multi_round"),
    (FIXED, "without_replacement"),
    (TreePolicy("chain", depth=2), "token"),
    (TreePolicy("chain", depth=3), "block"),
    *((policy, "auto") for policy in (FIXED, LINE, STRAIGHT, caterpillar(3, 5, 2), DYNAMIC, TreePolicy("chain", depth=3))),
]


@pytest.mark.parametrize("kind", ["random", "alike", "zeros"])
@pytest.mark.parametrize(("policy", "rule"), DRAWN)
def test_a_union_with_drawn_guesses_is_exact(policy: TreePolicy, rule: str, kind: str) -> None:
    world, sampling = pair(kind, 3, 3, policy.depth), SamplingParams(0.9, rule=rule)
    paths = Paths(((1, 2), (2,)))
    union = Union([paths, drafting(world.drafter)])
    found, seen, _ = emitted(union, world, policy, sampling)
    assert float((found - law(world, sampling, policy.depth)).abs().sum() / 2) < 1e-9
    assert (seen["drawn"] or kind == "zeros") and paths.sampling.temperature == 0  # of zeros there may be nothing left to draw
    if policy.kind != "chain":
        assert seen["deterministic"]


@pytest.mark.parametrize("rule", ["multi_round", "without_replacement", "top_plus_one"])
def test_where_the_others_say_nothing_as_much_is_accepted_as_of_the_last_part_alone(rule: str) -> None:
    """All of a row's drawn children are tried."""
    world, sampling = pair("random", 3, 3, 2), SamplingParams(0.9, rule=rule)
    own = drafting(world.drafter)
    assert emitted(Union([Paths(()), own]), world, FIXED, sampling)[2] == pytest.approx(emitted(own, world, FIXED, sampling)[2], abs=1e-12)


def test_the_rule_of_a_merged_tree_does_not_hang_on_what_was_drawn() -> None:
    """A dynamic tree is a chain now and then."""
    world, sampling, chains = pair("near_one_hot", 1, 4, 3), SamplingParams(1.0), 0
    union = Union([Paths(()), drafting(world.drafter)])
    for _, tree in outcomes(lambda rng: union.propose(TreePolicy(depth=3, nodes=3, branch=2), rng, sampling)):
        chains += int(tree.depths_BN.max()) == len(tree) > 1
        assert rule_of("auto", tree) == "top_plus_one"
    assert chains
    # a chain by its paths, to which the others' guesses add a node or not
    line, union = TreePolicy("fixed", paths=((0,), (0, 0), (0, 0, 0))), Union([Paths(((1, 2),)), drafting(world.drafter)])
    trees = [tree for _, tree in outcomes(lambda rng: union.propose(line, rng, sampling))]
    assert {rule_of("auto", tree) for tree in trees} == {"top_plus_one"}
    assert {int(tree.depths_BN.max()) == len(tree) for tree in trees} == {True, False}


@pytest.mark.parametrize("rule", ["traversal", "block"])
def test_a_merged_tree_is_not_verified_by_traversal(rule: str) -> None:
    """Which guesses find a place in it depends on what was drawn, also where the policy's own paths are a chain."""
    union, sampling = Union([Paths(((1, 2),)), drafting(pair("random", 1, 4, 3).drafter)]), SamplingParams(1.0, rule=rule)
    assert rule_of("auto", union.propose(FIXED, CounterRNG.of(), SamplingParams(1.0))) == "without_replacement"
    for policy in (FIXED, STRAIGHT):
        with pytest.raises(UserError, match=f"the rule {rule} cannot verify merged trees.*rule=auto"):
            union.propose(policy, CounterRNG.of(), sampling)
    assert union.propose(TreePolicy("chain", depth=2), CounterRNG.of(), sampling).is_chain


def test_only_the_last_of_two_drafters_draws() -> None:
    first, world = pair("random", 1, 4, 2), pair("alike", 2, 4, 2)
    sampling, policy = SamplingParams(1.0), TreePolicy(depth=2, nodes=5, branch=2)
    union = Union([drafting(first.drafter), drafting(world.drafter)])
    found, seen, both = emitted(union, world, policy, sampling)
    assert float((found - law(world, sampling, 2)).abs().sum() / 2) < 1e-9 and seen["drawn"]
    *_, half = emitted(drafting(world.drafter), world, TreePolicy(depth=2, nodes=3, branch=2), sampling)
    assert both > half  # what the other adds is accepted


def test_the_enumeration_notices_a_wrong_union() -> None:
    """Drawn children that are cut by their own probability are not drawn from q any more."""
    world = pair("alike", 3, 3, 2)

    class Choosy(Union):
        def propose(self, policy: TreePolicy, rng: CounterRNG, sampling: SamplingParams) -> Tree:
            tree = super().propose(policy, rng, sampling)
            assert tree.drawn_BN is not None
            tree.drawn_BN[0] &= tree.tokens_BN[0] > 1
            return tree

    found, _, _ = emitted(Choosy([drafting(world.drafter)]), world, FIXED, SamplingParams(1.0))
    assert float((found - law(world, SamplingParams(1.0), 2)).abs().sum() / 2) > 1e-3


# ---------------------------------------------------------------- hybrid


class Counting(Oracle):
    """Checks, as its base does, that it is told every root once, with its states."""

    rounds = 0

    def propose(self, policy: TreePolicy, rng: CounterRNG, sampling: SamplingParams) -> Tree:
        type(self).rounds += 1
        return super().propose(policy, rng, sampling)


class Asked(Knowing):
    """Counts its proposals, and may say that it has matched less than it has."""

    rounds = 0
    doubts = 0

    @property
    def matched(self) -> int:
        self.doubts += 1
        return super().matched if self.doubts % 3 else 0  # every third time the other one guesses

    def propose(self, policy: TreePolicy, rng: CounterRNG, sampling: SamplingParams) -> Tree:
        self.rounds += 1
        return super().propose(policy, rng, sampling)


def test_a_hybrids_drafter_is_told_every_root() -> None:
    target, said = TARGET("llama"), list(plain("llama", 0))
    text = PROMPTS[0] + said
    Counting.rounds = 0
    lookup, drafter = Asked([*said[:20], 3, *said[21:]]), Counting(target, text, 0.5)
    for _ in range(2):
        result = generate(target, Hybrid(lookup, drafter, match=2), PROMPTS[0], new_tokens=NEW, policy=TreePolicy("chain", depth=2))
        assert result.tokens == said
    assert lookup.rounds > 4 and Counting.rounds > 4 and result.accepted_length > 1.5


def test_a_hybrid_asks_its_lookup_where_it_matches() -> None:
    lookup, otherwise = Ngram(most=3), Paths(((5,),))
    hybrid = Hybrid(lookup, otherwise, match=3)
    hybrid.start(Context(TARGET("llama"), ()), 64)
    text, policy = [1, 2, 3, 4, 9, 2, 3, 4, 1, 2, 3], TreePolicy("chain", depth=2)
    known = 0
    for stop, wanted in ((7, [5]), (8, [9, 2]), (9, [5]), (10, [5]), (11, [4, 9])):
        ids = torch.tensor([text[:stop]])
        hybrid.absorb(Roots(ids[:, known : stop - 1], ids[:, known + 1 :], {}, torch.arange(known, stop - 1)[None]))
        known = stop - 1
        assert hybrid.propose(policy, CounterRNG.of(), SamplingParams()).tokens_BN[0].tolist() == wanted


def test_a_hybrid_at_temperature_is_exact_where_its_drafter_is() -> None:
    """Which one guesses hangs on the text alone; the drafter's own tree is handed on as it is."""
    world, sampling = pair("alike", 3, 4, 2), SamplingParams(1.0)
    hybrid = Hybrid(Ngram(), drafting(world.drafter), match=4)
    hybrid.lookup.clear()
    hybrid.waiting = []
    found, seen, _ = emitted(hybrid, world, DYNAMIC, sampling)
    assert float((found - law(world, sampling, 2)).abs().sum() / 2) < 1e-9 and seen["drawn"]


def test_settings_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UserError, match="union: parts must name at least one"):
        Union([])
    with pytest.raises(UserError, match="hybrid: match=5 is never reached, its lookup matches at most most=4"):
        Hybrid(Ngram(most=4), Paths(()), match=5)
    with pytest.raises(UserError, match="hybrid: match must be a whole number"):
        Hybrid(Ngram(most=4), Paths(()), match=0)
    sampling = SamplingParams(1.0, rule="block")
    union: Any = Union([Paths(()), drafting(ToyDrafter(torch.zeros(9, 4), 4))])
    with pytest.raises(UserError, match="the rule block cannot verify merged trees"):
        union.propose(TreePolicy(depth=2), CounterRNG.of(), sampling)
