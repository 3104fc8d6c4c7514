"""Saves results when the disk is full: writes them to another disk, removes what can be spared, or waits for space."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep

from headstart.data.lock import locked
from headstart.heads.errors import UserError, sized
from headstart.heads.files import put_text

POLL, REMIND = 5.0, 60.0  # seconds: between checks of the free space; between messages, and between attempts while space is short
OWNER = "out"  # a file in the folder in ``out_fallback``: the run folder that it belongs to
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def places_of(out: str, out_fallback: str | None) -> list[Path]:
    """The run folder, and its counterpart in ``out_fallback`` if given. Raises UserError for an ``out_fallback`` that is no folder, or that
    contains ``out`` itself.
    """
    if out_fallback is None:
        return [Path(out)]
    if not Path(out_fallback).is_dir():
        raise UserError(f"out_fallback must be null or a folder that is there, on another disk than out, found {out_fallback!r}")
    own, spare = Path(out).resolve(), Path(out_fallback) / Path(out).resolve().name
    if spare.resolve() == own:
        raise UserError(f"out_fallback={out_fallback} is where out={out} is: name a folder on another disk")
    if (spare / OWNER).is_file() and (of := (spare / OWNER).read_text().strip()) != str(own):
        raise UserError(f"{spare} keeps what {of} had no space for: name another out_fallback, or an out with another last part. (If that "
                        f"run was moved to {out}, write {own} into {spare / OWNER}.)")  # fmt: skip
    return [Path(out), spare]


def own_spare(places: Sequence[Path]) -> None:
    """Write into the counterpart in ``out_fallback`` which run folder it belongs to. An error is ignored: the disk may have space later."""
    for spare in places[1:]:
        with suppress(OSError):
            spare.mkdir(parents=True, exist_ok=True)
            put_text(spare / OWNER, f"{places[0].resolve()}\n")


@contextmanager
def taken(places: Sequence[Path], arms: Iterable[str]) -> Iterator[None]:
    """Inside, the run folders and those of the arms are locked. Raises UserError if another process writes into one of them."""
    with ExitStack() as locks:
        for key, place in zip(("out", "out_fallback"), places, strict=False):
            for folder in dict.fromkeys([place, *(place / name for name in arms)]):
                locks.enter_context(locked(folder, key))
        own_spare(places)
        yield


@dataclass
class Room:
    """Writes results and waits for disk space if needed: at most ``wait`` seconds (``out_wait``) for all results of a run together."""

    wait: float  # seconds
    until: float | None = None  # end of the waiting (monotonic seconds), set at the first refusal
    told: float = -REMIND  # time of the last message

    def keep(
        self,
        what: str,
        size: int,
        places: Sequence[Path],
        write: Callable[[Path], object],
        make_room: Callable[[], list[Path]] = list,
        patient: bool = True,
        advice: str = "free some space and run the same command again",
    ) -> Path:
        """Write ``what`` (about ``size`` bytes) into the first of the folders ``places`` that takes it, and return that folder.

        If all folders refuse because a disk is full, ``make_room`` removes what can be spared and returns its paths. After that, with
        ``patient``, wait for space. All of this is printed. When the time is over, raises UserError, which contains ``advice`` and has the
        disk's error as its cause.
        """
        refused: OSError | None = None
        while True:
            for place in places:
                error = _attempt(write, place)
                if error is None:
                    if refused is not None:
                        print(f"{what} is in {place}" + (f" (out_fallback): {_why(refused, places[0])}" if place != places[0] else " now"))
                    return place
                refused = refused or error
            assert refused is not None
            if refused.errno in FULL and (gone := make_room()):
                print(f"{_why(refused, places[0])}: {', '.join(path.name for path in gone)} removed to make room for {what}")
            else:
                self._wait(what, size, places, refused, patient, advice)

    def _wait(self, what: str, size: int, places: Sequence[Path], refused: OSError, patient: bool, advice: str) -> None:
        """Wait until there is space, or at most REMIND seconds. Raises UserError when the time is over."""
        now = monotonic()
        if self.until is None and patient:
            self.until = now + self.wait
        left = (self.until or now) - now if patient else 0.0
        where = f"{' nor '.join(map(str, places))} ({_reason(refused)})"
        if left <= 0:
            raise UserError(f"{what} cannot be written into {where}: what was there before is untouched; {advice}") from refused
        if now - self.told >= REMIND:
            self.told = now
            print(f"{what} cannot be written into {where}: {sized(size)} needed, {sized(free_space(places))} free. Waiting for space, "
                  f"for at most {left:.0f} seconds (out_wait); Ctrl-C gives up")  # fmt: skip
        end = now + min(REMIND, left)
        sleep(min(POLL, left))
        while monotonic() < end and free_space(places) < size:
            sleep(min(POLL, max(0.1, end - monotonic())))


def free_space(places: Sequence[Path]) -> int:
    """The free bytes on the one of these folders' disks that has most."""
    free = [0]
    for place in places:
        try:
            free.append(shutil.disk_usage(next(p for p in (place, *place.absolute().parents) if p.exists())).free)
        except OSError:
            continue
    return max(free)


def _attempt(write: Callable[[Path], object], place: Path) -> OSError | None:
    """Write to ``place``. Returns the disk's error, also if it is the cause of a UserError; None on success. Other errors are raised."""
    try:
        write(place)
    except OSError as e:
        return e
    except UserError as e:
        if not isinstance(e.__cause__, OSError):
            raise
        return e.__cause__
    return None


def _reason(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno else str(error)


def _why(error: OSError, place: Path) -> str:
    return f"{place}: {_reason(error)}"
