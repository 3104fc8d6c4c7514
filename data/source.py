"""From the settings of conf/data to batches: what is trained on, what is held out, and prompts to report on.

A source of data is one file and one YAML: ``conf/data/NAME.yaml`` holds the settings that ``data/NAME.py`` takes, in

    open(target, *, length, seed, **settings) -> Source

and, if it has files, ``check(**settings)``, which looks at them before a target is loaded. A source whose prompts the target can
answer (`python -m data regenerate`) has ``texts(seed, **settings)``, training and held-out text as data/plain.py wants them, or
``conversations(read, limit, **settings)``, as data/chat.py has it. One that holds what the target said already has ``CAPTURED = True``:
its ``open`` is content with what the target is, apart from running it (``TargetInfo``).
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, NoneType
from typing import Any, Protocol, get_args, get_type_hints

import numpy as np
import yaml  # type: ignore[import-untyped]
from numpy.typing import NDArray
from torch import Tensor

from headstart.data import arrow
from headstart.data.batch import TargetBatch, TokenBatch
from headstart.data.live import announced, look
from headstart.data.pack import pack
from headstart.data.packed import Document, Documents, Packed, sizes_of
from headstart.data.rows import file_path, is_dataset, is_there
from headstart.heads.errors import UserError
from headstart.inference.decoding.info import TargetInfo
from headstart.inference.decoding.target import Target

HOW = ("cache", "workers")  # settings of sources that change nothing of the rows, so that a run goes on with others
CONF = Path(__file__).resolve().parents[1] / "conf" / "data"
HELD_OUT_ROWS = 16  # of held-out text, for the curve while training
APART = 1024  # rows of data.held_out that are read, the first ones


class Rows(Protocol):
    """Rows by their numbers: tokens, or tokens with the target's states."""

    def __len__(self) -> int: ...
    def batch(self, rows: slice) -> TokenBatch: ...


@dataclass
class Source:
    """``stream(taps, batch_size, seed, start_step, rank, world)`` yields batches for ever, ``observe`` adds the target's states."""

    stream: Callable[..., Iterator[TokenBatch]]
    observe: Callable[[TokenBatch, Collection[int]], TargetBatch]
    counts: Callable[[], Tensor]  # [V] how often each token occurs
    held_out: Rows | None  # text that is never trained on
    prompts: Callable[[int, int], list[list[int]]]  # (count, new tokens) -> held-out prompts
    packed: Packed | None = None  # the training rows, for capturing
    captured: Callable[[], str] | None = None  # the digest of rows that are captured already, or streamed
    rows: int = 0  # how many there are, where they are not packed here

    def digest(self) -> str:
        """Names the training rows."""
        if self.packed is not None:
            return self.packed.digest()
        assert self.captured is not None
        return self.captured()


def is_captured(settings: dict[str, Any]) -> bool:
    """Whether no pass of the target is needed to train on it."""
    return bool(getattr(_module(settings), "CAPTURED", False))


def open_source(settings: dict[str, Any], target: TargetInfo, *, length: int, seed: int) -> Source:
    """``settings`` are those of conf/data/NAME.yaml. Raises UserError naming a wrong setting, file or line."""
    if target.shared and not target.apart:
        raise UserError("a target that processes share is for training and decoding; in capturing take target.device=auto or map")
    module, given = find(settings)
    source: Source = module.open(target, length=length, seed=seed, **given)
    return source


def check_source(settings: dict[str, Any]) -> tuple[ModuleType, dict[str, Any]]:
    """Check settings and files before a target is loaded. Returns what ``find`` does. Raises UserError."""
    module, given = find(settings)
    if hasattr(module, "check"):
        module.check(**given)
    return module, given


def of_rows(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of a source, and of those in it, that its rows depend on: without where tokens are kept and by how many processes."""
    kept = {key: value for key, value in settings.items() if key not in HOW}
    return {key: [of_rows(each) for each in value] if key == "sources" else value for key, value in kept.items()}


def names() -> list[str]:
    """The sources that conf/data has."""
    return sorted(path.stem for path in CONF.glob("*.yaml"))


def find(settings: dict[str, Any]) -> tuple[ModuleType, dict[str, Any]]:
    """The module of a source, and its settings, completed by their defaults. Raises UserError for a setting that is missing, unknown or of
    the wrong type.
    """
    name, given = settings.get("name"), {key: value for key, value in settings.items() if key != "name"}
    module = _module(settings)
    takes = {key: p for key, p in inspect.signature(module.open).parameters.items() if key not in ("target", "length", "seed")}
    for key in given.keys() - takes.keys():
        raise UserError(f"data={name} has no setting data.{key}: it has {', '.join(takes) or 'none'}")
    for key, parameter in takes.items():
        if key not in given and parameter.default is parameter.empty:
            raise UserError(f"data={name} needs data.{key}")
        given[key] = _checked(f"data.{key}", given.get(key, parameter.default), get_type_hints(module.open)[key])
    return module, given


def defaults(settings: dict[str, Any]) -> dict[str, Any]:
    """The defaults in the YAML of a source, without the settings that a user has to give."""
    _module(settings)  # there is one
    found = yaml.safe_load((CONF / f"{settings['name']}.yaml").read_text())
    found = found.get("data", found)
    return {key: value for key, value in found.items() if not str(value).startswith(("${", "???"))}


def _module(settings: dict[str, Any]) -> ModuleType:
    if (name := settings.get("name")) not in names():
        raise UserError(f"no data is called {name!r}: there are {', '.join(names())}")
    return importlib.import_module(f"headstart.data.{name}")


def _checked(key: str, value: Any, kind: Any) -> Any:
    """The value of a setting as the type ``kind``. Sources take words (numbers too, for files may be called so), lists of words or of
    settings, whole numbers, switches, or null. Raises UserError for another value.
    """
    if value is None and NoneType in get_args(kind):
        return None
    if kind in (list[str], list[str] | None) and value is not None:
        if not isinstance(value, list | tuple) or not all(isinstance(word, str) for word in value):
            raise UserError(f"{key} must be a list of words, found {value!r}")
        return list(value)
    if kind == list[dict[str, Any]]:
        if not isinstance(value, list) or not all(isinstance(each, dict) and all(isinstance(k, str) for k in each) for each in value):
            raise UserError(f"{key} must be a list of settings, [{{name: ...}}, ...], found {value!r}")
        return value
    if kind == bool | None:
        if not isinstance(value, bool):
            raise UserError(f"{key} must be true or false, found {value!r}")
        return value
    if kind == int | None:
        if type(value) is not int or value < 1:
            raise UserError(f"{key} must be a whole number of at least 1, found {value!r}")
        return value
    if value is None:
        raise UserError(f"{key} must have a value, found null")
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        raise UserError(f"{key} must be a word, found {value!r}")
    return str(value)


# ---- what sources are made of ----


def live(
    target: Target, train: Documents, held: list[Document], length: int, seed: int, prompts: Callable[[int, int], list[list[int]]],
    folder: Path | None = None,
) -> Source:  # fmt: skip
    """A source of documents that the target reads while they are trained on. Prints once what there is, and what is left out of it.

    ``folder``: the folder of documents that lie on disk (data/arrow.py).
    """
    context = target.shape.max_positions
    heldout = pack(held, length, context, seed)
    rows: Packed
    if folder is None:
        rows = pack([train[i] for i in range(len(train))], length, context, seed)
    else:
        rows = arrow.packed(folder, train, length, context, seed)
    say(f"{_size(train)} in {len(rows):,} rows of {length}; held out: {_size(held)}")
    for part, packed in (("", rows), ("of what is held out, ", heldout)):
        if packed.left_out:
            say(f"{part}left out: {packed.left_out}")
    vocab = target.shape.vocab_size

    def stream(taps: Collection[int], *place: int) -> Iterator[TokenBatch]:
        return announced(rows.stream(*place), target)

    return Source(stream, observing(target), lambda: rows.counts(vocab), heldout, prompts, rows)


def observing(target: Target) -> Callable[[TokenBatch, Collection[int]], TargetBatch]:
    """``Source.observe`` of a target that reads the batches."""
    return lambda batch, taps: look(batch, target, taps)


def say(line: str) -> None:
    """Print a line about the data, in the first process alone."""
    if os.environ.get("RANK", "0") == "0":
        print(f"data: {line}")


def _size(documents: Documents) -> str:
    return f"{len(documents):,} document{'s' * (len(documents) != 1)}, {int(sizes_of(documents).sum()):,} tokens"


def drawn(count: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The numbers of what is held out of ``count`` things (a twentieth, at least 1 and at most 64, drawn by ``seed``), and of the rest."""
    order = np.random.default_rng(seed).permutation(count)
    share = max(1, min(64, count // 20))
    return order[:share], order[share:]


def apart(held_out: str, path: str, split: str = "train") -> tuple[str, str]:
    """Where the rows of ``data.held_out`` stand: the file, or the dataset ``path``, and the split. Raises UserError where they are no
    others than those that are trained on, or where there is no such file.
    """
    if is_dataset(path) and not is_there(Path(held_out)):
        if held_out == split:
            raise UserError(f"data.held_out={held_out} is the split that is trained on: give another one, or a file")
        return path, held_out
    file = file_path(held_out, "data.held_out")
    if not is_there(file):
        raise UserError(f"data.held_out={held_out}: no such file" + ("" if is_dataset(path) else ", and path is no dataset with splits"))
    if is_there(trained := file_path(path)) and file.samefile(trained):
        raise UserError(
            f"data.held_out={held_out} is what is trained on: give another file, or leave it out (a twentieth is held out then)"
        )
    return held_out, split


def split_off(groups: list[list[Document]], seed: int) -> tuple[list[Document], list[Document]]:
    """The documents of held-out groups, and those of the rest. Groups are held out whole, as ``drawn`` says."""
    held, rest = ([document for i in part.tolist() for document in groups[i]] for part in drawn(len(groups), seed))
    return held, rest


def beginnings(target: Target, held: list[Document], count: int, new: int) -> list[list[int]]:
    """Up to ``count`` prompts: held-out documents up to their first supervised token, where an assistant first speaks or a prefix is
    continued. Those that leave no room for ``new`` tokens are passed over, and counted in a line.
    """
    prompts = [d.tokens[:n].tolist() for d in held if (n := int(d.loss_mask.argmax()))]
    fitting = [prompt for prompt in prompts if len(prompt) + new <= target.shape.max_positions]
    if long := len(prompts) - len(fitting):
        say(f"{long} of {len(prompts)} held-out prompts passed over: too long for the target's context with {new} new tokens")
    return fitting[:count]
