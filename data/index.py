"""The index of a folder of captured states.

``index.json`` holds the settings of the capture, an entry for each file (rows, bytes, SHA-256), and a SHA-256 of its own. If several
processes capture, each writes an index (``index-00003-of-00008.json``) with the same settings and its own files. Together they form one
index. When no file is missing, the last process writes ``index.json`` and removes the others. A file is put in place before the index that
names it. So every named file is whole, whichever process is killed at whatever time, and any number of processes can resume.

The files are ``shard-00000.safetensors`` and so on, with ``rows_per_shard`` rows each (the last one may have fewer), and
``held-out.safetensors``, with rows that are never trained on. Files have numbers: the shards from 0, then the held-out rows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from headstart.data.folder import Folder
from headstart.data.storage import STORAGES, Storage, own_taps
from headstart.heads.errors import UserError
from headstart.heads.files import sealed, sha256
from headstart.heads.stored import LARGEST_INDEX

VERSION = 1
BUFFER = 4  # shards that are read at a time: rows are shuffled within so many shards
NAME, HELD_OUT = "index.json", "held-out.safetensors"
# a single row, written during training until its shard is whole: row number, digest of the capture, SHA-256 of the file (data/capturing.py)
ROW = re.compile(r"row-(\d{9,})-([0-9a-f]{16})-[0-9a-f]{64}\.safetensors")
SHARD, PART = re.compile(r"shard-(\d{5,9})\.safetensors"), re.compile(r"index-\d{5}-of-\d{5}\.json")
SUPERVISED, ALL = "supervised", "all"  # which tokens have their final state stored
_SETTINGS: dict[str, type] = {"version": int, "target": dict, "taps": list, "layers": int, "length": int, "hidden": int}
_SETTINGS |= {"dtype": str, "rows": int, "rows_per_shard": int, "data": str}
_EARLIER = {"final": ALL, "held_out": None}  # the settings of captures by earlier versions, which did not write them
_KINDS = {storage.name: storage for storage in STORAGES.values()}
Index = dict[str, Any]
# name, rows, bytes, sha256; final: the number of stored final states, if not every token has one; errors: mean storage error by state
File = dict[str, Any]


def read_index(folder: Folder, name: str = NAME) -> Index:
    """Read an index and check its types, file names, numbers and its own checksum. (Earlier versions wrote no checksum.)

    Raises ``UserError`` for an index that is missing, damaged, malformed or of another version.
    """
    path = folder.of(name)
    try:
        index = folder.json(name, LARGEST_INDEX)
    except UserError as error:
        raise UserError(f"{error}: no target outputs can be read here; `python -m data` captures them") from None
    if "sha256" in index and index != sealed(index):
        raise UserError(f"{path} is damaged: its content does not have the checksum that it names: remove it, and capture again")
    wrong = [key for key, kind in _SETTINGS.items() if type(index.get(key)) is not kind]
    if wrong:
        raise UserError(f"{path}: {wrong[0]} is missing or of the wrong type")
    if index["version"] != VERSION:
        raise UserError(f"{path}: version {index['version']} is not {VERSION}: capture again")
    if min(index[key] for key in ("layers", "length", "hidden", "rows", "rows_per_shard")) < 1:
        raise UserError(f"{path}: a size in it is less than 1")
    if not all(type(tap) is int and 0 <= tap <= index["layers"] for tap in index["taps"]):
        raise UserError(f"{path}: taps {index['taps']} are not layers of the target")
    if index["dtype"] not in _KINDS or index.get("final", ALL) not in (SUPERVISED, ALL):
        raise UserError(f"{path}: states are stored as {index['dtype']}, final {index.get('final', ALL)!r}: not a way that is known here")
    held = index.get("held_out")
    if held is not None and not (isinstance(held, dict) and type(held.get("rows")) is int and held["rows"] > 0):
        raise UserError(f"{path}: held_out is malformed")
    _check_files(index, path)
    return index


def _check_files(index: Index, path: str) -> None:
    files = index.get("files")
    kinds = {"name": str, "rows": int, "bytes": int, "sha256": str} | ({"final": int} if index.get("final", ALL) == SUPERVISED else {})

    def well_formed(file: Any) -> bool:
        if not isinstance(file, dict) or any(type(file.get(key)) is not kind for key, kind in kinds.items()):
            return False
        errors = file.get("errors", {})
        if not isinstance(errors, dict) or any(type(error) is not float or error < 0 for error in errors.values()):
            return False
        return file["name"] == HELD_OUT or SHARD.fullmatch(file["name"]) is not None

    if not isinstance(files, list) or not all(map(well_formed, files)):
        raise UserError(f"{path}: files is missing or malformed")
    numbers = [number_of(index, file) for file in files]
    if numbers != sorted({*numbers}) or any(n >= files_in_all(index) for n in numbers):
        raise UserError(f"{path}: files are named twice, in another order, or are more than {index['rows']} rows need")
    if wrong := [file for n, file in zip(numbers, files, strict=True) if file["rows"] != rows_of(index, n)]:
        count = f"{index['rows']} in shards of {index['rows_per_shard']}"
        raise UserError(f"{path}: the files' rows do not add up to {count}: {wrong[0]['name']} has {wrong[0]['rows']}")


# ---- numbers of files ----


def shards_of(index: Index) -> int:
    """The number of shards of a complete capture."""
    return int(-(-index["rows"] // index["rows_per_shard"]))


def files_in_all(index: Index) -> int:
    """The number of files of a complete capture, including that of the held-out rows."""
    return shards_of(index) + (index.get("held_out") is not None)


def number_of(index: Index, file: File) -> int:
    """The number of a file: that of its shard, or the number of shards for the held-out rows."""
    shard = SHARD.fullmatch(file["name"])
    return int(shard[1]) if shard else shards_of(index)


def name_of(index: Index, number: int) -> str:
    """The name of file ``number``."""
    return f"shard-{number:05d}.safetensors" if number < shards_of(index) else HELD_OUT


def rows_of(index: Index, number: int) -> int:
    """The number of rows in file ``number``."""
    if number >= shards_of(index):
        return int(index["held_out"]["rows"])
    return int(min(index["rows_per_shard"], index["rows"] - number * index["rows_per_shard"]))


def file_of(index: Index, row: int) -> int:
    """The number of the file that holds a row. Held-out rows are numbered after the training rows."""
    return shards_of(index) if row >= index["rows"] else int(row // index["rows_per_shard"])


def first_row(index: Index, number: int) -> int:
    """The number of the first row in a file."""
    return int(min(number * index["rows_per_shard"], index["rows"]))


def order(index: Index, epoch: int, seed: int) -> NDArray[np.int64]:
    """The row numbers of an epoch, in its order: shards are shuffled, then the rows within each group of ``BUFFER`` shards."""
    rng = np.random.default_rng((seed, epoch))
    shards = rng.permutation(shards_of(index))
    rows = [np.arange(first_row(index, i), first_row(index, i) + rows_of(index, i)) for i in shards.tolist()]
    return np.concatenate([rng.permutation(np.concatenate(rows[i : i + BUFFER])) for i in range(0, len(rows), BUFFER)])


def files_of(index: Index) -> dict[int, File]:
    """The files by their numbers."""
    return {number_of(index, file): file for file in index["files"]}


# ---- several indexes ----


def check_same(folder: Folder, stored: Index, wanted: Index, advice: str) -> None:
    """Raises UserError, with ``advice``, that names the first key of ``wanted`` with another value in ``stored``.

    The content of "target" is compared key by key.
    """
    for key, value in wanted.items():
        if key == "target":
            there, here = ({f"target.{k}": v for k, v in each["target"].items()} for each in (stored, wanted))
            check_same(folder, there, here, advice)
        elif (was := stored.get(key, _EARLIER.get(key))) != value:
            raise UserError(f"{folder}: {key} differs: the shards have {was!r}, here it is {value!r}: {advice}")


def read(folder: Folder) -> Index:
    """All indexes of a folder merged into one. Raises ``UserError`` as ``read_all`` does, and for a folder without any."""
    return read_all(folder) or read_index(folder)


def read_all(folder: Folder) -> Index | None:
    """All indexes of a folder merged into one, or None without any. Raises ``UserError`` for a wrong index, and for indexes that contradict
    each other.
    """
    for last in (False, False, True):
        names = folder.sizes()
        found: list[Index] = []
        try:
            if NAME in names:
                found.append(read_index(folder))
            if not found or len(found[0]["files"]) < files_in_all(found[0]):
                found += [read_index(folder, name) for name in sorted(names) if PART.fullmatch(name)]
            return merged(folder, [index for index in found if index["files"]])
        except UserError:
            if last or names.keys() <= folder.sizes().keys():  # else another process has just merged them: try again
                raise
    raise AssertionError


def merged(folder: Folder, indexes: Sequence[Index]) -> Index | None:
    """One index made of several. If two describe a file differently, the description with the file's true checksum counts.

    Raises UserError if their settings differ.
    """
    if not indexes:
        return None
    first, *others = indexes
    files = files_of(first)
    for other in others:
        settings = {key: value for key, value in other.items() if key not in ("files", "sha256")}
        check_same(folder, first, settings, "two captures have written here: delete one's index and files")
        for number, file in files_of(other).items():
            if files.setdefault(number, file) != file and _is(folder, file):
                files[number] = file
    ordered = [files[number] for number in sorted(files)]
    return first if ordered == first["files"] else sealed(first | {"files": ordered})


def _is(folder: Folder, file: File) -> bool:
    """Whether the file on disk has the checksum of the entry ``file``."""
    try:
        with folder.file(file["name"]) as path:
            return sha256(path) == file["sha256"]
    except (OSError, UserError):
        return False


def put_index(folder: Folder, name: str, settings: Index, files: dict[int, File]) -> None:
    """Write an index with these settings and files. Raises OSError if the disk refuses."""
    text = json.dumps(sealed(settings | {"files": [files[number] for number in sorted(files)]}), indent=1)
    folder.put(name, lambda beside: beside.write_text(text, encoding="utf-8"))


# ---- files ----


def storage_of(index: Index) -> Storage:
    """The storage format of a capture's states."""
    return _KINDS[index["dtype"]]


def anew(folder: Folder) -> str:
    """How a damaged or missing file is written again."""
    return f"`python -m data verify {folder} drop=true` takes it out, the same capture writes it again"


def check_size(folder: Folder, file: File, size: int | None) -> None:
    """Raises ``UserError`` for a file that is missing (``size`` None), or of another size."""
    path = folder.of(file["name"])
    if size is None:
        raise UserError(f"{path}: the shard is missing: {anew(folder)}")
    if size != file["bytes"]:
        raise UserError(f"{path}: the shard has {size} bytes, not {file['bytes']}: it is damaged: {anew(folder)}")


def open_file(folder: Folder, index: Index, file: File, digest: bool = True) -> Any:
    """Map a file into memory. Raises ``UserError`` if it is no safetensors file, or (with ``digest``) if its checksum or its tensors'
    names, shapes or types differ from the index.
    """
    name = folder.of(file["name"])
    with folder.file(file["name"]) as path:
        try:
            if digest and sha256(path) != file["sha256"]:
                raise UserError(f"{name}: the checksum differs from the index: it is damaged: {anew(folder)}")
            opened = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise UserError(f"{name}: not a safetensors file ({error})") from error
    if digest:
        wanted = _tensors(index, file)
        found = {key: (opened.get_slice(key).get_dtype(), opened.get_slice(key).get_shape()) for key in opened.keys()}  # noqa: SIM118
        if found != wanted:
            wrong = sorted(key for key in wanted.keys() | found.keys() if wanted.get(key) != found.get(key))[0]
            raise UserError(f"{name}: tensor {wrong} is {found.get(wrong)}, the index says {wanted.get(wrong)}")
    return opened


def _tensors(index: Index, file: File) -> dict[str, tuple[str, list[int]]]:
    """The tensors that a file must hold: name -> (safetensors type, shape)."""
    flat, storage = [file["rows"], index["length"]], storage_of(index)
    places = {f"tap_{tap}": flat for tap in own_taps(index["taps"], index["layers"])}
    places["final"] = flat if index.get("final", ALL) == ALL else [file["final"]]
    found = dict.fromkeys(("tokens", "positions", "documents"), ("I32", flat)) | {"loss_mask": ("BOOL", flat)}
    found |= {name: (storage.code, [*place, index["hidden"]]) for name, place in places.items()}
    return found | ({f"{name}.scale": ("BF16", place) for name, place in places.items()} if storage.largest else {})
