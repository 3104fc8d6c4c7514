"""Streaming for corpora that do not fit on a disk: they are read, tokenised and packed during training, a block of rows at a time.

The first rows are held out. The rest is divided into blocks of ``BLOCK`` rows. Process b modulo the number of processes gets block b: it
skips the text of all other blocks, and tokenises only its own. Rows are shuffled within a block. The number of packed rows of each block
is kept on disk (``place``), so that a resumed run does not tokenise again the blocks that it has trained on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from headstart.data import arrow
from headstart.data.batch import TokenBatch
from headstart.data.live import announced
from headstart.data.pack import NothingToLearn, check_length, pack
from headstart.data.packed import Document, InMemory, Laid, joined
from headstart.data.reader import Lazy, Reader
from headstart.data.rows import Row, left_out, nothing_in, parsed, passing, tell
from headstart.data.source import Source, beginnings, observing, say
from headstart.heads.errors import UserError
from headstart.heads.files import put_text
from headstart.heads.stored import read_json
from headstart.inference.decoding.target import Target

BLOCK, HELD = 1024, 64  # rows of the source in a block; rows that are held out


class Dropped:
    """Counts the rows read that have no document."""

    def __init__(self, name: str) -> None:
        self.name, self.of, self.count, self.told, self.first = name, 0, 0, 0, list[str]()

    def left(self, some: list[Row], reader: Reader) -> list[tuple[Row, Document]]:
        """The rows that have a document, with it. Raises UserError for a bad row, unless the reader skips bad rows."""
        made = list(zip(some, reader(some), strict=True))
        why = [f"{row.where}: {reason}" for row, reason in made if isinstance(reason, str)]
        self.of, self.count, self.first = self.of + len(made), self.count + len(why), [*self.first, *why][:3]
        return [(row, document) for row, document in made if not isinstance(document, str)]

    def tell(self, often: int = 1) -> None:
        """Log the number of rows without a document, if it is at least ``often`` times the number logged before."""
        if self.count > self.told and self.count >= often * max(self.told, 1):
            tell([left_out(self.name, self.count, self.of, self.first)])
            self.told = self.count


class Stream:
    """Endless packed rows of a corpus. ``rows(first)``: the rows of the source from number ``first`` on. Its end begins the next epoch."""

    def __init__(self, rows: Callable[[int], Iterator[Row]], reader: Reader, length: int, place: Path, name: str, held: int) -> None:
        """``held``: the number of rows at the beginning that are not trained on."""
        self.rows, self.reader, self.length, self.place, self.name, self.held = rows, reader, length, place, name, held
        self.of: list[Any] = []  # identifies the corpus

    def block(self, some: list[Row], seed: tuple[int, ...], dropped: Dropped) -> InMemory | None:
        """The packed rows of a block, or None if nothing can be learnt from it. Raises UserError for a bad row."""
        documents = [document for _, document in dropped.left(some, self.reader)]
        try:
            return pack(documents, self.length, seed=int(np.random.SeedSequence(seed).generate_state(1)[0]))
        except NothingToLearn:
            return None

    def stream(self, batch_size: int, seed: int = 0, start_step: int = 0, rank: int = 0, world: int = 1) -> Iterator[TokenBatch]:
        """Endless batches. Batch k depends only on (seed, k, rank, world).

        Raises UserError for a bad row, and if this process finds nothing to learn in its blocks.
        """
        held = list[Laid]()
        for laid in self._line(seed, start_step * batch_size, rank, world):
            held.append(laid)
            if len(held) == batch_size:
                yield InMemory(*joined(held)).batch(slice(None))
                held = []

    def _line(self, seed: int, skip: int, rank: int, world: int) -> Iterator[Laid]:
        """The packed rows of a process, one at a time, after skipping ``skip`` rows."""
        book, epoch = _Book(self.place, rank, world, self.of), 0
        while True:
            block, dropped = rank, Dropped(self.name)
            while (known := book.sizes.get(block)) is not None and skip >= known:
                skip, block = skip - known, block + world
            for number, some in self._blocks(block, world) if block != book.end else ():
                packed = self.block(some, (seed, epoch, number), dropped)
                dropped.tell(often=10)  # an epoch may never end
                rows = 0 if packed is None else len(packed)
                book.add(number, rows)
                passed = min(skip, rows)
                skip -= passed
                for row in range(passed, rows):
                    assert packed is not None
                    yield packed.lay(np.array([row]))
                block = number + world
            book.close(block)
            dropped.tell()
            if not sum(book.sizes.values()):
                raise UserError(f"path={self.name}: process {rank + 1} of {world} finds nothing to learn in its blocks of {BLOCK} rows: "
                                "train without data.stream")  # fmt: skip
            epoch += 1

    def _blocks(self, first: int, world: int) -> Iterator[tuple[int, list[Row]]]:
        """(number, rows) of each block of a process, from block ``first`` on, to the end of the source."""
        rows = self.rows(self.held + first * BLOCK)
        while some := list(islice(rows, BLOCK)):
            yield first, some
            for _ in islice(rows, (world - 1) * BLOCK):  # those of the other processes
                pass
            first += world


class _Book:
    """The number of packed rows in each block that a process has read. It is kept on disk for a resumed run, if the disk allows it.
    ``of``: identifies the corpus. If the file is of another corpus (of the same path), it is replaced.
    """

    def __init__(self, place: Path, rank: int, world: int, of: list[Any]) -> None:
        self.path, self.of = place / f"blocks-{rank}-{world}.json", of
        try:
            found = read_json(self.path)
            if found["of"] != of:
                raise UserError(f"{self.path} is of another corpus")
            self.sizes = {int(block): int(rows) for block, rows in found["blocks"].items()}
            self.end: int | None = found["end"]
        except (UserError, KeyError, TypeError, ValueError, AttributeError):
            self.sizes, self.end = {}, None

    def add(self, block: int, rows: int) -> None:
        """Note the number of packed rows in a block."""
        if block not in self.sizes:
            self.sizes[block] = rows
            self._put()

    def close(self, block: int) -> None:
        """Note that the source has ended: ``block`` would be the number of the next block."""
        if self.end is None:
            self.end = block
            self._put()

    def _put(self) -> None:
        text = json.dumps({"of": self.of, "blocks": self.sizes, "end": self.end})
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            put_text(self.path, text)
        except OSError:
            return  # a resumed run then reads from the beginning


def open_stream(
    target: Target, reader: Reader, path: str, split: str, subset: str, *, length: int, seed: int, limit: int | None, cache: str | None,
    prompts: Callable[[int, int], list[list[int]]] | None = None, own: list[Document] | None = None,
) -> Source:  # fmt: skip
    """A source that streams a corpus, up to row ``limit``. ``prompts``: the prompts, if held-out documents do not contain them. ``own``:
    documents to hold out instead of the first rows. Raises UserError for rows of a wrong ``length``, for a bad row, and if nothing can be
    learnt from the first rows.
    """
    check_length(length, target.shape.max_positions)
    count, rows = HELD if own is None else 0, partial(passing, path, split, subset, limit=limit)
    place = arrow.folder_of({"streamed": [path, split, subset, limit, length, BLOCK, count], **reader.about()}, cache)
    stream = Stream(rows, reader, length, place, path, count)
    dropped = Dropped(path)
    aside = dropped if count else Dropped(path)  # without ``own`` the held-out rows are in the first block too, and counted there
    made = aside.left(list(islice(rows(0), HELD)), reader)
    found = [document for _, document in made]
    held = found if own is None else own
    if found:
        reader.check(found, Lazy(len(made), lambda i: reader.read(parsed(made[i][0].value))), [row.where for row, _ in made])
    first = stream.block(list(islice(rows(count), BLOCK)), (seed, 0, 0), dropped) if held else None
    dropped.tell()
    if first is None:
        raise nothing_in(path, f"{reader.what} beside the {HELD} that are held out" if count else reader.what, [])
    heldout = pack(held, length, target.shape.max_positions, seed)
    first_ones = "the first " if own is None else ""
    say(f"streamed from {path}; held out: {first_ones}{len(held)} {reader.what}. Its first {BLOCK} rows make {len(first)} rows of {length}")
    digest = hashlib.sha256(f"{place.name} {heldout.digest()} {first.digest()}".encode()).hexdigest()
    file = Path(path)
    stream.of = [digest, *([str(file.resolve()), (about := file.stat()).st_size, about.st_mtime_ns] if file.is_file() else [])]

    def counts() -> Tensor:
        """[V] how often tokens are supervised in the first block. The rest is not read yet."""
        return first.counts(target.shape.vocab_size)

    ask = prompts or (lambda count, new: beginnings(target, held, count, new))
    return Source(lambda taps, *where: announced(stream.stream(*where), target), observing(target), counts, heldout, ask, lambda: digest)
