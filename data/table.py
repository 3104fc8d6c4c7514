"""Rows by their numbers, for several processes at once: of a file of JSON lines, where they stand in it; of a data set, its own.

Files that cannot be entered in the middle (an array of JSON, .gz) are written out as lines first, beside what is made of them.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Iterable
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

from headstart.data.rows import Binary, Row, file_path, file_rows, hub_rows, is_array, is_dataset, lines, reading
from headstart.heads.files import sha256


class Lines:
    """The rows of ``file``: where each begins, its size in bytes, and its number in the user's file ``path`` (``word``: line or item)."""

    def __init__(self, file: Path, path: Path, word: str) -> None:
        self.file, self.path, self.word = file, path, word
        self.starts, self.sizes, self.numbers = array("q"), array("q"), array("q")

    @classmethod
    def written(cls, file: Path, path: Path, word: str, rows: Iterable[tuple[int, bytes]]) -> Lines:
        """``rows`` (number, line), written into ``file`` one after the other."""
        found, at = cls(file, path, word), 0
        with file.open("wb") as out:
            for number, line in rows:
                out.write(line + b"\n")
                found.add(at, len(line), number)
                at += len(line) + 1
        return found

    def add(self, start: int, size: int, number: int) -> None:
        """The next row."""
        for kept, value in ((self.starts, start), (self.sizes, size), (self.numbers, number)):
            kept.append(value)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, i: int) -> Row:
        # A place of its own for each read: processes that are forked share the file's.
        line = os.pread(self._open, self.sizes[i], self.starts[i])
        return Row(f"{self.path} {self.word} {self.numbers[i]}", self.numbers[i], line)

    @cached_property
    def _open(self) -> int:
        return os.open(self.file, os.O_RDONLY)

    def close(self) -> None:
        """The file."""
        if "_open" in self.__dict__:
            os.close(self.__dict__.pop("_open"))

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_open"}


class Hub:
    """The rows of a Hugging Face data set."""

    def __init__(self, name: str, found: Any, limit: int | None) -> None:
        self.name, self.found = name, found
        self.count = len(found) if limit is None else min(limit, len(found))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> Row:
        return Row(f"{self.name} row {i + 1}", i + 1, self.found[i])

    def close(self) -> None:
        """Nothing is open."""


Table: TypeAlias = Lines | Hub  # goes to other processes (pickled) without its rows


class Origin:
    """Where rows come from, and what names them whatever they are called: SHA-256 of a file, the fingerprint of a data set."""

    def __init__(self, path: str, split: str, subset: str, limit: int | None) -> None:
        """Raises UserError where there is no such file or data set."""
        self.limit, self.name = limit, path
        self.path = None if is_dataset(path) else file_path(path)
        self.found = hub_rows(path, split, subset) if self.path is None else None
        self.size: int | None = None  # bytes of a file
        if self.path is not None:
            with reading(self.path):
                self.size = self.path.stat().st_size

    def digest(self) -> str:
        """Names the rows."""
        return str(getattr(self.found, "_fingerprint", "")) if self.path is None else sha256(self.path)

    def table(self, beside: Path) -> Table:
        """The rows. ``beside``: a file that may be written, for what cannot be entered in the middle."""
        if self.path is None:
            return Hub(self.name, self.found, self.limit)
        with reading(self.path) as file:
            if not (items := is_array(file)) and self.path.suffix != ".gz":
                return self._in_place(file)
        return self._written_out(beside, "item" if items else "line")

    def _in_place(self, file: Binary) -> Lines:
        assert self.path is not None
        found = Lines(self.path, self.path, "line")
        for start, number, line in islice(lines(self.path, file), self.limit):
            found.add(start, len(line), number)
        return found

    def _written_out(self, beside: Path, word: str) -> Lines:
        assert self.path is not None
        rows = ((row.number, row.value) for row in islice(file_rows(self.name), self.limit))
        lines = ((number, value if isinstance(value, bytes) else json.dumps(value).encode()) for number, value in rows)
        return Lines.written(beside, self.path, word, ((number, line.rstrip(b"\r\n")) for number, line in lines))
