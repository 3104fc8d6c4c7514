"""Random access to rows by number, for several processes at once. Rows of a JSON lines file are found by their byte offsets, and rows of a
Hugging Face data set by the data set itself.

Files without random access (a JSON array, .gz) are first written out as lines, into the folder of the tokenised documents.
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
    """The rows of ``file``: for each its byte offset, its size in bytes, and its number in the user's file ``path``.

    ``word``: what messages call a row, such as "line" or "item".
    """

    def __init__(self, file: Path, path: Path, word: str) -> None:
        self.file, self.path, self.word = file, path, word
        self.starts, self.sizes, self.numbers = array("q"), array("q"), array("q")

    @classmethod
    def written(cls, file: Path, path: Path, word: str, rows: Iterable[tuple[int, bytes]]) -> Lines:
        """Write ``rows``, each (number, line), into ``file`` one after the other."""
        found, at = cls(file, path, word), 0
        with file.open("wb") as out:
            for number, line in rows:
                out.write(line + b"\n")
                found.add(at, len(line), number)
                at += len(line) + 1
        return found

    def add(self, start: int, size: int, number: int) -> None:
        """Note the next row: its byte offset, its size in bytes, and its number in the user's file."""
        for kept, value in ((self.starts, start), (self.sizes, size), (self.numbers, number)):
            kept.append(value)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, i: int) -> Row:
        # pread takes an offset for each read. Forked processes share the file's own position.
        line = os.pread(self._open, self.sizes[i], self.starts[i])
        return Row(f"{self.path} {self.word} {self.numbers[i]}", self.numbers[i], line)

    @cached_property
    def _open(self) -> int:
        return os.open(self.file, os.O_RDONLY)

    def close(self) -> None:
        """Close the file, if it is open."""
        if "_open" in self.__dict__:
            os.close(self.__dict__.pop("_open"))

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_open"}


class Hub:
    """The first ``limit`` rows (None: all) of a Hugging Face data set."""

    def __init__(self, name: str, found: Any, limit: int | None) -> None:
        self.name, self.found = name, found
        self.count = len(found) if limit is None else min(limit, len(found))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> Row:
        return Row(f"{self.name} row {i + 1}", i + 1, self.found[i])

    def close(self) -> None:
        """Does nothing: no file is open."""


Table: TypeAlias = Lines | Hub  # worker processes receive it pickled, without the content of its rows


class Origin:
    """The file or data set that rows come from, and a digest of its content, which does not depend on its name."""

    def __init__(self, path: str, split: str, subset: str, limit: int | None) -> None:
        """Raises UserError for a file that cannot be read, or a data set that does not load. ``limit``: use only the first rows."""
        self.limit, self.name = limit, path
        self.path = None if is_dataset(path) else file_path(path)
        self.found = hub_rows(path, split, subset) if self.path is None else None
        self.size: int | None = None  # bytes of a file
        if self.path is not None:
            with reading(self.path):
                self.size = self.path.stat().st_size

    def digest(self) -> str:
        """Identifies the rows: the SHA-256 of the file, or the fingerprint of the data set."""
        return str(getattr(self.found, "_fingerprint", "")) if self.path is None else sha256(self.path)

    def table(self, beside: Path) -> Table:
        """The rows with random access. ``beside``: the file to write rows to, if their own file lacks random access. Raises UserError for a
        file that cannot be read.
        """
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

        def line(row: Row) -> bytes:
            return row.value.rstrip(b"\r\n") if isinstance(row.value, bytes) else json.dumps(row.value).encode()

        rows = islice(file_rows(self.name), self.limit)
        return Lines.written(beside, self.path, word, ((row.number, line(row)) for row in rows))
