"""``decode=auto``: every round the shape that gains most, by what rounds cost on this machine and how often this sequence's guesses
were right so far; down to not drafting.

A round of a shape emits tau tokens and costs c plain rounds; the shape with the largest tau / c is taken, none where that hardly gains.
Costs are measured once. tau = 1 + sum over depths of the product of the acceptances so far, each a running mean over the sequence's
own past that leans on what is believed of the drafter (inference/reports/prior.py): so a sequence says the same whatever was decoded
before, and the choice, which hangs on nothing that is still to be drawn, leaves every rule exact.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import inf
from statistics import median
from typing import Any
from weakref import WeakKeyDictionary

import torch

from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.propose import Drafting, Proposer
from headstart.inference.decoding.sampling import LogitsWarper, SamplingParams
from headstart.inference.decoding.target import Target
from headstart.inference.decoding.tree import Tree

CHAINS = (1, 2, 3, 4, 5, 6, 8, 10, 13, 16)
# What is believed before anything was seen: chosen by playing many acceptances and costs through, good and bad drafters alike.
PRIOR, WEIGHT = [0.65], 2.0  # acceptance by depth where nobody knows it, and for how many guesses' worth
SURE = 32.0  # the same where it is known
LEANS = 16.0  # guesses' worth of what is believed of a depth after all that was seen
FADE = 0.96  # of what was seen, from round to round, with guesses and without: a text changes meanwhile
BRANCHES = 0.7  # of the misses of a chain, how many a tree is believed to miss too
# Plain rounds that may be lost at the start, and of every later one, to find out whether drafting gains after all.
CREDIT, LOSS = 1.5, 0.005
KNOWN_CREDIT = 0.5  # the same at the start where the drafter's acceptance was measured: there is less to find out
# Of a measurement; of a turn at most, and seconds of one after which it ends. The later half counts: it takes a small model some 15
# rounds of a kind until the weights that they read lie in the caches.
TURNS, ROUNDS, LONG = 5, 32, 0.2
# A gain below this is none: rounds cost up to a tenth more among others, and on another day, than when they were measured.
MARGIN = 1.05
PATIENCE = 4  # rounds without guesses in a row, at most, before it is asked again
WORTH = 24  # new tokens of one sequence for which measuring is worth its time


@dataclass
class Auto:
    """The shapes there are to choose from, what a round of each costs over a plain one, and how often guesses are right, by depth, as far
    as that is known beforehand.
    """

    shapes: list[TreePolicy]
    costs: list[float]
    prior: Sequence[float] = ()
    reading: float = 0.0  # what the drafter's reading of one more row costs, over a plain round: of a prompt, or of rounds without guesses


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
        """Of a round that asked for ``asked`` guesses in a row, the first ``accepted`` were right."""
        more = asked - len(self.seen)
        self.right, self.seen = self.right + [0.0] * more, self.seen + [0.0] * more
        for d in range(min(asked, accepted + 1)):
            self.right[d] = FADE * self.right[d] + (d < accepted)
            self.seen[d] = FADE * self.seen[d] + 1.0

    def fade(self) -> None:
        """What was learnt weighs less from now on."""
        self.right, self.seen = [FADE * x for x in self.right], [FADE * x for x in self.seen]

    def by_depth(self, prior: Sequence[float], weight: float) -> list[float]:
        """``prior``: what was believed of each depth before anything was seen. What is missed more often or less than that over all depths
        is believed to be missed so at each.
        """
        before = sum(prior) / len(prior)
        after = (sum(self.right) + weight * before) / (sum(self.seen) + weight)
        more = (1 - after) / max(1 - before, 1e-3)
        right, seen = ([*x, *[0.0] * len(prior)] for x in (self.right, self.seen))
        return [(r + LEANS * max(1 - (1 - p) * more, 0.0)) / (n + LEANS) for r, n, p in zip(right, seen, prior, strict=False)]


@dataclass
class Past:
    """What became of one sequence's guesses."""

    chain: Acceptance = field(default_factory=Acceptance)
    tree: Acceptance = field(default_factory=Acceptance)

    def learn(self, chain: bool, asked: int, accepted: int) -> None:
        """The same for chains and trees apart."""
        (self.chain if chain else self.tree).learn(asked, accepted)

    def see(self, shape: TreePolicy, tree: Tree, kept: Sequence[int]) -> None:
        """The same with the tree at hand; ``kept``: the rows of the accepted path, the root row first."""
        self.learn(shape.kind == "chain", shape.depth, len(kept) - 1)  # a tree that ended before is a miss: it costs what it costs
        if shape.kind != "chain" and len(tree):  # the path of best guesses is a chain too
            parents, straight = tree.parents_BN[0].tolist(), 0
            while straight + 1 < len(kept) and parents.index(parents[kept[straight + 1] - 1]) == kept[straight + 1] - 1:
                straight += 1
            self.chain.learn(tree.deepest, straight)

    def rest(self) -> None:
        """A round without guesses."""
        self.chain.fade()
        self.tree.fade()

    def taus(self, shapes: Sequence[TreePolicy], prior: Sequence[float] = ()) -> list[float]:
        """Tokens that a round of each shape is expected to emit."""
        deepest, known = max((shape.depth for shape in shapes), default=0), list(prior or PRIOR)
        weight = SURE if prior else WEIGHT
        chain = self.chain.by_depth((known + known[-1:] * deepest)[:deepest], weight)
        tree = self.tree.by_depth([1 - BRANCHES * (1 - x) for x in chain], weight)
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

    credit: float | None = None  # plain rounds that may still be lost by trying; None: as many as at the start
    resting: int = 0  # rounds that go by before it is asked again

    def choose(self, auto: Auto, pasts: Sequence[Past], waiting: int = 0) -> TreePolicy | None:
        """The shape that gains most; None for no drafting. Where none gains, the best is tried again and again, so rarely that what is
        lost by it stays a small share. ``waiting``: rows that the drafter would have to read first.
        """
        if self.credit is None:
            self.credit = KNOWN_CREDIT if auto.prior else CREDIT
        if self.resting > 0:
            self.resting, self.credit = self.resting - 1, self.credit + LOSS
            return None
        shapes, taus = auto.shapes, [past.taus(auto.shapes, auto.prior) for past in pasts]
        gains = [sum(each) / len(pasts) / cost for *each, cost in zip(*taus, auto.costs, strict=True)]
        best = max(range(len(gains)), key=gains.__getitem__)
        lost = auto.costs[best] * (MARGIN - gains[best])  # plain rounds, by one try
        lost = lost + auto.reading * waiting if lost > 0 else 0.0  # where drafting gains, what was read soon pays
        if lost > self.credit:
            self.resting = min(int((lost - self.credit) / LOSS), PATIENCE - 1)
            self.credit += LOSS
            return None
        self.credit -= lost
        return shapes[best]


# What rounds cost ----------------------------------------------------------------------------------------------------

KNOWN: WeakKeyDictionary[Target, WeakKeyDictionary[Any, dict[Any, Auto]]] = WeakKeyDictionary()  # what was measured of whom


def known_of(target: Target, proposer: Any) -> dict[Any, Auto]:
    """What was measured of this target with this drafter or proposer in this process."""
    guesser = proposer.drafter if isinstance(proposer, Drafting) else proposer
    return KNOWN.setdefault(target, WeakKeyDictionary()).setdefault(guesser, {})


def found_of(target: Target, proposer: Any, policy: TreePolicy, sampled: bool) -> Auto | None:
    """What was measured of this policy for one sequence, by whichever path; None: nothing yet."""
    known = known_of(target, proposer)
    return known.get((policy, sampled)) or known.get((policy, 1, sampled))


def auto_of(policy: TreePolicy, target: Target, proposer: Proposer, sampled: bool, generate: Callable[..., Any]) -> Auto:
    """For sequences that are decoded alone, by ``generate`` (``inference.decode``). The same for all of them: measured at the first call.
    A text of no meaning is continued; what is guessed of it hardly matters to the time that a round takes.
    """
    known, key = known_of(target, proposer), (policy, sampled)
    if key in known:
        return known[key]
    shapes = shapes_of(policy)
    most = target.shape.max_positions
    prompt = [i % target.shape.vocab_size for i in range(max(min(48, most // 2), 1))]
    how: dict[str, Any] = {"new_tokens": min(ROUNDS * (1 + policy.depth), most - len(prompt)), "sampling": SamplingParams(float(sampled))}

    def block(shape: TreePolicy | None) -> float:
        times = [now()]

        def tick(_: object) -> None:
            times.append(now())
            if len(times) > 3 and (len(times) > ROUNDS or times[-1] - times[1] > LONG):
                raise _Enough

        with suppress(_Enough):  # on a device that is not waited for, every round's tokens are
            generate(target, None if shape is None else proposer, prompt, policy=shape, stop_ids=(), on_tokens=tick, **how)
        first, *rounds = [b - a for a, b in zip(times[1:], times[2:], strict=False)] or [inf]  # without the target's reading of the prompt
        if rounds:
            (plain if shape is None else extra).append(_settled(rounds) if shape is None else first - _settled(rounds))
        return _settled(rounds or [first])

    now, plain, extra = (
        clock_of(target),
        list[float](),
        list[float](),
    )  # seconds: of plain rounds; of the drafter's reading of the prompt, in its first
    costs = _over_plain(shapes, block)
    reading = max(median(extra) / median(plain) / len(prompt), 0.0) if plain and extra else 0.0
    *costs, reading = _agreed([*costs, reading], target)
    known[key] = Auto(shapes, costs, _prior(proposer, sampled), reading)
    return known[key]


def _settled(rounds: Sequence[float]) -> float:
    """Seconds of a round among others of its kind."""
    return median(rounds[len(rounds) // 2 :])


def clock_of(target: Target) -> Callable[[], float]:
    """Seconds, of which only differences count. Where one CPU process does all the work: those that its thread really ran, for what others
    run beside it would stretch long rounds more than short ones (by factors, measured). Else those that went by.
    """
    return time.thread_time if target.device.type == "cpu" and not target.spread else time.perf_counter


def _prior(proposer: Any, sampled: bool) -> Sequence[float]:
    return proposer.drafter.acceptance.get(sampled, ()) if isinstance(proposer, Drafting) else ()


class _Enough(Exception):
    """So many rounds were timed."""


def auto_of_rounds(rounds: Any, kind: Any, warp: LogitsWarper) -> Auto:
    """For the sequences that the static path holds (``inference.rounds``), which stay as they are."""
    known, key = known_of(rounds.target, rounds.drafter), (kind.policy, kind.n, warp.sampled)
    if key in known:
        return known[key]
    put_back, shapes, now = rounds.snapshot(), shapes_of(kind.policy), clock_of(rounds.target)

    def wait() -> None:
        if rounds.device.type == "cuda":
            torch.cuda.synchronize(rounds.device)

    def block(shape: TreePolicy | None) -> float:
        seconds: list[float] = []
        while len(seconds) < 2 or (len(seconds) < ROUNDS and sum(seconds) < LONG):
            start = now()
            rounds.run(kind._replace(policy=shape), warp)
            wait()
            seconds.append(now() - start)
            put_back()
            wait()
        return _settled(seconds[1:])  # first calls are slow

    prior = rounds.drafter.acceptance.get(warp.sampled, ())
    known[key] = Auto(shapes, _agreed(_over_plain(shapes, block), rounds.target), prior)
    return known[key]


def _over_plain(shapes: Sequence[TreePolicy], block: Callable[[TreePolicy | None], float]) -> list[float]:
    """What a round of each shape costs over a plain one. ``block``: seconds of a round, of many of the same in a row, as they are decoded
    (other rounds in between would find other weights in the caches). Of chains three are measured, those between lie on lines.
    """
    chains = [shape for shape in shapes if shape.kind == "chain"]
    some = list(dict.fromkeys([chains[0], chains[len(chains) // 2], chains[-1], *(s for s in shapes if s.kind != "chain")]))
    turns = [[block(shape) for shape in (None, *some)] for _ in range(TURNS)]  # in turn, for the machine drifts
    plain, *others = (median(seconds) for seconds in zip(*turns, strict=True))
    found = {shape: each / plain for shape, each in zip(some, others, strict=True)}

    def of(shape: TreePolicy) -> float:
        if shape in found:
            return found[shape]
        below = max((c for c in chains if c in found and c.depth < shape.depth), key=lambda c: c.depth)
        above = min((c for c in chains if c in found and c.depth > shape.depth), key=lambda c: c.depth)
        return found[below] + (shape.depth - below.depth) / (above.depth - below.depth) * (found[above] - found[below])

    return [of(shape) for shape in shapes]


def _agreed(costs: list[float], target: Target) -> list[float]:
    """The same in all processes that share the target's layers: they must choose alike."""
    if target.shared:
        torch.distributed.broadcast_object_list(costs)
    return costs
