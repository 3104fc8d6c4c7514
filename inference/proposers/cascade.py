"""A cascade: a drafter whose own chain is speculated by a smaller proposer (1B drafts for 7B, which drafts for 70B).

The chain is exactly the one that the drafter would guess alone at temperature 0, in fewer of its passes: the small one
guesses, the drafter reads the guesses in one pass and keeps those that it would have said (2211.17192, greedy). The first
of these passes also absorbs what the target has verified. Cascades nest: a cascade can be the small one of another.

Guesses are never drawn, so they are exact under every rule at any temperature.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from headstart.heads.base import Drafter, Roots
from headstart.heads.errors import UserError
from headstart.heads.memory import Slots
from headstart.inference.decoding.rng import CounterRNG
from headstart.inference.decoding.context import Context
from headstart.inference.decoding.policy import MOST_READS, TreePolicy
from headstart.inference.decoding.propose import Drafting, begin
from headstart.inference.decoding.sampling import SamplingParams
from headstart.inference.decoding.tree import Tree
from headstart.inference.proposers.base import Follower, joined


class Cascade(Follower):
    """``drafter`` must be a language model of its own: only then is guessing behind a guess the same as behind a verified token.
    Without ``small`` it is the drafter's plain chain.
    """

    taps: tuple[int, ...] = ()
    within: ClassVar = {"small": {"kind": "ngram"}}

    def __init__(self, drafter: Drafter, small: Follower | Drafting | None = None) -> None:
        if drafter.unrolls or drafter.taps:
            raise UserError("proposer cascade: its drafter must be a language model of its own, which reads no state of the target")
        self.drafter, self.small = drafter, Cascade(small.drafter) if isinstance(small, Drafting) else small
        self.memory = Slots(dtype=drafter.memory_dtype)

    def start(self, context: Context, tokens: int) -> None:
        """Forget everything, in the smaller ones too."""
        self.memory.reserve(tokens + MOST_READS)
        self.memory.rewind(0)
        self.waiting, self.rows = list[Roots](), 0  # not read yet; roots in memory
        if self.small is not None:
            self.small.start(context, tokens)

    def absorb(self, roots: Roots) -> None:
        """What was verified waits until it is read together with the first guesses."""
        self.waiting.append(Roots(roots.read_BT, roots.chosen_BT, {}, roots.positions_BT))  # read together with the first guesses
        if self.small is not None:
            self.small.absorb(roots)

    def propose(self, policy: TreePolicy, rng: CounterRNG, sampling: SamplingParams) -> Tree:
        """A chain, whatever tree the policy would allow."""
        if sampling.temperature > 0:
            policy.check(sampling.rule)
        tokens = self.follow((), min(policy.depth, policy.nodes))
        return Tree.of(tokens, range(-1, len(tokens) - 1), self.drafter.ends.head_VD.device)

    def follow(self, after: Sequence[int], count: int) -> list[int]:
        """The drafter's own greedy chain, in fewer passes where the small one guesses it."""
        line, end = list(after), len(after) + count
        said = [] if self.waiting else [self.said]  # by the drafter behind the first 0, 1, .. tokens of the line
        while len(line) < end:
            right = len(line)
            if self.small is not None:
                line += self.small.follow(line, end - len(line) - 1)  # the drafter adds one itself
            said += self._read(line, max(len(said) - 1, 0))
            while right < len(line) and line[right] == said[right]:
                right += 1
            line[right:] = [said[right]]
            del said[right + 1 :]
            self.memory.rewind(self.rows + right)
        self.memory.rewind(self.rows)
        return line[len(after) :]

    @torch.inference_mode()
    def _read(self, line: list[int], known: int) -> list[int]:
        """What the drafter says behind the tokens of ``line`` that are not ``known``, as if the target had chosen them all, and behind
        the last root where that waits too.
        """
        new, fresh = len(line) - known, bool(self.waiting)
        if fresh:
            self.last = self.waiting[-1][-1:]
        if new:
            device = self.last.chosen_BT.device
            tokens_T = torch.cat([self.last.chosen_BT[0], torch.tensor(line, device=device)])
            positions_T = self.last.positions_BT[0] + torch.arange(known + 1, len(line) + 1, device=device)
            self.waiting.append(Roots(tokens_T[None, known:-1], tokens_T[None, known + 1 :], {}, positions_T[None]))
        if not self.waiting:
            return []
        roots, self.waiting = joined(self.waiting), []
        draft = begin(self.drafter, roots, self.memory, new + fresh)
        unembedding = self.drafter.unembedding(1)
        best_N = unembedding.logits(draft.hidden_BNH)[0].argmax(-1)
        said = (best_N if unembedding.ids_V is None else unembedding.ids_V[best_N]).tolist()
        if fresh:
            self.rows, self.said = self.memory.rows() - new, said[0]
        return said
