"""The accepted length, expected and decoded, with standard errors: the texts (prompts) are the sample.

For the same text the expected and the decoded number of rounds differ by chance alone (which guesses were drawn, which were accepted). So
the spread of these differences over the texts tells how far apart the two lengths may be.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite, sqrt
from typing import Any

FEWEST = 8  # new tokens of a text: fewer hold too few rounds to measure an accepted length
ENOUGH = 16  # texts: from this number on, the spread of their differences is used as it was measured
APART, SIGMAS = 0.02, 3.0  # the lengths are apart if they differ by more than this share and by more than so many standard errors


@dataclass
class Lengths:
    """For each text the tokens of its rounds and the number of rounds (an expected number may be a fraction)."""

    tokens: list[float] = field(default_factory=list)
    rounds: list[float] = field(default_factory=list)

    def add(self, rounds: float, tokens: float) -> None:
        """Add a text."""
        self.rounds.append(float(rounds))
        self.tokens.append(float(tokens))

    @property
    def length(self) -> float:
        """Tokens of a round, over all texts."""
        return sum(self.tokens) / max(sum(self.rounds), 1e-30)

    @property
    def standard_error(self) -> float:
        """The standard error of ``length`` over the texts (delta method for a ratio of sums); infinite for fewer than two texts."""
        n, tau = len(self.tokens), self.length
        if n < 2:
            return float("inf")
        return sqrt(n / (n - 1) * sum((t - tau * r) ** 2 for t, r in zip(self.tokens, self.rounds, strict=True))) / sum(self.rounds)


def error_text(error: float | None, of: str = "") -> str:
    """A standard error as text; ``of``: whose it is. A single text has none (None or infinite)."""
    return f"standard error{of} {error:.3f}" if error is not None and isfinite(error) else "of one text: no standard error"


def compared(expected: Lengths, decoded: Lengths, certain: bool = False) -> dict[str, Any]:
    """Compare the lengths of the same texts. Returns ``expected``, ``decoded``, the ``standard_error`` of their difference (None for a
    single text) and whether they are ``apart``.

    ``certain``: nothing is left to chance (temperature 0, fp32), so the standard error is 0 and the two should be equal.
    """
    off, n = [a - b for a, b in zip(expected.rounds, decoded.rounds, strict=True)], len(decoded.rounds)
    mean = sum(off) / max(n, 1)
    spread = sqrt(n / (n - 1) * sum((x - mean) ** 2 for x in off)) if n > 1 else float("inf")
    if n < ENOUGH:  # few differences may be alike by chance: take at least the spread of rounds whose tokens are accepted independently
        tokens, rounds = sum(decoded.tokens), sum(expected.rounds)
        spread = max(spread, sqrt(max(tokens - rounds, 0.0) * rounds / max(tokens, 1e-30)))
    error = 0.0 if certain else decoded.length / max(sum(decoded.rounds), 1e-30) * spread
    gap = abs(expected.length - decoded.length)
    apart = gap > APART * decoded.length and gap > SIGMAS * error
    known = error if isfinite(error) else None  # infinite for a single text, and JSON has no infinity
    return {"expected": expected.length, "decoded": decoded.length, "standard_error": known, "apart": apart}
