"""Capture during training: the target's states of the training rows are stored, in the same format that `python -m data` writes.

The rows come in the order in which the finished folder will be read, a few shards at a time. The drafter trains on the states as
stored. So a capturing run equals a ``data=shards`` run on its folder. Once every row has been read, it trains on from that folder.

Several processes read the rows of one shard. So the process that reads a row first writes it to a file of its own, called
``row-NUMBER-CAPTURE-SHA256.safetensors``. When all rows of shard i exist, process i mod ``world`` joins them to the shard and removes the
row files. Up to ``index.BUFFER`` shards can be on disk as row files at a time, because an epoch is shuffled within so many shards. Row
files survive any kill. Rows that were read but not yet written are read again when the run is resumed.

Shape suffixes: B rows of a batch.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save

from headstart.data import index as indexes
from headstart.data.batch import NumberedBatch, TargetBatch, TokenBatch
from headstart.data.capture import Stored, Writer, encoded, joined, one_by_one, say_amount, say_errors, settings_of
from headstart.data.folder import open_folder
from headstart.data.index import ALL, SUPERVISED, file_of, files_in_all, first_row, rows_of, shards_of
from headstart.data.live import announced, look
from headstart.data.packed import Packed, places
from headstart.data.shards import FLAT, Shards, StoredBatch
from headstart.data.source import FirstRows, Source, say
from headstart.heads.errors import UserError, sized
from headstart.heads.files import sealed
from headstart.inference.decoding.target import Target

POLL, PATIENCE = 0.5, 30.0  # seconds between two looks for files of other processes; seconds to wait for the last ones at the end
LOOK = 5.0  # seconds between two looks while rows are read; longer, because listing a bucket is slow


class Capturing:
    """Captures the rows of a source while the target reads them. Use the attribute ``source`` instead of it, and call ``close`` last."""

    def __init__(
        self, source: Source, target: Target, taps: Collection[int], *, out: str, storage: str, accumulate: int, rank: int, world: int
    ) -> None:
        """``accumulate``: the number of batches taken from the stream before the first of them is observed. The caller holds the lock.

        Raises UserError if the folder ``out`` holds another capture or a damaged one.
        """
        assert source.packed is not None
        assert source.held_out is None or isinstance(source.held_out, Packed)
        self.packed, self.held_out, self.target, self.out, self.rank, self.world = source.packed, source.held_out, target, out, rank, world
        self.settings = settings_of(self.packed, target, taps, storage, self.held_out, None)
        self.writer = Writer(open_folder(out), self.settings, rank, world)
        self.capture = sealed(self.settings)["sha256"][:16]  # part of each row file's name, since there may be no index yet to compare with
        held = 0 if self.held_out is None else rows_of(self.settings, shards_of(self.settings))
        own = None if self.held_out is None else FirstRows(held, self._held_out_rows)
        self.source = replace(source, stream=self.stream, observe=self.observe, held_out=own)
        self.accumulate, whole = accumulate, len(self.packed) + held
        self.kept, self.read = np.zeros(whole, bool), np.zeros(whole, bool)  # by row: written, and read, by any process
        self.mine = np.arange(whole) >= len(self.packed)  # by row: this process writes it (those it reads first, and held-out rows)
        self.names, self.looked = self._row_files(), time.monotonic()  # known row files; the time of the last look for them
        self._pool, self._writing = ThreadPoolExecutor(1, "writer"), Future[None]()
        self._writing.set_result(None)
        if self.writer.missing and rank == 0:
            say_amount(self.settings, self.packed, self.held_out, self.writer.there.values(), world)

    def _find_written(self) -> None:
        """Find out which rows are written already, by any process. Remove leftover row files."""
        self._writing.result()  # writing held-out rows adds to the names
        if (found := indexes.read_all(self.writer.folder)) is not None:
            self.writer.there |= indexes.files_of(found)
        for number in self.writer.there:
            self.kept[self._rows(number)] = True
        self.names = self._row_files()
        for row, name in self.names.items():
            number = file_of(self.settings, row)
            if number in self.writer.there and number % self.world == self.rank:  # killed before it removed this row file
                self.writer.folder.remove(name)
            self.kept[row] = True

    def _rows(self, number: int) -> slice:
        first = first_row(self.settings, number)
        return slice(first, first + rows_of(self.settings, number))

    def _row_files(self) -> dict[int, str]:
        """The names of the row files, by row number. Raises UserError for row files of another capture."""
        found = [match for name in self.writer.folder.sizes() if (match := indexes.ROW.fullmatch(name))]
        if other := next((match[0] for match in found if match[2] != self.capture), None):
            why = "of other rows, another target or other settings"
            raise UserError(f"{self.writer.folder.of(other)} is of another capture ({why}): choose another folder, or delete this one")
        return {int(match[1]): match[0] for match in found if int(match[1]) < len(self.kept)}

    # ---- reading ----

    def stream(self, taps: Collection[int], batch_size: int, seed: int, start: int, rank: int, world: int) -> Iterator[TokenBatch]:
        """Endless batches in the order of ``Shards``: first batches that the target has to read, then batches from the finished folder."""
        assert (rank, world) == (self.rank, self.world)
        step = batch_size * world  # rows
        each = places(lambda epoch: indexes.order(self.settings, epoch, seed), len(self.packed), step, start, 0, 1)
        read = indexes.order(self.settings, 0, seed)[: start * step]
        self.read[read] = True
        self._find_written()
        live = -(-len(self.packed) // (step * self.accumulate)) * self.accumulate  # batches until every row has been in one
        if self.target.sharded:  # all processes run the target together: none may switch to stored rows before the others
            live = 1 << 62
        elif self._whole():
            live = start
        else:
            for lost in announced(self._numbered(self._again(read, batch_size)), self.target):
                self.observe(lost, taps)

        def coming() -> Iterator[NumberedBatch]:
            for _, line in zip(range(start, live), each, strict=False):
                ours = line[rank * batch_size : (rank + 1) * batch_size]
                self.mine[ours[~self.read[ours]]] = True  # the last batch may reach into the next epoch, to rows that others write
                self.read[line] = True
                yield next(self._numbered([ours]))

        yield from announced(coming(), self.target)
        self._complete()
        yield from Shards(self.out, self.target.fingerprint, taps).stored_stream(
            batch_size, seed, max(start, live), rank, world, pin=self.target.device.type == "cuda"
        )

    def _again(self, read: NDArray[np.int64], batch_size: int) -> Iterator[NDArray[np.int64]]:
        """The rows, in batches, that this process must read again: they were trained on, but no process has written them."""
        lost = read[~self.kept[read] & (read % self.world == self.rank)]
        self.mine[lost] = True
        if len(lost):
            say(f"{len(lost):,} rows were trained on and not captured: they are read first")
        return (lost[i : i + batch_size] for i in range(0, len(lost), batch_size))

    def _held_out_rows(self, rows: range) -> NumberedBatch:
        """Held-out rows. They are numbered after the training rows."""
        assert self.held_out is not None
        before = len(self.packed)
        return NumberedBatch.of(self.held_out.batch(rows), range(before + rows.start, before + rows.stop))

    def _numbered(self, some: Any) -> Iterator[NumberedBatch]:
        return (NumberedBatch.of(self.packed.batch(rows), rows.tolist()) for rows in some)

    @torch.no_grad()
    def observe(self, batch: TokenBatch, taps: Collection[int]) -> TargetBatch:
        """The target's states of a batch, as decoded from storage. A batch that the target reads now is written in the background."""
        kept = batch if isinstance(batch, StoredBatch) else self._look(batch)
        kept.taps = tuple(sorted(taps))
        return kept.states_on(self.target.device, self.target.dtype)

    def _look(self, batch: TokenBatch) -> StoredBatch:
        with torch.autocast(self.target.device.type, enabled=False):  # so that the states equal those of `python -m data`
            seen = look(batch, self.target, self.settings["taps"])
            tensors, off = encoded(seen, self.settings)
        if isinstance(batch, NumberedBatch) and (self.mine & ~self.kept)[list(batch.rows)].any():
            self._keep(batch.rows, one_by_one(tensors, off, self.settings, batch.rows))
        final_F = None if self.settings["final"] == ALL else seen.supervised(0).flatten().nonzero()[:, 0]
        stored = {name: tensor for name, tensor in tensors.items() if name not in FLAT}
        return StoredBatch(**seen.each(lambda x: x), stored=stored, final_F=final_F, taps=(), layers=self.settings["layers"])

    # ---- writing ----

    def _keep(self, rows: Sequence[int], each: list[Stored]) -> None:
        new = {row: one for row, one in zip(rows, each, strict=True) if self.mine[row] and not self.kept[row]}
        if rows[0] >= len(self.packed) and shards_of(self.settings) % self.world != self.rank:  # every process reads held-out rows
            new = {}
        self.kept[list(rows)] = True
        self._writing.result()
        self._writing = self._pool.submit(self._write, new)

    def _write(self, new: dict[int, Stored]) -> None:
        for row, (tensors, sums) in new.items():
            content = save({name: tensor.contiguous() for name, tensor in tensors.items()}, {"errors": json.dumps(sums)})
            name = f"row-{row:09d}-{self.capture}-{hashlib.sha256(content).hexdigest()}.safetensors"
            with self.writer.writing(name):
                self.writer.folder.put(name, partial(Path.write_bytes, data=content))
            self.names[row] = name
        self._assemble(LOOK)

    def _assemble(self, wait: float = 0.0) -> None:
        """Join row files to shards: those of this process's shards whose rows all have a row file. Row files of other processes are looked
        for only if ``wait`` seconds have passed since the last look.
        """
        numbers = [i for i in range(self.rank, files_in_all(self.settings), self.world) if i not in self.writer.there]
        due = [i for i in numbers if (self.read | self.kept)[self._rows(i)].all()]
        rows_of_due = {number: range(self._rows(number).start, self._rows(number).stop) for number in due}
        lacking = any(row not in self.names for rows in rows_of_due.values() for row in rows)
        if lacking and self.world > 1 and time.monotonic() - self.looked >= wait:
            self.names |= self._row_files()
            self.looked = time.monotonic()
        for number, rows in rows_of_due.items():
            if all(row in self.names for row in rows):
                self.writer.add(number, *joined([self._row(row, self.names[row]) for row in rows]))
                for row in rows:
                    self.writer.folder.remove(self.names.pop(row))

    def _row(self, row: int, name: str) -> Stored:
        """Read a row file. Raises UserError if it is damaged, and removes it."""
        held = row >= len(self.packed)
        where = self.held_out if held else self.packed
        assert where is not None
        tokens = where.batch([row - len(self.packed) * held])
        about: dict[str, Any] = {"name": name, "rows": 1, "sha256": name.rpartition("-")[2].partition(".")[0]}
        if self.settings["final"] == SUPERVISED:
            about["final"] = int(tokens.supervised(0).sum())
        try:
            file = indexes.open_file(self.writer.folder, self.settings | {"held_out": None}, about)
        except UserError as error:
            self.writer.folder.remove(name)
            why = str(error).removesuffix(f": {indexes.anew(self.writer.folder)}")
            raise UserError(f"{why}; it is taken away: the same command reads that row again") from None
        return {key: file.get_tensor(key) for key in file.keys()}, json.loads(file.metadata()["errors"])  # noqa: SIM118

    def _whole(self) -> bool:
        found = indexes.read_all(self.writer.folder)
        return found is not None and len(found["files"]) == files_in_all(self.settings)

    def _complete(self) -> None:
        """Wait until every file exists, those of other processes too. Raises UserError if row files have vanished (one process only)."""
        self._writing.result()
        while not self._whole():
            self._assemble()
            if self._whole():
                break
            if self.world == 1:
                raise UserError(f"{self.writer.folder}: rows that were put down have gone: the same command reads them again")
            time.sleep(POLL)
        self.writer.finish()

    def close(self) -> None:
        """Finish writing, wait up to ``PATIENCE`` seconds for the last files of other processes, and print what is captured."""
        try:
            self._writing.result()
            self._assemble()
            until = time.monotonic() + (PATIENCE if self.world > 1 and (self.read | self.kept).all() else 0)
            while (left := self.writer.finish()) and time.monotonic() < until:
                time.sleep(POLL)
                self._assemble()
        finally:
            self._pool.shutdown()
        index = indexes.read_all(self.writer.folder)
        if not left and index is not None:
            say_errors(index)
            return say(f"captured: {self.out} holds all {len(self.packed):,} rows: data=shards path={self.out} trains from it")
        self._find_written()  # count the rows of other processes too
        rows, written = int(self.kept[: len(self.packed)].sum()), sized(sum(self.writer.folder.sizes().values()))
        say(f"captured so far: {rows:,} of {len(self.packed):,} rows, {written}, in {self.out}; more steps go on with it, or "
            f"`python -m data` over the same rows, with taps={self.settings['taps']} out={self.out}")  # fmt: skip
