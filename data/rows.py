"""Rows of a file or of a Hugging Face data set, each with its place. A file holds JSON lines or one JSON array (as ShareGPT's does). It may
be gzipped.

Files are read as a stream: memory holds about one row, whatever the size of the file. Errors are one line that names the file and the
line or item in it.
"""

from __future__ import annotations

import gzip
import io
import json
import logging
import re
import stat
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from headstart.heads.errors import UserError, first_line
from headstart.inference.decoding.placement import is_main
from headstart.inference.serving.text import BadRow

log = logging.getLogger(__name__)

BLOCK = 1 << 20  # characters of an array that are read at a time
LONGEST = 1 << 28  # bytes of a line, characters of an item; with anything longer it is not a file of rows
_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")  # of a data set: NAME or OWNER/NAME
_SPACE = re.compile(r"[ \t\r\n]*")
UTF16 = (b"\xff\xfe", b"\xfe\xff")  # byte order marks

T = TypeVar("T")
Binary = io.BufferedReader | gzip.GzipFile


class Row(NamedTuple):
    """A row of a file or data set, and its place."""

    where: str  # its place in words, for messages
    number: int  # of the line, item or row, from 1
    value: Any  # the bytes of a line, or the parsed item or row


# ---- files ----


def file_path(name: str, key: str = "path") -> Path:
    """The path ``name``, with ~ expanded to the home folder. Raises UserError for ~NAME of an unknown user."""
    try:
        return Path(name).expanduser()
    except RuntimeError as error:  # ~NAME of an unknown user
        raise UserError(f"{key}={name}: {error}") from None


@contextmanager
def reading(path: Path, key: str = "path") -> Iterator[Binary]:
    """Inside, the open file, decompressed if its name ends in .gz. ``key``: the setting that gives the path, for errors.

    Raises UserError if the file cannot be opened or read, or is UTF-16.
    """
    name = f"{key}={path}"
    try:
        if not stat.S_ISREG(mode := path.stat().st_mode):  # opening a pipe would wait for ever
            raise UserError(f"{name} is {'a folder' if stat.S_ISDIR(mode) else 'no file'}: give a file")
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            if file.peek(2)[:2] in UTF16:
                raise UserError(f"{name} is UTF-16: save it as UTF-8 (iconv -f UTF-16 -t UTF-8)")
            yield file
    except FileNotFoundError:
        raise UserError(f"{name}: no such file") from None
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{name} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except ValueError as error:  # a name that no file can have; UserError is a ValueError too
        raise error if isinstance(error, UserError) else UserError(f"{name} cannot be read: {error}") from None


def lines(path: Path, file: Binary) -> Iterator[tuple[int, int, bytes]]:
    """(byte offset, number, line) of every line that is not empty. Numbers count empty lines too. Raises UserError for too long a line."""
    number = at = 0
    while line := file.readline(LONGEST):
        number += 1
        if len(line) == LONGEST:
            raise UserError(f"{path} line {number} is longer than {LONGEST >> 20} MB: is this a file of JSON lines?")
        if line.strip():
            yield at, number, line
        at += len(line)


def _lines(path: Path, file: Binary) -> Iterator[Row]:
    return (Row(f"{path} line {number}", number, line) for _, number, line in lines(path, file))


def _items(path: Path, file: Binary) -> Iterator[Row]:
    """The items of a JSON array. It is read in blocks. An item that seems incomplete is parsed again together with the next block.

    Raises UserError for anything but one JSON array in UTF-8, with the item.
    """
    text, decoder = io.TextIOWrapper(file, encoding="utf-8-sig"), json.JSONDecoder()
    held, at, number, block, mark = "", 0, 0, BLOCK, "["
    while True:
        where, more = f"{path} item {number + 1}", False
        try:
            begin = _space(held, at)
            if held[begin] == "]" and mark == ",":
                break
            if held[begin] != mark:
                raise UserError(f"{where}: not JSON (expected {mark!r}, found {held[begin]!r})")
            begin = _space(held, begin + 1)
            if held[begin] == "]" and mark == "[":
                break
            value, at = decoder.raw_decode(held, begin)
        except IndexError:
            more, why = True, "the file ends within it"
        except json.JSONDecodeError as error:
            more, why = error.pos > len(held) - 16 or error.msg.startswith("Unterminated"), str(error.msg)
            if not more:
                raise UserError(f"{where}: not JSON ({why})") from None
        except RecursionError:
            raise UserError(f"{where}: not JSON (brackets in brackets, too many)") from None
        if more:
            try:
                read = text.read(block)
            except UnicodeDecodeError as error:
                raise UserError(f"{where}: not UTF-8 ({error.reason})") from None
            if not read or len(held) > LONGEST:
                raise UserError(f"{where}: not JSON ({why})")
            held, at, block = held[at:] + read, 0, 2 * block
        else:
            number, block, mark = number + 1, BLOCK, ","
            yield Row(where, number, value)
    if _space(held, begin + 1) < len(held) or text.read(BLOCK).strip():
        raise UserError(f"{path}: something follows its array: give one array, or one JSON object per line")


def _space(text: str, at: int) -> int:
    """The place where white space that begins at ``at`` ends."""
    found = _SPACE.match(text, at)
    assert found is not None
    return found.end()


def read_text(path: Path) -> str:
    """The text of a file. Raises BadRow if it is not UTF-8 text, and UserError if the file cannot be read."""
    with reading(path) as file:
        raw = file.read()
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadRow(f"not UTF-8 (byte {error.start}: {error.reason})") from None
    if "\0" in text:
        raise BadRow("not text: it holds NUL bytes")
    return text.replace("\r\n", "\n")


def is_there(path: Path) -> bool:
    """Whether the path exists, even as something that is not a file. False for a name that no file can have."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


# ---- rows ----


def rows(source: str, split: str, subset: str = "") -> Iterator[Row]:
    """The rows of a file, or of the ``split`` of a Hugging Face data set (and of its ``subset``, if it has several).

    Raises UserError for a file that cannot be read, or a data set that does not load.
    """
    return _dataset(source, split, subset) if is_dataset(source) else file_rows(source)


def file_rows(name: str, key: str = "path") -> Iterator[Row]:
    """The lines of a file, or the items of its JSON array. Empty lines are skipped, but numbers count them. Raises UserError for a file
    that cannot be read.
    """
    path = file_path(name, key)
    with reading(path, key) as file:
        yield from (_items if is_array(file) else _lines)(path, file)


def is_array(file: Binary) -> bool:
    """Whether the rows are the items of one JSON array, rather than lines."""
    return file.peek(64).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")


def is_dataset(source: str) -> bool:
    """Whether ``source`` can be the name of a data set, and no file has this name."""
    if is_there(Path(source)):
        return False
    return _NAME.fullmatch(source) is not None and not re.search(r"\.(jsonl?|txt|md|gz|csv|parquet)$", source) and len(source) <= 200


def _dataset(name: str, split: str, subset: str, first: int = 0, **how: Any) -> Iterator[Row]:
    found = hub_rows(name, split, subset, **how)
    for number, row in enumerate(found.skip(first) if first else found, first + 1):
        yield Row(f"{name} row {number}", number, row)


def passing(source: str, split: str, subset: str, first: int, limit: int | None) -> Iterator[Row]:
    """The rows from number ``first`` up to, not including, ``limit`` (None: all), counted from 0. A data set is streamed, not downloaded
    first. Raises UserError as ``rows`` does.
    """
    if not is_dataset(source):
        return islice(file_rows(source), first, limit)
    return islice(_dataset(source, split, subset, first, streaming=True), None if limit is None else max(limit - first, 0))


def hub_rows(name: str, split: str, subset: str = "", **how: Any) -> Any:
    """A Hugging Face data set. ``how``: further arguments of ``load_dataset``. Raises UserError if it does not load."""
    from datasets import load_dataset

    try:
        return load_dataset(name, subset or None, split=split, **how)
    except Exception as error:  # datasets raises a dozen kinds of error for names, networks and files
        how_not = f"as a Hugging Face dataset with data.split={split} it did not load: {first_line(error)}"
        raise UserError(f"path={name} is no file, and {how_not}") from error


def parsed(value: Any) -> dict[str, Any]:
    """The JSON object of a row. Raises BadRow if the row is not a JSON object."""
    if isinstance(value, bytes):
        try:
            value = json.loads(value)
        except RecursionError:
            raise BadRow("not JSON (brackets in brackets, too many)") from None
        except ValueError as error:
            cut = isinstance(error, json.JSONDecodeError) and error.pos >= len(error.doc.rstrip())
            hint = ": a row must stand on one line, or all of them in one array" if cut else ""
            if not value.lstrip().startswith((b"{", b"[", b'"')):
                hint = ": rows are objects, {...}; plain text is data=text, in a file that ends in .txt or .md"
            raise BadRow(f"not JSON ({error}){hint}") from None
    if not isinstance(value, dict):
        raise BadRow(f"not an object but {type(value).__name__}")
    return value


def kept(
    source: str, split: str, subset: str, on_bad: str, read: Callable[[dict[str, Any]], T], what: str, most: int | None = None,
    limit: int | None = None,
) -> list[tuple[Row, T]]:  # fmt: skip
    """``each`` as a list. Dropped rows are logged."""
    notes = list[str]()
    found = list(each(source, split, subset, on_bad, read, what, notes, most, limit))
    tell(notes)
    return found


def each(
    source: str, split: str, subset: str, on_bad: str, read: Callable[[dict[str, Any]], T], what: str, notes: list[str],
    most: int | None = None, limit: int | None = None,
) -> Iterator[tuple[Row, T]]:  # fmt: skip
    """Each good row with the result of ``read``: up to ``most`` good rows (None: all), out of the first ``limit`` rows of the source.

    A row is bad if ``read`` raises BadRow. A bad row raises UserError with its place. With ``on_bad="skip"`` it is dropped instead, and a
    line about all dropped rows is added to ``notes``. Raises UserError if there is no good row; ``what`` names the rows in that message.
    """
    count, dropped = 0, list[str]()
    for row in islice(rows(source, split, subset), limit):
        try:
            made = read(parsed(row.value))
        except BadRow as error:
            if on_bad != "skip":
                raise UserError(f"{row.where}: {error} (data.on_bad=skip drops such rows)") from None
            dropped.append(f"{row.where}: {error}")
        else:
            count += 1
            yield row, made
        if count == most:
            break
    if dropped:
        notes.append(left_out(source, len(dropped), len(dropped) + count, dropped[:3]))
    if not count:
        tell(notes)
        raise nothing_in(source, what, dropped)


def left_out(source: str, count: int, of: int, first: list[str]) -> str:
    """A line with the number of dropped rows and the reasons for the ``first`` ones."""
    return f"{source}: dropped {count} of {of} rows, first {'; '.join(first)}"


def tell(notes: list[str]) -> None:
    """Log the notes about dropped rows and skipped files, in one of several processes."""
    for note in notes if is_main() else ():
        log.warning("%s", note)


def nothing_in(source: str, what: str, dropped: list[str]) -> UserError:
    """The error for a source without good rows. ``dropped``: places and reasons of dropped rows, if any."""
    return UserError(f"path={source}: no {what} in it" + (f" ({dropped[0]})" if dropped else ""))
