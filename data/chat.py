"""Conversations -> documents of which only the assistant's tokens are supervised.

Rows are ``{"messages": [{"role", "content"}]}`` or ShareGPT's ``{"conversations": [{"from", "value"}]}``, one per line or all in
one array, or of a Hugging Face dataset; other columns and calls of tools: data/forms.py. Which tokens are supervised: data/masks.py.
Large sources are tokenised once, by many processes, and read from disk (data/arrow.py).
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from headstart.data import arrow
from headstart.data.forms import in_columns, preset, talk_of
from headstart.data.masks import Talk, Template, check_masks, masked
from headstart.data.pack import Document
from headstart.data.rows import Row, file_path, kept, nothing_in, parsed, read_text, rows, tell_left_out
from headstart.data.source import Source, beginnings, drawn, live, split_off
from headstart.data.table import Origin, Table
from headstart.heads.errors import UserError
from headstart.heads.seal import tokenizer_file_sha
from headstart.inference.decoding.target import Target
from headstart.inference.serving.text import BadRow

__all__ = ["check", "check_masks", "conversations", "documents", "open"]

LARGE = 8 << 20  # bytes of a file from which on what was made of it is kept on disk: less is made sooner than looked up

T = TypeVar("T")


def open(
    target: Target, *, length: int, seed: int, path: str, split: str, on_bad: str, subset: str = "", columns: list[str] | None = None,
    turns: str | None = None, template: str | None = None, limit: int | None = None, cache: str | None = None, workers: int | None = None,
) -> Source:  # fmt: skip
    """Conversations; whole ones are held out, and what assistants say is supervised. Raises UserError for fewer than two."""
    where = preset(path, split, subset, columns)
    reader = Reader(target.tokenizer, where.columns, turns, template, on_bad)
    origin = Origin(where.path, where.split, where.subset, limit)
    if origin.size is not None and origin.size < LARGE and cache is None:
        made = _documents(reader, where.path, where.split, where.subset, limit)
        _enough(path, len(made))
        held, train = split_off([[document] for document in made], seed)
        return live(target, train, held, length, seed, lambda count, new: beginnings(target, held, count, new))
    folder = arrow.folder_of({"rows": origin.digest(), "limit": limit, **reader.about}, cache)
    stored, index = arrow.tokenised(folder, origin.table, reader, reader.check, workers)
    tell_left_out(path, **index["left_out"])
    if not len(stored):
        raise nothing_in(path, "conversations", index["left_out"]["first"])
    _enough(path, len(stored))
    few, most = drawn(len(stored), seed)
    some = [stored[i] for i in few.tolist()]
    return live(target, arrow.Chosen(stored, most), some, length, seed, lambda count, new: beginnings(target, some, count, new), folder)


def _enough(path: str, count: int) -> None:
    if count < 2:
        raise UserError(f"path={path}: one conversation is held out, so at least two are needed, found {count}")


def check(*, path: str, split: str, subset: str, columns: list[str] | None, turns: str | None, template: str | None, **_: Any) -> None:
    """Raises UserError for a file that is not there, or whose first row is none."""
    if turns not in (None, "all", "last"):
        raise UserError(f"data.turns must be all or last, found {turns!r}")
    if columns is not None and len(columns) not in (1, 2):
        raise UserError(f"data.columns must be one column, or two: a question's and an answer's; found {columns!r}")
    if template is not None:
        _template(template)
    where = preset(path, split, subset, columns)
    next(rows(where.path, where.split, where.subset), None)


def conversations(
    read: Callable[[dict[str, Any]], T], limit: int | None = None, *, path: str, split: str, subset: str, on_bad: str,
    columns: list[str] | None = None, **_: Any,
) -> list[tuple[Row, T]]:  # fmt: skip
    """What ``read`` makes of the conversations (data/rows.py says what of those of which it makes nothing)."""
    where = preset(path, split, subset, columns)
    return kept(where.path, where.split, where.subset, on_bad, lambda row: read(in_columns(row, where.columns)), "conversations", limit)


def _template(path: str) -> str:
    try:
        return read_text(file_path(path, "data.template"))
    except BadRow as error:
        raise UserError(f"data.template={path}: {error}") from None


class Reader:
    """Of rows, documents. Goes to other processes (pickled)."""

    def __init__(
        self, tokenizer: Any, columns: tuple[str, ...] = (), turns: str | None = None, template: str | None = None, on_bad: str = "error"
    ) -> None:
        """``template``: a file with another one than the tokenizer's own. Raises UserError where there is none that can be used."""
        if template is not None:
            tokenizer = copy.copy(tokenizer)
            tokenizer.chat_template = _template(template)
        self.tokenizer, self.columns, self.on_bad = tokenizer, columns, on_bad
        self.template = Template(tokenizer, last=turns == "last")

    @property
    def about(self) -> dict[str, Any]:
        """Whatever else than the rows the documents follow from."""
        template = hashlib.sha256(self.template.text.encode()).hexdigest()
        how = {"columns": self.columns, "last": self.template.last, "on_bad": self.on_bad}
        return {"tokenizer": tokenizer_file_sha(self.tokenizer), "template": template, **how}

    def talk(self, row: dict[str, Any]) -> Talk:
        """Raises BadRow."""
        return self.template.talk(*talk_of(row, self.columns))

    def __call__(self, some: list[Row]) -> list[arrow.Made]:
        """Raises UserError for the first row that is no conversation, unless those are left out."""
        talks, found = list[Talk](), list[str | None]()
        for row in some:
            try:
                talks.append(self.talk(parsed(row.value)))
                found.append(None)
            except BadRow as error:
                if self.on_bad != "skip":
                    raise UserError(f"{row.where}: {error} (data.on_bad=skip drops such rows)") from None
                found.append(str(error))
        documents = masked(self.tokenizer, talks) if talks else iter(())
        return [next(documents) if why is None else why for why in found]

    def check(self, made: arrow.Mapped, table: Table) -> None:
        """Raises UserError where the masks cannot be trusted."""
        if not len(made):
            return  # said where it is opened, of every run
        numbers = made.rows.tolist()
        names = _Lazy(len(made), lambda i: table[numbers[i]].where)
        talks = _Lazy(len(made), lambda i: self.talk(parsed(table[numbers[i]].value)).messages)
        check_masks(self.tokenizer, talks, made, names, last=self.template.last)


class _Lazy(Sequence[Any]):
    """Read when it is looked at."""

    def __init__(self, count: int, get: Callable[[int], Any]) -> None:
        self.count, self.get = count, get

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: Any) -> Any:
        return self.get(i)


def documents(
    source: str, tokenizer: Any, split: str = "train", on_bad: str = "error", subset: str = "", limit: int | None = None
) -> list[Document]:
    """Documents of the conversations of a file (JSON lines or an array), or of a Hugging Face dataset's ``split`` (of its ``subset``).

    A row that is not a conversation raises ``UserError`` with its line, or is dropped and counted (``on_bad="skip"``).
    Also raises ``UserError`` where the template or its mask cannot be trusted (see ``check_masks``).
    """
    return _documents(Reader(tokenizer, on_bad=on_bad), source, split, subset, limit)


def _documents(reader: Reader, source: str, split: str, subset: str, limit: int | None) -> list[Document]:
    """In memory."""
    found = kept(source, split, subset, reader.on_bad, reader.talk, "conversations", first=limit)
    talks, made = [talk for _, talk in found], list[Document]()
    for start in range(0, len(found), arrow.BATCH):
        made.extend(masked(reader.tokenizer, talks[start : start + arrow.BATCH]))
    names = [row.where for row, _ in found]
    check_masks(reader.tokenizer, [talk.messages for talk in talks], made, names, last=reader.template.last)
    return made
