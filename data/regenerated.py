"""The target's own answers, as a file of JSON lines: data/regenerate.py writes it, and training reads it.

A line holds ``line`` (its number in the source), ``id``, ``messages`` (or ``prompt`` and ``text``), ``documents``, and
``regenerated`` (the target, the settings, and a digest ``of`` the source line). A document has ``tokens``, read and generated ones, and
``answers``, a [start, end) for each run of tokens that the target generated. Lines are in the order of the source.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from headstart.data import stdlib
from headstart.data.lock import warn_unlockable
from headstart.data.packed import Document
from headstart.data.rows import Binary, file_path, is_there, reading
from headstart.data.source import Source, apart, beginnings, check_enough, live, split_off
from headstart.heads.errors import UserError
from headstart.heads.seal import tokenizer_sha
from headstart.inference.decoding.placement import say
from headstart.inference.decoding.target import Target

START = b'{"line":'  # every line starts with it
OTHER = "give path= a file that was, or take data=chat for other conversations"
DIGITS = 16  # of the fingerprint of the target that answered, in every line
SYNC = 5.0  # seconds between two fsyncs: a crash of the machine loses at most the lines since the last one


def digest(value: Any) -> str:
    """16 hexadecimal digits that identify a value that JSON can hold."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def vocabulary(tokenizer: Any) -> str:
    """16 hexadecimal digits that identify a tokenizer. Tokens of another tokenizer mean nothing to the target."""
    return tokenizer_sha(tokenizer)[:16]


class JsonlWriter:
    """The output file, open for appending. ``last``: the number of the last source line in it. ``count``: the number of lines in it.

    An unfinished last line, left by a kill, is cut off. ``settings``: the target and the settings. ``of``: the digest of each source line,
    by number. Raises UserError if the file cannot be resumed: it is of another kind, its ``settings`` or source differ, it cannot be
    written, or another process has it open.
    """

    def __init__(self, path: Path, settings: dict[str, Any], of: dict[int, str]) -> None:
        self.path, self.settings, self.of = path, json.loads(json.dumps(settings)), of
        try:
            if path.exists() and not path.is_file():
                raise UserError(f"out={path} is not a file: give out=FILE.jsonl")
            path.parent.mkdir(parents=True, exist_ok=True)
            self.file = path.open("a+b", buffering=0)
        except OSError as error:
            raise UserError(f"out={path} cannot be written: {error.strerror or error}") from None
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"out={path} is being written by another process: wait for its end, or choose another out=") from None
        except OSError as error:
            warn_unlockable("out", path, error)
        self.last = self.count = self.size = 0
        self.synced = time.monotonic()
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.endswith(b"\n") and START.startswith(line[: len(START)]):
                    break
                self._check(f"{path} line {number}", line)
                self.count, self.size = number, self.size + len(line)
        self.file.truncate(self.size)

    def _check(self, where: str, line: bytes) -> None:
        advice = "choose another out=, or delete the file to start over"
        found = parse(where, line, advice)
        for key, value in self.settings.items():
            if found["regenerated"].get(key) != value:
                was = found["regenerated"].get(key)
                raise UserError(f"{where}: {key} differs: it was made with {was!r}, here it is {value!r}: {advice}")
        number = found["line"]
        if number > (most := max(self.of, default=number)):
            raise UserError(
                f"{where}: it is of line {number}, and what is asked for ends at line {most}: raise limit, or choose another out="
            )
        if number <= self.last or self.of.get(number) != found["regenerated"].get("of"):
            raise UserError(f"{where}: it was not made of line {number} of this source: {advice}")
        self.last = number

    def add(self, line: int, made: dict[str, Any], **about: Any) -> None:
        """Append the answers to source line ``line``. Raises UserError if the disk refuses. The lines before it stay whole."""
        record = {"line": line, **made, "regenerated": {**self.settings, **about, "of": self.of[line]}}
        data = memoryview(json.dumps(record).encode() + b"\n")
        whole = len(data)
        try:
            while data:
                data = data[self.file.write(data) :]
            if time.monotonic() - self.synced > SYNC:
                os.fsync(self.file.fileno())
                self.synced = time.monotonic()
        except OSError as error:
            self.file.truncate(self.size)
            raise UserError(f"{self.path}: not written ({error}); its {self.count} lines are kept: run again to go on") from None
        self.last, self.count, self.size = line, self.count + 1, self.size + whole

    def close(self) -> None:
        """Sync and close the file. Raises UserError if the disk did not keep all of it."""
        try:
            os.fsync(self.file.fileno())
        except OSError as error:
            raise UserError(f"{self.path}: the disk did not keep all of it ({error})") from None
        finally:
            self.file.close()


def parse(where: str, line: bytes, advice: str) -> dict[str, Any]:
    """The record in a line. Raises UserError, with ``advice``, for a line that regenerate did not write."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or type(found.get("line")) is not int or not isinstance(found.get("regenerated"), dict):
        raise UserError(f"{where} was not written by `python -m data regenerate`: {advice}")
    return found


# ---- reading it for training ----


def open(target: Target, *, length: int, seed: int, path: str, held_out: str | None = None) -> Source:
    """Conversations or texts that the target has answered. Whole ones are held out, or those of the file ``held_out`` instead.

    Raises UserError for a line that cannot be used. Without ``held_out``, also for fewer than two conversations or texts.
    """
    groups, source = _read_by(path, target)
    if held_out is not None:
        own, source = _read_by(apart(held_out, path)[0], target)
        held, train = ([document for group in part for document in group] for part in (own, groups))
    else:
        check_enough(path, "conversation or text", len(groups))
        held, train = split_off(groups, seed)

    def ask(count: int, new: int) -> list[list[int]]:
        return stdlib.asked(target, count, seed) if source == "stdlib" else beginnings(target, held, count, new)

    return live(target, train, held, length, seed, ask)


def _read_by(path: str, target: Target) -> tuple[list[list[Document]], str]:
    """``read``, with a printed line if not this target gave the answers. (Those of an endpoint do not say whose they are.)"""
    groups, source, weights = read(path, target.tokenizer, target.shape.vocab_size)
    here = target.fingerprint["weights"][:DIGITS]
    if others := weights - {here}:
        say(
            f"{path}: another target gave these answers, or this one before it was trained further (weights {min(others)}, here {here}): "
            "unless the two are close, make them again with python -m data regenerate"
        )
    return groups, source


def check(*, path: str, held_out: str | None = None) -> None:
    """Raises UserError for a missing file, or one that ``python -m data regenerate`` did not write."""
    for file in (path, *([] if held_out is None else [apart(held_out, path)[0]])):
        with _opened(file) as lines:
            if first := lines.readline():
                parse(f"{file} line 1", first, OTHER)


@contextmanager
def _opened(path: str) -> Iterator[Binary]:
    file = file_path(path)
    if not is_there(file):
        raise UserError(f"path={path}: no such file: make it with `python -m data regenerate out={path}`")
    with reading(file) as lines:
        yield lines


class Records(NamedTuple):
    """The content of a file of regenerated lines."""

    groups: list[list[Document]]  # the documents of each conversation or text: a group is held out as a whole, or not at all
    source: str  # the name of the source of data whose prompts were answered
    weights: set[str]  # the first ``DIGITS`` of the fingerprint of each target that answered, where it is known


def read(path: str, tokenizer: Any, vocab_size: int) -> Records:
    """All documents of a file. Only tokens that the target generated are supervised. Raises UserError that names an unusable line."""
    ours, groups, source, weights = vocabulary(tokenizer), dict[str, list[Document]](), "", set[str]()
    with _opened(path) as lines:
        for number, line in enumerate(lines, 1):
            where = f"{path} line {number}"
            if not line.endswith(b"\n"):
                raise UserError(f"{where} is cut in two: run the same `python -m data regenerate` again to go on")
            record = parse(where, line, OTHER)
            if record["regenerated"].get("tokenizer") != ours:
                raise UserError(f"{where}: it was made with another tokenizer than the target's: regenerate it with this target")
            if "documents" not in record:
                raise UserError(f"{where}: it has no tokens, the endpoint gave none: train on its text with data=chat path={path}")
            source = str(record["regenerated"].get("data"))
            weights |= {str(by) for by in [record["regenerated"].get("weights")] if by is not None}
            documents = record["documents"]
            if not isinstance(documents, list) or not documents or not all(_sound(d, vocab_size) for d in documents):
                raise UserError(f"{where}: its documents are damaged: regenerate it")
            groups.setdefault(str(record.get("document", number)), []).extend(_document(d) for d in documents)
    return Records(list(groups.values()), source, weights)


def _sound(document: Any, vocab_size: int) -> bool:
    """Whether a document has only tokens of the vocabulary, and its answers are ordered ranges within these."""
    if not isinstance(document, dict):
        return False
    tokens, answers = document.get("tokens"), document.get("answers")
    if not isinstance(tokens, list) or not all(type(t) is int and 0 <= t < vocab_size for t in tokens):
        return False
    if not isinstance(answers, list) or not all(isinstance(a, list) and len(a) == 2 and all(type(x) is int for x in a) for a in answers):
        return False
    edges = [0, *(edge for answer in answers for edge in answer), len(tokens)]
    return all(a <= b for a, b in pairwise(edges))


def _document(document: dict[str, Any]) -> Document:
    mask = np.zeros(len(document["tokens"]), dtype=np.bool_)
    for start, end in document["answers"]:
        mask[start:end] = True
    return Document(np.array(document["tokens"], dtype=np.int32), mask)
