"""What the target said, on disk: a drafter can be trained again without the target's passes.

A folder holds ``index.json`` and ``shard-00000.safetensors`` and so on: tokens, loss mask, positions, documents, one
bf16 tensor per tap, and the state after the final norm. Each shard is written under another name and put in place;
the index that names it follows, with its SHA-256 and a SHA-256 of its own. So what the index names is complete, whatever
happened, and writing can go on there; what was changed later is refused.

Shape suffixes: R rows, T tokens of a row, D target hidden.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from headstart.data import prompts, stdlib
from headstart.data.batch import TargetBatch, TokenBatch
from headstart.data.pack import places
from headstart.data.rows import file_rows
from headstart.data.source import Source
from headstart.heads.errors import UserError
from headstart.heads.files import put, sealed, sha256
from headstart.heads.stored import LARGEST_INDEX, read_json
from headstart.inference.decoding.info import TargetInfo

VERSION = 1
BUFFER = 4  # shards that are read at a time: rows are shuffled among so many
OPEN = 2 * BUFFER  # shards kept open
CAPTURED = True  # as a source of data, it needs no pass of the target
_NAME = re.compile(r"shard-\d{5}\.safetensors")
_SETTINGS = {"version": int, "target": dict, "taps": list, "layers": int, "length": int, "hidden": int}
_SETTINGS |= {"dtype": str, "rows": int, "rows_per_shard": int, "data": str}


def _put(path: Path, write: Any) -> None:
    """Raises ``UserError`` where the disk refuses (full, say)."""
    try:
        put(path, write)
    except OSError as error:
        raise UserError(f"{path}: not written ({error}); earlier shards are kept: run again to go on") from error


def _same(folder: Path, stored: dict[str, Any], wanted: dict[str, Any], advice: str) -> None:
    """Refuse settings that differ, naming the first key that does. What is inside "target" is compared key by key."""
    for key, value in wanted.items():
        if key == "target":
            _same(folder, {f"target.{k}": v for k, v in stored["target"].items()}, {f"target.{k}": v for k, v in value.items()}, advice)
        elif stored.get(key) != value:
            raise UserError(f"{folder}: {key} differs: the shards have {stored.get(key)!r}, here it is {value!r}: {advice}")


def read_index(folder: Path) -> dict[str, Any]:
    """The index, with every type, file name and number in it checked, and its own checksum. (Earlier versions wrote none.)

    Raises ``UserError``.
    """
    path = folder / "index.json"
    try:
        index = read_json(path, LARGEST_INDEX)
    except UserError as error:
        raise UserError(f"{error}: no target outputs can be read here; `python -m data` captures them") from None
    if "sha256" in index and index != sealed(index):
        raise UserError(f"{path} is damaged: its content does not have the checksum that it names: capture again")
    wrong = [key for key, kind in _SETTINGS.items() if type(index.get(key)) is not kind]
    if wrong:
        raise UserError(f"{path}: {wrong[0]} is missing or of the wrong type")
    if index["version"] != VERSION:
        raise UserError(f"{path}: version {index['version']} is not {VERSION}: capture again")
    if min(index[key] for key in ("layers", "length", "hidden", "rows", "rows_per_shard")) < 1:
        raise UserError(f"{path}: a size in it is less than 1")
    if not all(type(tap) is int and 0 <= tap <= index["layers"] for tap in index["taps"]):
        raise UserError(f"{path}: taps {index['taps']} are not layers of the target")
    files = index.get("files")
    kinds = {"name": str, "rows": int, "bytes": int, "sha256": str}
    if not isinstance(files, list) or not all(
        isinstance(f, dict) and all(type(f.get(k)) is kind for k, kind in kinds.items()) and _NAME.fullmatch(f["name"]) for f in files
    ):
        raise UserError(f"{path}: files is missing or malformed")
    counts = [file["rows"] for file in files]
    if counts != [_count(index, i) for i in range(len(files))]:
        raise UserError(f"{path}: the files' rows {counts[:5]} do not add up to {index['rows']} in shards of {index['rows_per_shard']}")
    return index


def _count(index: dict[str, Any], i: int) -> int:
    """Rows of shard i."""
    return int(min(index["rows_per_shard"], index["rows"] - i * index["rows_per_shard"]))


class Writer:
    """Adds shards to a folder. ``done`` rows are there already, from an earlier run with the same settings.

    The index comes with the first shard: what was refused before leaves nothing that another capture would be compared with.
    """

    def __init__(
        self, folder: str | Path, target: dict[str, Any], taps: Collection[int], layers: int, hidden: int, rows: int, length: int,
        data: str, rows_per_shard: int,
    ) -> None:  # fmt: skip
        """``target`` says whose outputs these are (JSON values); ``data`` names the rows (``Packed.digest``)."""
        self.folder = Path(folder)
        self.index: dict[str, Any] = {
            "version": VERSION, "target": target, "taps": sorted(set(taps)), "layers": layers, "length": length, "hidden": hidden,
            "dtype": "bfloat16", "rows": rows, "rows_per_shard": rows_per_shard, "data": data,
        }  # fmt: skip
        if rows_per_shard < 1:
            raise UserError(f"rows_per_shard={rows_per_shard}: choose 1 or more")
        self.files: list[dict[str, Any]] = []
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{self.folder}: {error}") from error
        stored = read_index(self.folder) if (self.folder / "index.json").exists() else {"files": []}
        if stored["files"]:
            _same(self.folder, stored, json.loads(json.dumps(self.index)), "choose another folder, or delete this one")
            self.files = stored["files"]
            for file in self.files:
                _check_size(self.folder, file)

    @property
    def done(self) -> int:
        return sum(file["rows"] for file in self.files)

    def add(self, batch: TargetBatch) -> None:
        """Write the next shard: exactly the rows that are its share."""
        i = len(self.files)
        share = _count(self.index, i)
        if len(batch.tokens_BT) != share:
            raise ValueError(f"shard {i} takes {share} rows, got {len(batch.tokens_BT)}")
        tensors = {
            "tokens": batch.tokens_BT.to(torch.int32),
            "loss_mask": batch.loss_mask_BT,
            "positions": batch.positions_BT.to(torch.int32),
            "documents": batch.documents_BT.to(torch.int32),
            "final": batch.final_BTD.to(torch.bfloat16),
        }
        for tap in _stored(self.index):
            tensors[f"tap_{tap}"] = batch.states[tap].to(torch.bfloat16)
        path = self.folder / f"shard-{i:05d}.safetensors"
        ready = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        _put(path, lambda beside: save_file(ready, beside))
        self.files.append({"name": path.name, "rows": share, "bytes": path.stat().st_size, "sha256": sha256(path)})
        self._write_index()

    def _write_index(self) -> None:
        text = json.dumps(sealed(self.index | {"files": self.files}), indent=1)
        _put(self.folder / "index.json", lambda beside: beside.write_text(text, encoding="utf-8"))


def _stored(index: dict[str, Any]) -> list[int]:
    """Taps with a tensor of their own: tap N is the final state, which is there anyway."""
    return [tap for tap in index["taps"] if tap != index["layers"]]


def _check_size(folder: Path, file: dict[str, Any]) -> None:
    path = folder / file["name"]
    if not path.is_file():
        raise UserError(f"{path}: the shard is missing: capture again")
    if path.stat().st_size != file["bytes"]:
        raise UserError(f"{path}: the shard has {path.stat().st_size} bytes, not {file['bytes']}: it is damaged, capture again")


class Shards:
    """Captured outputs, read by memory map. A shard's checksum is verified when it is first opened."""

    def __init__(self, folder: str | Path, target: dict[str, Any] | None = None, taps: Collection[int] | None = None) -> None:
        """``target``: refuse shards of another one. ``taps``: those to read (all when None).

        Raises ``UserError`` that names the key or the file.
        """
        self.folder = Path(folder)
        self.index = read_index(self.folder)
        if target is not None:
            _same(self.folder, self.index, {"target": json.loads(json.dumps(target))}, "these are another target's outputs")
        missing = sorted(set(taps or ()) - set(self.index["taps"]) - {self.index["layers"]})
        if missing:
            raise UserError(f"{self.folder}: tap {missing[0]} was not captured (only {self.index['taps']}): capture again with it")
        self.taps = tuple(sorted(set(self.index["taps"] if taps is None else taps)))
        self.files = self.index["files"]
        have = sum(file["rows"] for file in self.files)
        if have != self.index["rows"]:
            raise UserError(f"{self.folder}: only {have} of {self.index['rows']} rows are captured: run the same capture again to go on")
        for file in self.files:
            _check_size(self.folder, file)
        self._open: dict[int, Any] = {}
        self._verified: set[int] = set()

    def __len__(self) -> int:
        return int(self.index["rows"])

    def digest(self) -> str:
        """Names the data: SHA-256 of the index, which holds the checksum of every shard."""
        return str(sealed(self.index)["sha256"])

    def _shard(self, i: int) -> Any:
        """The open shard: checksum, names, shapes and types as the index says."""
        if i in self._open:
            return self._open[i]
        file = self.files[i]
        path = self.folder / file["name"]
        _check_size(self.folder, file)
        if i not in self._verified and sha256(path) != file["sha256"]:
            raise UserError(f"{path}: the checksum differs from the index: it is damaged, capture again")
        try:
            shard = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path}: not a safetensors file ({error})") from error
        if i not in self._verified:
            flat = [file["rows"], self.index["length"]]
            wanted = dict.fromkeys(("tokens", "positions", "documents"), ("I32", flat)) | {"loss_mask": ("BOOL", flat)}
            wanted |= {name: ("BF16", [*flat, self.index["hidden"]]) for name in ["final", *(f"tap_{t}" for t in _stored(self.index))]}
            found = {name: (shard.get_slice(name).get_dtype(), shard.get_slice(name).get_shape()) for name in shard.keys()}  # noqa: SIM118
            if found != wanted:
                wrong = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))[0]
                raise UserError(f"{path}: tensor {wrong} is {found.get(wrong)}, the index says {wanted.get(wrong)}")
        if len(self._open) >= OPEN:
            self._open.pop(next(iter(self._open)))
        self._verified.add(i)
        self._open[i] = shard
        return shard

    def batch(self, rows: NDArray[np.int64] | list[int]) -> TargetBatch:
        """The rows with these numbers, states in bf16, on the CPU."""
        per_shard = self.index["rows_per_shard"]
        states = [f"tap_{tap}" for tap in self.taps if tap != self.index["layers"]]
        names = ["tokens", "loss_mask", "positions", "documents", "final", *states]
        taken: dict[str, list[torch.Tensor]] = {name: [] for name in names}
        for row in np.asarray(rows).tolist():
            shard, place = self._shard(row // per_shard), row % per_shard
            for name in names:
                taken[name].append(shard.get_slice(name)[place : place + 1])
        full = {name: torch.cat(tensors) for name, tensors in taken.items()}
        return TargetBatch(
            tokens_BT=full["tokens"].long(),
            loss_mask_BT=full["loss_mask"],
            positions_BT=full["positions"].long(),
            documents_BT=full["documents"].long(),
            states={tap: full["final" if tap == self.index["layers"] else f"tap_{tap}"] for tap in self.taps},
            final_BTD=full["final"],
        )

    def order(self, epoch: int, seed: int) -> NDArray[np.int64]:
        """The order of the rows in an epoch: shards shuffled, then the rows of so many shards at a time as BUFFER says."""
        rng = np.random.default_rng((seed, epoch))
        per_shard = self.index["rows_per_shard"]
        shards = rng.permutation(len(self.files))
        rows = [np.arange(i * per_shard, i * per_shard + self.files[i]["rows"]) for i in shards.tolist()]
        return np.concatenate([rng.permutation(np.concatenate(rows[i : i + BUFFER])) for i in range(0, len(rows), BUFFER)])

    def stream(self, batch_size: int, seed: int = 0, start_step: int = 0, rank: int = 0, world: int = 1) -> Iterator[TargetBatch]:
        """Batches for ever. The k-th is a function of (seed, k, rank, world) alone: resuming needs only the step."""
        for rows in places(lambda epoch: self.order(epoch, seed), len(self), batch_size, start_step, rank, world):
            yield self.batch(rows)


# ---- as a source of data ----


def check(*, path: str, prompts_file: str | None, on_long: str) -> None:
    read_index(Path(path))
    if prompts_file is not None:
        next(file_rows(prompts_file, "data.prompts_file"), None)


def open(target: TargetInfo, *, length: int, seed: int, path: str, prompts_file: str | None, on_long: str = "error") -> Source:
    whose = target.fingerprint
    shards = Shards(path, whose)
    if (captured := shards.index["length"]) != length:
        raise UserError(f"{path} holds rows of {captured} tokens, trainer.length is {length}: set trainer.length={captured}")

    def observe(batch: TokenBatch, taps: Collection[int]) -> TargetBatch:
        assert isinstance(batch, TargetBatch)
        return batch.to(target.device, target.dtype)

    def counts() -> Tensor:
        total = torch.zeros(target.shape.vocab_size, dtype=torch.int64)
        for start in range(0, len(shards), 64):
            tokens = shards.batch(list(range(start, min(start + 64, len(shards))))).tokens_BT
            total += torch.bincount(tokens.reshape(-1), minlength=len(total))
        return total

    def ask(count: int, new: int) -> list[list[int]]:
        if prompts_file is None:
            return stdlib.asked(target, count, seed)
        keys = ("data.prompts_file", "decode.new_tokens", "data.on_long")
        return [prompt["tokens"] for prompt in prompts.fitting(prompts_file, count, target, new, on_long, keys=keys)]

    more: dict[str, Any] = dict(captured=shards.digest, rows=len(shards))
    return Source(lambda taps, *place: Shards(path, whose, taps).stream(*place), observe, counts, None, ask, **more)
