"""Proposers: they make a tree of draft tokens from the verified text of a sequence. A drafter with a tree policy is one of them."""

from __future__ import annotations

from typing import Protocol

import torch

from headstart.heads.base import Draft, Drafter, Roots
from headstart.heads.memory import Memory, Slots
from headstart.heads.visibility import CausalSees
from headstart.inference.decoding.context import Context
from headstart.inference.decoding.counter_rng import CounterRNG
from headstart.inference.decoding.growth import grow
from headstart.inference.decoding.policy import MOST_READS, TreePolicy
from headstart.inference.decoding.sampling import LogitsWarper, SamplingParams
from headstart.inference.decoding.tree import Tree

PIECE = 512  # most roots of a prompt that a drafter reads in one pass; this bounds the memory for activations


def begin(drafter: Drafter, roots: Roots, memory: Memory, asked: int = 1) -> Draft:
    """Let the drafter read new roots of one sequence after those in memory. Returns its drafts at the last ``asked`` of them."""
    while (rows := roots.read_BT.shape[1]) > max(PIECE, asked):
        piece = min(PIECE, rows - asked)
        _begin(drafter, roots[:piece], memory, 1)
        roots = roots[piece:]
    return _begin(drafter, roots, memory, asked)


def _begin(drafter: Drafter, roots: Roots, memory: Memory, asked: int) -> Draft:
    rows, device = roots.read_BT.shape[1], roots.read_BT.device
    ask_1A = torch.arange(rows - asked, rows, device=device)[None]
    return drafter.begin(roots, memory, CausalSees(rows, memory.rows() + rows), ask_1A)


class Proposer(Protocol):
    """The interface of whatever guesses for one sequence: a drafter under a tree policy, or a method without training."""

    taps: tuple[int, ...]  # target layers whose states the roots must carry

    def start(self, context: Context, tokens: int) -> None:
        """Forget the last sequence and start one of at most ``tokens`` tokens, prompt included. The target reads it in ``context``."""

    def absorb(self, roots: Roots) -> None:
        """Read newly verified positions, oldest first."""

    def propose(self, policy: TreePolicy, rng: CounterRNG, sampling: SamplingParams) -> Tree:
        """A tree of guesses after the last root. Above temperature 0 its nodes are drawn in the way that ``sampling.rule`` verifies."""


class Drafting:
    """A drafter as proposer, with its memory of one sequence."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.taps = drafter.taps
        self.memory = Slots()
        self.draft: Draft | None = None

    def start(self, context: Context | None, tokens: int) -> None:
        self.memory.reserve(
            tokens + MOST_READS
        )  # a row for each token (some drafters also read x[0], which no root chose), and the nodes of a round
        self.memory.rewind(0)
        self.draft = None

    @torch.inference_mode()
    def absorb(self, roots: Roots) -> None:
        self.draft = begin(self.drafter, roots, self.memory)
        self.position_B1 = roots.positions_BT[:, -1:]

    @torch.inference_mode()
    def propose(self, policy: TreePolicy, rng: CounterRNG, sampling: SamplingParams) -> Tree:
        rule = policy.check(sampling.rule) if sampling.temperature > 0 else "top_plus_one"
        if self.draft is None:
            raise RuntimeError("absorb verified positions before proposing")
        policy = policy.at_most(self.drafter.max_depth or policy.depth)
        roots = self.memory.rows()
        warp = LogitsWarper.of([sampling], self.draft.hidden_BNH.device)
        tree = grow(self.drafter, self.draft, self.position_B1, self.memory, policy, warp, rule, rng, hasty=True)
        self.memory.rewind(roots)
        return tree
