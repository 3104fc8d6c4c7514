"""Ctrl-C where it would be printed as a trace, or lost: before a door has begun, and where Python can raise nothing. And `| head`."""

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
    """While a door is imported and its settings are composed: nothing has begun, it ends at once. (Raised in the middle of OmegaConf,
    KeyboardInterrupt comes out as an error of its own.)
    """
    with _instead(signal.default_int_handler, _end):
        yield


@contextmanager
def as_usual() -> Iterator[None]:
    """Within ``one_line``: what has begun may have something to save."""
    with _instead(_end, signal.default_int_handler):
        yield


@contextmanager
def _instead(usual: Any, other: Any) -> Iterator[None]:
    """Ctrl-C is handled by ``other`` where it is by ``usual`` now."""
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
    """In a callback of the garbage collector, or as an object goes, Python prints what was raised and goes on: Ctrl-C comes again then."""
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
    """`| head`: around what only prints, which ends without a word once its reader has what it wanted."""
    try:
        yield
        sys.stdout.flush()  # as Python ends, it would raise where nobody can catch it
    except BrokenPipeError:
        reader_left()


def reader_left() -> None:
    """What is still printed goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _end(*_: object) -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # it may be in the middle of writing
            stream.flush()
    if os.environ.get("RANK", "0") == "0":
        os.write(2, b"interrupted\n")
    os._exit(130)
