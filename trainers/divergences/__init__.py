"""What a drafter's distribution is compared with, and how. ``Teacher`` is the one, a divergence the other: a file NAME.py with

    NAME(log_q_RV, teacher, **constants) -> [R]

for draft rows that ``teacher`` judges row by row, differentiable, not reduced; constants with their defaults. It is found by its name,
nothing else knows which there are: ``loss.terms.NAME`` weighs it, ``loss.constants.NAME`` sets its constants.

Shape suffixes: C positions that the target judges, R draft rows, K tokens that are looked at, V vocabulary of the drafter.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from headstart.heads.errors import UserError
from headstart.trainers.divergences.teacher import Teacher, nll, overlap

Divergence = Callable[..., Tensor]  # (log_q_RV, teacher, **constants) -> [R]
__all__ = ["Teacher", "find", "names", "nll", "overlap", "with_constants"]


def names() -> list[str]:
    """All divergences: the files of this folder that are named after their function."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != "teacher")


def find(name: str) -> Divergence:
    """Raises KeyError for one that there is not."""
    try:
        found: Divergence = getattr(importlib.import_module(f"{__name__}.{name}"), name)
    except (ModuleNotFoundError, AttributeError):
        raise KeyError(name) from None
    return found


def with_constants(name: str, function: Callable[..., Any], constants: Mapping[str, float]) -> Callable[..., Any]:
    """``function`` with these of its keyword arguments. Raises UserError for one that it does not have, or of another kind."""
    own = {key: p.default for key, p in inspect.signature(function).parameters.items() if p.default is not p.empty}
    for key, value in constants.items():
        if key not in own:
            raise UserError(f"loss.constants.{name} has no {key!r}: it has {', '.join(own) or 'none'}")
        if isinstance(own[key], int) and (not isinstance(value, int) or value < 1):
            raise UserError(f"loss.constants.{name}.{key} must be a whole number from 1 on, found {value!r}")
    return functools.partial(function, **constants) if constants else function
