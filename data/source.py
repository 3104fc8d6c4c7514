"""Sources of data: from the settings in conf/data to training batches, held-out rows, and prompts for reports.

A source is one file and one YAML. ``conf/data/NAME.yaml`` holds the settings, and ``data/NAME.py`` has the function

    open(target, *, length, seed, **settings) -> Source

A source with files also has ``check(**settings)``, which checks them before the target is loaded. `python -m data regenerate` needs prompts
for the target. A source provides them by ``texts(seed, **settings)``, which returns training and held-out text as in data/plain.py, or by
``conversations(read, limit, **settings)``, as in data/chat.py. A source of captured target states sets ``CAPTURED = True``. Its ``open``
needs only the target's ``TargetInfo`` and never runs the target.
"""

from __future__ import annotations

import importlib
import inspect
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
from headstart.inference.decoding import placement
from headstart.inference.decoding.decode import longest
from headstart.inference.decoding.info import TargetInfo
from headstart.inference.decoding.target import Target

HOW = ("cache", "workers")  # settings of sources that do not change the rows, so a resumed run may change them
CONF = Path(__file__).resolve().parents[1] / "conf" / "data"
HELD_OUT_ROWS = 16  # packed held-out rows that are evaluated during training
APART = 1024  # only the first rows of data.held_out are read, at most this many


class Rows(Protocol):
    """Rows accessed by number: tokens, or tokens with the target's states."""

    def __len__(self) -> int: ...
    def batch(self, rows: slice) -> TokenBatch: ...


@dataclass
class FirstRows:
    """The first ``count`` rows, of those that ``read`` returns by their numbers."""

    count: int
    read: Callable[[range], TokenBatch]

    def __len__(self) -> int:
        return self.count

    def batch(self, rows: slice) -> TokenBatch:
        """The rows of a slice that counts from 0."""
        return self.read(range(*rows.indices(self.count)))


@dataclass
class Source:
    """Opened data. ``stream(taps, batch_size, seed, start_step, rank, world)`` yields endless batches. ``observe(batch, taps)`` adds the
    target's states to a batch.
    """

    stream: Callable[..., Iterator[TokenBatch]]
    observe: Callable[[TokenBatch, Collection[int]], TargetBatch]
    counts: Callable[[], Tensor]  # [V] int64: how often each token of the vocabulary occurs as a supervised token
    held_out: Rows | None  # rows that are never trained on
    prompts: Callable[[int, int], list[list[int]]]  # (count, new tokens) -> held-out prompts
    digest: Callable[[], str]  # identifies the training rows
    rows: int = 0  # training rows of an epoch; 0: not known, as they are streamed
    packed: Packed | None = None  # the training rows, for capturing; None: they are captured already, or streamed


def is_captured(settings: dict[str, Any]) -> bool:
    """Whether the source holds the target's states, so that training needs no pass of the target."""
    return bool(getattr(_module(settings), "CAPTURED", False))


def check_to_capture(settings: dict[str, Any], key: str = "") -> None:
    """Raises UserError for a source whose rows cannot be captured. ``key``: the setting that asks for the capture, in a training."""
    begin, instead = f"{key}: " * bool(key), f", or leave {key} out" * bool(key)
    if is_captured(settings):
        raise UserError(f"{begin}data={settings['name']} is captured already: take data=text or chat{instead}")
    if settings.get("stream"):
        raise UserError(f"{begin}data.stream has no end that could be captured: leave it out{instead}")


def open_source(settings: dict[str, Any], target: TargetInfo, *, length: int, seed: int) -> Source:
    """Open a source with the ``settings`` of conf/data/NAME.yaml, in rows of ``length`` tokens.

    Raises UserError that names a wrong setting, file or line.
    """
    if target.sharded and not target.apart:
        raise UserError("a target that processes share is for training and decoding; in capturing take target.device=auto or map")
    module, given = find(settings)
    source: Source = module.open(target, length=length, seed=seed, **given)
    return source


def check_source(settings: dict[str, Any]) -> tuple[ModuleType, dict[str, Any]]:
    """Check settings and files before a target is loaded. Returns what ``find`` returns. Raises UserError for a wrong setting or file."""
    module, given = find(settings)
    if hasattr(module, "check"):
        module.check(**given)
    return module, given


def of_rows(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings that the rows of a source depend on: all except those in ``HOW``, also for the sources within a mix."""
    kept = {key: value for key, value in settings.items() if key not in HOW}
    return {key: [of_rows(each) for each in value] if key == "sources" else value for key, value in kept.items()}


def names() -> list[str]:
    """The names of all sources in conf/data."""
    return sorted(path.stem for path in CONF.glob("*.yaml"))


def find(settings: dict[str, Any]) -> tuple[ModuleType, dict[str, Any]]:
    """The module of a source, and its settings, completed by the defaults of its ``open``.

    Raises UserError for an unknown source, and for a setting that is missing, unknown or of the wrong type.
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
    """The defaults in the YAML of a source, without the settings that a user must give. Raises UserError for an unknown source."""
    _module(settings)  # raises UserError for an unknown source
    found = yaml.safe_load((CONF / f"{settings['name']}.yaml").read_text())
    found = found.get("data", found)
    return {key: value for key, value in found.items() if not str(value).startswith(("${", "???"))}


def _module(settings: dict[str, Any]) -> ModuleType:
    if (name := settings.get("name")) not in names():
        raise UserError(f"no data is called {name!r}: there are {', '.join(names())}")
    return importlib.import_module(f"headstart.data.{name}")


KINDS: dict[Any, tuple[str, Callable[[Any], bool], Callable[[Any], Any]]] = {  # type -> what it must be, the test of it, a conversion
    list[str]: ("a list of words", lambda v: isinstance(v, list | tuple) and all(isinstance(word, str) for word in v), list),
    list[dict[str, Any]]: (
        "a list of settings, [{name: ...}, ...]",
        lambda v: isinstance(v, list) and all(isinstance(each, dict) and all(isinstance(k, str) for k in each) for each in v),
        list,
    ),
    bool: ("true or false", lambda v: isinstance(v, bool), bool),
    int: ("a whole number of at least 1", lambda v: type(v) is int and v >= 1, int),
    str: ("a word", lambda v: isinstance(v, str | int | float) and not isinstance(v, bool), str),  # files may have numbers for names
}


def _checked(key: str, value: Any, kind: Any) -> Any:
    """The value of a setting, converted to the type ``kind``, which may allow null. Raises UserError for any other value."""
    if value is None and NoneType in get_args(kind):
        return None
    if value is None:
        raise UserError(f"{key} must have a value, found null")
    must, fits, convert = next((how for each, how in KINDS.items() if kind in (each, each | None)), KINDS[str])
    if not fits(value):
        raise UserError(f"{key} must be {must}, found {value!r}")
    return convert(value)


# ---- what sources are made of ----


def live(
    target: Target, train: Documents, held: list[Document], length: int, seed: int, prompts: Callable[[int, int], list[list[int]]],
    folder: Path | None = None,
) -> Source:  # fmt: skip
    """A source whose documents the target reads during training. Prints the amount of data, and what packing left out.

    ``folder``: the folder of the cache, if the documents lie on disk (data/arrow.py). Raises UserError for a ``length`` that the target
    cannot read, and for documents without anything to learn.
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
    return read_by(target, rows, heldout, prompts)


def read_by(target: Target, rows: Packed, held: Rows, prompts: Callable[[int, int], list[list[int]]]) -> Source:
    """A source of rows that the target reads during training. Each batch is announced, so that a remote target begins with it early."""
    vocab = target.shape.vocab_size

    def stream(taps: Collection[int], *place: int) -> Iterator[TokenBatch]:
        return announced(rows.stream(*place), target)

    return Source(stream, observing(target), lambda: rows.counts(vocab), held, prompts, rows.digest, len(rows), rows)


def observing(target: Target) -> Callable[[TokenBatch, Collection[int]], TargetBatch]:
    """``Source.observe`` for a target that reads the batches itself."""
    return lambda batch, taps: look(batch, target, taps)


def say(line: str) -> None:
    """Print a line about the data, in one of several processes."""
    placement.say(f"data: {line}")


def _size(documents: Documents) -> str:
    return f"{len(documents):,} document{'s' * (len(documents) != 1)}, {int(sizes_of(documents).sum()):,} tokens"


def drawn(count: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Split the numbers below ``count`` into held-out ones and the rest. ``seed`` draws a twentieth, at least 1 and at most 64."""
    order = np.random.default_rng(seed).permutation(count)
    share = max(1, min(64, count // 20))
    return order[:share], order[share:]


def apart(held_out: str, path: str, split: str = "train") -> tuple[str, str]:
    """The (path, split) of the rows that ``data.held_out`` gives: a file, or another split of the data set ``path``.

    Raises UserError if they are the training rows, or if there is no such file.
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


def check_whole(path: str, split: str, subset: str, instead: str = "") -> None:
    """Raises UserError if a split or subset is given for something that is not a dataset. ``instead``: the advice in the message."""
    for key, value in (("split", "" if split == "train" else split), ("subset", subset)):
        if value and not is_dataset(path):
            raise UserError(f"data.{key}={value}: path={path} is no dataset with {key}s, and is read whole: leave it out{instead}")


def check_enough(path: str, what: str, count: int) -> None:
    """Raises UserError for fewer than two documents, since ``drawn`` holds one out. ``what``: the word for a document."""
    if count < 2:
        raise UserError(f"path={path}: one {what} is held out, so at least two are needed, found {count}; or data.held_out=FILE")


def split_off(groups: list[list[Document]], seed: int) -> tuple[list[Document], list[Document]]:
    """The documents of the held-out groups, and those of all other groups. ``drawn`` chooses whole groups."""
    held, rest = ([document for i in part.tolist() for document in groups[i]] for part in drawn(len(groups), seed))
    return held, rest


def beginnings(target: Target, held: list[Document], count: int, new: int) -> list[list[int]]:
    """Up to ``count`` prompts: each is a held-out document up to its first supervised token, where the assistant first speaks or a prefix
    is continued. Prompts that leave no room for ``new`` tokens are skipped, and a line gives their number.
    """
    prompts = [d.tokens[:n].tolist() for d in held if (n := int(d.loss_mask.argmax()))]
    fitting = [prompt for prompt in prompts if len(prompt) + new <= longest(target, len(prompt))]
    if long := len(prompts) - len(fitting):
        say(f"{long} of {len(prompts)} held-out prompts passed over: too long for the target's context with {new} new tokens")
    return fitting[:count]
