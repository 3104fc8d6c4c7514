"""The log of the endpoint: every request with its whole reply, a line of JSON each. ``data=chat`` reads it, see data/forms.py."""

from __future__ import annotations

import json
import logging
import os
import stat
from datetime import UTC, datetime
from queue import SimpleQueue
from threading import Thread
from typing import Any

from headstart.heads.errors import UserError

log = logging.getLogger(__name__)


class Record:
    """Appends to a file, which several servers may share, in a thread of its own: a slow disk holds up no reply. Only the file's owner may
    read it, because it holds what users wrote. Call ``close`` at the end, which waits for what is left to write.
    """

    def __init__(self, path: str) -> None:
        """Raises UserError if the file cannot be written, or is no ordinary file."""
        self.path, self.rows = path, SimpleQueue[bytes | None]()
        try:
            how = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK  # the last one because opening a pipe waits for who reads it
            self.file = os.open(path, how, 0o600)
        except (OSError, ValueError) as error:
            raise UserError(f"log={path} cannot be written ({getattr(error, 'strerror', None) or error}): give another file") from None
        about = os.fstat(self.file)
        if not stat.S_ISREG(about.st_mode):
            os.close(self.file)
            raise UserError(f"log={path} is no ordinary file: give another one")
        self.cut = about.st_size > 0 and os.pread(self.file, 1, about.st_size - 1) != b"\n"  # the last line was not written to its end
        self.thread = Thread(target=self._run, name="log", daemon=True)
        self.thread.start()

    def add(self, request: bytes, reply: dict[str, Any]) -> None:
        """Append a request (its JSON) and its reply, soon."""
        row = {"time": datetime.now(UTC).isoformat(timespec="seconds"), "request": json.loads(request), "response": reply}
        self.rows.put(json.dumps(row).encode() + b"\n")

    def close(self) -> None:
        self.rows.put(None)
        self.thread.join()
        os.close(self.file)

    def _run(self) -> None:
        while (line := self.rows.get()) is not None:
            begun = b"\n" * self.cut + line
            try:
                written = os.write(self.file, begun)  # one write for each line, so that those of several servers do not mix
                self.cut = written < len(begun)
                if self.cut:
                    raise OSError(None, "the disk is full")
            except OSError as error:
                log.warning("log=%s lacks a reply: %s", self.path, error.strerror or error)
