"""Pipelined drafting: the next round's chain is drafted while the target still verifies this round's (the idea of Mirror Speculative
Decoding, 2510.13161).

The drafter bets on the likeliest outcome: that the whole chain is accepted, and that the target's own token after it is the drafter's
next guess. Where the bet is lost, its rows are removed from the drafter's memory and the round is drafted as usual. This is exact,
because the bet decides when a chain is drafted, never which chain. The drafter must not read the target's states, which do not exist
yet when it drafts. It may be on another device; bets are made and compared there.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import torch
from torch import Tensor

from headstart.heads.base import Drafter, Roots
from headstart.heads.errors import UserError
from headstart.inference.decoding.context import Context
from headstart.inference.decoding.counter_rng import CounterRNG
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.propose import Drafting
from headstart.inference.decoding.sampling import SamplingParams
from headstart.inference.decoding.tree import Tree
from headstart.inference.proposers.elsewhere import rng_on, tree_on


class Pipelined:
    """``threads``: CPU threads that draft while the target verifies. Raises UserError for a drafter that reads the target's states."""

    taps: tuple[int, ...] = ()

    def __init__(self, drafter: Drafter, *, threads: int = 1) -> None:
        if drafter.taps:
            raise UserError("pipelined drafting needs a drafter that reads no states of the target: they are not there before it has read")
        self.inner, self.device = Drafting(drafter), drafter.ends.head_VD.device
        self.worker = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(threads,))
        self.bet: Future[Tree] | None = None
        self.ready: Tree | None = None
        self.bets = self.won = 0

    def start(self, context: Context | None, tokens: int) -> None:
        """Begin a sequence. A bet that still runs is waited for and discarded."""
        bet, self.bet, self.ready = self.bet, None, None
        if bet is not None:
            bet.exception()  # waits for the bet; its result is not needed
        self.inner.start(context, tokens)

    def absorb(self, roots: Roots) -> None:
        """Compare the bet with what was verified. If it is won, its chain is the next round's; if it is lost, its rows are removed."""
        self.ready, self.home = None, roots.chosen_BT.device
        roots = replace(roots, states={}).to(self.inner.drafter.ends.head_VD.dtype, self.device)
        bet, self.bet = self.bet, None
        if bet is not None:
            tree = bet.result()
            if torch.equal(roots.chosen_BT, self.expected_BT):  # then read_BT, the same tokens one place later, agrees too
                self.ready, self.won = tree, self.won + 1
                return
            self.inner.memory.rewind(self.rows)
        self.inner.absorb(roots)

    def propose(self, policy: TreePolicy, rng: CounterRNG, sampling: SamplingParams) -> Tree:
        """Return the chain that the bet drafted, or a new one, and start the next bet. Raises UserError for a policy that is no chain."""
        if policy.kind != "chain":
            raise UserError(f"pipelined drafting makes chains, not trees of kind {policy.kind}: set decode.kind=chain")
        longer = replace(policy, depth=policy.depth + 1)  # the bet is that the target says the last guess itself
        tree = self.ready if self.ready is not None else self.inner.propose(longer, rng_on(rng, self.device), sampling)
        first = tree_on(_first(tree, policy.depth), self.home)  # copied now: once the bet has begun, the copy would wait for it
        if len(tree) > policy.depth:
            self.rows, self.bets = self.inner.memory.rows(), self.bets + 1
            self.expected_BT = tree.tokens_BN[:, : policy.depth + 1]
            self.bet = self.worker.submit(self._draft_on, self.expected_BT, longer, sampling)
        return first

    @torch.inference_mode()
    def _draft_on(self, chosen_BT: Tensor, policy: TreePolicy, sampling: SamplingParams) -> Tree:
        """Draft the next chain as if ``chosen_BT``, all guesses of the longer chain, were verified."""
        rows = chosen_BT.shape[1]
        positions_BT = self.inner.position_B1 + torch.arange(1, rows + 1, device=chosen_BT.device)
        self.inner.absorb(Roots(chosen_BT, chosen_BT, {}, positions_BT))  # without taps only ``chosen_BT`` is read
        rng = CounterRNG.of(sampling.seed, int(positions_BT[0, -1]) + 1, chosen_BT.device)
        return self.inner.propose(policy, rng, sampling)


def _first(tree: Tree, depth: int) -> Tree:
    """The chain cut to its first ``depth`` guesses."""
    if len(tree) <= depth:
        return tree
    names = ("tokens_BN", "parents_BN", "depths_BN", "drawn_BN")
    cut = {name: x[:, :depth] for name in names if (x := getattr(tree, name)) is not None}
    return replace(tree, **cut, depth=depth, q_BRV=None if tree.q_BRV is None else tree.q_BRV[:, : depth + 1])
