"""Ctrl-C where Python would print a stack trace (before a door has begun) or lose it (where it ignores exceptions); and `| head`."""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

SOON = 0.05  # seconds


@contextmanager
def one_line() -> Iterator[None]:
    """A context for importing a door and composing its settings. Nothing has begun yet, so Ctrl-C ends the process at once, with one line.
    (OmegaConf would turn a KeyboardInterrupt into an error of its own.)
    """
    with _instead(signal.default_int_handler, _end):
        yield


@contextmanager
def as_usual() -> Iterator[None]:
    """A context within ``one_line``, in which Ctrl-C raises KeyboardInterrupt: a run has begun, and may have something to save."""
    with _instead(_end, signal.default_int_handler):
        yield


@contextmanager
def _instead(usual: Any, other: Any) -> Iterator[None]:
    """A context in which ``other`` handles Ctrl-C, if ``usual`` does so now."""
    mine = signal.getsignal(signal.SIGINT) is usual and threading.current_thread() is threading.main_thread()
    if mine:
        signal.signal(signal.SIGINT, other)
    try:
        yield
    finally:
        if mine and signal.getsignal(signal.SIGINT) is other:
            signal.signal(signal.SIGINT, usual)


@contextmanager
def never_ignored() -> Iterator[None]:
    """A context that repeats a Ctrl-C which Python printed and ignored: in a callback of the garbage collector, or in a ``__del__``."""
    before, timers = sys.unraisablehook, list[threading.Timer]()

    def again(unraisable: Any) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            timers.append(threading.Timer(SOON, _thread.interrupt_main))  # not from here, where it would be ignored too
            timers[-1].daemon = True
            timers[-1].start()
        else:
            before(unraisable)

    sys.unraisablehook = again
    try:
        yield
    finally:
        sys.unraisablehook = before
        for timer in timers:
            timer.cancel()


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """A context for code that only prints: if the reader of its output has gone (`| head`), the code ends without an error."""
    try:
        yield
        sys.stdout.flush()  # a flush at Python's exit would raise where nobody can catch it
    except BrokenPipeError:
        reader_left()


def reader_left() -> None:
    """Discard everything that is printed from now on."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _end(*_: object) -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # the signal may have interrupted a write
            stream.flush()
    if os.environ.get("RANK", "0") == "0":
        os.write(2, b"interrupted\n")
    os._exit(130)
