"""Tokenised documents on disk: Arrow files that are made once, by many processes, and mapped by every process that trains with them.

A folder of the cache is called by its key, a digest of all that its tokens follow from: the rows, the tokenizer, the template, the
settings. It holds ``tokens*.arrow`` (columns ``input_ids``, ``loss_mask``, ``row``, ``why``: that a row is left out, and why),
``index.json``, and ``rows-LENGTH-SEED``, which pieces of documents make up each packed row. One process makes it, the others wait for
its lock; it is put in place when it is whole.

Shape suffixes: P pieces of documents, R packed rows.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headstart.data.lock import waiting
from headstart.data.pack import check_length, plan
from headstart.data.packed import Document, Documents, Planned, sizes_of
from headstart.data.table import Table
from headstart.heads.errors import UserError
from headstart.heads.files import put, put_folder, put_text, sealed, sha256
from headstart.heads.parent import forks_end_with_it
from headstart.heads.stored import LARGEST_INDEX, read_json

VERSION = 2  # raised where rows become other documents than before
MAPPED = 1 << 28  # bytes of the files that a process keeps mapped, at most, of what it has read
AROUND = 1 << 20  # bytes that Linux maps, about, to read a document: the large pages of its cache whole
BATCH = 256  # rows that a process tokenises at a time
SHARE = 1024  # rows that are worth a process of their own

Made = Document | str  # of a row: its document, or why it has none
Encode = Callable[[list[Any]], list[Made]]  # of rows (data/rows.py)


# ---- reading ----


class Mapped:
    """Documents of Arrow files, read by memory map. What was read is released again and again, so that the memory of a process does not
    grow with what it has seen.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        import pyarrow as pa

        self._maps, self._chunks, sizes, rows = list[mmap.mmap](), list[Any](), list[NDArray[Any]](), list[NDArray[Any]]()
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
        self._first = np.cumsum([0, *map(len, sizes)])  # of each chunk
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
        """Take everything that is mapped out of this process's memory. It is read again from the file, or from the system's cache."""
        self._read = 0
        for each in self._maps:
            if hasattr(mmap, "MADV_DONTNEED"):
                each.madvise(mmap.MADV_DONTNEED)


class Chosen:
    """Some of the documents, in an order of their own."""

    def __init__(self, documents: Documents, which: NDArray[np.int64]) -> None:
        self.documents, self.which, self.sizes = documents, which, sizes_of(documents)[which]

    def __len__(self) -> int:
        return len(self.which)

    def __getitem__(self, i: int) -> Document:
        return self.documents[int(self.which[i])]


COLUMNS = ("input_ids", "loss_mask", "row", "why")


def read_index(folder: Path) -> dict[str, Any] | None:
    """What a folder of the cache holds; None where it is not there or not whole."""
    try:
        index = read_json(folder / "index.json", LARGEST_INDEX)
        files = index["files"]
        whole = index == sealed(index) and all((folder / name).stat().st_size == size for name, size in files.items())
    except (UserError, OSError, KeyError, TypeError, AttributeError):
        return None
    # where it was made; one that was renamed holds the tokens of another template, perhaps (earlier versions do not say it)
    return index if whole and index.get("version") == VERSION and index.get("folder", folder.name) == folder.name else None


# ---- making ----


def folder_of(about: dict[str, Any], cache: str | None) -> Path:
    """The folder of the cache for what ``about`` describes. ``cache``: the user's own place for it."""
    place = cache or os.environ.get("HEADSTART_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "headstart"
    key = hashlib.sha256(json.dumps({**about, "version": VERSION}, sort_keys=True).encode()).hexdigest()
    return Path(place).absolute() / key[:32]


def tokenised(
    folder: Path, table: Callable[[Path], Table], encode: Encode, check: Callable[[Mapped, Table], None], workers: int | None
) -> tuple[Mapped, dict[str, Any]]:
    """The documents in ``folder``, and its index: made now by ``encode``, unless they are there.

    ``table(beside)``: the rows, see ``Origin.table``; ``check`` looks at what was made before it counts. Raises UserError as these do,
    and where the disk refuses.
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
    """Yields whether this process has to make what is missing (``there()`` is false). One process does; the others wait for it."""
    if there():
        yield False
        return
    try:
        with waiting(folder.parent / f".{folder.name}.lock", "data.cache", "tokenised data"):
            yield not there()
    except OSError as error:
        raise UserError(f"data.cache={folder.parent} cannot be written ({error.strerror or error}): choose another folder") from error


def _make(folder: Path, *, name: str, table: Callable[[Path], Table], encode: Encode, check: Callable[[Mapped, Table], None],
          workers: int | None) -> None:  # fmt: skip
    """``name``: what the folder will be called."""
    spool = folder / "lines"
    rows = table(spool)
    try:
        _map(folder, rows, encode, workers)
        files = {path.name: path.stat().st_size for path in sorted(folder.glob("tokens*.arrow"))}
        left_out = _left_out(folder, files, rows)
        made = Mapped([folder / file for file in files])
        check(made, rows)
    finally:
        rows.close()
        spool.unlink(missing_ok=True)
    about = {"version": VERSION, "folder": name, "documents": len(made), "tokens": int(made.sizes.sum())}
    index = about | {"files": files, "left_out": left_out}
    put_text(folder / "index.json", json.dumps(sealed(index)))


def _map(folder: Path, table: Table, encode: Encode, workers: int | None) -> None:
    try:
        import datasets
    except ImportError as error:
        raise UserError("what is large is tokenised by the library of Hugging Face datasets: `pip install datasets`") from error
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
                _Columns(table, encode), batched=True, batch_size=BATCH, num_proc=count if count > 1 else None, features=features,
                cache_file_name=str(folder / "tokens.arrow"), load_from_cache_file=False, new_fingerprint=folder.name.strip("."),
                desc=f"tokenise ({count} processes)",
            )  # fmt: skip
        except RuntimeError as error:
            if "subprocesses has abruptly died" not in str(error):
                raise
            raise UserError(f"one of {count} processes that tokenised was ended, by the system perhaps: give data.workers less") from None


class _Columns:
    """From numbers of rows to the columns that are stored of them."""

    def __init__(self, table: Table, encode: Encode) -> None:
        self.table, self.encode = table, encode

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        made = self.encode([self.table[i] for i in batch["row"]])
        documents = [(np.empty(0, np.int32), np.empty(0, np.bool_)) if isinstance(one, str) else one for one in made]
        ids, masks = ([document[k] for document in documents] for k in (0, 1))
        return {"input_ids": ids, "loss_mask": masks, "row": batch["row"], "why": [one if isinstance(one, str) else None for one in made]}


@contextmanager
def _quiet(datasets: Any) -> Iterator[None]:
    """Inside, a progress bar is shown on terminals alone, and tokenizers start no threads (they warn of them in forked processes)."""
    shown, before = sys.stderr.isatty(), os.environ.get("TOKENIZERS_PARALLELISM")
    was_on = datasets.is_progress_bar_enabled()
    (datasets.enable_progress_bars if shown else datasets.disable_progress_bars)()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        (datasets.enable_progress_bars if was_on else datasets.disable_progress_bars)()
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before


def _left_out(folder: Path, files: dict[str, int], table: Table) -> dict[str, Any]:
    """How many rows have no document (``count``), of how many (``of``), and for the ``first`` three where they stand and why."""
    import pyarrow as pa

    count, first = 0, list[str]()
    for name in files:
        with pa.memory_map(str(folder / name)) as source:
            for batch in pa.ipc.open_stream(source):
                why = batch.column(batch.schema.get_field_index("why"))
                count += len(why) - why.null_count
                if why.null_count < len(why) and len(first) < 3:
                    reasons = zip(batch.column(batch.schema.get_field_index("row")).to_pylist(), why.to_pylist(), strict=True)
                    first += [f"{table[row].where}: {reason}" for row, reason in reasons if reason is not None][: 3 - len(first)]
    return {"count": count, "of": len(table), "first": first}


# ---- packed rows ----


class Stored(Planned):
    """Planned rows whose digest is known."""

    def __init__(self, known: str, *planned: Any) -> None:
        super().__init__(*planned)
        self.known = known

    def digest(self) -> str:
        return self.known


def packed(folder: Path, documents: Documents, length: int, context: int | None, seed: int) -> Stored:
    """``pack.plan`` of the training ``documents`` of the cache's ``folder``, which keeps it too."""
    check_length(length, context)
    name = f"rows-{length}-{seed}" if isinstance(documents, Chosen) else f"rows-{length}-{seed}-all"  # what is held out is elsewhere
    with only_one(folder, lambda: (folder / f"{name}.json").exists()) as first:
        if first:
            _keep_plan(folder, name, plan(documents, length, context, seed))
    index, path = read_json(folder / f"{name}.json", LARGEST_INDEX), folder / f"{name}.npy"
    if index != sealed(index) or sha256(path) != index.get("plan"):
        with suppress(OSError):
            (folder / f"{name}.json").unlink()
        raise UserError(f"{path} is damaged: run the same again, to pack anew")
    table = np.load(path, mmap_mode="r", allow_pickle=False)
    pieces, first_R = table[: index["pieces"] * 3].reshape(-1, 3), table[index["pieces"] * 3 :]
    return Stored(index["digest"], documents, pieces, first_R, length, index["dropped"], index["unsupervised"])


def _keep_plan(folder: Path, name: str, rows: Planned) -> None:
    path = folder / f"{name}.npy"

    def write(beside: Path) -> None:
        with beside.open("wb") as file:
            np.save(file, np.concatenate([rows.pieces_P3.reshape(-1), rows.first_R]), allow_pickle=False)

    put(path, write)
    about = {"digest": rows.digest(), "pieces": len(rows.pieces_P3), "dropped": rows.dropped, "unsupervised": rows.unsupervised}
    put_text(folder / f"{name}.json", json.dumps(sealed(about | {"plan": sha256(path)})))
