"""How much a text repeats itself: what was said already is easily guessed, and flatters whoever drafts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

SIZE = 8  # tokens: so many alike are hardly chance, and a loop shows after its first turn
HIGH = 0.2  # above it a report says so: ordinary prose and code stay below, by far
WHY = "what repeats is easily guessed, so accepted lengths and speed-ups are higher than over text that does not"


def repetition(texts: Iterable[Sequence[int]], size: int = SIZE) -> float:
    """The share of the n-grams of ``size`` tokens that stood before in the same text, of those of all texts; 0 where there are none."""
    repeated = every = 0
    for tokens in texts:
        grams = [tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)]
        every += len(grams)
        repeated += len(grams) - len(set(grams))
    return repeated / max(every, 1)
