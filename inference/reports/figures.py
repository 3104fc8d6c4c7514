"""The figures of decoded texts: accepted length, acceptance by depth, tokens per second beside those of plain decoding.

Intervals say how far a figure would move with other prompts, by bootstrap over prompts (Efron, 1979). The prompts are the random sample,
and the rounds of one prompt depend on each other. So whole prompts are drawn again, with replacement, and the figure, a ratio of sums over
prompts, is computed for each set so drawn. The interval is the middle 95 % of these (percentiles).

Shape suffixes: P prompts, C columns that are summed, S sets of drawn prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headstart.inference.decoding.decode import Generation, Guesses
from headstart.inference.decoding.tree import NO_NODE
from headstart.inference.reports.report import Round

SETS, COVERED, DIGITS = 2000, 0.95, 4  # of the intervals
LEAST = 2  # prompts: a single one gives no interval
GRAM = 8  # tokens: long enough that a repetition is hardly chance, short enough that a loop shows in its second turn
HIGH = 0.2  # repetition above which a report warns: ordinary prose and code stay far below
WHY = "what repeats is easily guessed, which flatters accepted lengths and speed-ups: over other text they are lower"

Array = NDArray[np.float64]


def accepted_of(emitted: Sequence[int], guesses: Sequence[Guesses]) -> list[int]:
    """How many guesses each round accepted and emitted. The target's own token follows them, except in a round that was cut by the limit
    or after an accepted stop token: whether its deeper guesses were right is not known. Without ``guesses`` (transformers does not tell
    them), every round is taken to have the target's own token.
    """
    if not guesses:
        return [n - 1 for n in emitted]
    return [min(n, each.accepted) for n, each in zip(emitted, guesses, strict=True)]


def acceptance(drafted: Sequence[Generation], depth: int) -> dict[str, Any]:
    """The accepted length, and for d = 1 .. ``depth`` the share of rounds that accepted at least d guesses: of all rounds, and
    (conditional) of those that accepted d - 1, were not cut there, and whose tree reached depth d.
    """
    rounds, asked = [n for g in drafted for n in g.emitted], [n for g in drafted for n in g.asked]
    accepted = [n for g in drafted for n in accepted_of(g.emitted, g.guesses)]
    right = [sum(n >= d for n in accepted) for d in range(1, depth + 1)]
    tried = [sum(n >= d and k >= d for n, k in zip(rounds, asked, strict=True)) for d in range(1, depth + 1)]  # that had guesses at depth d
    return {
        "accepted_length": sum(rounds) / max(len(rounds), 1),
        "acceptance_by_depth": [n / max(len(rounds), 1) for n in right],
        "conditional_acceptance_by_depth": [b / a if a else 0.0 for a, b in zip(tried, right, strict=True)],
    }


def decoding_figures(drafted: Sequence[Generation], plain: Sequence[Generation], depth: int, expected: float = 0.0) -> dict[str, Any]:
    """The figures of a report at one temperature. ``plain``: the same prompts, decoded plainly; ``expected``: the expected length of a
    chain, in tokens per round; 0: unknown.
    """
    rounds = [n for g in drafted for n in g.emitted]
    return {
        **acceptance(drafted, depth),
        **({"expected_length": expected} if expected else {}),
        "tokens_per_second": tokens_per_second(drafted),
        "plain_tokens_per_second": tokens_per_second(plain),
        "speedup": tokens_per_second(drafted) / tokens_per_second(plain),
        "target_passes": len(rounds),
        "new_tokens": sum(rounds),
        "repetition": repetition(g.tokens for g in drafted),
        **({"intervals": found} if (found := intervals(drafted, plain, depth)) else {}),
    }


def as_one(said: Iterable[tuple[Sequence[int], Sequence[int], Sequence[int]]], seconds: float) -> Generation:
    """Texts that were decoded together in ``seconds``, as a single Generation. ``said``: for each text its tokens, how many tokens each
    round emitted, and how many guesses each accepted.
    """
    texts = list(said)
    emitted, guesses = [n for _, rounds, _ in texts for n in rounds], [Guesses([], [], n) for *_, accepted in texts for n in accepted]
    return Generation([t for tokens, *_ in texts for t in tokens], emitted, asked=[0] * len(emitted), guesses=guesses, seconds=seconds)


def tokens_per_second(runs: Sequence[Generation]) -> float:
    """Tokens per second of wall clock, the prompt's pass and token included."""
    return sum(len(g.tokens) for g in runs) / sum(g.seconds for g in runs)


def bootstrap(table_PC: Array, figure: Callable[[Array], Array]) -> list[float]:
    """The interval [low, high] of ``figure``, which turns sums over prompts [S, C] into numbers [S]. The seed is fixed."""
    P = len(table_PC)
    drawn_SP = np.random.default_rng(0).multinomial(P, np.full(P, 1 / P), SETS)
    found_S = figure(drawn_SP @ table_PC)
    low, high = np.quantile(found_S[np.isfinite(found_S)], [(1 - COVERED) / 2, (1 + COVERED) / 2])
    return [round(float(low), DIGITS), round(float(high), DIGITS)]


def intervals(drafted: Sequence[Generation], plain: Sequence[Generation], depth: int) -> dict[str, Any]:
    """The intervals of ``accepted_length``, ``speedup`` and each entry of ``acceptance_by_depth``; empty for fewer than two prompts, or
    where no prompt has a round.
    """
    if len(drafted) < LEAST or not any(made.emitted for made in drafted):
        return {}

    def row(made: Generation, alone: Generation) -> list[float]:
        accepted = accepted_of(made.emitted, made.guesses)
        right = [sum(n >= d for n in accepted) for d in range(1, depth + 1)]
        return [sum(made.emitted), len(made.emitted), len(made.tokens), made.seconds, len(alone.tokens), alone.seconds, *right]

    def share(d: int) -> Callable[[Array], Array]:
        return lambda x: x[:, 6 + d] / x[:, 1]

    table_PC = np.array([row(made, alone) for made, alone in zip(drafted, plain, strict=True)], dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        return {
            "accepted_length": bootstrap(table_PC, lambda x: x[:, 0] / x[:, 1]),
            "speedup": bootstrap(table_PC, lambda x: (x[:, 2] / x[:, 3]) / (x[:, 4] / x[:, 5])),
            "acceptance_by_depth": [bootstrap(table_PC, share(d)) for d in range(depth)],
        }


def times_as_long(drafted: Sequence[Generation], other: Sequence[Generation]) -> dict[str, Any]:
    """The ``accepted_length`` of ``other``, and how many ``times`` as long that of ``drafted`` is, with its interval in ``intervals`` (none
    for fewer than two prompts). Both decoded the same prompts, and a drawn set holds the same ones for both. Empty without rounds.
    """
    rows = [[sum(x.emitted), len(x.emitted), sum(y.emitted), len(y.emitted)] for x, y in zip(drafted, other, strict=True)]
    table_PC = np.array(rows, dtype=np.float64)
    whole_C = table_PC.sum(0)
    if not whole_C.all():
        return {}

    def times(x: Array) -> Array:
        return np.asarray((x[:, 0] / x[:, 1]) / (x[:, 2] / x[:, 3]))

    with np.errstate(divide="ignore", invalid="ignore"):
        sure = {"intervals": {"times": bootstrap(table_PC, times)}} if len(rows) >= LEAST else {}
    return {"accepted_length": float(whole_C[2] / whole_C[3]), "times": float(times(whole_C[None])[0]), **sure}


def repetition(texts: Iterable[Sequence[int]], size: int = GRAM) -> float:
    """How much texts repeat themselves: the share of n-grams of ``size`` tokens, over all texts, that stood earlier in the same text; 0
    where there are no n-grams.
    """
    repeated = every = 0
    for tokens in texts:
        grams = [tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)]
        every += len(grams)
        repeated += len(grams) - len(set(grams))
    return repeated / max(every, 1)


def too_much(figures: Mapping[Any, Mapping[str, Any]]) -> list[str]:
    """A warning for each temperature whose share of repetition is above ``HIGH``. ``figures``: temperature -> its figures."""
    shares = {temperature: each.get("repetition") or 0.0 for temperature, each in figures.items()}
    return [
        f"the target repeats itself at temperature {temperature:g}: {share:.0%} of the {GRAM}-grams of a text stood in it before; {WHY}"
        for temperature, share in shares.items()
        if share > HIGH
    ]


def rounds_of(made: Generation) -> list[Round]:
    """The rounds of a sequence as a report keeps them."""
    found, at = [], 1  # token 0 comes from the pass over the prompt
    for count, round_ in zip(made.emitted, made.guesses, strict=True):
        tokens, at = made.tokens[at : at + count], at + count
        guesses, parents = (torch.as_tensor(x, dtype=torch.int64).flatten().tolist() for x in (round_.tokens, round_.parents))
        there = [node for node, parent in enumerate(parents) if parent != NO_NODE]  # a tree of fixed shape may have places without a node
        place = {-1: -1} | {node: i for i, node in enumerate(there)}
        guesses, parents = [guesses[node] for node in there], [place[parents[node]] for node in there]
        accepted, here = list[int](), -1
        for token in tokens[: round_.accepted]:
            here = next(i for i, guess in enumerate(zip(guesses, parents, strict=True)) if guess == (token, here))
            accepted.append(here)
        found.append(Round(tokens, guesses, parents, accepted))
    return found
