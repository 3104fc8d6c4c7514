"""What a drafter's distribution is compared with, and how. ``Teacher`` is the one, a divergence the other: a file NAME.py with

    NAME(log_q_RV, teacher, **constants) -> [R]

for draft rows that ``teacher`` judges row by row, differentiable, not reduced; constants with their defaults. It is found by its name,
nothing else knows which there are: ``loss.terms.NAME`` weighs it, ``loss.constants.NAME`` sets its constants.

Shape suffixes: C positions that the target judges, R draft rows, K tokens that are looked at, V vocabulary of the drafter.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable

from torch import Tensor

from headstart.trainers.divergences.teacher import Teacher, nll, overlap

Divergence = Callable[..., Tensor]  # (log_q_RV, teacher, **constants) -> [R]
__all__ = ["Teacher", "find", "names", "nll", "overlap"]


def names() -> list[str]:
    """All divergences: the files of this folder that are named after their function."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != "teacher")


def find(name: str) -> Divergence:
    """Raises KeyError for one that there is not."""
    try:
        module = importlib.import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as e:
        if e.name != f"{__name__}.{name}":  # it is there, what it imports is not
            raise
        raise KeyError(name) from None
    found: Divergence = getattr(module, name)
    return found
