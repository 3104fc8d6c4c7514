"""Capture: write a target's hidden states of all rows to disk, with one process or many. Any number of processes can resume it.

Process i mod ``world`` writes file i, unless the file exists already. So the processes need not communicate: torchrun may start them,
or a cluster, or a user by hand, one after the other. The last one to finish merges their indexes. ``live.look`` reads the rows
through any ``live.Reader``: a model in this process, or one on a server.

Shape suffixes: B batch, T tokens, D target hidden.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from safetensors.torch import save_file
from torch import Tensor

from headstart.data import index as indexes
from headstart.data import source
from headstart.data.batch import NumberedBatch, TargetBatch, TokenBatch
from headstart.data.folder import Folder, open_folder
from headstart.data.index import ALL, SUPERVISED, File, Index, file_of, files_in_all, files_of, name_of, put_index, rows_of, shards_of
from headstart.data.live import Reader, announced, look
from headstart.data.packed import Packed
from headstart.data.shards import FLAT, Shards
from headstart.data.storage import STORAGES, bytes_of, encode, errors, own_taps
from headstart.heads.errors import UserError, sized
from headstart.heads.files import UNFINISHED, sha256

ROWS, BYTES = 64, 1 << 29  # the most rows and bytes of a shard; a single row may be larger
PIECE = 1024  # rows in which supervised tokens are counted at a time
KILLED = re.compile(rf"\.(index|shard|held-out|row)[\w-]*\.(json|safetensors)\.part|{UNFINISHED.pattern}")  # left by a killed process
Stored = tuple[dict[str, Tensor], dict[str, float]]  # the tensors of some rows, and a storage error for each state


class Writer:
    """Writes files of states into a folder. All processes of a capture have the same ``settings``.

    The index is first written with the first file. So a run that is refused earlier leaves no index to conflict with a later capture.
    """

    def __init__(self, folder: Folder, settings: Index, rank: int = 0, world: int = 1) -> None:
        """Raises UserError if the folder holds another capture or a damaged one."""
        self.folder, self.index = folder, json.loads(json.dumps(settings))
        self.name = indexes.NAME if world == 1 else f"index-{rank:05d}-of-{world:05d}.json"
        folder.make()
        stored = indexes.read_all(folder)
        self.there: dict[int, File] = {}  # files that exist, from any process
        self.own: dict[int, File] = {}  # files in this process's own index
        if stored is not None:
            indexes.check_same(folder, stored, self.index, "choose another folder, or delete this one")
            self.there, sizes = files_of(stored), folder.sizes()
            for file in self.there.values():
                indexes.check_size(folder, file, sizes.get(file["name"]))
        self.missing = [i for i in range(files_in_all(self.index)) if i not in self.there]
        if self.missing and self.name in folder.sizes():  # else another process may be removing the index right now
            self.own = files_of(indexes.read_index(folder, self.name))

    def add(self, number: int, tensors: dict[str, Tensor], errors: dict[str, float]) -> None:
        """Write file ``number``, then the index that lists it. Raises UserError if the disk refuses."""
        name = name_of(self.index, number)
        made: dict[str, Any] = {"name": name, "rows": len(tensors["tokens"])}
        if self.index["final"] == SUPERVISED:
            made["final"] = len(tensors["final"])

        def write(beside: Path) -> None:
            save_file(tensors, beside)
            made.update(bytes=beside.stat().st_size, sha256=sha256(beside), errors=errors)

        with self.writing(name):
            self.folder.put(name, write)
        self.own[number] = self.there[number] = made
        with self.writing(self.name):
            put_index(self.folder, self.name, self.index, self.own)

    def finish(self) -> int:
        """Return how many files other processes still have to write. If there are none, write one index of all files and remove the
        indexes of the single processes.
        """
        with self.folder.waiting(".lock-index", "the index"):
            stored = indexes.read_all(self.folder)
            if missing := files_in_all(self.index) - (0 if stored is None else len(stored["files"])):
                return missing
            assert stored is not None
            names = self.folder.sizes()
            left = [name for name in names if indexes.PART.fullmatch(name) or KILLED.fullmatch(name) or indexes.ROW.fullmatch(name)]
            if indexes.NAME not in names or stored != indexes.read_index(self.folder):
                with self.writing(indexes.NAME):
                    put_index(self.folder, indexes.NAME, self.index, files_of(stored))
            for name in left:
                self.folder.remove(name)
        return 0

    @contextmanager
    def writing(self, name: str) -> Iterator[None]:
        """Inside, an OSError becomes a UserError that names the file."""
        try:
            yield
        except OSError as error:
            why = f"not written ({error}); earlier shards are kept: run again to go on"
            raise UserError(f"{self.folder.of(name)}: {why}") from error


def capture(
    packed: Packed, target: Reader, taps: Collection[int], folder: str | Path, batch_size: int = 8, rows_per_shard: int | None = None, *,
    storage: str = "bf16", held_out: Packed | None = None, rank: int = 0, world: int = 1,
) -> Shards | None:  # fmt: skip
    """Capture the target's states of every row, with a progress bar. Resume an earlier capture, whatever its number of processes.
    ``held_out``: the first rows of it are captured too, for evaluation. This is process ``rank`` of ``world``.

    The final state is stored only at positions that predict a supervised token (at all positions if it is also a tap). The expected size is
    printed before the first file, and the storage error at the end. Returns the complete capture, or None while other processes still
    have files to write. Raises ``UserError`` if the folder holds another capture or another process writes it, if the disk is full, and
    for NaN or infinite states.
    """
    place = open_folder(folder)
    settings = settings_of(packed, target, taps, storage, held_out, rows_per_shard)
    with place.locked(f".lock-{rank}" if rank else ".lock"):
        writer = Writer(place, settings, rank, world)
        mine = [number for number in writer.missing if number % world == rank]
        if mine:
            say_amount(settings, packed, held_out, writer.there.values(), world)
        with ThreadPoolExecutor(1, "writer") as pool:  # the target reads the next rows while the last file is written
            written: Future[None] | None = None
            read = read_files(packed, held_out, target, settings, mine, batch_size)
            for number, made in track(read, description="capture", total=len(mine), disable=not mine or rank > 0):
                if written is not None:
                    written.result()
                written = pool.submit(writer.add, number, *made)
            if written is not None:
                written.result()
        if left := writer.finish():
            print(f"process {rank} of {world} has written its files; the others have {left} of {files_in_all(settings)} to write")
            return None
        shards = Shards(folder, target.fingerprint, taps)
        if mine:
            say_errors(shards.index)
        return shards


def settings_of(
    packed: Packed, target: Reader, taps: Collection[int], storage: str, held_out: Packed | None, rows_per_shard: int | None
) -> Index:
    """The settings that all processes of a capture share. A folder is recognised by them.

    Raises UserError for an unknown ``storage`` and for ``rows_per_shard`` below 1.
    """
    rows, length = len(packed), packed.batch(slice(0, 1)).tokens_BT.shape[1]
    layers, hidden, kept = target.shape.layers, target.shape.hidden_size, sorted({*taps})
    if storage not in STORAGES:
        raise UserError(f"storage must be one of {', '.join(STORAGES)}, found {storage!r}")
    if rows_per_shard is None:
        rows_per_shard = max(1, min(ROWS, BYTES // bytes_of(STORAGES[storage], hidden, len(own_taps(kept, layers)), length, length)))
    if rows_per_shard < 1:
        raise UserError(f"rows_per_shard={rows_per_shard}: choose 1 or more")
    return {
        "version": indexes.VERSION, "target": target.fingerprint, "taps": kept, "layers": layers, "length": length, "hidden": hidden,
        "dtype": STORAGES[storage].name, "rows": rows, "rows_per_shard": rows_per_shard, "data": packed.digest(),
        "final": ALL if layers in kept else SUPERVISED,
        "held_out": None if held_out is None else {"rows": min(source.HELD_OUT_ROWS, len(held_out)), "data": held_out.digest()},
    }  # fmt: skip


# ---- rows ----


def read_files(
    packed: Packed, held_out: Packed | None, target: Reader, settings: Index, numbers: Iterable[int], batch_size: int
) -> Iterator[tuple[int, Stored]]:
    """For each file in ``numbers``: its number, its tensors as stored, and the mean storage error of each state."""
    parts: list[Stored] = []
    for batch in announced(_batches(packed, held_out, settings, numbers, batch_size), target):
        parts += one_by_one(*encoded(look(batch, target, settings["taps"]), settings), settings, batch.rows)
        number = file_of(settings, batch.rows[0])
        if len(parts) == rows_of(settings, number):
            yield number, joined(parts)
            parts = []


def _batches(packed: Packed, held_out: Packed | None, settings: Index, numbers: Iterable[int], batch_size: int) -> Iterator[NumberedBatch]:
    for number in numbers:
        whole, before = (packed, 0) if number < shards_of(settings) else (held_out, settings["rows"])
        assert whole is not None
        first, end = indexes.first_row(settings, number), indexes.first_row(settings, number) + rows_of(settings, number)
        for i in range(first, end, batch_size):
            some = range(i, min(i + batch_size, end))
            yield NumberedBatch.of(whole.batch(slice(some.start - before, some.stop - before)), some)


def encoded(batch: TargetBatch, settings: Index) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors of a batch as stored, and for each state the relative storage error of every token."""
    storage = indexes.storage_of(settings)
    tensors = {
        "tokens": batch.tokens_BT.to(torch.int32),
        "loss_mask": batch.loss_mask_BT,
        "positions": batch.positions_BT.to(torch.int32),
        "documents": batch.documents_BT.to(torch.int32),
    }
    states = {f"tap_{tap}": batch.states[tap] for tap in own_taps(settings["taps"], settings["layers"])}
    states["final"] = batch.final_BTD if settings["final"] == ALL else batch.final_BTD[batch.supervised(0)]
    off = {}
    for name, state in states.items():
        tensors[name], scale = encode(state, storage)
        if scale is not None:
            tensors[f"{name}.scale"] = scale
        off[name] = errors(state, tensors[name], scale)
    return tensors, off


def one_by_one(tensors: dict[str, Tensor], off: dict[str, Tensor], settings: Index, rows: Sequence[int]) -> list[Stored]:
    """Split a batch into rows on the CPU, so that a file of a large target does not fill the device. Each row comes with the sum of its
    tokens' storage errors, for each state. Raises UserError for NaN or infinite states.
    """
    here = {name: tensor.cpu() for name, tensor in tensors.items()}
    flat = TokenBatch(**{field: here[name] for name, field in FLAT.items()})
    counts = flat.supervised(0).sum(1).tolist() if settings["final"] == SUPERVISED else [1] * len(rows)
    parts = {name: tensor.split(counts if name.startswith("final") else 1) for name, tensor in here.items()}
    sums = {name: [part.double().sum() for part in each.cpu().split(counts if name == "final" else 1)] for name, each in off.items()}
    for name, each in sums.items():
        if not all(total.isfinite() for total in each):
            which = f"rows {rows[0]} to {rows[-1]}: the target's {name.replace('_', ' ')}"
            raise UserError(f"{which} holds NaN or infinite values: try target.dtype=float32")
    return [({name: part[i] for name, part in parts.items()}, {name: float(each[i]) for name, each in sums.items()})
            for i in range(len(rows))]  # fmt: skip


def joined(parts: list[Stored]) -> Stored:
    """The tensors of a file, and the mean storage error over the tokens of each state."""
    tensors = {name: torch.cat([part[name] for part, _ in parts]) for name in parts[0][0]}
    tokens = {name: max(1, tensors[name][..., 0].numel()) for name in parts[0][1]}
    return tensors, {name: sum(off[name] for _, off in parts) / count for name, count in tokens.items()}


# ---- what is said ----


def say_amount(settings: Index, packed: Packed, held_out: Packed | None, there: Collection[File], world: int) -> None:
    """Print the size that all files together will have. Called before the first file is written."""
    held = settings["held_out"]["rows"] if held_out is not None else 0
    taps, tokens = len(own_taps(settings["taps"], settings["layers"])), (settings["rows"] + held) * settings["length"]
    final = tokens
    if settings["final"] == SUPERVISED:
        final = supervised(packed, len(packed)) + (supervised(held_out, held) if held_out is not None else 0)
    whole = bytes_of(indexes.storage_of(settings), settings["hidden"], taps, tokens, final)
    done = sum(file["bytes"] for file in there)
    source.say(
        f"{settings['rows']:,} rows of {settings['length']:,} tokens{f', and {held} held out' * (held > 0)}; of each token {taps} "
        f"tap{'s' * (taps != 1)}, of {final / tokens:.0%} the final state, as {settings['dtype']}: {whole / tokens:,.0f} bytes a token, "
        f"{sized(whole)} in {files_in_all(settings)} files{f', {sized(done)} of it there already' * (done > 0)}"
        f"{f', by {world} processes' * (world > 1)}"
    )


def supervised(packed: Packed, rows: int) -> int:
    """The number of positions in the first ``rows`` rows that predict a supervised token."""
    return sum(int(packed.batch(slice(i, min(i + PIECE, rows))).supervised(0).sum()) for i in range(0, rows, PIECE))


def say_errors(index: Index) -> None:
    """Print how far the stored states are from the target's states. Called at the end of a capture."""
    found = mean_errors(index)
    each = ", ".join(f"{name.replace('_', ' ')} {error:.2%}" for name, error in found.items())
    source.say(f"stored as {index['dtype']}, the mean token differs from what the target said by (of its norm): {each}")


def mean_errors(index: Index) -> dict[str, float]:
    """The mean storage error of each state over all of its stored tokens, relative to the norm of the state."""
    sums: dict[str, float] = {}
    counts: dict[str, float] = {}
    for file in index["files"]:
        for name, error in file.get("errors", {}).items():
            count = file.get("final", file["rows"] * index["length"]) if name == "final" else file["rows"] * index["length"]
            sums[name], counts[name] = sums.get(name, 0.0) + error * count, counts.get(name, 0.0) + count
    return {name: total / max(1.0, counts[name]) for name, total in sums.items()}
