"""Replays decoding over a known text: the decode loop as it is, without the target's passes.

A text's tokens, and the target's states at each of them, are recorded once. Any drafter with any tree can then be judged by the recording
alone, round by round: the drafter reads the recorded states as its roots and grows its tree, and the path that the text takes is kept.

At temperature 0 the text decides which guesses are accepted, so the rounds equal decoding's. Above it, different rounds can give the same
text: a token may be an accepted guess, or sampled by the target after a guess was refused. So the drawn guesses, and whether each was
accepted, are sampled here under the condition that this text came out. Of the probability p(x) of emitting x after a row, min(p, q)(x)
comes from accepting a drawn child, where q is the distribution that it was drawn from; a refused child was drawn from max(q - p, 0),
normalized. With several drawn children, p becomes the residual after each refusal; the rules block and traversal scale p by w, the weight
of the path (see ``verify.traversal``). Thus the expected number of rounds equals decoding's under every rule. It does not matter whether
the text was decoded plainly or with some drafter: its distribution is the target's in both cases. Text of others is another matter: the
target finds its tokens less probable, and a smaller p makes it more likely here that a guess was accepted.

Shape suffixes: T tokens, R rows of one pass (root row and nodes), E expanded rows of a level, K children of each, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from headstart.heads.base import Drafter
from headstart.heads.errors import UserError
from headstart.heads.memory import Slots
from headstart.inference.decoding.counter_rng import CounterRNG
from headstart.inference.decoding.decode import Generation, SequenceState, run
from headstart.inference.decoding.info import TargetInfo
from headstart.inference.decoding.policy import TreePolicy, fit_depth
from headstart.inference.decoding.propose import Drafting, Proposer
from headstart.inference.decoding.sampling import SamplingParams
from headstart.inference.decoding.target import Target
from headstart.inference.decoding.tree import Tree
from headstart.inference.decoding.verify import RULES, rule_of

OWN = 1 << 24  # the first slot of random numbers that decoding does not use
REPEATS = 1 << 20  # added to the seed, so that the numbers here are independent of those that decoding drew
LEAST = 1e-30  # the smallest divisor


class Recorded:
    """A prompt, its continuation and the target's states over both. It takes the target's place in the decode loop. ``states``: tapped
    layer -> [1, T, D]; ``final_1TD``: the states after the final norm (needed above temperature 0).
    """

    rope_switch: int | None = None

    def __init__(
        self, target: TargetInfo, prompt: Sequence[int], said: Sequence[int], states: dict[int, Tensor], final_1TD: Tensor
    ) -> None:
        self.name, self.ends, self.shape, self.device = target.name, target.ends, target.shape, target.device
        self.stop_ids: tuple[int, ...] = getattr(target, "stop_ids", ())
        self.prompt, self.said, self.text = list(prompt), list(said), [*prompt, *said]
        self.states, self.final_1TD = states, final_1TD

    @classmethod
    @torch.no_grad()
    def by(cls, target: Target, taps: Collection[int], prompt: Sequence[int], said: Sequence[int]) -> Recorded:
        """Record ``prompt`` and its continuation ``said`` by one teacher-forced pass."""
        tokens_1T = torch.tensor([[*prompt, *said]], device=target.device)
        states, final_1TD = target.read(tokens_1T, torch.arange(tokens_1T.shape[1], device=target.device)[None], taps)
        return cls(target, prompt, said, states, final_1TD)

    def new_memory(self, rows: int = 0) -> Slots:
        """A memory without keys and values: the target computes nothing here, so nothing is stored."""
        return Slots(rows)

    def read_rows(
        self, tokens_1R: Tensor, positions_1R: Tensor, memory: Any, sees: Any, taps: Collection[int] = ()
    ) -> tuple[dict[int, Tensor], Tensor]:
        """The recorded states at these positions. They mean nothing for rows whose tokens are not the text's: no round keeps such rows."""
        at_R = positions_1R[0].clamp(max=len(self.text) - 1)
        return {tap: self.states[tap][:, at_R] for tap in taps}, self.final_1TD[:, at_R]

    def behind(self, position: int) -> int | None:
        """The text's token after this position; None at the end of the text."""
        return self.text[position + 1] if position + 1 < len(self.text) else None


class ReplayedState(SequenceState):
    """The state of a sequence whose rounds emit a recorded text."""

    def __init__(self, recorded: Recorded, new_tokens: int, sampling: SamplingParams) -> None:
        super().__init__(recorded, recorded.prompt, new_tokens, sampling, None, None, None)  # type: ignore[arg-type]
        self.recorded = recorded

    def rng(self, position: int, shape: TreePolicy | None = None) -> CounterRNG:
        """Random numbers by which drawn guesses follow the text (above temperature 0)."""
        return ReplayedRNG(self, position, shape) if self.warp.sampled else super().rng(position)

    def p(self, position: int) -> Tensor:
        """The target's distribution [V] after a position of the text."""
        logits_11V = self.recorded.ends.logits(self.recorded.final_1TD[:, position : position + 1])
        return self.warp.target(logits_11V)[0, 0].double()

    def verdict(self, final_1RD: Tensor, tree: Tree, rng: CounterRNG) -> tuple[list[int], int]:
        """The rows of the accepted path, the root row first, and the text's token after it. The path follows the text through the tree."""
        tokens, parents = tree.tokens_BN[0].tolist(), tree.parents_BN[0].tolist()
        root = len(self.prompt) + len(self.result.tokens) - 1  # the position of row 0
        rows = [0]
        while (token := self.recorded.behind(root + len(rows) - 1)) is not None:
            found = (i for i, (t, parent) in enumerate(zip(tokens, parents, strict=True)) if t == token and parent == rows[-1] - 1)
            node = next(found, None)
            if node is None:
                return rows, token
            if isinstance(rng, ReplayedRNG) and not rng.several:
                drawn = tree.drawn_BN is not None and bool(tree.drawn_BN[0, node])
                q = float(tree.q_BRV[0, rows[-1], token]) if drawn and tree.q_BRV is not None else 1.0
                if drawn and not rng.happens(q / max(float(self.p(root + len(rows) - 1)[token]), LEAST), len(rows)):
                    return rows, token
            rows.append(node + 1)
        return rows, self.recorded.text[-1]  # at the end of the text: a filler, since no token after it is kept


class ReplayedRNG(CounterRNG):
    """The random numbers of one round, given that the round emits this text.

    With one drawn child a row (``token``, ``top_plus_one``), the child is the text's token if the row can draw it.
    ``ReplayedState.verdict`` decides whether it was accepted; if not, the tree below it does not matter. With several drawn children a
    row, and where rows have weights, whether the text's token was accepted is decided child by child, while they are drawn.
    """

    def __init__(self, told: ReplayedState, position: int, shape: TreePolicy | None) -> None:
        super().__init__(torch.tensor([told.sampling.seed], device=told.target.device), torch.tensor([position], device=told.target.device))
        rule = rule_of(told.sampling.rule, shape or Tree.empty())
        self.weighted = rule in ("block", "traversal")
        self.several = self.weighted or RULES[rule].draw != "top_plus_one"  # whether a row may have several drawn children
        self.told, self.place = told, position  # position of the tokens whose children are chosen now
        self.row: int | None = 0  # index among the rows expanded now of the one whose path is the text's; None: no such row
        self.p_V: Tensor | None = None  # the target's distribution after the refusals at this row; None: nothing was refused yet
        self.w, self.next_w = 1.0, 1.0  # weight of this row, and of its child whose token is the text's
        self.taken = False  # whether a child of this row was accepted

    def happens(self, probability: float, use: int) -> bool:
        """True with this probability. ``use`` numbers the decisions of a round; their random numbers are not decoding's."""
        return float(self.uniform(OWN + use)) < probability

    def draws(self, probs_BXV: Tensor, slot: int, count: int = 1) -> Tensor:
        drawn_1XC, token = super().draws(probs_BXV, slot, count), self.told.recorded.behind(self.place)
        if self.row is not None and token is not None and float(total := probs_BXV[0, self.row].double().sum()) > 0:
            for i in range(count if not self.taken else 0):
                drawn_1XC[0, self.row, i] = self._child(probs_BXV[0, self.row].double() / total, token, slot + i)
                if self.taken:
                    break
        return drawn_1XC

    def _child(self, q_V: Tensor, token: int, slot: int) -> int:
        """A drawn child of the text's row: the text's token, or a token that was refused."""
        left_of_p_V = self.told.p(self.place) if self.p_V is None else self.p_V
        p_V = self.w * left_of_p_V
        if self.several:
            self.taken = self.happens(float(q_V[token] / p_V[token].clamp(min=LEAST)), slot)
            self.next_w = min(1.0, float(p_V[token] / q_V[token].clamp(min=LEAST))) if self.weighted else 1.0
        if q_V[token] > 0 and (self.taken or not self.several):
            return token
        refused_V, left_V = (q_V - p_V).clamp(min=0), (p_V - q_V).clamp(min=0)
        s = float(left_V.sum())
        self.p_V = left_V / s if s > 0 else left_of_p_V
        self.w = s / max(s + (1 - self.w), LEAST) if self.weighted else 1.0
        return int(super().draws((refused_V if refused_V.sum() > 0 else q_V)[None, None], 2 * OWN + slot))

    def expand(self, tokens_BEK: Tensor, rows_BE: Tensor) -> None:
        token = self.told.recorded.behind(self.place)
        here = [] if self.row is None else tokens_BEK[0, self.row].tolist()
        child = (self.row or 0) * len(here) + here.index(token) if token in here else -1  # the first one, where it was drawn twice
        rows = rows_BE[0].tolist()
        self.row = rows.index(child) if child in rows else None
        self.place, self.p_V, self.taken, self.w = self.place + 1, None, False, self.next_w


def replay(
    recorded: Recorded, guesser: Drafter | Proposer, policy: TreePolicy, sampling: SamplingParams, *, new_tokens: int | None = None
) -> Generation:
    """The rounds in which ``guesser`` emits the recorded text under this policy; above temperature 0 a sample of them, drawn by
    ``sampling.seed``.

    ``new_tokens``: how many were asked for, where a stop token ended the text earlier. Raises UserError for a repetition penalty above
    temperature 0, and for an auto policy.
    """
    if sampling.temperature > 0 and sampling.repetition_penalty != 1:
        raise UserError("above temperature 0 nothing can be expected under a repetition penalty: it depends on the path")
    if not recorded.said:
        return Generation(ended="length")
    proposer = Drafting(guesser.eval()) if isinstance(guesser, Drafter) else guesser
    policy = fit_depth(policy, guesser) if isinstance(guesser, Drafter) else policy
    if policy.kind == "auto":
        raise UserError(
            "decode=auto chooses by what rounds cost, which a recording does not tell: give a shape (decode=chain, dynamic, ..)"
        )
    told = ReplayedState(recorded, new_tokens or len(recorded.said), replace(sampling, seed=sampling.seed + REPEATS))
    return run(told, proposer, policy)
