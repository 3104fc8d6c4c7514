"""Skips a step that would do harm: one whose loss or gradient norm is not finite, or far above the usual.

A skipped step leaves the weights unchanged, and its batch is not tried again. A line of RUN/skipped.jsonl names its rows. The usual is
the median over the latest steps that were taken. Checkpoints hold these figures, so that a resumed run decides like an uninterrupted one.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from torch import Tensor

from headstart.data.batch import TargetBatch
from headstart.heads.files import keep_lines

FILE = "skipped.jsonl"
HISTORY, LEAST = 64, 16  # the most and the fewest steps for the median; with fewer steps nothing counts as a spike
WINDOW = 100  # steps among which ``skips`` may be skipped
DIVERGED = "training diverged{}. Lower trainer.lr"  # {}: how often
OVERFLOWS = "the target's own states are not finite, as those of some are in float16: take target.dtype=bfloat16, or float32"
BEGINNING = 16  # first tokens of a row, shown in skipped.jsonl


@dataclass
class Guard:
    """Decides which steps are skipped. ``skips``: how many of the latest ``WINDOW`` steps may be. ``spike``: skip a step whose loss or
    gradient norm is more than this many times the usual; 0: only if it is not finite. If the usual is zero, nothing is a spike.
    """

    skips: int
    spike: float
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)

    def wrong(self, loss: float, norm: float) -> str:
        """Why a step with this loss and gradient norm must be skipped; "" if it need not be. All processes must pass the same numbers."""
        for what, value, latest in (("the loss", loss, self.losses), ("the gradient's norm", norm, self.norms)):
            if not math.isfinite(value):
                return f"{what} is {value}"
            if len(latest) >= LEAST and 0 < self.spike * (usual := median(latest)) < value:
                return f"{what} is {value:.3g}, {value / usual:.0f} times the usual"
        return ""

    def took(self, loss: float, norm: float) -> None:
        """Note the figures of a step that was taken. They enter the median."""
        self.losses, self.norms = [*self.losses, loss][-HISTORY:], [*self.norms, norm][-HISTORY:]

    def skip(self, step: int) -> bool:
        """Note a bad step. Returns whether it may be skipped; False: too many were."""
        self.skipped = [*(s for s in self.skipped if s > step - WINDOW), step]
        return len(self.skipped) <= self.skips

    def shown(self, step: int) -> dict[str, int]:
        """How many of the latest ``WINDOW`` steps up to ``step`` were skipped; {} if no step ever was."""
        return {"skipped": sum(s > step - WINDOW for s in self.skipped)} if self.skipped else {}

    def state(self) -> dict[str, list[Any]]:
        """What a checkpoint keeps, for ``restore``."""
        return {"losses": self.losses, "norms": self.norms, "skipped": self.skipped}

    def restore(self, state: Mapping[str, list[Any]]) -> None:
        """Restore what ``state`` returned. Checkpoints of earlier versions lack it; then the lists are empty."""
        self.losses, self.norms, self.skipped = (list(state.get(key, ())) for key in ("losses", "norms", "skipped"))


def overflowed(batch: TargetBatch | None) -> bool:
    """Whether the target's states of a batch are not all finite, as those of some targets in float16: that is no fault of the training."""
    return batch is not None and not all(bool(x.isfinite().all()) for x in (batch.final_BTD, *batch.states.values()))


def describe(tokens_RT: Tensor) -> list[dict[str, Any]]:
    """For each row of ``tokens_RT`` the SHA-256 of its tokens (as int32), and its first tokens."""
    rows = tokens_RT.cpu().numpy().astype(np.int32)
    return [{"sha256": hashlib.sha256(row.tobytes()).hexdigest(), "begins": row[:BEGINNING].tolist()} for row in rows]


def note(run: Path, step: int, why: str, place: Sequence[int], rows: Sequence[Mapping[str, Any]]) -> None:
    """Add a step to RUN/skipped.jsonl. ``place``: the numbers of its first row and of the row after its last one, counted over all epochs.
    Raises OSError.
    """
    line = {"step": step, "why": why, "place": list(place), "rows": list(rows)}
    keep_lines(run / FILE, _up_to(step - 1), line)


def forget(run: Path, after: int) -> None:
    """Remove the lines of steps after ``after``, which a resumed run repeats. Raises OSError."""
    keep_lines(run / FILE, _up_to(after))


def _up_to(last: int) -> Callable[[Mapping[str, Any]], bool]:
    return lambda line: isinstance(line.get("step"), int) and line["step"] <= last
