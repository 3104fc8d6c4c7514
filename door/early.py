"""Ctrl-C where Python would print a trace of it: before there is a door to catch it, and where nothing can be raised."""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SOON = 0.05  # seconds


@contextmanager
def one_line() -> Iterator[None]:
    """While what a door is made of is imported, which takes a third of a second: it ends at once, with a line in the place of a trace."""
    before: Any = signal.default_int_handler
    try:
        if signal.getsignal(signal.SIGINT) is before:
            signal.signal(signal.SIGINT, _end)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is _end:
            signal.signal(signal.SIGINT, before)


@contextmanager
def never_ignored() -> Iterator[None]:
    """In a callback of the garbage collector, or as an object goes, Python prints what was raised and goes on: Ctrl-C comes again then."""
    before, timers = sys.unraisablehook, list[threading.Timer]()

    def again(unraisable: Any) -> None:
        if isinstance(unraisable.exc_value, KeyboardInterrupt):
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


def _end(*_: object) -> None:
    if os.environ.get("RANK", "0") == "0":
        os.write(2, b"interrupted\n")
    os._exit(130)
