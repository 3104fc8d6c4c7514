"""A source of the user's plain text: a file, a folder of files, or a column of a Hugging Face data set. Whole documents are held out."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from headstart.data import arrow, plain, reader, streamed
from headstart.data.pack import check_length
from headstart.data.packed import Document
from headstart.data.plain import Text
from headstart.data.rows import file_path, is_dataset, is_there, parsed, passing, reading, tell
from headstart.data.source import Source, apart, check_whole, live, say
from headstart.data.table import Lines, Origin
from headstart.data.text_files import LEAST, ONE_IN, PART, ROWS, cut, documents_of, files_of, found_in, suffix_of, value_of
from headstart.heads.errors import UserError
from headstart.heads.files import put_text, sealed, sha256
from headstart.heads.seal import tokenizer_file_sha
from headstart.heads.stored import read_json
from headstart.inference.decoding.target import Target
from headstart.inference.serving.text import BadRow

MOST_HELD = 1 << 19  # characters: once so many are held out, no further document is
STARTS = (plain.LINES, plain.PARAGRAPHS)  # where prompts begin, paragraphs preferred


def open(
    target: Target, *, length: int, seed: int, path: str, split: str, field: str, suffixes: list[str], on_bad: str, subset: str = "",
    stream: bool | None = None, cache: str | None = None, workers: int | None = None, held_out: str | None = None,
) -> Source:  # fmt: skip
    """Documents of plain text, all tokens supervised; whole ones are held out. Large text is tokenised once and read from disk
    (data/arrow.py). Raises UserError for text that cannot be read, is too little, or does not fit ``length``.
    """
    given: dict[str, Any] = dict(path=path, split=split, subset=subset, field=field, suffixes=suffixes, on_bad=on_bad)
    own = None if held_out is None else _apart(held_out, given)
    if stream:
        return _streamed(target, Reader(target.tokenizer, field, on_bad), path, split, subset, cache, own, length=length, seed=seed)
    if is_dataset(path) or cache is not None or _size(files_of(path, suffixes)[1]) >= reader.LARGE:
        return _on_disk(target, given, cache, workers, own, length=length, seed=seed)
    train, held = texts(seed, **given, held_out=held_out)
    return plain.source(target, train, held, length, seed, STARTS, _groups(held))


def check(*, path: str, split: str, subset: str, suffixes: list[str], stream: bool | None, held_out: str | None = None, **_: Any) -> None:
    """Raises UserError for a missing path, a folder without matching files, a file that cannot be read, or one that cannot be streamed."""
    if held_out is not None:
        apart(held_out, path, split)
    if stream:
        if not is_dataset(path) and suffix_of(file_path(path)) not in ROWS:
            raise UserError(f"path={path}: what is streamed has rows: a file that ends in {' or '.join(ROWS)} (.gz), or a dataset")
        next(passing(path, split, subset, 0, 1), None)
    elif not is_dataset(path):
        folder, files = files_of(path, suffixes)
        if folder != file_path(path):
            with reading(files[0]):
                pass
    check_whole(path, split, subset)


class Reader(reader.Reader):
    """Reads the text of a row. (An empty text makes a document that packing leaves out.)"""

    what = "texts"

    def __init__(self, tokenizer: Any, field: str, on_bad: str) -> None:
        self.tokenizer, self.field, self.on_bad = tokenizer, field, on_bad

    def about(self) -> dict[str, Any]:
        """The tokenizer's digest and the settings that the documents depend on."""
        return {"tokenizer": tokenizer_file_sha(self.tokenizer), "field": self.field, "on_bad": self.on_bad}

    def read(self, row: dict[str, Any]) -> Text:
        """The text of a row. Raises BadRow for a row without text in ``field``."""
        return Text("", value_of(row, self.field).strip("\n") + "\n")

    def made(self, read: Sequence[Text]) -> list[Document]:
        """A document of each text, with the end-of-text token at its end."""
        return plain.encode_texts(self.tokenizer, read)


class Spooled(Reader):
    """Reads rows that are documents already, cut and written to a temporary file."""

    def read(self, row: dict[str, Any]) -> Text:
        return Text(**row)


def _on_disk(
    target: Target, given: dict[str, Any], cache: str | None, workers: int | None, own: list[Text] | None, *, length: int, seed: int
) -> Source:
    """Many processes tokenise the documents into a folder of the cache. The folder also holds the number of characters of each document,
    and the held-out documents of each seed.
    """
    check_length(length, target.shape.max_positions)  # before the slow work
    path, how = given["path"], Spooled(target.tokenizer, given["field"], given["on_bad"])
    folder = arrow.folder_of({"texts": _named(given), "parts": [ONE_IN, LEAST, PART], **how.about()}, cache)

    def spool(beside: Path) -> Lines:
        notes, characters = list[str](), list[int]()
        whole = sum(len(text) for _, text in found_in([], **given))

        def numbered() -> Iterator[tuple[int, bytes]]:
            for number, text in enumerate(cut(found_in(notes, **given), whole), 1):
                characters.append(len(text.text))
                yield number, json.dumps(text._asdict()).encode()

        lines = Lines.written(beside, beside, "text", numbered())
        if own is None:
            _held(path, characters, seed)  # raises UserError if there is too little text
        put_text(beside.with_name("texts.json"), json.dumps(sealed({"characters": characters, "notes": notes})))
        return lines

    stored, _ = arrow.tokenised(folder, spool, how, lambda made, rows: None, workers)
    about = _sealed(folder / "texts.json")
    tell(about["notes"])
    if own is not None:
        held_out, groups = plain.encode_texts(target.tokenizer, own), _groups(own)
        return live(target, stored, held_out, length, seed, _asking(target, groups, seed), folder)
    held = _held(path, about["characters"], seed)
    name = folder / f"held-{seed}.json"
    with arrow.only_one(folder, name.is_file) as first:
        if first:
            documents = cut(found_in([], **given), sum(about["characters"]))
            put_text(name, json.dumps(sealed({"texts": [text._asdict() for i, text in enumerate(documents) if i in held]})))
    held_out, groups = [stored[i] for i in sorted(held)], _groups([Text(**text) for text in _sealed(name)["texts"]])
    others = np.array([i for i in range(len(stored)) if i not in held], dtype=np.int64)
    return live(target, arrow.Chosen(stored, others), held_out, length, seed, _asking(target, groups, seed), folder)


def _asking(target: Target, groups: plain.Groups, seed: int) -> Callable[[int, int], list[list[int]]]:
    return lambda count, new: plain.asked(target.tokenizer, groups, count, seed, STARTS)


def _named(given: dict[str, Any]) -> Any:
    """What identifies the texts: the data set's fingerprint, or the name and SHA-256 of each file."""
    if is_dataset(given["path"]):
        return Origin(given["path"], given["split"], given["subset"], None).digest()
    folder, files = files_of(given["path"], given["suffixes"])
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
    target: Target, how: Reader, path: str, split: str, subset: str, cache: str | None, own: list[Text] | None, *, length: int, seed: int
) -> Source:  # fmt: skip
    groups: plain.Groups = {} if own is None else _groups(own)
    for row in passing(path, split, subset, 0, streamed.HELD if own is None else 0):
        with suppress(BadRow):  # it is reported when the documents are made
            groups[row.where] = [(row.where, how.read(parsed(row.value)).text)]
    held, ask = None if own is None else plain.encode_texts(target.tokenizer, own), _asking(target, groups, seed)
    return streamed.open_stream(target, how, path, split, subset, length=length, seed=seed, limit=None, cache=cache, prompts=ask, own=held)


def texts(
    seed: int, *, path: str, split: str, subset: str, field: str, suffixes: list[str], on_bad: str, held_out: str | None = None, **_: Any
) -> tuple[list[Text], list[Text]]:
    """The training texts and the held-out ones, which are drawn by ``seed`` or read from ``held_out``. Raises UserError that names a file
    or line without text.
    """
    given: dict[str, Any] = dict(path=path, split=split, subset=subset, field=field, suffixes=suffixes, on_bad=on_bad)
    documents = documents_of(given)
    if held_out is not None:
        return documents, _apart(held_out, given)
    held = _held(path, [len(document.text) for document in documents], seed)
    return [d for i, d in enumerate(documents) if i not in held], [documents[i] for i in sorted(held)]


def _apart(held_out: str, given: dict[str, Any]) -> list[Text]:
    """The first documents of ``held_out``, until they have ``MOST_HELD`` characters. Raises UserError if there are none."""
    where = apart(held_out, given["path"], given["split"])
    documents = documents_of(given | dict(zip(("path", "split"), where, strict=True)))
    before = accumulate((len(each.text) for each in documents), initial=0)
    if not (found := [each for each, so_far in zip(documents, before, strict=False) if so_far < MOST_HELD]):
        raise UserError(f"data.held_out={held_out}: there is no text in it")
    if len(found) < len(documents):
        say(f"of data.held_out={held_out} the first {len(found):,} of {len(documents):,} documents are held out")
    return found


def _held(path: str, characters: Sequence[int], seed: int) -> set[int]:
    """The numbers of the held-out documents. ``seed`` draws documents until they make up a twentieth of the text, or ``MOST_HELD``
    characters. Raises UserError for fewer than two documents.
    """
    whole, held = sum(characters), set[int]()
    if len(characters) < 2:
        raise UserError(f"path={path}: {whole} characters of text are too few to learn from and to hold some of them out: give more")
    left = min(whole // ONE_IN, MOST_HELD)
    for i in np.random.default_rng(seed).permutation(len(characters))[1:].tolist():  # the first one is always trained on
        held.add(i)
        left -= characters[i]
        if left <= 0:
            break
    return held
