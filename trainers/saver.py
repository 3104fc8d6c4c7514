"""Writes the checkpoints of one arm while training continues, on the first disk that takes them, and removes old ones.

The content of a checkpoint is a copy (``Parallel.snapshot``, ``checkpoint.copied``). A thread writes and hashes it and renames it into
place. At most one checkpoint is being written: the next one waits for it, and so does the end of the run. An error of the disk is printed
and does not end the training. Any other error is raised by ``Saver.wait``.
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
    """Writes the checkpoints of one arm. ``places``: the run folder, and the one on another disk if there is one. ``background``: write in
    a thread. Leaving the context waits for a checkpoint that is still being written.
    """

    def __init__(self, label: str, places: Sequence[Path], background: bool) -> None:
        self.label, self.places, self.background = label, places, background
        self.unsaved: Snapshot | None = None  # the latest checkpoint, as long as it is on no disk
        self.pool: ThreadPoolExecutor | None = None
        self.pending: Future[None] | None = None

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.wait()
        except Exception:
            if kind is None:  # else the error that ended the training is raised
                raise
        finally:
            if self.pool is not None:
                self.pool.shutdown()
                self.pool = None

    def save(self, snapshot: Snapshot, keep: int, before_the_fall: int | None, console: Console, *, last: bool) -> None:
        """Write a checkpoint after the previous one is written. Then remove all but the newest ``keep``, the best one, and that of step
        ``before_the_fall``. ``last``: return only when this is done. Raises what writing the previous one raised.
        """
        self.wait()
        self.unsaved = snapshot
        if self.background:
            self.pool = self.pool or ThreadPoolExecutor(1, "checkpoint")
            self.pending = self.pool.submit(self._write, snapshot, keep, before_the_fall, console, last)
        else:
            self._write(snapshot, keep, before_the_fall, console, last)
        if last:
            self.wait()

    def wait(self) -> None:
        """Wait until no checkpoint is being written. Raises what the writing thread raised."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.result()

    def _write(self, snapshot: Snapshot, keep: int, before_the_fall: int | None, console: Console, last: bool) -> None:
        (step, parts, _), refused = snapshot, ""
        if not all(bool(x.isfinite().all()) for x in parts["drafter"].values()):  # it would replace one from which training can resume
            self.unsaved = None  # nothing to write later either
            why = f"checkpoint of step {step} not written: its weights are not finite. The last one is {self.newest() or 'none'}"
            return console.print(f"{self.label}{why}", style="red", markup=False, soft_wrap=True)
        for place in self.places:
            try:
                checkpoint.save(place, *snapshot)
                self.unsaved = None
                break
            except OSError as e:  # hours of training are worth more than one checkpoint: print it and continue
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
        """The folder of the newest whole checkpoint; None if there is none. Raises UserError if they cannot be listed."""
        return checkpoint.newest(*self.places)

    def secure(self, room: Room, patient: bool) -> None:
        """After the training, write the checkpoint that ``save`` could not write. Only the main process calls this. ``patient``: wait for
        space. Raises UserError if no disk takes it.
        """
        assert self.unsaved is not None
        step, parts, _ = snapshot = self.unsaved
        what, size = f"{self.label}the checkpoint of step {step}", sum(x.nbytes for part in parts.values() for x in part.values())

        def write(place: Path) -> None:
            checkpoint.save(place, *snapshot)

        room.keep(what, size, self.places, write, self.make_room, patient, advice=self.advice(step))
        self.unsaved = None

    def make_room(self) -> list[Path]:
        """Remove all checkpoints in the run folder but the newest. Returns their paths; [] if the disk refuses."""
        gone = checkpoint.folders(self.places[0])[:-1]
        try:
            for folder in gone:
                checkpoint.remove(folder)
        except OSError:
            return []
        return gone

    def advice(self, step: int) -> str:
        """A phrase that says where the weights of ``step`` are, for the message that something else could not be written."""
        newest = self.newest()
        if newest and not self.unsaved:
            return f"the weights are safe in {newest}: free some space and run the same command again"
        lost = f"the weights of step {step} are on no disk"
        return f"{lost}: the same command goes on from {newest}" if newest else lost
