"""A user's own plain text: a file, a folder of files, or a column of a Hugging Face dataset. Held out are whole documents."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from headstart.data import arrow, plain, reader, streamed
from headstart.data.pack import check_length
from headstart.data.packed import Document
from headstart.data.plain import Text
from headstart.data.rows import Row, each, file_path, is_dataset, is_there, parsed, passing, read_text, reading, tell
from headstart.data.source import Source, live
from headstart.data.table import Lines, Origin
from headstart.heads.errors import UserError
from headstart.heads.files import put_text, sealed, sha256
from headstart.heads.seal import tokenizer_file_sha
from headstart.heads.stored import read_json
from headstart.inference.decoding.target import Target
from headstart.inference.serving.text import BadRow, unicode

ROWS = (".jsonl", ".json")  # a text in each row; other files are a text each
HELD, MOST_HELD = 20, 1 << 19  # one part of so many is held out, but not more characters
STARTS = (plain.LINES, plain.PARAGRAPHS)  # where prompts begin
PART, LEAST = 1 << 15, 1000  # characters of a part of a text that is cut, at most and at least


def open(
    target: Target, *, length: int, seed: int, path: str, split: str, field: str, suffixes: list[str], on_bad: str, subset: str = "",
    stream: bool | None = None, cache: str | None = None, workers: int | None = None,
) -> Source:  # fmt: skip
    """Whole documents are held out; every token is supervised. Large text is tokenised once, and read from disk (data/arrow.py)."""
    if stream:
        return _streamed(target, Reader(target.tokenizer, field, on_bad), path, split, subset, cache, length=length, seed=seed)
    given: dict[str, Any] = dict(path=path, split=split, subset=subset, field=field, suffixes=suffixes, on_bad=on_bad)
    if is_dataset(path) or cache is not None or _size(_files(path, suffixes)[1]) >= reader.LARGE:
        return _on_disk(target, given, cache, workers, length=length, seed=seed)
    train, held = texts(seed, **given)
    return plain.source(target, train, held, length, seed, STARTS, _groups(held))


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
    """Rows with a text each. (An empty text makes a document that packing leaves out.)"""

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


class Spooled(Reader):
    """Of documents that were cut already."""

    def read(self, row: dict[str, Any]) -> Text:
        return Text(**row)


def _on_disk(target: Target, given: dict[str, Any], cache: str | None, workers: int | None, *, length: int, seed: int) -> Source:
    """Documents are tokenised by many processes and kept on disk. Beside them lie how many characters each has, and what each seed holds
    out.
    """
    check_length(length, target.shape.max_positions)  # before what takes long
    path, how = given["path"], Spooled(target.tokenizer, given["field"], given["on_bad"])
    folder = arrow.folder_of({"texts": _named(given), "parts": [HELD, LEAST, PART], **how.about()}, cache)

    def spool(beside: Path) -> Lines:
        notes, characters = list[str](), list[int]()
        whole = sum(len(text) for _, text in _found([], **given))

        def numbered() -> Iterator[tuple[int, bytes]]:
            for number, text in enumerate(_cut(_found(notes, **given), whole), 1):
                characters.append(len(text.text))
                yield number, json.dumps(text._asdict()).encode()

        lines = Lines.written(beside, beside, "text", numbered())
        _held(path, characters, seed)  # there is enough
        put_text(beside.with_name("texts.json"), json.dumps(sealed({"characters": characters, "notes": notes})))
        return lines

    stored, _ = arrow.tokenised(folder, spool, how, lambda made, rows: None, workers)
    about = _sealed(folder / "texts.json")
    tell(about["notes"])
    held = _held(path, about["characters"], seed)
    name = folder / f"held-{seed}.json"
    with arrow.only_one(folder, name.is_file) as first:
        if first:
            documents = _cut(_found([], **given), sum(about["characters"]))
            put_text(name, json.dumps(sealed({"texts": [text._asdict() for i, text in enumerate(documents) if i in held]})))
    groups = _groups([Text(**text) for text in _sealed(name)["texts"]])
    few, most = (np.array([i for i in range(len(stored)) if (i in held) == out], dtype=np.int64) for out in (True, False))
    held_out = [stored[i] for i in few.tolist()]
    return live(target, arrow.Chosen(stored, most), held_out, length, seed, _asking(target, groups, seed), folder)


def _asking(target: Target, groups: plain.Groups, seed: int) -> Callable[[int, int], list[list[int]]]:
    return lambda count, new: plain.asked(target.tokenizer, groups, count, seed, STARTS)


def _named(given: dict[str, Any]) -> Any:
    """What tells the texts from others: their digests."""
    if is_dataset(given["path"]):
        return Origin(given["path"], given["split"], given["subset"], None).digest()
    folder, files = _files(given["path"], given["suffixes"])
    return [[file.relative_to(folder).as_posix(), sha256(file) if is_there(file) else None] for file in files]


def _sealed(path: Path) -> dict[str, Any]:
    found = read_json(path, 1 << 32)
    if found != sealed(found):
        raise UserError(f"{path} is not what was written there: delete its folder")
    return found


def _size(files: Sequence[Path]) -> int:
    return sum(file.stat().st_size for file in files if is_there(file))


def _groups(held: Sequence[Text]) -> plain.Groups:
    return {text.name: [(text.name, text.text)] for text in held}


def _streamed(
    target: Target, how: Reader, path: str, split: str, subset: str, cache: str | None, *, length: int, seed: int
) -> Source:  # fmt: skip
    def rows(first: int) -> Iterator[Row]:
        return passing(path, split, subset, first, None)

    groups: plain.Groups = {}
    for row in islice(rows(0), streamed.HELD):
        with suppress(BadRow):  # it is said when its documents are made
            groups[row.where] = [(row.where, how.read(parsed(row.value)).text)]
    place = arrow.folder_of(streamed.about(path, split, subset, None, length, how), cache)
    return streamed.open_stream(target, how, rows, path, place, length=length, seed=seed, prompts=_asking(target, groups, seed))


def texts(
    seed: int, *, path: str, split: str, subset: str, field: str, suffixes: list[str], on_bad: str, **_: Any
) -> tuple[list[Text], list[Text]]:
    """What is trained on and what is held out, as ``seed`` draws it. Raises UserError naming the file or line that is no text."""
    notes = list[str]()
    found = list(_found(notes, path=path, split=split, subset=subset, field=field, suffixes=suffixes, on_bad=on_bad))
    tell(notes)
    documents = list(_cut(found, sum(len(text) for _, text in found)))
    held = _held(path, [len(document.text) for document in documents], seed)
    return [d for i, d in enumerate(documents) if i not in held], [documents[i] for i in sorted(held)]


def _held(path: str, characters: Sequence[int], seed: int) -> set[int]:
    """The documents that are held out, as ``seed`` draws them: until they make up a twentieth of the text."""
    whole, held = sum(characters), set[int]()
    if len(characters) < 2:
        raise UserError(f"path={path}: {whole} characters of text are too few to learn from and to hold some of them out: give more")
    left = min(whole // HELD, MOST_HELD)
    for i in np.random.default_rng(seed).permutation(len(characters))[1:].tolist():  # one is trained on in any case
        held.add(i)
        left -= characters[i]
        if left <= 0:
            break
    return held


def _cut(found: Iterable[tuple[str, str]], whole: int) -> Iterator[Text]:
    """Documents. A text that is more than a fifth of all ``whole`` characters (a single large file) is cut into parts, at blank lines
    where there are any.
    """
    size = min(max(whole // HELD, LEAST), PART)
    for name, text in found:
        yield from _parts(name, text, size) if 5 * len(text) > whole else [Text(name, text)]


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


def _found(
    notes: list[str], *, path: str, split: str, subset: str, field: str, suffixes: list[str], on_bad: str
) -> Iterator[tuple[str, str]]:
    """(name, text) of those that are not empty: of a file with rows its rows, of any other all of it. What is passed over is noted."""

    def of_rows(source: str) -> Iterator[tuple[Row, str]]:
        return each(source, split, subset, on_bad, lambda row: _value(row, field), "texts", notes)

    found = ((row.where, text) for row, text in of_rows(path)) if is_dataset(path) else _of_files(path, suffixes, on_bad, of_rows, notes)
    return ((name, text.strip("\n") + "\n") for name, text in found if text.strip())


def _of_files(
    path: str, suffixes: list[str], on_bad: str, of_rows: Callable[[str], Iterator[tuple[Row, str]]], notes: list[str]
) -> Iterator[tuple[str, str]]:
    bad = list[str]()
    folder, files = _files(path, suffixes)
    for file in files:
        name = file.relative_to(folder).as_posix()
        if _suffix(file) in ROWS:
            yield from ((f"{name}:{row.number}", text) for row, text in of_rows(str(file)))
            continue
        try:
            text = read_text(file)
        except (BadRow, UserError) as error:
            if on_bad != "skip":
                raise UserError(f"{file}: {error} (data.on_bad=skip passes such files over)") from None
            bad.append(f"{file}: {error}")
        else:
            yield name, text
    if bad:
        notes.append(f"{path}: passed over {len(bad)} of {len(files)} files, first {'; '.join(bad[:3])}")


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
