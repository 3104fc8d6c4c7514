"""A user's own plain text: a file, a folder of files, or a column of a Hugging Face dataset. Held out are whole documents."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from headstart.data import arrow, plain, reader, streamed
from headstart.data.pack import Document
from headstart.data.plain import Text
from headstart.data.rows import Row, file_path, is_dataset, is_there, kept, parsed, passing, read_text, reading
from headstart.data.source import Source
from headstart.heads.errors import UserError
from headstart.heads.seal import tokenizer_file_sha
from headstart.inference.decoding.target import Target
from headstart.inference.serving.text import BadRow, unicode

log = logging.getLogger(__name__)

ROWS = (".jsonl", ".json")  # a text in each row; other files are a text each
HELD, MOST_HELD = 20, 1 << 19  # one part of so many is held out, but not more characters
PART, LEAST = 1 << 15, 1000  # characters of a part of a text that is cut, at most and at least


def open(
    target: Target, *, length: int, seed: int, path: str, split: str, field: str, suffixes: list[str], on_bad: str, subset: str = "",
    stream: bool | None = None, cache: str | None = None,
) -> Source:  # fmt: skip
    """Whole documents are held out; every token is supervised."""
    if stream:
        return _streamed(target, Reader(target.tokenizer, field, on_bad), path, split, subset, cache, length=length, seed=seed)
    train, held = texts(seed, path=path, split=split, subset=subset, field=field, suffixes=suffixes, on_bad=on_bad)
    groups = {text.name: [(text.name, text.text)] for text in held}
    return plain.source(target, train, held, length, seed, (plain.LINES, plain.PARAGRAPHS), groups)


def check(*, path: str, split: str, subset: str, suffixes: list[str], stream: bool | None, **_: Any) -> None:
    """Raises UserError for a path that is not there, a folder without such files, or a file that cannot be read."""
    if stream:
        if not is_dataset(path) and _suffix(file_path(path)) not in ROWS:
            raise UserError(f"path={path}: what is streamed has rows: a file that ends in {' or '.join(ROWS)} (.gz), or a dataset")
        next(passing(path, split, subset, 0, 1), None)
    elif not is_dataset(path):
        folder, files = _files(path, suffixes)
        if folder != file_path(path):
            with reading(files[0]):
                pass


class Reader(reader.Reader):
    """Of rows with a text each; one that is empty makes a document of no use."""

    what = "texts"

    def __init__(self, tokenizer: Any, field: str, on_bad: str) -> None:
        self.tokenizer, self.field, self.on_bad = tokenizer, field, on_bad

    def about(self) -> dict[str, Any]:
        """The tokenizer, the settings."""
        return {"tokenizer": tokenizer_file_sha(self.tokenizer), "field": self.field, "on_bad": self.on_bad}

    def read(self, row: dict[str, Any]) -> Text:
        """Raises BadRow."""
        return Text("", _value(row, self.field).strip("\n") + "\n")

    def made(self, read: Sequence[Text]) -> list[Document]:
        """With the end-of-text token behind each."""
        return plain.encode_texts(self.tokenizer, read)


def _streamed(
    target: Target, how: Reader, path: str, split: str, subset: str, cache: str | None, *, length: int, seed: int
) -> Source:  # fmt: skip
    def rows(first: int) -> Iterator[Row]:
        return passing(path, split, subset, first, None)

    groups: plain.Groups = {}
    for row in islice(rows(0), streamed.HELD):
        with suppress(BadRow):  # it is said when its documents are made
            groups[row.where] = [(row.where, how.read(parsed(row.value)).text)]

    def ask(count: int, new: int) -> list[list[int]]:
        return plain.asked(target.tokenizer, groups, count, seed, (plain.LINES, plain.PARAGRAPHS))

    place = arrow.folder_of(streamed.about(path, split, subset, None, length, how), cache)
    return streamed.open_stream(target, how, rows, path, place, length=length, seed=seed, prompts=ask)


def texts(
    seed: int, *, path: str, split: str, subset: str, field: str, suffixes: list[str], on_bad: str, **_: Any
) -> tuple[list[Text], list[Text]]:
    """What is trained on and what is held out, as ``seed`` draws it.

    Documents are held out until they make up a twentieth of the text. One that is more than a fifth of it (a single large file)
    is cut into parts first, at blank lines where there are any. Raises UserError naming the file or line that is no text.
    """

    def of_rows(source: str) -> list[tuple[Row, str]]:
        return kept(source, split, subset, on_bad, lambda row: _value(row, field), "texts")

    found = [(row.where, text) for row, text in of_rows(path)] if is_dataset(path) else _of_files(path, suffixes, on_bad, of_rows)
    found = [(name, text.strip("\n") + "\n") for name, text in found if text.strip()]
    whole = sum(len(text) for _, text in found)
    size = min(max(whole // HELD, LEAST), PART)
    documents = [part for name, text in found for part in (_parts(name, text, size) if 5 * len(text) > whole else [Text(name, text)])]
    if len(documents) < 2:
        raise UserError(f"path={path}: {whole} characters of text are too few to learn from and to hold some of them out: give more")
    held, left = set[int](), min(whole // HELD, MOST_HELD)
    for i in np.random.default_rng(seed).permutation(len(documents))[1:].tolist():  # one is trained on in any case
        held.add(i)
        left -= len(documents[i].text)
        if left <= 0:
            break
    return [d for i, d in enumerate(documents) if i not in held], [documents[i] for i in sorted(held)]


def _value(row: dict[str, Any], field: str) -> str:
    if not isinstance(text := row.get(field), str):
        has = ", ".join(map(repr, row))[:200] or "nothing"
        talk = "; conversations are data=chat" if {"messages", "conversations"} & row.keys() else ""
        raise BadRow(f"no text in {field!r}, it has {has}: data.field=NAME says where the text stands{talk}")
    return unicode(text, field)


def _parts(name: str, text: str, size: int) -> Iterator[Text]:
    """Pieces of up to ``size`` characters, numbered. They end at a blank line, else a line, else a word."""
    start = number = 0
    while start < len(text):
        end = start + size
        if end < len(text):
            ends = (text.rfind(mark, start + size // 2, end) + len(mark) for mark in ("\n\n", "\n", " "))
            end = next((place for place in ends if place > start + size // 2), end)
        number += 1
        yield Text(f"{name}:{number}", text[start:end], ends=end >= len(text))
        start = end


def _of_files(path: str, suffixes: list[str], on_bad: str, of_rows: Callable[[str], list[tuple[Row, str]]]) -> list[tuple[str, str]]:
    """(name, text): of a file with rows its rows, of any other all of it."""
    found, bad = list[tuple[str, str]](), list[str]()
    folder, files = _files(path, suffixes)
    for file in files:
        name = file.relative_to(folder).as_posix()
        if _suffix(file) in ROWS:
            found += [(f"{name}:{row.number}", text) for row, text in of_rows(str(file))]
            continue
        try:
            found.append((name, read_text(file)))
        except (BadRow, UserError) as error:
            if on_bad != "skip":
                raise UserError(f"{file}: {error} (data.on_bad=skip passes such files over)") from None
            bad.append(f"{file}: {error}")
    if bad:
        log.warning("%s: passed over %d of %d files, first %s", path, len(bad), len(files), "; ".join(bad[:3]))
    return found


def _suffix(file: Path) -> str:
    return (file.with_suffix("") if file.suffix == ".gz" else file).suffix.lower()


def _files(path: str, suffixes: list[str]) -> tuple[Path, list[Path]]:
    """The folder, and the files in it and in its folders, in the order of their names. Hidden ones are passed over."""
    given = file_path(path)
    if not is_there(given) or not given.is_dir():
        return given.parent, [given]
    wanted = {f".{suffix.lower().lstrip('.')}" for suffix in suffixes}
    found = list[Path]()
    for folder, inner, files in os.walk(given, onerror=_refuse):
        inner[:] = [name for name in inner if not name.startswith(".")]
        found += [Path(folder, name) for name in files if not name.startswith(".") and _suffix(Path(name)) in wanted]
    if not found:
        raise UserError(f"path={path}: no file in it ends in {', '.join(sorted(wanted))}: data.suffixes=[...] takes others")
    return given, sorted(found, key=lambda file: file.relative_to(given).parts)


def _refuse(error: OSError) -> None:
    raise UserError(f"path={error.filename}: {error.strerror}") from None
