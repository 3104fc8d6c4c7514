"""How much texts repeat themselves: repeated tokens are easy to guess, and flatter the figures of every drafter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

SIZE = 8  # tokens: so many alike are hardly chance, and a loop shows after its first turn
HIGH = 0.2  # above it a report says so: ordinary prose and code stay below, by far
WHY = "what repeats is easily guessed, which flatters accepted lengths and speed-ups: over other text they are lower"


def too_much(figures: Mapping[Any, Mapping[str, Any]]) -> list[str]:
    """A warning for each temperature (-> figures) at which the target repeats itself too much, by a share above ``HIGH``."""
    shares = {temperature: each.get("repetition") or 0.0 for temperature, each in figures.items()}
    return [
        f"the target repeats itself at temperature {temperature:g}: {share:.0%} of the {SIZE}-grams of a text stood in it before; {WHY}"
        for temperature, share in shares.items()
        if share > HIGH
    ]


def repetition(texts: Iterable[Sequence[int]], size: int = SIZE) -> float:
    """The share of n-grams of ``size`` tokens, over all texts, that stood earlier in the same text; 0 where there are no n-grams."""
    repeated = every = 0
    for tokens in texts:
        grams = [tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)]
        every += len(grams)
        repeated += len(grams) - len(set(grams))
    return repeated / max(every, 1)
