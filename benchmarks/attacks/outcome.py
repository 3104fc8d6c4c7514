"""The outcome of an attack, and calls of commands within this process as a user would call them."""

from __future__ import annotations

import io
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.doors import call

TRACE = "Traceback (most recent call last)"
LIMIT = 40  # seconds that a command may take within this process
BAD = ("traceback", "silent", "lost")


class Outcome(NamedTuple):
    name: str
    came: str  # refused, same, runs; or one of BAD
    said: str = ""

    @property
    def shown(self) -> str:
        """The output from the first traceback on, else its end."""
        at = self.said.find(TRACE)
        return self.said[max(0, at - 300) :][:4000] if at >= 0 else self.said[-2000:]


class Called(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def said(self) -> str:
        return (self.out + self.err)[-3000:]


class Hung(BaseException):
    """A command that should have refused does not end, or serves."""


@contextmanager
def _streams() -> Iterator[tuple[io.TextIOWrapper, io.TextIOWrapper]]:
    """Streams like a terminal's: text that cannot be encoded is an error on stdout and escaped on stderr."""
    before = sys.stdin, sys.stdout, sys.stderr
    sys.stdin = io.TextIOWrapper(io.BytesIO())
    sys.stdout = out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    sys.stderr = err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace")
    try:
        yield out, err
    finally:
        sys.stdin, sys.stdout, sys.stderr = before


def text_of(stream: io.TextIOWrapper) -> str:
    stream.flush()
    found: io.BytesIO = stream.buffer  # type: ignore[assignment]
    return found.getvalue().decode()


def door(name: str, arguments: Sequence[str], folder: Path, stdin: bytes = b"") -> Called:
    """Call a command in ``folder``. The exit code is Python's: 1, with a traceback, if an exception is raised."""

    def late(*_: object) -> None:
        raise Hung

    handler = signal.signal(signal.SIGALRM, late)
    with pytest.MonkeyPatch.context() as patch, _streams() as (out, err):
        sys.stdin = io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8")
        signal.alarm(LIMIT)
        try:
            code = call(name, arguments, folder, patch)
            code = code if isinstance(code, int) else 0 if code is None else 1
        except BaseException:
            traceback.print_exc()
            code = 1
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, handler)
        return Called(code, text_of(out), text_of(err))


def judged(called: Called, names: str = "") -> str:
    """Judge a call. A refusal is exit code 2 and readable lines that begin with "error". ``names``: what a line must name."""
    errors = [line for line in called.err.splitlines() if line.startswith("error")]
    if TRACE in called.out + called.err or called.code not in (0, 2):
        return "traceback"
    if called.code == 0:
        return "runs"
    readable = errors and all(len(line) < 2100 for line in errors)
    return "refused" if readable and any(names in line for line in errors) else "traceback"


@contextmanager
def as_a_user() -> Iterator[None]:
    """Inside, root loses its right to ignore file permissions (Linux only; no effect elsewhere and for other users)."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "capset") or os.geteuid() != 0:
        yield
        return
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3 of the capability header; this thread
    data = (ctypes.c_uint32 * 6)()
    libc.capget(header, data)
    before = data[0]
    data[0] &= ~0b110  # effective: without CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH
    libc.capset(header, data)
    try:
        yield
    finally:
        data[0] = before
        libc.capset(header, data)
