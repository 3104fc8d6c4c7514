"""The log of the endpoint: every request with its whole reply, a line of JSON each. ``data=chat`` reads it, see data/forms.py."""

from __future__ import annotations

import json
import logging
import os
import threading
from datetime import UTC, datetime
from typing import Any

from headstart.heads.errors import UserError

log = logging.getLogger(__name__)


class Record:
    """Appends to a file, which several servers may share. Only its owner may read it: it holds what users wrote."""

    def __init__(self, path: str) -> None:
        """Raises UserError if the file cannot be opened for writing."""
        self.path, self.lock, self.cut = path, threading.Lock(), False
        try:
            self.file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        except OSError as error:
            raise UserError(f"log={path} cannot be written ({error.strerror or error}): give another file") from None

    def add(self, request: bytes, reply: dict[str, Any]) -> None:
        """Append a request (its JSON) and its reply. A disk that refuses costs the line, which is told, and not the reply."""
        row = {"time": datetime.now(UTC).isoformat(timespec="seconds"), "request": json.loads(request), "response": reply}
        line = json.dumps(row).encode() + b"\n"
        with self.lock:  # one write for each line, so that those of several servers do not mix
            try:
                written = os.write(self.file, b"\n" * self.cut + line)
                self.cut = written < len(line) + self.cut  # the disk is full: the next line must not continue this one
                if self.cut:
                    raise OSError(None, "the disk is full")
            except OSError as error:
                log.warning("log=%s lacks a reply: %s", self.path, error.strerror or error)
