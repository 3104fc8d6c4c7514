"""Texts out of a file, a folder of files, or a column of a Hugging Face dataset, as documents."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from headstart.data.plain import Text
from headstart.data.rows import Row, each, file_path, is_dataset, is_there, read_text, tell
from headstart.heads.errors import UserError
from headstart.inference.serving.text import BadRow, unicode

ROWS = (".jsonl", ".json")  # a text in each row; other files are a text each
HELD = 20  # one part of so many is held out
PART, LEAST = 1 << 15, 1000  # characters of a part of a text that is cut, at most and at least


def documents_of(given: dict[str, Any]) -> list[Text]:
    """The documents of the settings ``given``; what is passed over is logged. Raises UserError naming the file or line that is no text."""
    notes = list[str]()
    found = list(found_in(notes, **given))
    tell(notes)
    return list(cut(found, sum(len(text) for _, text in found)))


def cut(found: Iterable[tuple[str, str]], whole: int) -> Iterator[Text]:
    """Documents. A text that is more than a fifth of all ``whole`` characters (a single large file) is cut into parts, at blank lines
    where there are any.
    """
    size = min(max(whole // HELD, LEAST), PART)
    for name, text in found:
        yield from _parts(name, text, size) if 5 * len(text) > whole else [Text(name, text)]


def value_of(row: dict[str, Any], field: str) -> str:
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


def found_in(
    notes: list[str], *, path: str, split: str, subset: str, field: str, suffixes: list[str], on_bad: str
) -> Iterator[tuple[str, str]]:
    """(name, text) of those that are not empty: of a file with rows its rows, of any other all of it. What is passed over is noted."""

    def of_rows(source: str) -> Iterator[tuple[Row, str]]:
        return each(source, split, subset, on_bad, lambda row: value_of(row, field), "texts", notes)

    found = ((row.where, text) for row, text in of_rows(path)) if is_dataset(path) else _of_files(path, suffixes, on_bad, of_rows, notes)
    return ((name, text.strip("\n") + "\n") for name, text in found if text.strip())


def _of_files(
    path: str, suffixes: list[str], on_bad: str, of_rows: Callable[[str], Iterator[tuple[Row, str]]], notes: list[str]
) -> Iterator[tuple[str, str]]:
    bad = list[str]()
    folder, files = files_of(path, suffixes)
    for file in files:
        name = file.relative_to(folder).as_posix()
        if suffix_of(file) in ROWS:
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


def suffix_of(file: Path) -> str:
    return (file.with_suffix("") if file.suffix == ".gz" else file).suffix.lower()


def files_of(path: str, suffixes: list[str]) -> tuple[Path, list[Path]]:
    """The folder, and the files in it and in its folders, in the order of their names. Hidden ones are passed over."""
    given = file_path(path)
    if not is_there(given) or not given.is_dir():
        return given.parent, [given]
    wanted = {f".{suffix.lower().lstrip('.')}" for suffix in suffixes}
    found = list[Path]()
    for folder, inner, files in os.walk(given, onerror=_refuse):
        inner[:] = [name for name in inner if not name.startswith(".")]
        found += [Path(folder, name) for name in files if not name.startswith(".") and suffix_of(Path(name)) in wanted]
    if not found:
        raise UserError(f"path={path}: no file in it ends in {', '.join(sorted(wanted))}: data.suffixes=[...] takes others")
    return given, sorted(found, key=lambda file: file.relative_to(given).parts)


def _refuse(error: OSError) -> None:
    raise UserError(f"path={error.filename}: {error.strerror}") from None
