"""Ctrl-C, SIGTERM or a closed terminal: a message appears at once, the current step is finished, and a checkpoint is written."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
AFTER = "stopping after this step, with a checkpoint; Ctrl-C again ends at once (the last checkpoint stays)"
WRITING = "a checkpoint is being written, then it ends; Ctrl-C again breaks that off (the one before it stays)"


@dataclass
class Interrupt:
    """Handles these signals while it is entered as a context. ``asked``: the current step is the last one. A second Ctrl-C ends the run at
    once; while a checkpoint is being written, only a third one does. ``say``: print messages (in one of several processes).
    """

    say: bool = True
    asked: bool = False
    again: bool = False
    busy: bool = False
    old: dict[int, Any] = field(default_factory=dict)

    def __enter__(self) -> Interrupt:
        try:
            heard = [s for s in ENDING if signal.getsignal(s) is not signal.SIG_IGN]  # under nohup a closed terminal ends nothing
            self.old = {s: signal.signal(s, self._ask) for s in heard}
        except ValueError:  # not the main thread, which receives no signals
            self.old = {}
        return self

    def __exit__(self, *_: object) -> None:
        for s, handler in self.old.items():
            signal.signal(s, handler)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Inside, a checkpoint is being written: a second Ctrl-C takes effect after it, as KeyboardInterrupt."""
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
        """Write to stderr directly, not through Python's streams: the signal may have interrupted a write to one of them."""
        if self.say:
            with suppress(OSError):
                clear = "\r\x1b[2K" if os.isatty(2) else "\n"  # clears the progress bar, which is drawn again below
                os.write(2, f"{clear}{text}\n".encode())
