"""Warming up an engine: the expected rounds are captured as graphs before any sequence waits, and measured for an auto policy.

A capture takes the time of a few rounds, a measurement that of many, and meanwhile no sequence of the engine gets a token. So a server
does both at its start. Rounds with rarer settings (log-probabilities, min_tokens, a top_k above ``TOP_K``) are not captured but launched
kernel by kernel.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch

from headstart.inference.decoding.auto import auto_of_rounds
from headstart.inference.decoding.capture import MOST_GRAPHS
from headstart.inference.decoding.policy import TreePolicy, shapes_of
from headstart.inference.decoding.rounds import Kind, Rounds
from headstart.inference.decoding.sampling import LogitsWarper

log = logging.getLogger(__name__)

TOP_K = 64  # most clients ask for no more
BRIEF = 0.03  # seconds per turn of a measurement; shorter than ``auto.LONG``, because a server measures many kinds of rounds at its start
# The sampling of the sequences in a round: all greedy, all sampled without filters, any mixture of settings.
GREEDY: dict[str, Any] = dict(sampled=False, greedy=True, top_k=0, top_p=False, min_p=False, penalty=False)
SAMPLED: dict[str, Any] = dict(sampled=True, greedy=False, top_k=0, top_p=False, min_p=False, penalty=False)
FILTERED: dict[str, Any] = dict(sampled=True, greedy=True, top_k=TOP_K, top_p=True, min_p=True, penalty=True)
HOWS = [GREEDY | {"heat": 0}, *(how | {"heat": heat} for how in (SAMPLED, FILTERED) for heat in (1, 2))]


Plan = Callable[[int], TreePolicy | None]  # number of sequences -> the policy for them; None: no drafting


@torch.inference_mode()
def prepare_expected(rounds: Rounds, plan: Plan) -> None:
    """Capture the rounds for every length and number of sequences that the engine can hold, up to ``MOST_GRAPHS``, and measure the rounds
    of an auto policy. Afterwards nothing more is captured.
    """
    if rounds.graphs is not None:
        rounds.remember()
    for kind, warp in _expected(rounds, plan):
        if kind.policy is not None and kind.policy.kind == "auto":
            auto_of_rounds(rounds, kind, warp, BRIEF)
        elif rounds.graphs is None:
            continue
        elif len(rounds.graphs.kept) < MOST_GRAPHS:
            rounds.run(kind, warp)
        else:
            log.warning("%d rounds are captured, those of longer sequences or rarer loads will be launched kernel by kernel", MOST_GRAPHS)
            break
    if rounds.graphs is not None:
        rounds.graphs.complete = True


def _expected(rounds: Rounds, plan: Plan) -> Iterator[tuple[Kind, LogitsWarper]]:
    """The kinds of rounds to prepare. Any plan can meet any number of places: sequences leave empty places between them, and those whose
    prompts are still read count for the plan but are in no round. Rounds whose plan is that of about as many sequences as places are the
    usual ones, so they come first; among these, and among the others, those of short sequences. Rounds without drafting are needed under
    every policy. The kind of an auto policy, which stands for measuring it, comes after the shapes that it chooses among.
    """
    most = len(rounds.token_B)
    sizes = [*(1 << i for i in range((most - 1).bit_length())), most]
    lengths = [rounds.padded_length(1)] if rounds.graphs is None else rounds.padded_lengths()
    every = dict.fromkeys(plan(load) for load in range(1, most + 1))
    for usual, padded_length, how, n in product((True, False), lengths, HOWS, sizes):
        warp = LogitsWarper({name: column[:n] for name, column in rounds.warps.items()}, **how)
        of_n = {plan(load) for load in range(n // 2 + 1, n + 1)}
        for policy in (policy for policy in every if (policy in of_n) == usual):
            shapes = [] if policy is None else shapes_of(policy, rounds.rule, warp.heat)
            if policy is not None and policy.kind == "auto" and padded_length == rounds.padded_length(1) and not how["penalty"]:
                shapes.append(policy)
            for shape in (None, *shapes):
                yield Kind(n, padded_length, shape, policy is not None, 0, False), warp
