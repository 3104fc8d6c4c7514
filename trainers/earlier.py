"""Removes what an earlier run left in the run folder for steps after the one that the present run begins at."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from headstart.heads.errors import UserError
from headstart.heads.stored import read_json
from headstart.trainers import checkpoint, guard
from headstart.trainers.diagnosis import FILE as DIAGNOSIS


def forget(places: Sequence[Path], began: int, skipped: int) -> int:
    """Remove what belongs to steps after ``began`` (0: everything): checkpoints, the weights that decoded best, a diagnosis, and lines of
    skipped.jsonl. ``skipped``: the latest skipped step; if the present run has skipped it, recording it has already removed those lines.
    ``places``: the run folder, and the one on another disk if there is one. Returns the number of removed checkpoints. Raises UserError and
    OSError.
    """
    run = places[0]
    if skipped <= began:  # else recording that step has removed them
        with suppress(OSError):
            guard.forget(run, began)
    removed = sum(checkpoint.clear(place, after=began) for place in places)
    if began == 0 or checkpoint.best_of(run / checkpoint.BEST)[0] > began:
        (run / checkpoint.BEST).unlink(missing_ok=True)
    if began == 0 or _diagnosed(run / DIAGNOSIS) > began:
        (run / DIAGNOSIS).unlink(missing_ok=True)
    return removed


def _diagnosed(path: Path) -> int:
    """The step of a diagnosis; 0 if there is none, or none that can be read."""
    with suppress(UserError, OSError):
        step = read_json(path).get("step") if path.is_file() else 0
        return step if isinstance(step, int) else 0
    return 0
