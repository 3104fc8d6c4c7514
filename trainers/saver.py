"""The checkpoints of one arm: written while training goes on, onto the first disk that takes them; which stay, and which is the newest.

What a checkpoint holds is a copy (``Parallel.snapshot``, ``checkpoint.copied``); a thread writes and hashes it and puts it in place. At
most one is on its way: the next one waits for it, and so does whoever ends. A disk that refuses is told of, and is no reason to stop;
whatever else fails is raised where it is waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console

from headstart.trainers import checkpoint
from headstart.trainers.space import Room

Snapshot = tuple[int, checkpoint.Parts, dict[str, Any]]  # step, files, state: what checkpoint.save takes


class Saver:
    """``places``: the run folder, and the one on another disk. ``background``: write in a thread. Leaving it as a context waits for what is
    still being written.
    """

    def __init__(self, label: str, places: Sequence[Path], background: bool) -> None:
        self.label, self.places, self.background = label, places, background
        self.made: Snapshot | None = None
        self.unsaved = False  # the latest is on no disk, and is held until it is
        self.pool: ThreadPoolExecutor | None = None
        self.pending: Future[None] | None = None

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.wait()
        except Exception:
            if kind is None:  # else what ended the training is told of
                raise
        finally:
            if self.pool is not None:
                self.pool.shutdown()
                self.pool = None

    def save(self, made: Snapshot, keep: int, before_the_fall: int | None, console: Console, *, last: bool) -> None:
        """Write a checkpoint once the one before it is written. Then remove all but the newest ``keep``, the best one, and that of step
        ``before_the_fall``. ``last``: wait until that is done.
        """
        self.wait()
        self.unsaved, self.made = True, made
        if self.background:
            self.pool = self.pool or ThreadPoolExecutor(1, "checkpoint")
            self.pending = self.pool.submit(self._put, made, keep, before_the_fall, console, last)
        else:
            self._put(made, keep, before_the_fall, console, last)
        if last:
            self.wait()

    def wait(self) -> None:
        """Wait until no checkpoint is being written. Raises what writing it has raised."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.result()

    def _put(self, made: Snapshot, keep: int, before_the_fall: int | None, console: Console, last: bool) -> None:
        (step, parts, _), refused = made, ""
        if not all(bool(x.isfinite().all()) for x in parts["drafter"].values()):  # it would take the place of one that can be gone on from
            said = f"checkpoint of step {step} not written: its weights are not finite. The last one is {self.newest() or 'none'}"
            self.unsaved, self.made = False, None  # nor is there any disk to look for
            return console.print(f"{self.label}{said}", style="red", markup=False, soft_wrap=True)
        for place in self.places:
            try:
                checkpoint.save(place, *made)
                self.unsaved, self.made = False, None
                break
            except OSError as e:  # hours of training are worth more than one checkpoint: say so and go on
                refused = refused or str(e)
        if refused:
            there = f"not written: {refused}. {'The' if last else 'Training goes on; the'} last whole one is {self.newest() or 'none'}"
            if not self.unsaved:
                there = f"is in {self.newest()} (out_fallback), where the same command finds it: {refused}"
            console.print(f"{self.label}checkpoint of step {step} {there}. Free some space.", style="red", markup=False, soft_wrap=True)
        try:
            best = checkpoint.best(self.places)
            for place in self.places:
                checkpoint.prune(place, keep, before_the_fall, best)
        except OSError as e:
            console.print(f"{self.label}earlier checkpoints are not removed: {e}", style="red", markup=False, soft_wrap=True)

    def newest(self) -> Path | None:
        """The last whole checkpoint."""
        return max((folder for place in self.places for folder in checkpoint.folders(place)), key=checkpoint.step_of, default=None)

    def secure(self, room: Room, patient: bool) -> None:
        """When training is over, write the checkpoint that ``save`` could not write. Called by the main process alone. ``patient``: wait
        for space. Raises UserError where no disk takes it.
        """
        assert self.made is not None
        step, parts, _ = made = self.made
        what, size = f"{self.label}the checkpoint of step {step}", sum(x.nbytes for part in parts.values() for x in part.values())
        room.keep(what, size, self.places, lambda place: checkpoint.save(place, *made), self.make_room, patient, advice=self.advice(step))
        self.unsaved, self.made = False, None

    def make_room(self) -> list[Path]:
        """Remove all checkpoints of this run's folder but the newest; returns them."""
        gone = checkpoint.folders(self.places[0])[:-1]
        try:
            for folder in gone:
                checkpoint.remove(folder)
        except OSError:
            return []
        return gone

    def advice(self, step: int) -> str:
        """Where the weights of ``step`` are, for a message that something else could not be written."""
        newest = self.newest()
        if newest and not self.unsaved:
            return f"the weights are safe in {newest}: free some space and run the same command again"
        lost = f"the weights of step {step} are on no disk"
        return f"{lost}: the same command goes on from {newest}" if newest else lost
