"""A hybrid: a lookup in the text guesses where it finds a match, a trained drafter (or any other proposer) where it does not.

Which of the two guesses depends on the verified text alone, so every rule that is exact for each of them is exact for the hybrid.
"""

from __future__ import annotations

from typing import ClassVar

from headstart.heads.base import Roots
from headstart.heads.errors import UserError
from headstart.inference.decoding.context import Context
from headstart.inference.decoding.counter_rng import CounterRNG
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.propose import Proposer
from headstart.inference.decoding.sampling import SamplingParams
from headstart.inference.decoding.tree import Tree
from headstart.inference.proposers.base import Lookup, check_whole, joined


class Hybrid:
    """``match``: the lookup guesses where its match has at least this many tokens. Raises UserError for a length that it never reaches."""

    within: ClassVar = {"lookup": {"kind": "suffix"}, "otherwise": {"kind": "drafter"}}

    def __init__(self, lookup: Lookup, otherwise: Proposer, *, match: int = 3) -> None:
        check_whole("hybrid", match=match)
        if match > lookup.most:
            raise UserError(f"proposer hybrid: match={match} is never reached, its lookup matches at most most={lookup.most} tokens")
        self.lookup, self.otherwise, self.match = lookup, otherwise, match
        self.taps = otherwise.taps

    def start(self, context: Context, tokens: int) -> None:
        """Begin a sequence in both proposers."""
        self.lookup.start(context, tokens)
        self.otherwise.start(context, tokens)
        self.waiting: list[Roots] = []

    def absorb(self, roots: Roots) -> None:
        self.lookup.absorb(roots)
        self.waiting.append(roots)

    def propose(self, policy: TreePolicy, rng: CounterRNG, sampling: SamplingParams) -> Tree:
        if self.lookup.matched >= self.match:
            return self.lookup.propose(policy, rng, sampling)
        if self.waiting:  # all roots since it last guessed, in one pass
            self.otherwise.absorb(joined(self.waiting))
            self.waiting = []
        return self.otherwise.propose(policy, rng, sampling)
