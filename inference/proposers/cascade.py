"""A cascade: a drafter whose own chain is drafted by a smaller proposer (1B drafts for 7B, which drafts for 70B).

The chain is exactly the one that the drafter would guess alone at temperature 0, made in fewer passes of the drafter: the small
proposer guesses, the drafter reads these guesses in one pass and keeps those that equal its own choices (2211.17192, greedy). The
first of these passes also absorbs the newly verified roots. Cascades nest: a cascade can be the small proposer of another.

Guesses are never drawn, so every rule verifies them exactly at any temperature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch

from headstart.heads.base import Drafter, Roots
from headstart.heads.errors import UserError
from headstart.heads.memory import Slots
from headstart.inference.decoding.context import Context
from headstart.inference.decoding.counter_rng import CounterRNG
from headstart.inference.decoding.policy import MOST_READS, TreePolicy
from headstart.inference.decoding.propose import Drafting, begin
from headstart.inference.decoding.sampling import SamplingParams
from headstart.inference.decoding.tree import Tree
from headstart.inference.proposers.base import Follower, joined


class Cascade(Follower):
    """``drafter`` must be an independent language model: only such a drafter reads a guess in the same way as a verified token. ``small``:
    the smaller proposer; None: the drafter guesses its chain alone. Raises UserError for another kind of drafter.
    """

    taps: tuple[int, ...] = ()
    within: ClassVar = {"small": {"kind": "ngram"}}

    def __init__(self, drafter: Drafter, small: Follower | Drafting | None = None) -> None:
        if drafter.unrolls or drafter.taps:
            raise UserError("proposer cascade: its drafter must be a language model of its own, which reads no state of the target")
        self.drafter, self.small = drafter, Cascade(small.drafter) if isinstance(small, Drafting) else small
        self.memory = Slots()

    def start(self, context: Context, tokens: int) -> None:
        """Begin a sequence, in the smaller proposers too."""
        self.memory.reserve(tokens + MOST_READS)
        self.memory.rewind(0)
        self.waiting, self.rows = list[Roots](), 0  # verified roots that were not read yet; rows of read roots in memory
        if self.small is not None:
            self.small.start(context, tokens)

    def absorb(self, roots: Roots) -> None:
        """Keep the roots waiting. The drafter reads them with the first guesses."""
        self.waiting.append(replace(roots, states={}))  # the drafter reads no states
        if self.small is not None:
            self.small.absorb(roots)

    def propose(self, policy: TreePolicy, rng: CounterRNG, sampling: SamplingParams) -> Tree:
        """A chain, whatever tree the policy would allow."""
        if sampling.temperature > 0:
            policy.check(sampling.rule)
        tokens = self.follow((), min(policy.depth, policy.nodes))
        return Tree.of(tokens, range(-1, len(tokens) - 1), self.drafter.ends.head_VD.device)

    def follow(self, after: Sequence[int], count: int) -> list[int]:
        """The drafter's own greedy chain after ``after``; the better the small proposer guesses it, the fewer passes it takes."""
        line, end = list(after), len(after) + count
        said = [] if self.waiting else [self.said]  # the drafter's choice after the first 0, 1, .. tokens of the line
        while len(line) < end:
            right = len(line)
            if self.small is not None:
                line += self.small.follow(line, end - len(line) - 1)  # one fewer: the drafter adds a token itself
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
        """Let the drafter read the waiting roots, then the tokens of ``line`` after the first ``known``, as if the target had chosen them.
        Returns its choice after each of these tokens. If roots were waiting, the list begins with its choice at the last root.
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
