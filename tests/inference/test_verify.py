"""Every rule is exact: the law of the emitted tokens is computed over all outcomes and compared with the target's own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

import inference.propose as propose
from heads.errors import UserError
from inference.propose import TreePolicy
from inference.tree import Tree
from inference.verify import RULES, Chance, Sampling, greedy, warp
from tests.inference.test_tree import make, parent_lists
from tests.inference.toys import ToyDrafter, drafting, heap_size, outcomes, row_index


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tiny tensors by the thousand: a second thread only waits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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


def law(world: Pair, sampling: Sampling, depth: int) -> Tensor:
    """The target's own law of depth + 1 tokens, [V, .., V]."""
    p_PV = warp(world.target_PV, sampling.temperature, sampling.top_k, sampling.top_p)
    joint, level = torch.ones(1, dtype=torch.float64), 0
    for d in range(depth + 1):
        joint = (joint[:, None] * p_PV[level : level + world.V**d]).flatten()
        level = level * world.V + 1
    return joint.view([world.V] * (depth + 1))


def emitted_law(
    world: Pair, policy: TreePolicy, sampling: Sampling, wrong_p: Callable[[Tensor], Tensor] | None = None
) -> tuple[Tensor, float]:
    """Law of the tokens of one round, continued by the target where they are fewer; and the mean number accepted."""
    true = law(world, sampling, policy.depth)
    p_PV = warp(world.target_PV, sampling.temperature, sampling.top_k, sampling.top_p)
    emitted: Counter[tuple[int, ...]] = Counter()
    proposer = drafting(world.drafter)
    for weight, tree in outcomes(lambda chance: proposer.propose(policy, chance, sampling)):
        p_RV = p_PV[row_index(tree, world.V)]
        if wrong_p is not None:
            p_RV = wrong_p(p_RV)
        for chosen, verdict in outcomes(lambda chance, t=tree, p=p_RV: RULES[sampling.rule].verify(t, p, chance)):
            tokens = (*tree.tokens_N[verdict.path].tolist(), verdict.token)
            emitted[tokens] += weight * chosen  # type: ignore[assignment]
    return continued(emitted, true), sum(w * (len(tokens) - 1) for tokens, w in emitted.items())


def continued(emitted: Counter[tuple[int, ...]], true: Tensor) -> Tensor:
    """The law of as many tokens as ``true`` has, those that were not emitted drawn from the target."""
    found = torch.zeros_like(true)
    for tokens, weight in emitted.items():
        assert true[tokens].sum() > 0, f"{tokens} cannot come from the target"
        found[tokens] += weight * true[tokens] / true[tokens].sum()
    return found


def variation(world: Pair, policy: TreePolicy, sampling: Sampling, wrong_p: Callable[[Tensor], Tensor] | None = None) -> float:
    found, _ = emitted_law(world, policy, sampling, wrong_p)
    return float((found - law(world, sampling, policy.depth)).abs().sum() / 2)


# ---------------------------------------------------------------- exactness

KINDS = ["random", "equal", "alike", "zeros", "trimmed", "near_one_hot"]
CHAIN = TreePolicy("chain", depth=3)
FIXED = TreePolicy("fixed", paths=((0,), (1,), (0, 0), (0, 1), (1, 0)))
WIDE = TreePolicy("fixed", paths=((0,), (1,), (2,)))
DEEP = TreePolicy("fixed", paths=((0,), (1,), (1, 0), (1, 0, 0), (1, 0, 1)))
PRUNED = TreePolicy(depth=3, nodes=4, branch=2)
PRUNED_WIDE = TreePolicy(depth=2, nodes=5, branch=3, expand=2)
FULL = TreePolicy(depth=2, nodes=99, branch=2)
DOUBTFUL = TreePolicy(depth=3, nodes=6, branch=2, least=0.3)
SAMPLINGS = [(1.0, 0, 1.0), (0.6, 3, 1.0), (1.3, 2, 1.0), (1.0, 0, 0.8), (0.8, 3, 0.9)]
CASES = [(rule, CHAIN) for rule in RULES]
CASES += [(rule, policy) for rule in ("multi_round", "without_replacement", "top_plus_one") for policy in (FIXED, WIDE, DEEP)]
CASES += [("top_plus_one", policy) for policy in (PRUNED, PRUNED_WIDE, FULL, DOUBTFUL)]


def vocab(rule: str, policy: TreePolicy) -> int:
    """Many draws a row make many outcomes."""
    return 3 if RULES[rule].draw != "top_plus_one" and policy in (FIXED, DEEP) else 4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rule", "policy"), CASES)
def test_exact(rule: str, policy: TreePolicy, kind: str) -> None:
    assert variation(pair(kind, 1, vocab(rule, policy), 3), policy, Sampling(1.0, rule=rule)) < 1e-9


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), SAMPLINGS[1:])
@pytest.mark.parametrize(("rule", "policy"), CASES)
def test_exact_under_warping(rule: str, policy: TreePolicy, temperature: float, top_k: int, top_p: float) -> None:
    assert variation(pair("alike", 2, vocab(rule, policy), 3), policy, Sampling(temperature, top_k, top_p, rule)) < 1e-9


def test_exact_on_larger_vocabulary() -> None:
    for rule in RULES:
        assert variation(pair("random", 5, 6, 2), TreePolicy("chain", depth=2), Sampling(1.0, rule=rule)) < 1e-9
    for seed in range(3):
        assert variation(pair("alike", seed, 6, 2), TreePolicy(depth=2, nodes=3, branch=2), Sampling(1.0)) < 1e-9


def test_deterministic_trees_are_exact_under_every_rule() -> None:
    """A proposer that draws nothing (n-grams, say) may be verified by any rule."""
    world = pair("random", 3, 4, 2)
    p_PV = world.target_PV.softmax(-1)
    true = law(world, Sampling(1.0), 2)
    for rule in RULES:
        tree = make([-1, 0], [1, 2]) if RULES[rule].chain_only else make([-1, -1, 0, 0, 1], [1, 2, 2, 3, 0])
        emitted: Counter[tuple[int, ...]] = Counter()
        for weight, verdict in outcomes(lambda c, t=tree, r=rule: RULES[r].verify(t, p_PV[row_index(t, 4)], c)):
            emitted[(*tree.tokens_N[verdict.path].tolist(), verdict.token)] += weight  # type: ignore[assignment]
        assert (continued(emitted, true) - true).abs().sum() < 1e-9
        for _, verdict in outcomes(lambda c, r=rule: RULES[r].verify(Tree.empty(), p_PV[:1], c)):
            assert verdict.path.tolist() == []


# ---------------------------------------------------------------- the test has teeth


def test_ranking_the_drawn_child_by_its_own_probability_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = propose.draw_children

    def wrong(q_EV: Tensor, *args: Any) -> Any:
        level, value_E = right(q_EV, *args), args[-1]
        own = value_E[:, None] + q_EV.gather(1, level.tokens_EK).log()
        return level._replace(values_EK=torch.where(level.drawn_EK, own, level.values_EK))

    worst_right = max(variation(pair("random", s, 4, 3), PRUNED, Sampling(1.0)) for s in range(3))
    monkeypatch.setattr(propose, "draw_children", wrong)
    worst_wrong = max(variation(pair("random", s, 4, 3), PRUNED, Sampling(1.0)) for s in range(3))
    assert worst_right < 1e-9 and worst_wrong > 1e-3


def test_keeping_q_of_a_cut_child_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calling the last kept child of a row drawn when the drawn one was cut."""
    right = propose._cut

    def wrong(policy: TreePolicy, plan: Any, levels: Any, expanded: Any) -> Tree:
        tree = right(policy, plan, levels, expanded)
        q_XV = torch.cat([x.q_EV for x in levels])
        tree.q_RV[0], tree.drawn_N[tree.children(0)[-1]] = q_XV[0], True
        return tree

    world = pair("near_one_hot", 0, 4, 3)
    one = TreePolicy(depth=1, nodes=1, branch=2)
    assert variation(world, one, Sampling(1.0)) < 1e-9
    monkeypatch.setattr(propose, "_cut", wrong)
    assert variation(world, one, Sampling(1.0)) > 1e-3


@pytest.mark.parametrize(("rule", "policy"), CASES)
def test_renormalising_the_target_is_caught(rule: str, policy: TreePolicy) -> None:
    """The target's distribution restricted to the drafter's vocabulary."""
    world = pair("trimmed", 1, vocab(rule, policy), 3)

    def renormalised(p_RV: Tensor) -> Tensor:
        kept = torch.zeros_like(p_RV).index_copy(1, world.drafter.ids_V, p_RV[:, world.drafter.ids_V])  # type: ignore[arg-type]
        return kept / kept.sum(-1, keepdim=True)

    assert variation(world, policy, Sampling(1.0, rule=rule), renormalised) > 1e-2


@pytest.mark.parametrize(("draws", "verify"), [("multi_round", "without_replacement"), ("without_replacement", "multi_round")])
def test_verifying_with_the_wrong_rule_is_caught(draws: str, verify: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(propose.RULES, draws, RULES[verify].__class__(RULES[verify].verify, RULES[draws].draw))
    assert variation(pair("random", 1, 3, 3), FIXED, Sampling(1.0, rule=draws)) > 1e-3


# ---------------------------------------------------------------- orderings


def test_known_orderings() -> None:
    """Block verification accepts at least as much as the token rule; top plus one at least as much as multi-round
    at one node, and without replacement at least as much as with."""
    star = TreePolicy("fixed", paths=((0,), (1,), (2,)))
    gains = []
    for kind, seed in product(("random", "alike"), range(3)):
        world = pair(kind, seed, 4, 3)
        mean = {rule: emitted_law(world, CHAIN, Sampling(1.0, rule=rule))[1] for rule in ("token", "block")}
        assert mean["block"] >= mean["token"] - 1e-12
        node = {
            rule: emitted_law(world, star, Sampling(1.0, rule=rule))[1] for rule in ("multi_round", "without_replacement", "top_plus_one")
        }
        assert node["top_plus_one"] >= node["multi_round"] - 1e-12
        assert node["without_replacement"] >= node["multi_round"] - 1e-12
        gains.append((mean["block"] - mean["token"], node["top_plus_one"] - node["multi_round"]))
    assert min(max(g) for g in zip(*gains, strict=True)) > 1e-3  # and somewhere strictly more


def test_equal_drafter_is_always_accepted_on_a_chain() -> None:
    for rule in RULES:
        assert abs(emitted_law(pair("equal", 0, 4, 3), CHAIN, Sampling(1.0, rule=rule))[1] - 3) < 1e-9


# ---------------------------------------------------------------- greedy


@settings(max_examples=200, deadline=None)
@given(parent_lists(), st.randoms(use_true_random=False))
def test_greedy_equals_a_naive_walk(parents: list[int], random: Any) -> None:
    siblings: dict[int, list[int]] = {}
    tokens = []
    for p in parents:  # siblings differ
        taken = siblings.setdefault(p, [])
        taken.append(random.choice([t for t in range(25) if t not in taken][:3]))
        tokens.append(taken[-1])
    choice = [random.randrange(3) for _ in range(len(parents) + 1)]
    row, path = 0, []
    while True:
        step = [i for i, p in enumerate(parents) if p == row - 1 and tokens[i] == choice[row]]
        if not step:
            break
        path.append(step[0])
        row = step[0] + 1
    verdict = greedy(make(parents, tokens), torch.tensor(choice))
    assert verdict.path.tolist() == path and verdict.token == choice[row]


# ---------------------------------------------------------------- warping and chance


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [*SAMPLINGS, (0.7, 1, 1.0), (1.0, 99, 0.5), (1.0, 0, 1e-6), (2.0, 5, 0.3)])
def test_warp_is_transformers(temperature: float, top_k: int, top_p: float) -> None:
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(50, 17, generator=g)
    logits[10:20] = logits[10:20].round()  # ties
    logits[20:25, ::3] = -torch.inf  # tokens a trimmed drafter does not have
    expected = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    found = warp(logits, temperature, top_k, top_p)
    assert torch.equal(found > 0, expected.softmax(-1) > 0)
    assert torch.allclose(found, expected.softmax(-1), atol=1e-7)
    assert warp(logits.bfloat16(), temperature, top_k, top_p).dtype == torch.float32
    assert warp(logits.double(), temperature, top_k, top_p).dtype == torch.float64


def test_chance_draws_what_it_is_told_and_nothing_for_certainties() -> None:
    chance = Chance(torch.Generator().manual_seed(0))
    before = chance.generator.get_state()
    assert chance.flip(1.0) and chance.flip(1.5) and not chance.flip(0.0)
    assert chance.draw(torch.tensor([0.0, 0.0, 0.3])) == 2
    assert chance.draws(torch.eye(3), 2).tolist() == [[0, 0], [1, 1], [2, 2]]
    assert torch.equal(before, chance.generator.get_state())
    probs = torch.tensor([[0.0, 0.5, 0.2, 0.0, 0.3, 0.0], [0.0, 0.0, 0.0, 1.0, 0.0, 0.0]])
    drawn = chance.draws(probs, 20_000)
    counts = torch.stack([row.bincount(minlength=6) for row in drawn]) / 20_000
    assert (counts - probs).abs().max() < 0.02 and bool((counts[probs == 0] == 0).all())
    assert abs(sum(chance.flip(0.3) for _ in range(5_000)) / 5_000 - 0.3) < 0.03


@pytest.mark.parametrize("wrong", [{"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1}, {"rule": "nucleus"}])
def test_wrong_sampling_is_one_clear_line(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        Sampling(**wrong)


def test_block_refuses_trees() -> None:
    with pytest.raises(UserError, match="chain"):
        RULES["block"].verify(make([-1, -1]), torch.full((3, 2), 0.5), Chance())
