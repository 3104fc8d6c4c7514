"""``decode=auto``: choose in every round the tree shape, or no drafting, that promises the largest speed-up.

A round of a shape emits tau tokens and costs as much as c plain rounds. The shape with the largest tau / c is taken. If even its tau / c is
below ``MARGIN``, most rounds do not draft. Costs are measured once per process. tau is estimated: 1 + the sum over depths d of the product
of the acceptance rates up to d. Each rate is a running mean over the sequence's own past, mixed with a prior of the drafter
(inference/reports/prior.py). Sequences that share their rounds share the choice. It uses no token that is still to be drawn, so every
verification rule stays exact.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import inf
from operator import mul
from statistics import median
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from headstart.inference.decoding.policy import TreePolicy, costs_as, shapes_of
from headstart.inference.decoding.propose import Drafting, Proposer
from headstart.inference.decoding.sampling import LogitsWarper, SamplingParams, heat_of
from headstart.inference.decoding.target import Target

# Constants of the prior, chosen by simulating many acceptance rates and costs, of good and bad drafters alike.
PRIOR, WEIGHT = [0.65], 2.0  # acceptance rate by depth where it was never measured, and the weight of this prior, in guesses
SURE = 32.0  # weight of the prior, in guesses, where the drafter's acceptance was measured
LEANS = 16.0  # weight, in guesses, of a depth's prior once it was scaled by the misses seen at all depths
FADE = 0.96  # past guesses of a depth lose weight by this factor when the depth is seen again or a round does not draft: texts change
BRANCHES = 0.7  # share of the chain's misses that a tree is assumed to miss too
# Trying to draft may cost time where it does not gain. CREDIT: how many plain rounds may be lost by this at the start (KNOWN_CREDIT where
# the drafter's acceptance was measured, so that there is less to find out). LOSS: added to the credit by every round without drafting.
CREDIT, KNOWN_CREDIT, LOSS = 1.5, 0.5, 0.005
# A measurement takes TURNS turns. A turn ends after ROUNDS rounds or LONG seconds. Only the later half of its rounds counts: a small model
# needs about 15 rounds of one kind until the CPU caches hold the weights.
TURNS, ROUNDS, LONG = 5, 32, 0.2
# A smaller speed-up counts as none: between other rounds, or on another day, a round can cost up to 10 % more than it was measured to cost.
MARGIN = 1.05
PATIENCE, MOST = 8, 256  # most rounds without drafting before the next choice: PATIENCE once guesses were seen (they fade), MOST before
WORTH = 24  # a measurement is only worth its time for a sequence of at least this many new tokens


@dataclass
class Auto:
    """The shapes to choose from, the cost of a round of each relative to a plain round, and ``prior``: the drafter's measured acceptance
    rate by depth (empty: unknown).
    """

    shapes: list[TreePolicy]
    costs: list[float]
    prior: Sequence[float] = ()
    reading: float = 0.0  # cost, in plain rounds, of each waiting row that the drafter reads (prompt, undrafted rounds)


@dataclass
class AcceptanceByDepth:
    """How often guesses of each depth were right where all before them were: running sums, for chains or for trees."""

    right: list[float] = field(default_factory=list)
    seen: list[float] = field(default_factory=list)

    def learn(self, asked: int, accepted: int) -> None:
        """Record a round that asked for ``asked`` guesses in a row, of which the first ``accepted`` were right."""
        more = asked - len(self.seen)
        self.right, self.seen = self.right + [0.0] * more, self.seen + [0.0] * more
        for d in range(min(asked, accepted + 1)):
            self.right[d] = FADE * self.right[d] + (d < accepted)
            self.seen[d] = FADE * self.seen[d] + 1.0

    def fade(self) -> None:
        """Reduce the weight of everything recorded so far."""
        self.right, self.seen = [FADE * x for x in self.right], [FADE * x for x in self.seen]

    def by_depth(self, prior: Sequence[float], weight: float) -> list[float]:
        """The estimated acceptance rate of each depth. ``prior``: the rate assumed for each depth. First, the miss rate over all depths is
        estimated from the guesses seen and the prior's mean, which weighs as much as ``weight`` guesses. Its ratio to the assumed miss rate
        scales the misses of every depth's prior. Then each depth's own guesses are averaged with ``LEANS`` guesses of this scaled prior.
        """
        before = sum(prior) / len(prior)
        after = (sum(self.right) + weight * before) / (sum(self.seen) + weight)
        more = (1 - after) / max(1 - before, 1e-3)
        right, seen = ([*x, *[0.0] * len(prior)] for x in (self.right, self.seen))
        return [(r + LEANS * max(1 - (1 - p) * more, 0.0)) / (n + LEANS) for r, n, p in zip(right, seen, prior, strict=False)]


@dataclass
class Past:
    """How often one sequence's guesses were right so far, for chains and for trees."""

    chain: AcceptanceByDepth = field(default_factory=AcceptanceByDepth)
    tree: AcceptanceByDepth = field(default_factory=AcceptanceByDepth)

    def learn(self, chain: bool, asked: int, accepted: int) -> None:
        """Record a round, of a chain or of a tree: see ``AcceptanceByDepth.learn``."""
        (self.chain if chain else self.tree).learn(asked, accepted)

    def see(self, shape: TreePolicy | None, deepest: int, tokens: Sequence[int], parents: Sequence[int], accepted: Sequence[int]) -> None:
        """``learn`` from a round's shape (None: no guesses) and its tree: its depth, and tokens and parents as in ``Guesses``.
        ``accepted``: the guesses that were right.
        """
        if shape is None:
            self.chain.fade()
            self.tree.fade()
            return
        self.learn(shape.kind == "chain", shape.depth, len(accepted))  # a tree that ended early counts as a miss: its round costs as much
        if shape.kind != "chain" and tokens:  # the path of first children tells what a chain would have got
            firsts, here = list[int](), -1
            while here in parents:
                here = parents.index(here)
                firsts.append(tokens[here])
            straight = sum(accumulate((a == b for a, b in zip(firsts, accepted, strict=False)), mul))
            self.chain.learn(deepest, straight)

    def taus(self, shapes: Sequence[TreePolicy], prior: Sequence[float] = ()) -> list[float]:
        """tau: the tokens that a round of each shape is expected to emit."""
        deepest, known = max((shape.depth for shape in shapes), default=0), list(prior or PRIOR)
        weight = SURE if prior else WEIGHT
        chain = self.chain.by_depth((known + known[-1:] * deepest)[:deepest], weight)
        tree = self.tree.by_depth([1 - BRANCHES * (1 - x) for x in chain], weight)
        sums = {True: _expected(chain), False: _expected(tree)}
        return [sums[shape.kind == "chain"][shape.depth] for shape in shapes]


def _expected(acceptance: Sequence[float]) -> list[float]:
    """tau of shapes of depth 0, 1, 2, ...: 1 + the sum over depths of the product of the acceptance rates up to there."""
    return list(accumulate(accumulate(acceptance, mul), initial=1.0))


@dataclass
class Pace:
    """The choice of each round's shape, for sequences that share their rounds."""

    credit: float | None = None  # plain rounds that may still be lost by trying; None: before the first choice
    resting: int = 0  # rounds without drafting until the next choice
    closed: int = 0  # rounds from now on in which no try can be afforded, whatever the target says

    def choose(self, auto: Auto, pasts: Sequence[Past], waiting: int = 0) -> TreePolicy | None:
        """The shape with the largest expected gain; None: no drafting. Where no shape gains, the best one is still tried now and then, so
        rarely that the loss stays a small share of the time. ``waiting``: rows that the drafter would have to read first.
        """
        if self.credit is None:
            self.credit = KNOWN_CREDIT if auto.prior else CREDIT
        if self.resting > 0:
            self.resting, self.closed, self.credit = self.resting - 1, self.closed - 1, self.credit + LOSS
            return None
        shapes, taus = auto.shapes, [past.taus(auto.shapes, auto.prior) for past in pasts]
        gains = [sum(each) / len(pasts) / cost for *each, cost in zip(*taus, auto.costs, strict=True)]
        best = max(range(len(gains)), key=gains.__getitem__)
        lost = auto.costs[best] * (MARGIN - gains[best])  # the loss of one try, in plain rounds
        lost = lost + auto.reading * waiting if lost > 0 else 0.0  # where drafting gains, it soon repays reading these rows
        if lost > self.credit:
            seen = any(past.chain.seen or past.tree.seen for past in pasts)  # else nothing changes until the credit suffices
            short = int((lost - self.credit) / LOSS)
            self.resting, self.closed = min(short, PATIENCE - 1 if seen else MOST), 0 if seen else short
            self.credit += LOSS
            return None
        self.credit, self.closed = self.credit - lost, 0
        return shapes[best]


# What rounds cost ----------------------------------------------------------------------------------------------------

KNOWN: WeakKeyDictionary[Target, WeakKeyDictionary[Any, dict[Any, Auto]]] = WeakKeyDictionary()  # target -> guesser -> measurements


def known_of(target: Target, proposer: Any) -> dict[Any, Auto]:
    """The measurements of this target with this drafter or proposer in this process, by policy, rule, heat (and number of sequences)."""
    guesser = proposer.drafter if isinstance(proposer, Drafting) else proposer
    return KNOWN.setdefault(target, WeakKeyDictionary()).setdefault(guesser, {})


def key_of(policy: TreePolicy, sampling: SamplingParams) -> tuple[TreePolicy, str, int]:
    """The key of a measurement for one sequence that is decoded alone."""
    return policy, sampling.rule, costs_as(sampling.rule, heat_of(sampling.temperature))


def found_of(target: Target, proposer: Any, policy: TreePolicy, sampling: SamplingParams) -> Auto | None:
    """The measurement of this policy for one sequence, made by either decoding path; None: there is none yet."""
    known, key = known_of(target, proposer), key_of(policy, sampling)
    return known.get(key) or known.get((*key, 1))


def auto_of(policy: TreePolicy, target: Target, proposer: Proposer, sampling: SamplingParams, generate: Callable[..., Any]) -> Auto:
    """The costs of rounds for sequences that are decoded alone, by ``decode.generate``. Measured at the first call, then kept for the
    process. The measurement continues a meaningless text, because the time of a round hardly depends on which tokens are guessed. It grows
    trees to their full depth: in such a text the drafter is unsure, and ``least`` would end trees earlier than in real text.
    """
    from headstart.inference.decoding.decode import longest  # that file imports this one

    known, key = known_of(target, proposer), key_of(policy, sampling)
    if key in known:
        return known[key]
    shapes, how = shapes_of(*key), SamplingParams(sampling.temperature, rule=sampling.rule)
    most = longest(target, 1)
    prompt = [i % target.shape.vocab_size for i in range(max(min(48, most // 2), 1))]
    new_tokens = min(ROUNDS * (1 + policy.depth), most - len(prompt))

    def block(shape: TreePolicy | None) -> float:
        times = [now()]

        def tick(_: object) -> None:
            times.append(now())
            if len(times) > 3 and (len(times) > ROUNDS or times[-1] - times[1] > LONG):
                raise _Enough

        with suppress(_Enough):  # tick is called with tokens on the host, so it marks a round's end on any device
            full = None if shape is None else replace(shape, least=0.0)
            guesser = None if shape is None else proposer
            generate(target, guesser, prompt, new_tokens=new_tokens, policy=full, sampling=how, stop_ids=(), on_tokens=tick)
        first, *rounds = [b - a for a, b in zip(times[1:], times[2:], strict=False)] or [inf]  # without reading the prompt
        if not rounds:
            return first
        usual = _settled(rounds)
        if shape is None:
            plain.append(usual)
        else:
            extra.append(first - usual)
        return usual

    # seconds of plain rounds; seconds by which reading the prompt lengthens the drafter's first round
    now, plain, extra = clock_of(target), list[float](), list[float]()
    costs = _over_plain(shapes, block)
    reading = max(median(extra) / median(plain) / len(prompt), 0.0) if plain and extra else 0.0
    prior = proposer.drafter.acceptance.get(sampling.temperature > 0, ()) if isinstance(proposer, Drafting) else ()
    known[key] = Auto(shapes, costs, prior, reading)
    return known[key]


def _settled(rounds: Sequence[float]) -> float:
    """Seconds of a round among others of its kind: the median of the later half of ``rounds``."""
    return median(rounds[len(rounds) // 2 :])


def clock_of(target: Target) -> Callable[[], float]:
    """A clock in seconds, for differences. Where one CPU process does all the work, it counts the time that the thread really ran: other
    processes stretch long rounds more than short ones (by factors, as measured). Elsewhere it counts wall-clock time.
    """
    return time.thread_time if target.device.type == "cpu" and not target.spread else target.agreed(time.perf_counter)


def wait_for(device: torch.device) -> None:
    """Wait until a GPU has finished its work. On a CPU there is nothing to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _Enough(Exception):
    """Raised when enough rounds were timed."""


def auto_of_rounds(rounds: Any, kind: Any, warp: LogitsWarper, long: float | None = None) -> Auto:
    """The costs of rounds for the sequences that the engine holds now (``Rounds``). Measured once for each kind of round; the state of the
    sequences is restored after every measured round. ``long``: seconds of a turn instead of ``LONG``.
    """
    known, key = known_of(rounds.target, rounds.drafter), (kind.policy, rounds.rule, costs_as(rounds.rule, warp.heat), kind.n)
    if key in known:
        return known[key]
    put_back, shapes, now = rounds.snapshot(), shapes_of(*key[:3]), clock_of(rounds.target)

    def block(shape: TreePolicy | None) -> float:
        seconds: list[float] = []
        while len(seconds) < 2 or (len(seconds) < ROUNDS and sum(seconds) < (long or LONG)):
            start = now()
            rounds.run(kind._replace(policy=shape), warp)
            wait_for(rounds.device)
            seconds.append(now() - start)
            put_back()
            wait_for(rounds.device)
        return _settled(seconds)

    prior = rounds.drafter.acceptance.get(warp.sampled, ())
    known[key] = Auto(shapes, _over_plain(shapes, block), prior)
    return known[key]


def _over_plain(shapes: Sequence[TreePolicy], block: Callable[[TreePolicy | None], float]) -> list[float]:
    """The cost of a round of each shape, relative to a plain round. ``block`` runs many rounds of one shape and returns the seconds of one.
    (Rounds of other shapes in between would change what the CPU caches hold.) Three chains are measured, the others interpolated. Two turns
    are enough where both say that no shape could gain even if every guess were right.
    """
    chains = [shape for shape in shapes if shape.kind == "chain"]
    some = list(dict.fromkeys([chains[0], chains[len(chains) // 2], chains[-1], *(s for s in shapes if s.kind != "chain")]))
    turns = list[list[float]]()
    while len(turns) < TURNS:  # in turns, because the machine's speed drifts
        turns.append([block(shape) for shape in (None, *some)])
        dear = [MARGIN * cost > (shape.depth + 1) * plain for plain, *each in turns for shape, cost in zip(some, each, strict=True)]
        if len(turns) == 2 and all(dear):
            break
    plain, *others = (median(seconds) for seconds in zip(*turns, strict=True))
    found = {shape: each / plain for shape, each in zip(some, others, strict=True)}
    costs = {shape.depth: found[shape] for shape in chains if shape in found}
    return [found[s] if s in found else float(np.interp(s.depth, list(costs), list(costs.values()))) for s in shapes]
