"""The cache of tokenised documents: Arrow files that many processes make once, and every training process maps into memory.

A folder of the cache is named after its key, a digest of everything that determines its tokens: rows, tokenizer, template and settings.
It holds ``tokens*.arrow`` (columns ``input_ids``, ``loss_mask``, ``row``, and ``why``: the reason for leaving a row out, or null),
``index.json``, and ``rows-LENGTH-SEED*`` (the pieces of documents that make up each packed row). One process makes the folder while the
others wait for its lock. The folder is put in place when it is complete.

Shape suffixes: P pieces of documents, R packed rows.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from accelerate.utils import patch_environment
from numpy.typing import NDArray

from headstart.data.lock import POLL, waiting
from headstart.data.pack import check_length, plan
from headstart.data.packed import Document, Documents, Planned, sizes_of
from headstart.data.table import Table
from headstart.heads.errors import UserError
from headstart.heads.files import cache_folder, put, put_folder, put_text, sealed, sha256, unfinished
from headstart.heads.parent import forks_end_with_it
from headstart.heads.stored import LARGEST_INDEX, read_json
from headstart.inference.decoding.placement import is_main

VERSION = 5  # raise it when the same rows give other documents than before
MAPPED = 1 << 28  # bytes: after reading about this many, a process releases its mapped pages
AROUND = 1 << 20  # bytes: an estimate of what Linux maps additionally for a document, since it maps large pages of its cache whole
BATCH = 256  # rows that a process tokenises at a time
UNSEEN = 600.0  # seconds in which the first process must begin to make what the others wait for, on a file system without locks
SHARE = 1024  # rows per process: for fewer another process does not pay

Made = Document | str  # a row's document, or the reason why it has none
Encode = Callable[[list[Any]], list[Made]]  # from rows (data/rows.py) to what is made of each


# ---- reading ----


class Mapped:
    """The documents of Arrow files, read by memory map. Pages are released regularly, so that a process's memory does not grow with the
    amount it has read. ``left_out``: row and reason of the first three rows that have no document.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        import pyarrow as pa

        self._maps, self._chunks, sizes, rows = list[mmap.mmap](), list[Any](), list[NDArray[Any]](), list[NDArray[Any]]()
        self.left_out = list[tuple[int, str]]()
        for path in files:
            with path.open("rb") as file:
                self._maps.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            for batch in pa.ipc.open_stream(pa.py_buffer(self._maps[-1])):
                ids, mask, row, why = (batch.column(batch.schema.get_field_index(name)) for name in COLUMNS)
                offsets = ids.offsets.to_numpy()
                self._chunks.append((offsets, ids.values.to_numpy(), mask.offsets.to_numpy(), mask.values))
                used = np.array(why.is_null().to_numpy(zero_copy_only=False))
                sizes.append(np.where(used, np.diff(offsets), -1))
                rows.append(row.to_numpy())
                self.left_out += [(int(rows[-1][i]), why[i].as_py()) for i in np.flatnonzero(~used)[: 3 - len(self.left_out)]]
        self._first = np.cumsum([0, *map(len, sizes)])  # the first row of each chunk
        of, self.rows = (np.concatenate([np.empty(0, np.int64), *parts]) for parts in (sizes, rows))
        self._kept = np.flatnonzero(of >= 0)
        self.sizes, self.rows, self._read = of[self._kept], self.rows[self._kept], 0

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, i: int) -> Document:
        if not 0 <= i < len(self):
            raise IndexError(i)
        place = int(self._kept[i])
        chunk = int(np.searchsorted(self._first, place, side="right")) - 1
        at = place - self._first[chunk]
        offsets, ids, of_mask, mask = self._chunks[chunk]
        start, end, of = offsets[at], offsets[at + 1], of_mask[at]
        self._read += 4 * int(end - start) + AROUND
        if self._read > MAPPED:
            self.release()
        return Document(ids[start:end], mask[int(of) : int(of + end - start)].to_numpy(zero_copy_only=False))

    def release(self) -> None:
        """Release all mapped pages from this process's memory. Later reads load them again from the file or the system's page cache."""
        self._read = 0
        for each in self._maps:
            each.madvise(mmap.MADV_DONTNEED)


class Chosen:
    """A selection of documents: ``which`` holds their numbers, in the order of the selection."""

    def __init__(self, documents: Documents, which: NDArray[np.int64]) -> None:
        self.documents, self.which, self.sizes = documents, which, sizes_of(documents)[which]

    def __len__(self) -> int:
        return len(self.which)

    def __getitem__(self, i: int) -> Document:
        return self.documents[int(self.which[i])]


COLUMNS = ("input_ids", "loss_mask", "row", "why")


def read_index(folder: Path) -> dict[str, Any] | None:
    """The index of a folder of the cache, or None if the folder is missing, incomplete or of another version."""
    try:
        index = read_json(folder / "index.json", LARGEST_INDEX)
        files = index["files"]
        whole = index == sealed(index) and all((folder / name).stat().st_size == size for name, size in files.items())
    except (UserError, OSError, KeyError, TypeError, AttributeError):
        return None
    # The index names its folder: a renamed folder may hold the tokens of another template. (Indexes of earlier versions lack the name.)
    return index if whole and index.get("version") == VERSION and index.get("folder", folder.name) == folder.name else None


# ---- making ----


def folder_of(about: dict[str, Any], cache: str | None) -> Path:
    """The folder of the cache for the documents that ``about`` describes. ``cache``: the user's place for the cache (None: the default)."""
    place = Path(cache) if cache else cache_folder()
    key = hashlib.sha256(json.dumps({**about, "version": VERSION}, sort_keys=True).encode()).hexdigest()
    return place.absolute() / key[:32]


def tokenised(
    folder: Path, table: Callable[[Path], Table], encode: Encode, check: Callable[[Mapped, Table], None], workers: int | None
) -> tuple[Mapped, dict[str, Any]]:
    """The documents in ``folder`` and its index. If they do not exist yet, ``workers`` processes (None: one for each core) make them.

    ``table(beside)`` gives the rows, see ``Origin.table``. ``encode`` makes documents of them. ``check`` inspects these before the folder
    is put in place. Raises UserError as these do, and if the disk refuses.
    """
    with only_one(folder, lambda: read_index(folder) is not None) as first:
        if first:
            put_folder(folder, partial(_make, name=folder.name, table=table, encode=encode, check=check, workers=workers))
    index = read_index(folder)
    if index is None:
        raise UserError(f"{folder} is not what was written there: delete it")
    return Mapped([folder / name for name in index["files"]]), index


@contextmanager
def only_one(folder: Path, there: Callable[[], bool]) -> Iterator[bool]:
    """Yields whether this process has to make what is missing (``there()`` is false). One process does, the others wait for it: the one
    that has the lock, or on a file system without locks the first one of the run. Raises UserError if the cache cannot be written, or if
    that first one makes something else.
    """
    if there():
        yield False
        return
    try:
        with waiting(folder.parent / f".{folder.name}.lock", "data.cache", "tokenised data") as held:
            seen = time.monotonic()
            while not (held or is_main() or there()):  # else the processes of a run would remove each other's unfinished files
                if folder.exists() or unfinished(folder).exists():
                    seen = time.monotonic()
                elif time.monotonic() - seen > UNSEEN:
                    raise UserError("the first process makes other tokens: give all processes the same data (rows) and the same settings")
                time.sleep(POLL)
            yield not there()
    except OSError as error:
        raise UserError(f"data.cache={folder.parent} cannot be written ({error.strerror or error}): choose another folder") from error


def _make(folder: Path, *, name: str, table: Callable[[Path], Table], encode: Encode, check: Callable[[Mapped, Table], None],
          workers: int | None) -> None:  # fmt: skip
    """Tokenise all rows into ``folder``, which is temporary. ``name``: its final name."""
    spool = folder / "lines"
    rows = table(spool)
    try:
        _map(folder, rows, encode, workers)
        files = {path.name: path.stat().st_size for path in sorted(folder.glob("tokens*.arrow"))}
        made = Mapped([folder / file for file in files])
        first = [f"{rows[row].where}: {reason}" for row, reason in made.left_out]
        left_out = {"count": len(rows) - len(made), "of": len(rows), "first": first}
        check(made, rows)
    finally:
        rows.close()
        spool.unlink(missing_ok=True)
    about = {"version": VERSION, "folder": name, "documents": len(made), "tokens": int(made.sizes.sum())}
    index = about | {"files": files, "left_out": left_out}
    put_text(folder / "index.json", json.dumps(sealed(index)))


def _map(folder: Path, table: Table, encode: Encode, workers: int | None) -> None:
    import datasets

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = min(workers or cores, -(-len(table) // SHARE)) or 1
    features = datasets.Features({
        "input_ids": datasets.Sequence(datasets.Value("int32")), "loss_mask": datasets.Sequence(datasets.Value("bool")),
        "row": datasets.Value("int64"), "why": datasets.Value("string"),
    })  # fmt: skip
    numbers = datasets.Dataset.from_dict({"row": np.arange(len(table))})
    with _quiet(datasets), forks_end_with_it():
        try:
            numbers.map(
                _columns, batched=True, batch_size=BATCH, fn_kwargs={"table": table, "encode": encode},
                num_proc=count if count > 1 else None, features=features, cache_file_name=str(folder / "tokens.arrow"),
                load_from_cache_file=False, new_fingerprint=folder.name.strip("."), desc=f"tokenise ({count} processes)",
            )  # fmt: skip
        except RuntimeError as error:
            if "subprocesses has abruptly died" not in str(error):
                raise
            raise UserError(f"one of {count} processes that tokenised was ended, by the system perhaps: give data.workers less") from None


def _columns(batch: dict[str, Any], table: Table, encode: Encode) -> dict[str, Any]:
    """The columns that are stored for the rows whose numbers ``batch`` holds."""
    made = encode([table[i] for i in batch["row"]])
    documents = [(np.empty(0, np.int32), np.empty(0, np.bool_)) if isinstance(one, str) else one for one in made]
    ids, masks = ([document[k] for document in documents] for k in (0, 1))
    return {"input_ids": ids, "loss_mask": masks, "row": batch["row"], "why": [one if isinstance(one, str) else None for one in made]}


@contextmanager
def _quiet(datasets: Any) -> Iterator[None]:
    """Inside, progress bars appear only on terminals, and tokenizers start no threads (they warn about threads in forked processes)."""
    shown, was_on = sys.stderr.isatty(), datasets.is_progress_bar_enabled()
    (datasets.enable_progress_bars if shown else datasets.disable_progress_bars)()
    try:
        with patch_environment(TOKENIZERS_PARALLELISM="false"):
            yield
    finally:
        (datasets.enable_progress_bars if was_on else datasets.disable_progress_bars)()


# ---- packed rows ----


def packed(folder: Path, documents: Documents, length: int, context: int | None, seed: int) -> Planned:
    """``pack.plan`` of the training ``documents`` in ``folder`` of the cache. The plan is kept in the folder.

    Raises UserError for a ``length`` that does not suit the ``context``, for documents without anything to learn, and for a damaged plan.
    """
    check_length(length, context)
    name = f"rows-{length}-{seed}" if isinstance(documents, Chosen) else f"rows-{length}-{seed}-all"  # -all: none is held out
    with only_one(folder, lambda: (folder / f"{name}.json").exists()) as first:
        if first:
            _keep_plan(folder, name, plan(documents, length, context, seed))
    index, path = read_json(folder / f"{name}.json", LARGEST_INDEX), folder / f"{name}.npy"
    if index != sealed(index) or sha256(path) != index.get("plan"):
        with suppress(OSError):
            (folder / f"{name}.json").unlink()
        raise UserError(f"{path} is damaged: run the same command again, which packs the rows again")
    table = np.load(path, mmap_mode="r", allow_pickle=False)
    pieces, first_R = table[: index["pieces"] * 3].reshape(-1, 3), table[index["pieces"] * 3 :]
    return Planned(documents, pieces, first_R, length, index["dropped"], index["unsupervised"], index["digest"])


def _keep_plan(folder: Path, name: str, rows: Planned) -> None:
    path = folder / f"{name}.npy"

    def write(beside: Path) -> None:
        with beside.open("wb") as file:
            np.save(file, np.concatenate([rows.pieces_P3.reshape(-1), rows.first_R]), allow_pickle=False)

    put(path, write)
    about = {"digest": rows.digest(), "pieces": len(rows.pieces_P3), "dropped": rows.dropped, "unsupervised": rows.unsupervised}
    put_text(folder / f"{name}.json", json.dumps(sealed(about | {"plan": sha256(path)})))
