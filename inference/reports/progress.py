"""The progress of a measurement: a bar on a terminal; in a log file a line now and then, without control characters."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sized
from typing import TypeVar

from rich.console import Console
from rich.progress import track

EVERY = 30.0  # least seconds between two lines
T = TypeVar("T")


class Lines:
    """Lines of progress where the output is no terminal. ``what``: what is counted, "prompts decoded"; ``total``: how many in all."""

    def __init__(self, what: str, total: int) -> None:
        self.what, self.total = what, total
        self.silent, self.said = Console().is_terminal, time.monotonic()

    def at(self, done: int, more: str = "") -> None:
        """Print a line, if the last one was at least ``EVERY`` seconds ago."""
        if not self.silent and (now := time.monotonic()) - self.said >= EVERY:
            print(f"{self.what}: {done:,} of {self.total:,}{more}", flush=True)
            self.said = now


def watched(items: Iterable[T], what: str, total: int | None = None) -> Iterator[T]:
    """Yield the items and show the progress. ``total``: how many there are, where ``items`` has no length."""
    count = len(items) if isinstance(items, Sized) else total or 0
    lines = Lines(what, count)
    if lines.silent:
        yield from track(items, description=what, total=count, transient=True)
        return
    for i, item in enumerate(items):
        lines.at(i)
        yield item
