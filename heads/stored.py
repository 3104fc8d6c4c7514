"""Careful reading of model folders: JSON and safetensors files that anybody may have written.

Nothing in them is trusted. Sizes, nesting, names and numbers are checked before they are used. A file that cannot be read, or has
unexpected content, raises a UserError of one line that names the file.
"""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headstart.heads.errors import UserError
from headstart.heads.files import sha256

LARGEST, LARGEST_INDEX = 16 << 20, 256 << 20  # bytes of a config, and of the index of a model with very many tensors
DEEPEST = 32  # levels of nested dictionaries and lists
STORED = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # dtypes of stored weights, under their safetensors names
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")  # names that configs use for the number of layers
INDEX = "model.safetensors.index.json"


def check_file(path: Path) -> int:
    """The file's size in bytes. Raises UserError where it is missing, is not a file, or cannot be read."""
    try:
        found = path.stat()
        if stat.S_ISREG(found.st_mode):
            path.open("rb").close()
            return found.st_size
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{named(path)} does not exist") from None
    except (OSError, ValueError) as e:
        raise _unreadable(path, e) from None
    raise UserError(f"{named(path)} is not a file")


def read_json(path: Path, largest: int = LARGEST) -> dict[str, Any]:
    """A JSON object. Raises UserError where the file is missing, unreadable, larger than ``largest`` bytes, too deeply nested, or no JSON
    object.
    """
    if check_file(path) > largest:
        raise UserError(f"{path} is larger than {largest >> 20} MiB: not a config")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise _unreadable(path, e) from None
    except (ValueError, RecursionError) as e:
        raise UserError(f"{path} is not valid JSON: {' '.join(str(e).split())}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} must hold a JSON object")
    level: list[Any] = [value]
    for _ in range(DEEPEST):
        level = [x for part in level for x in (part.values() if isinstance(part, dict) else part) if isinstance(x, dict | list)]
    if level:
        raise UserError(f"{path} is not a config: more than {DEEPEST} dictionaries and lists lie within each other")
    return value


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file, memory-mapped. Raises UserError where it is missing, unreadable, damaged or truncated."""
    check_file(path)
    try:
        with safe_open(path, framework="pt") as f:
            return {k: f.get_tensor(k) for k in f.keys()}  # noqa: SIM118 - not a dict
    except SafetensorError as e:
        raise UserError(f"{path} is damaged or truncated ({e}): copy or export it again") from None
    except (OSError, ValueError) as e:
        raise _unreadable(path, e) from None


def file_sha(path: Path) -> str:
    """The SHA-256 of a file. Raises UserError where it cannot be read."""
    try:
        return sha256(path)
    except OSError as e:
        raise _unreadable(path, e) from None


def check_weights(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Raises UserError naming a tensor whose dtype is not in ``STORED``, or that holds NaN or infinite values."""
    for name, tensor in tensors.items():
        if tensor.dtype not in STORED.values():
            kinds = ", ".join(str(d).removeprefix("torch.") for d in STORED.values())
            raise UserError(f"{path}: {name} is {str(tensor.dtype).removeprefix('torch.')}, weights are {kinds}: quantised or not weights")
        if not finite(tensor):
            raise UserError(f"{path}: {name} holds NaN or infinite values: copy or export it again")


def finite(tensor: Tensor) -> bool:
    """Whether it holds neither NaN nor infinities. (Both show in the minimum or maximum, so no mask has to be allocated.)"""
    return tensor.numel() == 0 or bool(torch.stack(torch.aminmax(tensor)).isfinite().all())


def shards(index: Path) -> dict[str, Path]:
    """Tensor name -> the file that holds it, for a model in several files.

    Raises UserError where the index names anything but safetensors files that lie beside it. In the hub's cache, which links to contents
    that it stores elsewhere, they must lie in the cache of the same model.
    """
    places, plain = read_json(index, LARGEST_INDEX).get("weight_map"), re.compile(r"[\w-][\w.-]*\.safetensors")
    if not isinstance(places, dict) or not all(isinstance(f, str) and plain.fullmatch(f) for f in places.values()):
        raise UserError(f"{index}: weight_map must name safetensors files in the same folder")
    folder = index.absolute().parent
    inside = [folder.resolve()] + ([(folder.parent.parent / "blobs").resolve()] if folder.parent.name == "snapshots" else [])
    for file in sorted(set(places.values())):
        if (folder / file).resolve().parent not in inside:
            raise UserError(f"{index}: weight_map names {file}, a link that leaves the folder: put the file itself there")
    return {tensor: index.parent / file for tensor, file in places.items()}


def model_files(folder: Path) -> list[Path]:
    """The files with the weights of a local model. Raises UserError where they are not safetensors files inside the folder."""
    whole, index = folder / "model.safetensors", folder / INDEX
    if not whole.exists() and not index.exists():
        pickled = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in folder.glob(pattern))
        instead = f"{pickled[0]} is a pickled file, which is never loaded" if pickled else "nothing else is loaded"
        raise UserError(f"{folder} has no model.safetensors or {INDEX} ({instead}): save the model as safetensors")
    return [whole] if whole.exists() else sorted(set(shards(index).values()))


def check_model(folder: Path) -> dict[str, Any]:
    """The config.json of a local model, checked before anything is built from it.

    Raises UserError where it is not a config, where the weights are not readable safetensors files inside the folder, or where it states
    more layers than there are tensors: transformers would take forever to build them.
    """
    config, tensors = read_json(folder / "config.json"), 0
    for path in model_files(folder):
        check_file(path)
        try:
            with suppress(SafetensorError), safe_open(path, framework="pt") as file:  # damage is reported by the code that loads it
                tensors += len(file.keys())
        except OSError as e:  # a file that can be opened but not mapped
            raise _unreadable(path, e) from None
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        for key in LAYERS:
            if isinstance(part.get(key), int | float) and tensors and part[key] > tensors:
                raise UserError(f"{folder / 'config.json'}: {key}={part[key]} does not fit the {tensors} tensors of its weights")
    return config


def check_types(folder: Path, tables: re.Pattern[str]) -> None:
    """Raises UserError for a tensor of a local model whose dtype is not in ``STORED``, because transformers would silently cast integers.
    ``tables``: matches the names of tensors that are not weights.
    """
    for path in model_files(folder):
        with safe_open(path, framework="pt") as file:
            types = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118 - not a dict
        if wrong := sorted(name for name, kind in types.items() if kind not in STORED and not tables.search(name)):
            raise UserError(f"{path}: {wrong[0]} is of type {types[wrong[0]]}, weights are {', '.join(STORED)}: quantised or not weights")


def _unreadable(path: Path, e: Exception) -> UserError:
    why = e.strerror if isinstance(e, OSError) and e.strerror else str(e)
    return UserError(f"{named(path)} cannot be read ({' '.join(why.split())})")


def named(path: str | Path) -> str:
    """A path for an error message: printable, and shortened where it is longer than any file system accepts."""
    name = str(path).encode("utf-8", "backslashreplace").decode()
    return name if len(name) < 300 else f"{name[:100]}...{name[-100:]}"
