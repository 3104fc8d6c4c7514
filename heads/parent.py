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
    call, parent = getattr(ctypes.CDLL(None), "prctl", None), os.getpid()

    def tie() -> None:
        assert call is not None
        call(PR_SET_PDEATHSIG, sign)
        if os.getppid() != parent:  # it has gone before the child came here
            os.kill(os.getpid(), sign)

    return tie if call is not None else None


@contextmanager
def forks_end_with_it() -> Iterator[None]:
    """What is forked inside, by libraries too, is killed where this process is."""
    _tie_forks()
    try:
        yield
    finally:
        _tying.clear()


def _tie_forks() -> None:
    tie = with_its_parent(signal.SIGKILL)
    _tying[:] = [tie] if tie is not None else []


def _in_a_fork() -> None:
    if _tying:
        _tying[0]()
        _tie_forks()  # what it forks itself ends with it


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_a_fork)
