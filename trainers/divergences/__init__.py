"""Divergences between the target's distribution p (``Teacher``) and the drafter's q. Each is a file NAME.py with a function

    NAME(log_q_RV, teacher, **constants) -> [R]

that takes draft rows and a teacher with one row for each of them. It is differentiable and not reduced; constants have defaults. It is
found by its name; no list of divergences exists. ``loss.terms.NAME`` sets its weight, ``loss.constants.NAME`` its constants.

Shape suffixes: C positions that the target judges, R draft rows, K tokens of the top k, V vocabulary of the drafter.
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
    """Names of all divergences: the files of this folder except teacher.py."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != "teacher")


def find(name: str) -> Divergence:
    """The divergence of that name. Raises KeyError if there is none."""
    try:
        module = importlib.import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as e:
        if e.name != f"{__name__}.{name}":  # the file exists, but something that it imports does not
            raise
        raise KeyError(name) from None
    found: Divergence = getattr(module, name)
    return found
