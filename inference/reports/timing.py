"""Times whole rounds of many sequences, as the engine decodes them: the cost of verification, and of a level of drafting.

B: sequences at once. n: nodes.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from headstart.heads.base import Drafter
from headstart.inference.decoding.auto import wait_for
from headstart.inference.decoding.engine import Engine
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.rounds import Kind
from headstart.inference.decoding.sampling import LogitsWarper, SamplingParams
from headstart.inference.decoding.target import Target

TIMED = {"cpu": (3, 4.0, 1), "cuda": (1, 0.0, 10)}  # at least: passes over all trees (the fastest counts), seconds; calls in a row

now = time.perf_counter
Trees = Sequence[TreePolicy]


class Round(NamedTuple):
    """Seconds of a round of B sequences."""

    draft: float
    verify: float


@torch.inference_mode()
def time_rounds(
    target: Target, drafter: Drafter, trees: Trees, prompts: Sequence[Sequence[int]], B: int, new_tokens: int
) -> dict[TreePolicy | None, Round]:
    """The seconds of a round with each tree (None: a plain round), in an engine full of B sequences halfway through their new tokens."""
    longest, device, clock = max(map(len, prompts)), target.device, target.agreed(now)
    engine = Engine(target, drafter, sequences=B, max_length=longest + new_tokens, plans=trees[0], trees=trees)
    for i in range(B):
        engine.add_request(prompts[i % len(prompts)], new_tokens=new_tokens, stop_ids=())
    rounds = engine.rounds
    while any(row.read < len(row.prompt) for row in engine.active):
        engine.step()
    passes, least, runs = TIMED.get(device.type, TIMED["cuda"])
    warp, put_back = LogitsWarper.over(rounds.warps, [SamplingParams()] * B), rounds.snapshot()  # put_back undoes a round

    def seconds(call: Callable[[], Any]) -> float:
        spent = 0.0
        for _ in range(runs):
            wait_for(device)
            start = clock()
            call()
            wait_for(device)
            spent += clock() - start
            put_back()
        return spent / runs

    def once(tree: TreePolicy | None) -> Round:
        kind = Kind(B, rounds.padded_length(longest + new_tokens // 2), tree, tree is not None, 0, False)
        draft, verify = rounds.parts(kind, warp)
        put_back()
        return Round(seconds(draft), seconds(verify))

    found, start, done = defaultdict[TreePolicy | None, list[Round]](list), clock(), 0
    while done < passes or clock() - start < least:
        for tree in trees:
            found[None].append(once(None))  # beside every tree: all costs are relative to it
            found[tree].append(once(tree))
        done += 1
    return {tree: Round(min(x.draft for x in each), min(x.verify for x in each)) for tree, each in found.items()}


def surface(B: int, times: Mapping[TreePolicy | None, Round]) -> dict[str, Any]:
    """v(n, B), c and o (see inference/reports/tune.py) from the times of rounds."""
    plain, trees = times[None].verify, [tree for tree in times if tree is not None]
    verify = {n: min(times[tree].verify for tree in trees if tree.nodes == n) / plain for n in sorted({tree.nodes for tree in trees})}
    chains = sorted((tree for tree in trees if tree.kind == "chain"), key=lambda tree: tree.depth)
    short, long = chains[0], chains[-1]
    level = (times[long].draft - times[short].draft) / plain / max(long.depth - short.depth, 1)
    return {
        "sequences": B,
        "plain_round_milliseconds": 1e3 * plain,
        "verify_over_plain_by_nodes": {str(n): v for n, v in verify.items()},
        "chain_level_over_plain": level,
        "rest_over_plain": times[short].draft / plain - short.depth * level,
    }
