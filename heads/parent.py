"""Processes that end with the one that started them, however it ended."""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Callable

PR_SET_PDEATHSIG = 1  # Linux' constant


def with_its_parent(sign: int = signal.SIGTERM) -> Callable[[], object] | None:
    """What is to be called in a child: where its parent is killed, the child gets ``sign``. None where the system has no such thing
    (only Linux has): there it goes on.
    """
    call = getattr(ctypes.CDLL(None), "prctl", None)
    return (lambda: call(PR_SET_PDEATHSIG, sign)) if call is not None else None
