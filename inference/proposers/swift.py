"""Layer skipping with a search while decoding (SWIFT, 2410.06916): the target guesses with some of its attentions and MLPs skipped.

The set of skipped parts is searched in the first rounds, one candidate a round: at first random sets, then the best set so far with
one part exchanged. A candidate is measured by its matchness: the share of the last positions at which it predicts the same token as
the whole target. The best set so far is measured anew over the same positions, so that both are compared on the same text. The parts
of the first and the last layer are never skipped.

Shape suffixes: T tokens of the window, V vocabulary.
"""

from __future__ import annotations

import random

import torch

from headstart.heads.base import Roots
from headstart.heads.errors import UserError
from headstart.heads.visibility import CausalSees
from headstart.inference.decoding.context import Context
from headstart.inference.decoding.target import Target
from headstart.inference.proposers.base import check_whole
from headstart.inference.proposers.layers import PARTS, Borrowed, Itself, SomeLayers, values_returned

Choice = frozenset[tuple[int, str]]  # a set of skipped parts: (layer, name of the part)


class Swift(Itself):
    """``skip``: the share of all attentions and MLPs that is skipped (rounded down to a whole number). ``search``: how many rounds try a
    candidate. ``window``: how many last tokens a candidate is measured over. ``seed``: of the search. Raises UserError for a wrong value,
    and where layers cannot be skipped.
    """

    def __init__(self, target: Target, *, skip: float = 0.4, search: int = 16, window: int = 32, seed: int = 0) -> None:
        check_whole("swift", search=search, window=window)
        for name, value in (("skip", skip), ("seed", seed)):
            if isinstance(value, bool) or not isinstance(value, (int, float) if name == "skip" else int):
                raise UserError(f"proposer swift: {name} must be a number, found {value!r}")
        layers = target.shape.layers
        self.free = [(layer, part) for layer in range(1, layers - 1) for part in PARTS]
        self.count = int(skip * layers * len(PARTS))
        if not 1 <= self.count <= len(self.free):
            raise UserError(
                f"proposer swift: skip={skip} would leave out {self.count} of the {len(self.free)} attentions and MLPs "
                f"that lie between the first and the last of {layers} layers: choose another share"
            )
        super().__init__(SomeLayers(target, values_returned(target, "swift", PARTS)))
        self.taps = (layers,)
        self.search, self.window, self.seed = search, window, seed

    def start(self, context: Context, tokens: int) -> None:
        """Begin a sequence and a new search. At first, evenly spaced parts are skipped."""
        super().start(context, tokens)
        self.dice, self.tried = random.Random(self.seed), 0
        self.tokens_1T = torch.empty(1, 0, dtype=torch.int64, device=context.target.device)
        self.said_1T = self.tokens_1T  # what the target predicts after each of these tokens
        step = len(self.free) / self.count
        self._use(frozenset(self.free[int(i * step)] for i in range(self.count)))

    @torch.inference_mode()
    def absorb(self, roots: Roots) -> None:
        """While the search lasts, measure one more candidate, and keep it if it is better than the best set so far."""
        super().absorb(roots)
        if self.tried == self.search:
            return
        target, new = self.context.target, roots[-self.window :]
        said_1T = target.logits(new.states[self.taps[0]]).argmax(-1)
        self.tokens_1T = torch.cat([self.tokens_1T, new.read_BT], dim=1)[:, -self.window :]
        self.said_1T = torch.cat([self.said_1T, said_1T], dim=1)[:, -self.window :]
        self.tried += 1
        best, candidate = self.choice, self._candidate()
        if self._matchness(best) >= self._matchness(candidate):
            self._use(best)

    def _candidate(self) -> Choice:
        """The next candidate: a random set in the first half of the search, then the best set with one part exchanged."""
        if 2 * self.tried <= self.search:
            return frozenset(self.dice.sample(self.free, self.count))
        others = [part for part in self.free if part not in self.choice]
        if not others:
            return self.choice
        return self.choice - {self.dice.choice(sorted(self.choice))} | {self.dice.choice(others)}

    def _matchness(self, choice: Choice) -> float:
        """The matchness of ``choice``: with these parts skipped, read the window again, after the rows before it in the target's cache."""
        self._use(choice)
        before, tokens = self.context.length - self.tokens_1T.shape[1], self.tokens_1T.shape[1]
        positions_1T = torch.arange(before - 1, self.context.length - 1, device=self.tokens_1T.device)[None]
        roots = Roots(self.tokens_1T, self.tokens_1T, {}, positions_1T)
        sees = CausalSees(tokens, self.context.length)
        draft = self.drafter.begin(roots, Borrowed(self.context, before), sees)
        logits_1TV = self.drafter.unembedding(1).logits(draft.hidden_BNH)
        return float((logits_1TV.argmax(-1) == self.said_1T).float().mean())

    def _use(self, choice: Choice) -> None:
        self.choice = choice
        self.drafter.left_out = {getattr(self.context.target.layers[layer], part): False for layer, part in sorted(choice)}
