"""Captured target states, read from disk: a drafter trains on them without running the target.

``data/capture.py`` writes the files, ``data/index.py`` describes their format. Each file is checked against its SHA-256 when it is first
opened. Reading, hashing and fetching from remote storage run in background threads. Training receives the stored numbers (in pinned
memory for a GPU) and decodes them to states on its own device.

Shape suffixes: B rows of a batch, T tokens of a row, F tokens of the batch that have a final state, D target hidden.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headstart.data import index as indexes
from headstart.data import prompts, stdlib
from headstart.data.batch import TargetBatch, TokenBatch
from headstart.data.folder import Elsewhere, open_folder
from headstart.data.index import ALL, BUFFER, HELD_OUT, check_same, check_size, files_in_all, open_file, shards_of
from headstart.data.packed import places
from headstart.data.rows import file_rows
from headstart.data.source import FirstRows, Source
from headstart.data.storage import decode, own_taps
from headstart.heads.errors import UserError
from headstart.heads.files import sealed
from headstart.inference.decoding.info import TargetInfo

OPEN = 2 * BUFFER + 1  # files kept open: the current ones, the next ones, and the held-out rows
AHEAD = 2  # batches that are read before they are needed
CAPTURED = True  # as a source of data, it needs no pass of the target
FLAT = {"tokens": "tokens_BT", "loss_mask": "loss_mask_BT", "positions": "positions_BT", "documents": "documents_BT"}


@dataclass
class StoredBatch(TokenBatch):
    """Rows with the target's states as stored."""

    stored: dict[str, Tensor]  # named as in the files
    final_F: Tensor | None  # int64, the tokens with a final state, as indices into the flattened [B * T] batch; None: all
    taps: tuple[int, ...]
    layers: int  # layers of the target; the tap of this number is the final state

    def states_on(self, device: torch.device, dtype: torch.dtype) -> TargetBatch:
        """The decoded states [B, T, D] in ``dtype`` on ``device``. The final state is 0 at tokens without a stored one."""

        def state(name: str) -> Tensor:
            scale = self.stored.get(f"{name}.scale")
            numbers = self.stored[name].to(device, non_blocking=True)
            return decode(numbers, None if scale is None else scale.to(device, non_blocking=True), dtype)

        tokens = self.each(lambda x: x.to(device, non_blocking=True))
        final = state("final")
        if self.final_F is not None:
            whole = final.new_zeros(self.tokens_BT.numel(), final.shape[-1])
            final = whole.index_copy_(0, self.final_F.to(device, non_blocking=True), final).view(*self.tokens_BT.shape, -1)
        states = {tap: final if tap == self.layers else state(f"tap_{tap}") for tap in self.taps}
        return TargetBatch(**tokens, states=states, final_BTD=final)

    def pinned(self) -> StoredBatch:
        """The same batch in pinned memory, from which copies to a GPU are asynchronous."""
        final_F = None if self.final_F is None else self.final_F.pin_memory()
        stored = {name: x.pin_memory() for name, x in self.stored.items()}
        return StoredBatch(**self.each(Tensor.pin_memory), stored=stored, final_F=final_F, taps=self.taps, layers=self.layers)


@dataclass
class _File:
    """An open file. ``starts``: the index of each row's first final state, and their total at the end (None: every token has one)."""

    tensors: Any
    starts: NDArray[np.int64] | None


class Shards:
    """Captured states, read by memory map."""

    def __init__(self, folder: str | Path, target: dict[str, Any] | None = None, taps: Collection[int] | None = None) -> None:
        """``target``: the fingerprint that the shards must have (None: any). ``taps``: the taps to read (None: all).

        Raises ``UserError`` that names the wrong key or file: for another target, a missing tap, an incomplete or a damaged capture.
        """
        self.folder = open_folder(folder)
        self.index = indexes.read(self.folder)
        if target is not None:
            check_same(self.folder, self.index, {"target": json.loads(json.dumps(target))}, "these are another target's outputs")
        self.check_taps(taps or ())
        self.taps = tuple(sorted(set(self.index["taps"] if taps is None else taps)))
        self.files = self.index["files"]
        if len(self.files) < files_in_all(self.index):
            have = sum(file["rows"] for file in self.files if file["name"] != HELD_OUT)
            what = f"only {have} of {self.index['rows']}" if have < len(self) else "no held-out"
            raise UserError(f"{self.folder}: {what} rows are captured: run the same capture again to go on")
        sizes = self.folder.sizes()
        for file in self.files:
            check_size(self.folder, file, sizes.get(file["name"]))
        self._open: dict[int, Future[_File]] = {}  # by file number, the most recently used last
        self._verified: set[int] = set()
        self._opener, self._lock = ThreadPoolExecutor(1, "shards"), Lock()

    @property
    def layers(self) -> int:
        return int(self.index["layers"])

    @property
    def whole(self) -> bool:
        """Whether every token has its final state stored."""
        return bool(self.index.get("final", ALL) == ALL)

    def __len__(self) -> int:
        return int(self.index["rows"])

    def check_taps(self, taps: Collection[int]) -> None:
        """Raises ``UserError`` for a tap that was not captured."""
        if missing := sorted({*taps} - {*self.index["taps"], *([self.layers] if self.whole else [])}):
            every = str(sorted({*self.index["taps"], *missing})).replace(" ", "")
            raise UserError(f"{self.folder}: tap {missing[0]} was not captured (only {self.index['taps']}): capture into another folder, "
                            f"with `python -m data ... taps={every}` for both drafters, or with head= of this one alone")  # fmt: skip

    def digest(self) -> str:
        """The SHA-256 of the index, which identifies the data: the index holds the checksum of every shard."""
        return str(sealed(self.index)["sha256"])

    # ---- files ----

    def prepare(self, number: int) -> Future[_File]:
        """Open a file in a thread, if it is not open yet: fetch it and check its hash. Returns the future of the open file.

        The future raises UserError for a missing or damaged file.
        """
        with self._lock:
            if (found := self._open.pop(number, None)) is None:
                while len(self._open) >= OPEN:
                    self._open.pop(next(iter(self._open)))
                found = self._opener.submit(self._opened, number)
            self._open[number] = found
            return found

    def _opened(self, number: int) -> _File:
        file, fresh = self.files[number], number not in self._verified or isinstance(self.folder, Elsewhere)
        check_size(self.folder, file, self.folder.size(file["name"]))
        tensors = open_file(self.folder, self.index, file, digest=fresh)
        self._verified.add(number)
        if self.whole:
            return _File(tensors, None)
        counts = TokenBatch(**{field: tensors.get_tensor(name) for name, field in FLAT.items()}).supervised(0).sum(1)
        if (found := int(counts.sum())) != file["final"]:
            raise UserError(f"{self.folder.of(file['name'])}: it has {file['final']} final states for {found} tokens: capture again")
        return _File(tensors, np.concatenate([[0], np.cumsum(counts.numpy())]))

    def stored(self, rows: NDArray[np.int64] | Sequence[int], within: int | None = None, states: bool = True) -> StoredBatch:
        """The rows with these numbers. ``within``: the numbers count from 0 within this file. Without ``states``, only tokens are read."""
        per_shard = self.index["rows_per_shard"]
        wanted = [*(f"tap_{tap}" for tap in own_taps(self.taps, self.layers)), "final"] if states else []
        taken: dict[str, list[Tensor]] = {name: [] for name in [*FLAT, *wanted, *(f"{name}.scale" for name in wanted)]}
        for row in np.asarray(rows).tolist():
            number, place = (row // per_shard, row % per_shard) if within is None else (within, row)
            file = self.prepare(number).result()
            for name in taken.keys() & {*file.tensors.keys()}:
                part = slice(place, place + 1)
                if file.starts is not None and name.startswith("final"):
                    part = slice(int(file.starts[place]), int(file.starts[place + 1]))
                taken[name].append(file.tensors.get_slice(name)[part])
        found = {name: torch.cat(tensors) for name, tensors in taken.items() if tensors}
        flat = {FLAT[name]: found.pop(name) for name in FLAT}
        tokens = TokenBatch(**{name: x if x.dtype == torch.bool else x.long() for name, x in flat.items()})
        final_F = None if self.whole else tokens.supervised(0).flatten().nonzero()[:, 0]
        return StoredBatch(**vars(tokens), stored=found, final_F=final_F, taps=self.taps, layers=self.layers)

    def batch(self, rows: NDArray[np.int64] | list[int]) -> TargetBatch:
        """The rows with these numbers, with states in bf16 on the CPU."""
        return self.stored(rows).states_on(torch.device("cpu"), torch.bfloat16)

    # ---- streams ----

    def order(self, epoch: int, seed: int) -> NDArray[np.int64]:
        """The row numbers of an epoch, in its order."""
        return indexes.order(self.index, epoch, seed)

    def stored_stream(
        self, batch_size: int, seed: int = 0, start_step: int = 0, rank: int = 0, world: int = 1, *, pin: bool = False
    ) -> Iterator[StoredBatch]:
        """Endless batches. Batch k depends only on (seed, k, rank, world), so resuming needs only the step. The states stay encoded, and a
        thread reads them. Files are opened before their first row is needed. ``pin``: return pinned memory.
        """

        def made() -> Iterator[StoredBatch]:
            per_shard = self.index["rows_per_shard"]
            line = places(lambda epoch: self.order(epoch, seed), len(self), batch_size, start_step, rank, world)
            lead = BUFFER * per_shard // (batch_size * world)  # batches: the next buffer's files open while this one is trained on
            coming: deque[NDArray[np.int64]] = deque()
            for rows in line:
                coming.append(rows)
                for number in dict.fromkeys((rows // per_shard).tolist()):
                    self.prepare(number)
                if len(coming) > lead:
                    batch = self.stored(coming.popleft())
                    yield batch.pinned() if pin else batch

        return ahead(made())


T = TypeVar("T")
_END = object()


def ahead(made: Iterator[T]) -> Iterator[T]:
    """Yield the same items, with ``AHEAD`` of them made by a thread before they are needed. An exception is raised in its item's place."""
    with ThreadPoolExecutor(1, "ahead") as pool:
        try:
            waiting = deque(pool.submit(next, made, _END) for _ in range(AHEAD))
            while (item := waiting.popleft().result()) is not _END:
                waiting.append(pool.submit(next, made, _END))
                yield item  # type: ignore[misc]
        finally:
            pool.shutdown(cancel_futures=True)


# ---- as a source of data ----


def check(*, path: str, prompts_file: str | None, on_long: str) -> None:
    """Raises UserError for a folder without a capture, or a prompts file that cannot be read."""
    indexes.read(open_folder(path))
    if prompts_file is not None:
        next(file_rows(prompts_file, "data.prompts_file"), None)


def open(target: TargetInfo, *, length: int, seed: int, path: str, prompts_file: str | None, on_long: str = "error") -> Source:
    """The rows captured in the folder ``path``. Prompts are those of ``prompts_file``, else held-out ones of the standard library.

    Raises UserError for a capture of another target or length, and for an incomplete or damaged one.
    """
    whose = target.fingerprint
    shards = Shards(path, whose)
    if (captured := shards.index["length"]) != length:
        raise UserError(f"{path} holds rows of {captured} tokens, trainer.length is {length}: set trainer.length={captured}")

    def stream(taps: Collection[int], *place: int) -> Iterator[TokenBatch]:
        return Shards(path, whose, taps).stored_stream(*place, pin=target.device.type == "cuda")

    def observe(batch: TokenBatch, taps: Collection[int]) -> TargetBatch:
        assert isinstance(batch, StoredBatch)
        shards.check_taps(taps)
        batch.taps = tuple(sorted(taps))
        return batch.states_on(target.device, target.dtype)

    def counts() -> Tensor:
        total = torch.zeros(target.shape.vocab_size, dtype=torch.int64)
        for start in range(0, len(shards), 64):
            stored = shards.stored(list(range(start, min(start + 64, len(shards)))), states=False)
            total += torch.bincount(stored.tokens_BT[stored.loss_mask_BT], minlength=len(total))
        return total

    def ask(count: int, new: int) -> list[list[int]]:
        if prompts_file is None:
            return stdlib.asked(target, count, seed)
        keys = ("data.prompts_file", "decode.new_tokens", "data.on_long")
        return prompts.fitting(prompts_file, count, target, new, on_long, keys=keys)

    held = shards.index.get("held_out")
    held_out = None if held is None else FirstRows(int(held["rows"]), partial(shards.stored, within=shards_of(shards.index)))
    return Source(stream, observe, counts, held_out, ask, shards.digest, len(shards))
