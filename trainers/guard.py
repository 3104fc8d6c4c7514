"""A step that would do harm is passed over: its loss or its gradient is not finite, or far beyond what is usual.

The weights stay as they were, the batch is behind, and what it was is kept: a line of RUN/skipped.jsonl names its rows. What is usual
is the median of the latest steps that were taken; a checkpoint holds them, so that a run that goes on decides as one that was not stopped.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from torch import Tensor

from headstart.heads.files import json_lines, put_text

FILE = "skipped.jsonl"
HISTORY, LEAST = 64, 16  # steps whose median is the usual; with fewer nothing is a spike
WINDOW = 100  # steps, of which so many may be skipped
BEGINNING = 16  # tokens of a row that its line shows


@dataclass
class Guard:
    """``skips``: how many of the latest ``WINDOW`` steps may be skipped. ``spike``: a step whose loss or gradient norm is more than this
    many times the usual is skipped; 0: none is.
    """

    skips: int
    spike: float
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)

    def wrong(self, loss: float, norm: float) -> str:
        """What is wrong with a step of this loss and gradient norm; "" where nothing is. All processes are given the same numbers."""
        for what, value, latest in (("the loss", loss, self.losses), ("the gradient's norm", norm, self.norms)):
            if not math.isfinite(value):
                return f"{what} is {value}"
            if self.spike and len(latest) >= LEAST and value > self.spike * (usual := median(latest)):
                return f"{what} is {value:.3g}, {value / usual if usual else math.inf:.0f} times the usual"
        return ""

    def took(self, loss: float, norm: float) -> None:
        """Note the figures of a step that was taken: they count as usual from now on."""
        self.losses, self.norms = [*self.losses, loss][-HISTORY:], [*self.norms, norm][-HISTORY:]

    def skip(self, step: int) -> bool:
        """Note a bad step. Returns whether it may be skipped."""
        self.skipped = [*(s for s in self.skipped if s > step - WINDOW), step]
        return len(self.skipped) <= self.skips

    def shown(self, step: int) -> dict[str, int]:
        """How many of the latest ``WINDOW`` steps up to ``step`` were skipped; nothing where none ever was."""
        return {"skipped": sum(s > step - WINDOW for s in self.skipped)} if self.skipped else {}

    def state(self) -> dict[str, list[Any]]:
        """What a checkpoint keeps."""
        return {"losses": self.losses, "norms": self.norms, "skipped": self.skipped}

    def restore(self, state: Mapping[str, list[Any]]) -> None:
        """Take over what ``state`` gave; nothing from checkpoints of versions that did not have it."""
        self.losses, self.norms, self.skipped = (list(state.get(key, ())) for key in ("losses", "norms", "skipped"))


def describe(tokens_RT: Tensor) -> list[dict[str, Any]]:
    """For each row of tokens [R, T] the SHA-256 of its tokens (as int32), and its first tokens."""
    rows = tokens_RT.cpu().numpy().astype(np.int32)
    return [{"sha256": hashlib.sha256(row.tobytes()).hexdigest(), "begins": row[:BEGINNING].tolist()} for row in rows]


def note(run: Path, step: int, why: str, place: Sequence[int], rows: Sequence[Mapping[str, Any]]) -> None:
    """Add a step to RUN/skipped.jsonl. ``place``: the numbers of its first row and of the one behind its last, counted over all epochs.
    Raises OSError.
    """
    line = {"step": step, "why": why, "place": list(place), "rows": list(rows)}
    put_text(run / FILE, "".join(f"{json.dumps(each)}\n" for each in [*_noted(run, step - 1), line]))


def forget(run: Path, after: int) -> None:
    """Remove the lines of later steps, which a run that goes on after step ``after`` makes again. Raises OSError."""
    if (run / FILE).is_file():
        put_text(run / FILE, "".join(f"{json.dumps(each)}\n" for each in _noted(run, after)))


def _noted(run: Path, last: int) -> list[dict[str, Any]]:
    """The lines up to step ``last``."""
    return [each for each in json_lines(run / FILE) if isinstance(each.get("step"), int) and each["step"] <= last]
