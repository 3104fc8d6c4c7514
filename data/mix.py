"""A mix of several sources, each with a share of the training rows.

Every source is packed by itself. An epoch is the shortest one with these shares that contains every row of every source at least once. If
a source's share exceeds its share of all rows, its rows are repeated.

Shape suffixes: S sources.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headstart.data.packed import InMemory, Laid, Packed, joined
from headstart.data.source import Source, check_source, defaults, is_captured, open_source, read_by, say
from headstart.heads.errors import UserError
from headstart.inference.decoding.target import Target

MOST = 1 << 31  # rows of an epoch


def open(target: Target, *, length: int, seed: int, sources: list[dict[str, Any]]) -> Source:
    """``sources``: the settings of each source as in conf/data, and a ``weight`` for each source or for none.

    Raises UserError for a wrong setting or weight, and as the sources do.
    """
    settings, weights = _settings(sources)
    opened = list[Source]()
    for i, given in enumerate(settings):
        with _of(i, given):
            opened.append(open_source(given, target, length=length, seed=seed))
    parts = [source.packed for source in opened if source.packed is not None]
    rows = Mixed(parts, weights)
    shares = ", ".join(
        f"{count / len(rows):.1%} {each.get('path', each['name'])}" for each, count in zip(settings, rows.counts_S, strict=True)
    )
    say(f"mixed: {len(rows):,} rows an epoch, {shares}")
    held = Mixed([each for source in opened if isinstance(each := source.held_out, Packed)], None)

    def prompts(count: int, new: int) -> list[list[int]]:
        """Prompts of the sources in turn."""
        turns = zip_longest(*(source.prompts(count, new) for source in opened))
        return [prompt for turn in turns for prompt in turn if prompt is not None][:count]

    return read_by(target, rows, held.whole(), prompts)


def check(*, sources: list[dict[str, Any]]) -> None:
    """Raises UserError for a wrong setting, weight or file of any source."""
    for i, each in enumerate(_settings(sources)[0]):
        with _of(i, each):
            check_source(each)


@contextmanager
def _of(number: int, settings: dict[str, Any]) -> Iterator[None]:
    """Inside, errors name the settings of a source as they stand in a mix: data.sources[0].path, not data.path or path."""
    try:
        yield
    except UserError as error:
        keys = rf"\bdata\.(?=(?:{'|'.join(map(re.escape, {*settings, 'path'}))})\b)|(?<![\w.])(?<!data=chat )(?=path=)"
        raise UserError(re.sub(keys, f"data.sources[{number}].", str(error))) from error


def _settings(sources: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[float] | None]:
    """The settings of each source, completed by the defaults of its YAML, and the weights (None if no source has one).

    Raises UserError for a source that cannot be mixed, and for a wrong or missing weight.
    """
    if not sources:
        raise UserError("data.sources is empty: give data.sources=[{name:chat,path:FILE.jsonl,weight:2},{name:text,path:DIR,weight:1}]")
    found, weights = list[dict[str, Any]](), list[Any]()
    for i, each in enumerate(sources):
        if each.get("name") == "mix":
            raise UserError(f"data.sources[{i}]: a mix cannot hold another")
        settings = {**defaults(each), **{key: value for key, value in each.items() if key != "weight"}}
        if is_captured(settings):
            raise UserError(f"data.sources[{i}]: data={each['name']} is captured, and cannot be mixed with what the target has yet to read")
        if settings.get("stream"):
            raise UserError(f"data.sources[{i}]: what is streamed has no known size, and cannot be mixed: leave its stream out")
        found.append(settings)
        weights.append(each.get("weight"))
    if all(weight is None for weight in weights):
        return found, None
    for i, weight in enumerate(weights):
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < float("inf"):
            raise UserError(f"data.sources[{i}].weight must be a number above 0, of all sources or of none; found {weight!r}")
    return found, [float(weight) for weight in weights]


class Mixed(Packed):
    """The rows of several sources. ``weights`` are each source's share of an epoch. Without weights, every row comes once."""

    def __init__(self, parts: Sequence[Packed], weights: Sequence[float] | None) -> None:
        """Raises UserError for weights that make an epoch longer than ``MOST`` rows."""
        self.parts, self.length = parts, parts[0].length
        sizes_S = np.array([len(part) for part in parts])
        counts_S: NDArray[Any] = sizes_S
        if weights is not None:
            share_S = np.array(weights) / sum(weights)
            with np.errstate(all="ignore"):  # weights that are too far apart give infinity or NaN
                counts_S = np.ceil((sizes_S / share_S).max() * share_S - 1e-9)
        if not counts_S.sum() <= MOST:
            raise UserError(
                f"data.sources: at these weights an epoch has more than {MOST:,} rows: give the smallest source more, or limit the largest"
            )
        self.counts_S = counts_S.astype(np.int64)
        self.first_S = np.cumsum(self.counts_S) - self.counts_S
        times_S = self.counts_S / sizes_S
        for what in ("padding", "dropped", "unsupervised"):
            setattr(self, what, round(sum(getattr(part, what) * times for part, times in zip(parts, times_S, strict=True))))

    def __len__(self) -> int:
        return int(self.counts_S.sum())

    def lay(self, rows: NDArray[np.int64]) -> Laid:
        of = np.searchsorted(self.first_S, rows, side="right") - 1
        laid = [self.parts[s].lay(np.array([(row - self.first_S[s]) % len(self.parts[s])])) for s, row in zip(of, rows, strict=True)]
        return joined(laid)

    def whole(self) -> InMemory:
        """All rows in memory, shuffled, because only the first few of them are evaluated during training."""
        return InMemory(*self.lay(self.order(0, 0)), self.padding, self.dropped, self.unsupervised)

    def digest(self) -> str:
        """The SHA-256 of the parts' digests and their numbers of rows in an epoch, which identifies the data."""
        said = [f"{count} {part.digest()}" for count, part in zip(self.counts_S.tolist(), self.parts, strict=True)]
        return hashlib.sha256("\n".join(said).encode()).hexdigest()
