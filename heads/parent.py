"""Processes that end with the one that started them, however it ended. (On Linux; other systems have no such thing, and they go on.)"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PR_SET_PDEATHSIG = 1  # Linux' constant
_tying: list[Callable[[], object]] = []  # what is called in processes that are forked now


def with_its_parent(sign: int = signal.SIGTERM) -> Callable[[], object] | None:
    """What is to be called in a child: where its parent is killed, the child gets ``sign``. None where the system knows no such thing."""
    call = getattr(ctypes.CDLL(None), "prctl", None)
    return (lambda: call(PR_SET_PDEATHSIG, sign)) if call is not None else None


@contextmanager
def forks_end_with_it() -> Iterator[None]:
    """What is forked inside, by libraries too, is killed where this process is."""
    tie = with_its_parent(signal.SIGKILL)
    _tying.extend([tie] if tie is not None else [])
    try:
        yield
    finally:
        _tying.clear()


def _in_a_fork() -> None:
    for tie in _tying:
        tie()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_a_fork)
