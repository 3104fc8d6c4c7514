"""Tokens of a round, expected and decoded, with intervals: the texts (prompts) are the sample.

Over the same texts the expected and the decoded number of rounds differ by chance alone (which guesses were drawn, which were accepted),
text by text: so how far the two may part is told by the differences themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite, sqrt
from typing import Any

ENOUGH = 16  # texts, whose own spread says how far chance goes
APART, SIGMAS = 0.02, 3.0  # expected and decoded part, where they differ by more than this share, and by more standard errors


@dataclass
class Lengths:
    """Of each text: the tokens of its rounds, and how many rounds there were (above temperature 0 expected ones: a mean)."""

    tokens: list[float] = field(default_factory=list)
    rounds: list[float] = field(default_factory=list)

    def add(self, rounds: float, tokens: float) -> None:
        """One text."""
        self.rounds.append(float(rounds))
        self.tokens.append(float(tokens))

    @property
    def length(self) -> float:
        """Tokens of a round, over all texts."""
        return sum(self.tokens) / max(sum(self.rounds), 1e-30)

    @property
    def standard_error(self) -> float:
        """Of ``length``, other texts being as different from these as these from each other (linearised ratio)."""
        n, tau = len(self.tokens), self.length
        if n < 2:
            return float("inf")
        return sqrt(n / (n - 1) * sum((t - tau * r) ** 2 for t, r in zip(self.tokens, self.rounds, strict=True))) / sum(self.rounds)


def compared(expected: Lengths, decoded: Lengths, certain: bool = False) -> dict[str, Any]:
    """Of the same texts: ``expected``, ``decoded``, the ``standard_error`` of their difference (None: a single text has none), and whether
    they part (``apart``).

    ``certain``: nothing is left to chance (at temperature 0, in fp32): then they are equal, or something is wrong.
    """
    off, n = [a - b for a, b in zip(expected.rounds, decoded.rounds, strict=True)], len(decoded.rounds)
    mean = sum(off) / max(n, 1)
    spread = sqrt(n / (n - 1) * sum((x - mean) ** 2 for x in off)) if n > 1 else float("inf")
    if n < ENOUGH:  # a few differences may be alike by chance: so far the number of rounds strays where each token is accepted alike
        tokens, rounds = sum(decoded.tokens), sum(expected.rounds)
        spread = max(spread, sqrt(max(tokens - rounds, 0.0) * rounds / max(tokens, 1e-30)))
    error = 0.0 if certain else decoded.length / max(sum(decoded.rounds), 1e-30) * spread
    gap = abs(expected.length - decoded.length)
    apart = gap > APART * decoded.length and gap > SIGMAS * error
    known = error if isfinite(error) else None  # of a single text nothing is known: JSON has no infinity
    return {"expected": expected.length, "decoded": decoded.length, "standard_error": known, "apart": apart}
