"""From rows to documents. Small sources are kept in memory. Large ones are tokenised once by many processes and read from disk
(data/arrow.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from headstart.data import arrow
from headstart.data.pack import check_length
from headstart.data.packed import Document, Documents
from headstart.data.rows import Row, kept, left_out, nothing_in, parsed, passing, rows, tell
from headstart.data.source import APART, Source, apart, beginnings, check_enough, check_whole, drawn, live, say
from headstart.data.table import Origin, Table
from headstart.heads.errors import UserError
from headstart.inference.decoding.target import Target
from headstart.inference.serving.text import BadRow

LARGE = 8 << 20  # bytes; documents of a file at least this large are kept on disk. A smaller file is tokenised faster than looked up


class Reader(ABC):
    """The conversion of a source's rows to documents. Worker processes receive it pickled."""

    what: str  # the plural noun for the documents in messages, such as "texts"
    on_bad: str  # "error" or "skip"

    @abstractmethod
    def about(self) -> dict[str, Any]:
        """Everything besides the rows that determines the documents, as values for JSON."""

    @abstractmethod
    def read(self, row: dict[str, Any]) -> Any:
        """The content of a row, for ``made``. Raises BadRow for a row that cannot be read."""

    @abstractmethod
    def made(self, read: Sequence[Any]) -> Iterable[Document]:
        """One document for each result of ``read``."""

    def check(self, documents: Documents, read: Sequence[Any], names: Sequence[str]) -> None:  # noqa: B027
        """Raises UserError if the documents are wrong. ``read``: what each was made of. ``names``: the place of each, for the error."""

    def __call__(self, rows: Sequence[Row]) -> list[Document | str]:
        """For each row its document, or the reason why it has none. Raises UserError for a bad row, unless ``on_bad`` is "skip"."""
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
        """``check`` for documents on disk. The rows that it inspects are read again."""
        if len(made):  # every run reports an empty source when it opens it
            read = Lazy(len(made), lambda i: self.read(parsed(table[int(made.rows[i])].value)))
            self.check(made, read, Lazy(len(made), lambda i: table[int(made.rows[i])].where))


class Lazy(Sequence[Any]):
    """A sequence of ``count`` items. ``get`` makes each item when it is accessed."""

    def __init__(self, count: int, get: Callable[[int], Any]) -> None:
        self._count, self._get = count, get

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, i: Any) -> Any:
        return self._get(i)


def check_rows(path: str, split: str, subset: str, stream: bool | None, held_out: str | None) -> None:
    """Raises UserError for a source of rows, or a ``held_out``, that is missing or cannot be read, and for a split of a file. Reads the
    first row only.
    """
    if held_out is not None:
        apart(held_out, path, split)
    next(passing(path, split, subset, 0, 1) if stream else rows(path, split, subset), None)
    check_whole(path, split, subset, ", or take data.limit=N for the first rows")


def in_memory(reader: Reader, path: str, split: str, subset: str, limit: int | None) -> list[Document]:
    """All documents (of the first ``limit`` rows). Raises UserError for a bad row, for wrong documents, and if there are none."""
    found = kept(path, split, subset, reader.on_bad, reader.read, reader.what, limit=limit)
    read, made = [each for _, each in found], list[Document]()
    for start in range(0, len(found), arrow.BATCH):
        made.extend(reader.made(read[start : start + arrow.BATCH]))
    reader.check(made, read, [row.where for row, _ in found])
    return made


def open_rows(
    target: Target, reader: Reader, path: str, split: str, subset: str, *, length: int, seed: int, limit: int | None, cache: str | None,
    workers: int | None, stream: bool | None = None, held_out: str | None = None,
) -> Source:  # fmt: skip
    """A source of the documents that ``reader`` makes. Some are held out, or instead those of ``held_out`` (a file or another split).
    ``stream``: read the rows during training, without documents on disk. ``limit``: use only the first rows. Raises UserError for a
    wrong ``length``, for a bad row, and for fewer than two documents (without ``held_out``).
    """
    check_length(length, target.shape.max_positions)  # before the slow work
    own = None if held_out is None else in_memory(reader, *apart(held_out, path, split), subset, APART)
    if own is not None and len(own) == APART:
        say(f"of data.held_out={held_out} the first {APART:,} {reader.what} are held out")
    if stream:
        from headstart.data.streamed import open_stream  # that module imports this one

        return open_stream(target, reader, path, split, subset, length=length, seed=seed, limit=limit, cache=cache, own=own)
    origin = Origin(path, split, subset, limit)
    folder: Path | None = None
    documents: Documents
    train: Documents
    if origin.size is not None and origin.size < LARGE and cache is None:
        documents = in_memory(reader, path, split, subset, limit)
    else:
        folder = arrow.folder_of({"rows": origin.digest(), "limit": limit, **reader.about()}, cache)
        documents, index = arrow.tokenised(folder, origin.table, reader, reader.check_stored, workers)
        if index["left_out"]["count"]:
            tell([left_out(path, **index["left_out"])])
        if not len(documents):
            raise nothing_in(path, reader.what, index["left_out"]["first"])
    if own is not None:
        held, train = own, documents
    else:
        check_enough(path, reader.what.removesuffix("s"), len(documents))
        few, most = drawn(len(documents), seed)
        held, train = [documents[i] for i in few.tolist()], arrow.Chosen(documents, most)
    return live(target, train, held, length, seed, lambda count, new: beginnings(target, held, count, new), folder)
