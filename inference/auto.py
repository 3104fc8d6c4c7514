"""``decode=auto``: every round the shape that gains most, by what rounds cost on this machine and how often this sequence's guesses
were right so far; down to not drafting.

A round of a shape emits tau tokens and costs c plain rounds; the shape with the largest tau / c is taken, none where that is below 1.
Costs are measured once. tau = 1 + sum over depths of the product of the acceptances so far, each a running mean over the sequence's
own past that leans on the depth before it: so a sequence says the same whatever was decoded before, and the choice, which hangs on
nothing that is still to be drawn, leaves every rule exact.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any
from weakref import WeakKeyDictionary

import torch

from heads.base import Roots
from inference.chance import Chance
from inference.propose import Drafting, Proposer, TreePolicy
from inference.sampling import Sampling, Warp
from inference.target import Context, Target
from inference.tree import Tree
from inference.verify import choose_alone, rule_of

CHAINS = (1, 2, 3, 4, 5, 6, 8, 10, 13, 16)
ROWS = (1, 2, 3, 4, 6, 9, 12, 17, 33, 65)  # of a pass, whose costs are measured
# What is believed before anything was seen: chosen by playing many acceptances and costs through, good and bad drafters alike.
PRIOR, WEIGHT = 0.65, 2.0  # acceptance of the first guess, and for how many rounds' worth
LEANS = 16.0  # rounds' worth of what was seen at one depth, for the next
FADE = 0.98  # of what was seen, from round to round
BRANCHES = 0.7  # of the misses of a chain, how many a tree is believed to miss too
LOSS = 0.01  # of the time, to find out whether drafting gains after all
TRIES, BUDGET = 3, 4e-3  # calls of one measurement, and seconds: at least
ENOUGH = 2.0  # seconds of measuring after which a second call of each is the last
WORTH = 24  # new tokens of one sequence for which measuring is worth its time


@dataclass(frozen=True)
class Costs:
    """Seconds: of a pass over so many rows with its verdict; of absorbing a round with the first guess; of every further level."""

    rows: tuple[int, ...]
    verify: tuple[float, ...]
    first: float
    level: float
    level_of_tree: float

    def of(self, shape: TreePolicy) -> float:
        """A round of the shape, over a plain one."""
        level = self.level if shape.kind == "chain" else self.level_of_tree
        return (self.passes(1 + shape.nodes) + self.first + (shape.depth - 1) * level) / self.verify[0]

    def passes(self, rows: int) -> float:
        """Between those that were measured, on a line; beyond, as the last ones rise."""
        i = min(max(bisect_left(self.rows, rows), 1), len(self.rows) - 1)
        (a, b), (x, y) = self.rows[i - 1 : i + 1], self.verify[i - 1 : i + 1]
        return x + (y - x) * (rows - a) / (b - a)


@dataclass
class Auto:
    """The shapes there are to choose from, and what a round of each costs over a plain one."""

    shapes: list[TreePolicy]
    costs: list[float]


def shapes_of(policy: TreePolicy) -> list[TreePolicy]:
    """Chains up to the depth of an auto policy, and its tree (where its rule and nodes allow one)."""
    chains = [TreePolicy("chain", depth=d) for d in CHAINS if d <= policy.depth]
    if policy.nodes < 2 or policy.depth < 2:
        return chains
    tree = replace(policy, kind="dynamic")
    return [*chains, *dict.fromkeys(tree.at_most(d) for d in (3, policy.depth))]


@dataclass
class Acceptance:
    """Of guesses by depth, where all before them were right: running sums of one family of shapes."""

    right: list[float] = field(default_factory=list)
    seen: list[float] = field(default_factory=list)

    def learn(self, asked: int, accepted: int) -> None:
        more = asked - len(self.seen)
        self.right, self.seen = self.right + [0.0] * more, self.seen + [0.0] * more
        for d in range(min(asked, accepted + 1)):
            self.right[d] = FADE * self.right[d] + (d < accepted)
            self.seen[d] = FADE * self.seen[d] + 1.0

    def by_depth(self, depth: int, first: float) -> list[float]:
        """``first``: what is believed of the first guess. Deeper ones lean on the one before."""
        found, weight = [first], WEIGHT
        for d in range(depth):
            right, seen = (self.right[d], self.seen[d]) if d < len(self.seen) else (0.0, 0.0)
            found.append((right + weight * found[-1]) / (seen + weight))
            weight = LEANS
        return found[1:]


@dataclass
class Past:
    """What became of one sequence's guesses."""

    chain: Acceptance = field(default_factory=Acceptance)
    tree: Acceptance = field(default_factory=Acceptance)

    def learn(self, chain: bool, asked: int, accepted: int) -> None:
        (self.chain if chain else self.tree).learn(asked, accepted)

    def see(self, shape: TreePolicy, tree: Tree, kept: Sequence[int]) -> None:
        """The same with the tree at hand; ``kept``: the rows of the accepted path, the root row first."""
        self.learn(shape.kind == "chain", shape.depth, len(kept) - 1)  # a tree that ended before is a miss: it costs what it costs
        if shape.kind != "chain" and len(tree):  # the path of best guesses is a chain too
            parents, straight = tree.parents_BN[0].tolist(), 0
            while straight + 1 < len(kept) and parents.index(parents[kept[straight + 1] - 1]) == kept[straight + 1] - 1:
                straight += 1
            self.chain.learn(tree.deepest, straight)

    def taus(self, shapes: Sequence[TreePolicy]) -> list[float]:
        """Tokens that a round of each shape is expected to emit."""
        deepest = max((shape.depth for shape in shapes), default=0)
        chain = self.chain.by_depth(deepest, PRIOR)
        tree = self.tree.by_depth(deepest, 1 - BRANCHES * (1 - chain[0]))
        sums = {"chain": _expected(chain), "dynamic": _expected(tree)}
        return [sums[shape.kind][shape.depth] for shape in shapes]


def _expected(acceptance: Sequence[float]) -> list[float]:
    """Tokens of a round that goes so deep: 1 + sum of the products."""
    found, reached = [1.0], 1.0
    for a in acceptance:
        reached *= a
        found.append(found[-1] + reached)
    return found


@dataclass
class Pace:
    """The choice, round by round, for sequences that share their rounds."""

    plain: int = 0  # rounds without drafting, one after the other

    def choose(self, auto: Auto, pasts: Sequence[Past]) -> TreePolicy | None:
        """The shape that gains most; None for no drafting. Where none gains, the best is tried again and again, so rarely that what is
        lost by it stays a small share.
        """
        shapes, taus = auto.shapes, [past.taus(auto.shapes) for past in pasts]
        gains = [sum(each) / len(pasts) / cost for *each, cost in zip(*taus, auto.costs, strict=True)]
        best = max(range(len(gains)), key=gains.__getitem__)
        lost = auto.costs[best] * (1 - gains[best])  # plain rounds, by one try
        if lost > LOSS * self.plain:
            self.plain += 1
            return None
        self.plain = 0
        return shapes[best]


# What rounds cost ----------------------------------------------------------------------------------------------------

KNOWN: WeakKeyDictionary[Target, WeakKeyDictionary[Any, dict[Any, Auto]]] = WeakKeyDictionary()  # what was measured of whom


def known_of(target: Target, proposer: Any) -> dict[Any, Auto]:
    """What was measured of this target with this drafter or proposer in this process."""
    guesser = proposer.drafter if isinstance(proposer, Drafting) else proposer
    return KNOWN.setdefault(target, WeakKeyDictionary()).setdefault(guesser, {})


def auto_of(policy: TreePolicy, target: Target, proposer: Proposer, sampled: bool) -> Auto:
    """For sequences that are decoded alone. The same for all of them: measured at the first call."""
    known = known_of(target, proposer)
    if (key := (policy, sampled)) not in known:
        shapes, measured = shapes_of(policy), measure(policy, target, proposer, Sampling(float(sampled)))
        known[key] = Auto(shapes, _agreed([measured.of(shape) for shape in shapes], target))
    return known[key]


def _agreed(costs: list[float], target: Target) -> list[float]:
    """The same in all processes that share the target's layers: they must choose alike."""
    if target.shared:
        torch.distributed.broadcast_object_list(costs)
    return costs


@torch.inference_mode()
def measure(policy: TreePolicy, target: Target, proposer: Proposer, sampling: Sampling) -> Costs:
    """By a text of no meaning: what is read and guessed does not matter to the time it takes."""
    shapes, device = shapes_of(policy), target.device
    longest, most = max(shape.depth for shape in shapes), 1 + max(shape.nodes for shape in shapes)
    T = max(min(48, target.shape.max_positions - most - longest), 1)
    tokens_T = torch.arange(T, device=device) % target.shape.vocab_size
    context, warp = Context(target, proposer.taps, T + most), Warp.of([sampling], device)
    states, _ = context.read_prompt(tokens_T)
    context.keep(T)
    proposer.start(context, T + most)
    roots = Roots(tokens_T[None], tokens_T[None], states, torch.arange(T, device=device)[None])
    proposer.absorb(roots)

    def verify(tree: Tree) -> None:
        rows_R = torch.cat([tokens_T[-1:], tree.tokens_BN[0]])
        _, final = context.read(rows_R, tree)
        choose_alone(target.logits(final), tree, warp, rule_of(sampling.rule, tree.is_chain), Chance.of(0, T, device))
        context.keep(0)

    def draft(shape: TreePolicy) -> Tree:
        return proposer.propose(shape, Chance.of(0, T, device), sampling)

    def absorb() -> None:
        proposer.absorb(roots[-1:])

    chains = [shape for shape in shapes if shape.kind == "chain"]
    trees = [shape for shape in shapes if shape.kind != "chain"]
    short, long = chains[0], chains[-1]
    rows = [n for n in ROWS if n <= most] or [1]
    rows = rows if rows[-1] == most else [*rows, most]
    filled = draft(long)
    calls: list[Callable[[], object]] = [lambda n=n: verify(_chain_of(filled, n - 1)) for n in rows]  # type: ignore[misc]
    calls += [lambda: draft(short), lambda: draft(long), absorb, *(lambda shape=shape: draft(shape) for shape in trees)]
    *verifying, first, whole, absorbing = (seconds := _seconds(calls, device))[: len(rows) + 3]
    level = max(whole - first, 0.0) / max(long.depth - short.depth, 1)
    deepest = trees[-1] if trees else None
    wide = level if deepest is None else max(seconds[-1] - first, 0.0) / max(deepest.depth - 1, 1)
    return Costs(tuple(rows), tuple(verifying), first + absorbing, level, wide)


def auto_of_rounds(rounds: Any, kind: Any, warp: Warp) -> Auto:
    """For the sequences that the static path holds (``inference.rounds``), which stay as they are. Of chains three are measured, those
    between lie on lines.
    """
    known, key = known_of(rounds.target, rounds.drafter), (kind.policy, kind.n, warp.sampled)
    if key in known:
        return known[key]
    put_back, shapes = rounds.snapshot(), shapes_of(kind.policy)
    chains = [shape for shape in shapes if shape.kind == "chain"]
    some = list(dict.fromkeys([chains[0], chains[len(chains) // 2], chains[-1], *(s for s in shapes if s.kind != "chain")]))

    def once(policy: TreePolicy | None) -> None:
        rounds.run(kind._replace(policy=policy), warp)
        put_back()

    calls: list[Callable[[], object]] = [lambda p=p: once(p) for p in (None, *some)]  # type: ignore[misc]
    plain, *seconds = _seconds(calls, rounds.device)
    found = dict(zip(some, seconds, strict=True))

    def of(shape: TreePolicy) -> float:
        if shape in found:
            return found[shape] / plain
        below = max((c for c in chains if c in found and c.depth < shape.depth), key=lambda c: c.depth)
        above = min((c for c in chains if c in found and c.depth > shape.depth), key=lambda c: c.depth)
        share = (shape.depth - below.depth) / (above.depth - below.depth)
        return (found[below] + share * (found[above] - found[below])) / plain

    known[key] = Auto(shapes, _agreed([of(shape) for shape in shapes], rounds.target))
    return known[key]


def _chain_of(tree: Tree, nodes: int) -> Tree:
    """A chain of so many nodes with the tokens of another."""
    if nodes == 0:
        return Tree.empty(tree.tokens_BN.device)
    some = tree.tokens_BN[0].repeat(-(-nodes // len(tree)))[:nodes].tolist() if len(tree) else [0] * nodes
    made = Tree.of(some, range(-1, nodes - 1), tree.tokens_BN.device)
    if tree.q_BRV is not None and len(tree):
        made.drawn_BN, made.all_drawn = torch.ones_like(made.tokens_BN, dtype=torch.bool), True
        made.q_BRV = tree.q_BRV[:, :1].expand(-1, nodes + 1, -1).contiguous()
    return made


def _seconds(calls: Sequence[Callable[[], object]], device: torch.device) -> list[float]:
    """Of the fastest of each, in turn, so that a noisy machine disturbs them alike."""
    best = [inf] * len(calls)
    began, tries = time.perf_counter(), 0
    for call in calls:
        call()  # first calls are slow
    while tries == 0 or (time.perf_counter() - began < (ENOUGH if tries < TRIES else BUDGET * len(calls))):
        for i, call in enumerate(calls):
            start = time.perf_counter()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            best[i] = min(best[i], time.perf_counter() - start)
        tries += 1
    return best
