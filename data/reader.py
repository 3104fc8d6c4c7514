"""From rows to documents: in memory where there are few, else tokenised once, by many processes, and read from disk (data/arrow.py)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from headstart.data import arrow
from headstart.data.pack import check_length
from headstart.data.packed import Document, Documents
from headstart.data.rows import Row, kept, left_out, nothing_in, parsed, passing, tell
from headstart.data.source import APART, Source, apart, beginnings, drawn, live, say, split_off
from headstart.data.table import Origin, Table
from headstart.heads.errors import UserError
from headstart.inference.decoding.target import Target
from headstart.inference.serving.text import BadRow

D = TypeVar("D", bound=Documents)
LARGE = 8 << 20  # bytes of a file from which on what was made of it is kept on disk: less is made sooner than looked up


class Reader(ABC):
    """How the rows of a source become documents. Goes to other processes (pickled)."""

    what: str  # the rows are, for people
    on_bad: str  # error, or skip

    @abstractmethod
    def about(self) -> dict[str, Any]:
        """Everything that the documents depend on beside the rows, as JSON can hold it."""

    @abstractmethod
    def read(self, row: dict[str, Any]) -> Any:
        """What is read from a row, of which ``made`` makes a document. Raises BadRow for a row that cannot be read."""

    @abstractmethod
    def made(self, read: Sequence[Any]) -> Iterable[Document]:
        """A document of each row that was read."""

    def check(self, documents: Documents, read: Sequence[Any], names: Sequence[str]) -> None:  # noqa: B027
        """Raises UserError where the documents cannot be trusted; ``names``: where each stands."""

    def __call__(self, rows: Sequence[Row]) -> list[Document | str]:
        """For each row its document, or in words why it has none. Raises UserError for a bad row, unless ``on_bad`` is skip."""
        read, why = list[Any](), list[str | None]()
        for row in rows:
            try:
                read.append(self.read(parsed(row.value)))
                why.append(None)
            except BadRow as error:
                if self.on_bad != "skip":
                    raise UserError(f"{row.where}: {error} (data.on_bad=skip drops such rows)") from None
                why.append(str(error))
        found = iter(self.made(read) if read else ())
        return [next(found) if reason is None else reason for reason in why]

    def check_stored(self, made: arrow.Mapped, table: Table) -> None:
        """``check`` for documents on disk; the rows that it looks at are read again."""
        if len(made):  # else it is said when it is opened, of every run
            read = Lazy(len(made), lambda i: self.read(parsed(table[int(made.rows[i])].value)))
            self.check(made, read, Lazy(len(made), lambda i: table[int(made.rows[i])].where))


class Lazy(Sequence[Any]):
    """A sequence whose items are made when they are looked at."""

    def __init__(self, count: int, get: Callable[[int], Any]) -> None:
        self._count, self._get = count, get

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, i: Any) -> Any:
        return self._get(i)


def in_memory(reader: Reader, path: str, split: str, subset: str, limit: int | None) -> list[Document]:
    """All documents (of the first ``limit`` rows). Raises UserError where there are none."""
    found = kept(path, split, subset, reader.on_bad, reader.read, reader.what, first=limit)
    read, made = [each for _, each in found], list[Document]()
    for start in range(0, len(found), arrow.BATCH):
        made.extend(reader.made(read[start : start + arrow.BATCH]))
    reader.check(made, read, [row.where for row, _ in found])
    return made


def open_rows(
    target: Target, reader: Reader, path: str, split: str, subset: str, *, length: int, seed: int, limit: int | None, cache: str | None,
    workers: int | None, stream: bool | None = None, held_out: str | None = None,
) -> Source:  # fmt: skip
    """A source of the rows that ``reader`` reads; some are held out, or those of ``held_out`` (a file, or another split). ``stream``:
    nothing is kept on disk. Raises UserError for fewer than two documents.
    """
    check_length(length, target.shape.max_positions)  # before what takes long
    own = None if held_out is None else in_memory(reader, *apart(held_out, path, split), subset, APART)
    if own is not None and len(own) == APART:
        say(f"of data.held_out={held_out} the first {APART:,} {reader.what} are held out")
    if stream:
        from headstart.data.streamed import about, open_stream  # made of what is here

        place = arrow.folder_of(about(path, split, subset, limit, length, reader, own), cache)
        rows = partial(passing, path, split, subset, limit=limit)
        return open_stream(target, reader, rows, path, place, length=length, seed=seed, own=own)
    origin = Origin(path, split, subset, limit)
    folder: Path | None = None
    train: Documents
    if origin.size is not None and origin.size < LARGE and cache is None:
        made = in_memory(reader, path, split, subset, limit)
        held, train = (own, made) if own is not None else split_off([[each] for each in _enough(reader, path, made)], seed)
    else:
        folder = arrow.folder_of({"rows": origin.digest(), "limit": limit, **reader.about()}, cache)
        stored, index = arrow.tokenised(folder, origin.table, reader, reader.check_stored, workers)
        if index["left_out"]["count"]:
            tell([left_out(path, **index["left_out"])])
        if not len(stored):
            raise nothing_in(path, reader.what, index["left_out"]["first"])
        if own is not None:
            held, train = own, stored
        else:
            few, most = drawn(len(_enough(reader, path, stored)), seed)
            held, train = [stored[i] for i in few.tolist()], arrow.Chosen(stored, most)
    return live(target, train, held, length, seed, lambda count, new: beginnings(target, held, count, new), folder)


def _enough(reader: Reader, path: str, made: D) -> D:
    if len(made) < 2:
        one = reader.what.removesuffix("s")
        raise UserError(f"path={path}: one {one} is held out, so at least two are needed, found {len(made)}; or data.held_out=FILE")
    return made
