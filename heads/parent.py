"""Processes that end when their parent ends, for whatever reason. (On Linux only: on other systems they keep running.)"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PR_SET_PDEATHSIG = 1  # Linux constant
_tying: list[Callable[[], object]] = []  # called in each process that is forked from now on


def with_its_parent(sign: int = signal.SIGTERM) -> Callable[[], object] | None:
    """A function that a child calls to get the signal ``sign`` when its parent ends. None where the system does not support it."""
    call, parent = getattr(ctypes.CDLL(None), "prctl", None), os.getpid()

    def tie() -> None:
        assert call is not None
        call(PR_SET_PDEATHSIG, sign)
        if os.getppid() != parent:  # the parent ended before the child came here
            os.kill(os.getpid(), sign)

    return tie if call is not None else None


@contextmanager
def forks_end_with_it() -> Iterator[None]:
    """Processes that are forked inside, by libraries too, are killed when this process ends."""
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
        _tie_forks()  # so that processes which the child forks end with it


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_a_fork)
