"""The figures of decoded texts: accepted length, acceptance by depth, tokens per second beside those of plain decoding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from headstart.inference.decoding.decode import Generation
from headstart.inference.reports.intervals import intervals
from headstart.inference.reports.repetition import repetition


def acceptance(drafted: Sequence[Generation], depth: int) -> dict[str, Any]:
    """The accepted length, and for d = 1 .. ``depth`` the share of rounds that accepted at least d guesses: of all rounds, and
    (conditional) of those that accepted d - 1 and whose tree reached depth d.
    """
    rounds, asked = [n for g in drafted for n in g.emitted], [n for g in drafted for n in g.asked]
    reached = [sum(n > d for n in rounds) for d in range(depth + 1)]  # rounds with at least d guesses accepted
    tried = [sum(n >= d and k >= d for n, k in zip(rounds, asked, strict=True)) for d in range(1, depth + 1)]  # that had guesses at depth d
    return {
        "accepted_length": sum(rounds) / max(len(rounds), 1),
        "acceptance_by_depth": [n / max(len(rounds), 1) for n in reached[1:]],
        "conditional_acceptance_by_depth": [b / a if a else 0.0 for a, b in zip(tried, reached[1:], strict=True)],
    }


def decoding_figures(drafted: Sequence[Generation], plain: Sequence[Generation], depth: int, expected: float = 0.0) -> dict[str, Any]:
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


def as_one(said: Iterable[tuple[Sequence[int], Sequence[int]]], seconds: float) -> Generation:
    """Texts that were decoded together in ``seconds``, as a single Generation. ``said``: for each text its tokens, and how many tokens
    each round emitted.
    """
    texts = list(said)
    emitted = [n for _, rounds in texts for n in rounds]
    return Generation([t for tokens, _ in texts for t in tokens], emitted, asked=[0] * len(emitted), seconds=seconds)


def tokens_per_second(runs: Sequence[Generation]) -> float:
    """Tokens per second of wall clock, the prompt's pass and token included."""
    return sum(len(g.tokens) for g in runs) / sum(g.seconds for g in runs)
