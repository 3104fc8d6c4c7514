"""Ctrl-C, SIGTERM, a closed terminal: the step is ended, a checkpoint written, and that this will happen is said at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

ENDING = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
AFTER = "stopping after this step, with a checkpoint; Ctrl-C again ends at once (the last checkpoint stays)"
WRITING = "a checkpoint is being written, then it ends; Ctrl-C again breaks that off (the one before it stays)"


@dataclass
class Interrupt:
    """``asked``: the step shall be the last one. A second Ctrl-C ends at once, but for a checkpoint that is being written: that
    takes a third. ``say``: one of several processes speaks for all.
    """

    say: bool = True
    asked: bool = False
    again: bool = False
    busy: bool = False
    old: dict[int, Any] = field(default_factory=dict)

    def __enter__(self) -> Interrupt:
        try:
            heard = [s for s in ENDING if signal.getsignal(s) is not signal.SIG_IGN]  # nohup: a terminal that is closed ends nothing
            self.old = {s: signal.signal(s, self._ask) for s in heard}
        except ValueError:  # not the main thread: nobody sends signals here
            self.old = {}
        return self

    def __exit__(self, *_: object) -> None:
        for s, handler in self.old.items():
            signal.signal(s, handler)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Around what is not broken off lightly."""
        self.busy = True
        try:
            yield
        finally:
            self.busy = False
        if self.again:
            raise KeyboardInterrupt

    def _ask(self, number: int, _: object) -> None:
        if not self.asked:
            self.asked = True
            self._tell(AFTER)
        elif number == signal.SIGINT:  # launchers and schedulers may send SIGTERM several times
            if self.again or not self.busy:
                raise KeyboardInterrupt
            self.again = True
            self._tell(WRITING)

    def _tell(self, text: str) -> None:
        """Past Python's streams: the signal may have come while one of them was being written to."""
        if self.say:
            with suppress(OSError):
                clear = "\r\x1b[2K" if os.isatty(2) else "\n"  # the progress bar is drawn anew below
                os.write(2, f"{clear}{text}\n".encode())
