"""Reads texts from a file, a folder of files, or a column of a Hugging Face data set, and makes documents of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from headstart.data.forms import columns_of
from headstart.data.plain import Text
from headstart.data.rows import Row, each, file_path, is_dataset, is_there, read_text, tell
from headstart.heads.errors import UserError
from headstart.inference.serving.text import BadRow, unicode

ROWS = (".jsonl", ".json")  # files with a text in each row; any other file is one text
ONE_IN = 20  # one part in 20 is held out
PART, LEAST = 1 << 15, 1000  # the largest and the smallest size of a part when a text is cut, in characters


def documents_of(given: dict[str, Any]) -> list[Text]:
    """The documents of the settings ``given``. Skipped files and rows are logged. Raises UserError that names an unusable file or line."""
    notes = list[str]()
    found = list(found_in(notes, **given))
    tell(notes)
    return list(cut(found, sum(len(text) for _, text in found)))


def cut(found: Iterable[tuple[str, str]], whole: int) -> Iterator[Text]:
    """Make documents of (name, text) pairs. ``whole``: the number of characters of all texts. A text with more than a fifth of them (for
    example a single large file) is cut into parts, at blank lines if possible.
    """
    size = min(max(whole // ONE_IN, LEAST), PART)
    for name, text in found:
        yield from _parts(name, text, size) if 5 * len(text) > whole else [Text(name, text)]


def value_of(row: dict[str, Any], field: str) -> str:
    """The text in the column ``field`` of a row. Raises BadRow if there is none."""
    if not isinstance(text := row.get(field), str):
        talk = "; conversations are data=chat" if {"messages", "conversations"} & row.keys() else ""
        raise BadRow(f"no text in {field!r}, it has {columns_of(row)}: data.field=NAME says where the text stands{talk}")
    return unicode(text, field)


def _parts(name: str, text: str, size: int) -> Iterator[Text]:
    """Numbered parts of up to ``size`` characters. Each ends at a blank line if possible, else at the end of a line, else of a word."""
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
    """(name, text) of every text that is not empty: each row of a file with rows, and the whole of any other file. Skipped rows and files
    are reported in ``notes``. Raises UserError for an unusable row or file, unless ``on_bad`` is "skip".
    """

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
    """The folder, and the files with one of the ``suffixes`` in it and below, sorted by name, without hidden ones. For a file: its folder,
    and the file itself. Raises UserError for a folder without such files, or one that cannot be read.
    """
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
