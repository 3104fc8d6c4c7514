"""The tuner: finds the tree that is fastest on this machine, for one sequence and for many at once.

The speed-up over plain decoding is tau / (v(n, B) + K c + o): tau is the number of tokens a round emits, v the verification of n nodes,
c a level of drafting, o the rest; v, c and o are multiples of a plain round of B sequences. tau is counted by greedy decoding of given
prompts. Whole rounds are timed for every tree, and nothing is modeled: for one sequence while it is decoded alone, prompt by prompt
beside plain decoding; for B sequences by calling the engine's two functions, draft and verify. All trees are tried on a few prompts, and
those that come near the best at some B on all prompts. Fixed trees are made from how often the guesses of each rank are right. The
chosen trees are written to ``decode.json`` in the speculator folder.

B: sequences at once. n: nodes. K: depth.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from math import prod
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from headstart.heads.base import Drafter
from headstart.heads.errors import UserError
from headstart.inference.decoding.decode import Generation, check_prompt
from headstart.inference.decoding.decoder import Decoder, generate_batch
from headstart.inference.decoding.plans import ALONE
from headstart.inference.decoding.policy import TreePolicy, fit_depth
from headstart.inference.decoding.target import Target
from headstart.inference.provenance import provenance, ran_on
from headstart.inference.reports.expected import guesses_of
from headstart.inference.reports.figures import decoding_figures
from headstart.inference.reports.lengths import FEWEST
from headstart.inference.reports.progress import watched
from headstart.inference.reports.recorded import Recorded
from headstart.inference.reports.timing import Trees, now, surface, time_rounds

MARGIN = 1.03  # a tree must be so much faster than plain decoding: less is noise
CHAINS, DEPTHS = (1, 2, 3, 4, 5, 7, 10), (4, 7)
NODES = {4: (2,), 8: (2, 4), 15: (2, 4), 31: (4, 8), 60: (8,)}  # nodes of a dynamic tree -> nodes expanded at each level
LEAST = (0.03, 0.1)  # values of ``TreePolicy.least`` that are tried on a CPU
FIXED, RANKS = (8, 16), 8  # nodes of fixed trees, and the children of one row that they choose from
DEAREST = 2.5  # plain rounds: trees whose verification alone takes longer are left out

Figures = Mapping[TreePolicy, float]  # tau, or the cost of a round over that of a plain one


class Run(NamedTuple):
    """One prompt, decoded alone with a tree and just before without."""

    tokens: int
    emitted: int  # tokens of the rounds
    rounds: int
    seconds: float
    plain_rounds: int
    plain_seconds: float


# Choosing: pure functions of what was measured -----------------------------------------------------------------------


def best(taus: Figures, costs: Figures, count: int) -> list[TreePolicy]:
    """The ``count`` trees with the largest tau / cost, the best first."""
    return sorted(costs, key=lambda tree: -taus[tree] / costs[tree])[:count]


def choose(taus: Figures, costs: Figures) -> TreePolicy | None:
    """The best tree; None where it is no gain over plain decoding."""
    return next((tree for tree in best(taus, costs, 1) if taus[tree] / costs[tree] >= MARGIN), None)


def in_the_running(taus: Figures, costs: Figures) -> list[TreePolicy]:
    """The trees that may be the best for more sequences. Nodes cost more with more sequences, so a tree that is much slower than the best
    one and not smaller is dropped.

    For each number of nodes the tree that is cheapest to draft stays, because the surface is measured with these.
    """
    leader = choose(taus, costs)
    gain, nodes, reads = (1.0, 0, 0) if leader is None else (taus[leader] / costs[leader], leader.nodes, leader.reads)
    cheapest = {tree.nodes: tree for tree in sorted(costs, key=lambda tree: -tree.reads)}

    def stays(tree: TreePolicy) -> bool:
        return tree.nodes < nodes or tree.reads < reads or cheapest[tree.nodes] == tree or taus[tree] / costs[tree] >= 0.8 * gain

    return [tree for tree in costs if stays(tree)]


def candidates(drafter: Drafter) -> list[TreePolicy]:
    """The chains and dynamic trees that are tried, none deeper than the drafter can guess."""
    trees = [TreePolicy("chain", depth=d) for d in CHAINS]
    trees += [TreePolicy(depth=d, nodes=n, branch=max(4, e), expand=e) for n, some in NODES.items() for e in some for d in DEPTHS]
    trees += [TreePolicy("best_first", depth=DEPTHS[-1], nodes=n) for n in NODES]
    return list(dict.fromkeys(fit_depth(tree, drafter) for tree in trees))


def all_trees(drafter: Drafter, shares: Sequence[Sequence[float]]) -> list[TreePolicy]:
    """The candidates, and the fixed trees that ``shares`` [depth][rank] make."""
    return list(dict.fromkeys([*candidates(drafter), *(fixed(shares, nodes) for nodes in FIXED)]))


def fixed(shares: Sequence[Sequence[float]], nodes: int) -> TreePolicy:
    """The fixed tree of the ``nodes`` paths that are most often right. The guesses of a path are taken to be right independently of each
    other, each by ``shares`` [depth][rank] (2401.10774).
    """

    def right(path: tuple[int, ...]) -> float:
        return prod(shares[depth][rank] for depth, rank in enumerate(path))

    paths: list[tuple[int, ...]] = []
    edge: list[tuple[int, ...]] = [(0,)]
    while edge and len(paths) < nodes:
        path = max(edge, key=right)
        edge.remove(path)
        paths.append(path)
        edge += [(*path[:-1], path[-1] + 1)] if path[-1] + 1 < RANKS else []
        edge += [(*path, 0)] if len(path) < len(shares) else []
    return TreePolicy("fixed", paths=tuple(paths))


# Measuring -----------------------------------------------------------------------------------------------------------


def decode_all(
    decoder: Decoder, trees: Trees, prompts: Sequence[Sequence[int]], new_tokens: int, runs: dict[TreePolicy, list[Run]], what: str
) -> None:
    """Decode every prompt plainly and with every tree in turn, so that a noisy machine disturbs them alike. Adds to ``runs``."""
    for prompt in watched(prompts, what):
        plain, plain_seconds = decoder.timed(prompt, clock=now, new_tokens=new_tokens, policy=None)
        for tree in trees if plain.emitted else ():  # no rounds: the target ends it with its first token
            made, seconds = decoder.timed(prompt, clock=now, new_tokens=new_tokens, policy=tree)
            runs[tree].append(Run(len(made.tokens), sum(made.emitted), len(made.emitted), seconds, len(plain.emitted), plain_seconds))


@torch.inference_mode()
def rank_shares(target: Target, drafter: Drafter, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[float]]:
    """``shares_of`` the prompts with their plain continuations, each read once more in one teacher-forced pass, as in training."""
    made = generate_batch(target, None, prompts, new_tokens=new_tokens, sequences=16)
    return shares_of(drafter, (Recorded.by(target, drafter.taps, *each) for each in zip(prompts, (m.tokens for m in made), strict=True)))


@torch.inference_mode()
def shares_of(drafter: Drafter, texts: Iterable[Recorded]) -> list[list[float]]:
    """[depth][rank]: how often the guess of this rank is right where its ancestors are."""
    depth = min(DEPTHS[-1], drafter.max_depth or DEPTHS[-1])
    right_KR, all_K1 = torch.zeros(depth, RANKS + 1), torch.zeros(depth, 1)
    for text in texts:
        for d, (q_NV, x_N, _) in enumerate(guesses_of(drafter, text, depth)):
            rank_N = (q_NV > q_NV.gather(1, x_N[:, None])).sum(1)
            right_KR[d] += rank_N.clamp(max=RANKS).bincount(minlength=RANKS + 1).cpu()
            all_K1[d] += len(x_N)
    return (right_KR / all_K1.clamp(min=1))[:, :RANKS].tolist()


def tau(runs: Sequence[Run]) -> float:
    """Tokens per round over all runs."""
    return sum(r.emitted for r in runs) / sum(r.rounds for r in runs)


def cost(runs: Sequence[Run]) -> float:
    """The cost of a round over a plain one, each with its share of the pass over the prompt. The median over prompts, against noise."""
    return median(r.seconds / r.rounds / (r.plain_seconds / r.plain_rounds) for r in runs)


def figures(runs: Mapping[TreePolicy, Sequence[Run]]) -> tuple[Figures, dict[int, dict[TreePolicy, float]]]:
    """Tokens per round of each tree, and what its round costs over a plain one when a sequence is decoded alone."""
    return {tree: tau(r) for tree, r in runs.items()}, {ALONE: {tree: cost(r) for tree, r in runs.items()}}


def tune(target: Target, drafter: Drafter, prompts: Sequence[Sequence[int]], *, sequences: int, new_tokens: int) -> dict[str, Any]:
    """The content of decode.json, for up to ``sequences`` at once. Raises UserError for prompts that do not fit or end at once."""
    if not prompts or sequences < 1 or new_tokens < FEWEST:
        raise UserError(f"tuning needs prompts, sequences of at least 1 and new_tokens of at least {FEWEST}")
    for prompt in prompts:
        check_prompt(target, prompt, new_tokens)
    shares = rank_shares(target, drafter, prompts, new_tokens)
    trees = all_trees(drafter, shares)
    few, runs = max(2, len(prompts) // 5), defaultdict[TreePolicy, list[Run]](list)
    times = {1: time_rounds(target, drafter, trees, prompts, 1, new_tokens)}
    trees = [t for t in trees if t.kind == "chain" or times[1][t].verify <= DEAREST * times[1][None].verify]
    decoder = Decoder(target, drafter, trees=trees, max_length=max(map(len, prompts)) + new_tokens)
    decoder.generate(prompts[0], new_tokens=new_tokens, policy=trees[0])  # first calls are slow
    decode_all(decoder, trees, prompts[:few], new_tokens, runs, "all trees")
    if not runs:
        raise UserError("the target ends all of the first prompts with its first token: give others")
    taus, costs = figures(runs)
    if target.device.type == "cpu":  # stopping a tree where the drafter is in doubt saves time only there
        shapes = [replace(t, kind="dynamic") if t.kind == "chain" else t for t in best(taus, costs[ALONE], 3)]
        decode_all(
            decoder, [replace(t, least=p) for t in shapes if not t.planned for p in LEAST], prompts[:few], new_tokens, runs, "where to stop"
        )
        taus, costs = figures(runs)
    for B in watched([1 << i for i in range(sequences.bit_length())], "many sequences"):
        try:
            times[B] = times.get(B) or time_rounds(target, drafter, trees, prompts, B, new_tokens)
        except torch.OutOfMemoryError:
            print(f"{B} sequences do not fit into the device's memory: not measured")
            break
        costs[B] = {t: (times[B][t].draft + times[B][t].verify) / times[B][None].verify for t in trees}
        trees = in_the_running(taus, costs[B])
    leaders = {B: [t for t in best(taus, c, 4 if B == ALONE else 2) if taus[t] > 0.9 * c[t]] for B, c in costs.items()}
    finalists = list(dict.fromkeys(t for some in leaders.values() for t in some))
    decode_all(decoder, leaders[ALONE], prompts[few:], new_tokens, runs, "the best for one sequence")
    decoder.close()
    taus, depths = {}, dict[TreePolicy, list[float]]()
    for t in watched(finalists, "the best trees"):
        made: list[Generation] = [*generate_batch(target, drafter, prompts, new_tokens=new_tokens, policy=t, sequences=16)]
        found = decoding_figures(made, made, t.depth)  # as in a report, so that the two can be compared
        taus[t], depths[t] = found["accepted_length"], found["acceptance_by_depth"]
    costs = {B: {t: c[t] for t in finalists if t in c} for B, c in costs.items()} | {ALONE: {t: cost(runs[t]) for t in leaders[ALONE]}}
    plans = plans_of(taus, costs, depths)
    if chosen := choose(taus, costs[ALONE]):
        plans[ALONE] |= measured(runs[chosen])
    return {
        "drafter": drafter.config["head"],
        "target": Path(target.name).name,
        **ran_on(target.device, target.dtype),
        "prompts": len(prompts),
        "new_tokens": new_tokens,
        "plans": {"alone" if B == ALONE else str(B): p for B, p in plans.items()},
        "surface": [surface(B, t) for B, t in times.items()],
        **provenance(),
    }


def plans_of(taus: Figures, costs: Mapping[int, Figures], depths: Mapping[TreePolicy, list[float]]) -> dict[int, dict[str, Any]]:
    """For each number of sequences the best tree, with its figures (tree None: no drafting). Nodes cost more with more sequences: where
    drafting gains nothing with fewer sequences, a gain with more is taken for noise.
    """
    plans: dict[int, dict[str, Any]] = {}
    tree: TreePolicy | None = None
    for B, c in sorted(costs.items()):
        tree = None if B > 1 and plans and tree is None else choose(taus, c)
        plans[B] = {"tree": None}
        if tree is not None:
            accepted = {"accepted_length": taus[tree], "acceptance_by_depth": depths[tree]}
            plans[B] = {"tree": asdict(tree), **accepted, "round_over_plain": c[tree], "predicted_speedup": taus[tree] / c[tree]}
    return plans


def measured(runs: Sequence[Run]) -> dict[str, float]:
    """Tokens per second and speed-up over all prompts, the passes over the prompts included."""
    tokens, seconds, plain = sum(r.tokens for r in runs), sum(r.seconds for r in runs), sum(r.plain_seconds for r in runs)
    return {"tokens_per_second": tokens / seconds, "plain_tokens_per_second": tokens / plain, "measured_speedup": plain / seconds}
