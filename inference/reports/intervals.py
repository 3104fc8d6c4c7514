"""How far a figure would move with other prompts: intervals by bootstrap over prompts (Efron, 1979).

The prompts are the random sample, and the rounds of one prompt depend on each other. So whole prompts are drawn again, with replacement,
and the figure, a ratio of sums over prompts, is computed for each set so drawn. The interval is the middle 95 % of these (percentiles).

Shape suffixes: P prompts, C columns that are summed, S sets of drawn prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headstart.inference.decoding.decode import Generation

SETS, COVERED, DIGITS = 2000, 0.95, 4
LEAST = 2  # prompts: a single one gives no interval

Array = NDArray[np.float64]


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
        reached = [sum(n > d for n in made.emitted) for d in range(1, depth + 1)]
        return [sum(made.emitted), len(made.emitted), len(made.tokens), made.seconds, len(alone.tokens), alone.seconds, *reached]

    def share(d: int) -> Callable[[Array], Array]:
        return lambda x: x[:, 6 + d] / x[:, 1]

    table_PC = np.array([row(made, alone) for made, alone in zip(drafted, plain, strict=True)], dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        return {
            "accepted_length": bootstrap(table_PC, lambda x: x[:, 0] / x[:, 1]),
            "speedup": bootstrap(table_PC, lambda x: (x[:, 2] / x[:, 3]) / (x[:, 4] / x[:, 5])),
            "acceptance_by_depth": [bootstrap(table_PC, share(d)) for d in range(depth)],
        }
