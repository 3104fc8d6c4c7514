"""A source of tokenised rows: ``{"input_ids": [...], "loss_mask": [...]}``, as other trainers prepare them. Instead of ``loss_mask`` a row
may have transformers' ``labels`` (-100 at unsupervised tokens) and ``assistant_masks``, or TRL's ``completion_mask``. Without any, all
tokens are supervised. Tokens that ``attention_mask`` leaves out are padding and are dropped. The tokens must be those of the target's
tokenizer. The rows do not show which tokenizer made them, so this cannot be checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from headstart.data import reader
from headstart.data.packed import Document
from headstart.data.source import Source
from headstart.inference.decoding.target import Target
from headstart.inference.serving.text import BadRow

MASKS = ("assistant_masks", "completion_mask")  # names of masks in transformers and TRL


def open(
    target: Target, *, length: int, seed: int, path: str, split: str, subset: str, on_bad: str, limit: int | None = None,
    cache: str | None = None, workers: int | None = None, stream: bool | None = None, held_out: str | None = None,
) -> Source:  # fmt: skip
    """Documents of tokens. Whole documents are held out. Raises UserError for a bad row, and for fewer than two documents (without
    ``held_out``).
    """
    more: dict[str, Any] = dict(limit=limit, cache=cache, workers=workers, stream=stream, held_out=held_out)
    return reader.open_rows(target, Reader(target.shape.vocab_size, on_bad), path, split, subset, length=length, seed=seed, **more)


def check(*, path: str, split: str, subset: str, stream: bool | None, held_out: str | None = None, **_: Any) -> None:
    """Raises UserError for a source that is missing or cannot be read. Reads the first row only."""
    reader.check_rows(path, split, subset, stream, held_out)


class Reader(reader.Reader):
    """Reads rows of tokens, which must be below ``vocab_size``."""

    what = "documents"

    def __init__(self, vocab_size: int, on_bad: str) -> None:
        self.vocab_size, self.on_bad = vocab_size, on_bad

    def about(self) -> dict[str, Any]:
        """The vocabulary size and the settings that the documents depend on."""
        return {"tokens below": self.vocab_size, "on_bad": self.on_bad}

    def read(self, row: dict[str, Any]) -> Document:
        """The document of a row. Raises BadRow for tokens outside the vocabulary, and for masks or labels that do not fit them."""
        ids = row.get("input_ids")
        if not isinstance(ids, list):
            raise BadRow("not tokenised: no list input_ids")
        if not all(type(token) is int and 0 <= token < self.vocab_size for token in ids):
            raise BadRow(f"input_ids are not all tokens of the target, from 0 to {self.vocab_size - 1}")
        tokens, learnt, real = np.array(ids, dtype=np.int32), _learnt(row, ids), _mask(row, "attention_mask", ids)
        if real is not None:  # padding is not text
            at = np.flatnonzero(real)
            if len(at) and at[-1] - at[0] >= len(at):
                raise BadRow("attention_mask leaves out tokens between others: it may leave out padding, at either end")
            tokens, learnt = tokens[at], learnt[at]
        return Document(tokens, learnt)

    def made(self, read: Sequence[Document]) -> Sequence[Document]:
        """The documents unchanged: ``read`` has made them."""
        return read


def _learnt(row: dict[str, Any], ids: list[int]) -> np.ndarray:
    """Which tokens are supervised: those of ``loss_mask``; without it, those that every other mask and the labels name. Raises BadRow."""
    if (own := _mask(row, "loss_mask", ids)) is not None:
        return own
    found, labels = [np.ones(len(ids), dtype=np.bool_)], row.get("labels")
    if labels is not None:
        if not isinstance(labels, list) or len(labels) != len(ids):
            raise BadRow("labels must be a list as long as input_ids, of tokens and -100")
        if any(label not in (-100, token) for label, token in zip(labels, ids, strict=True)):
            raise BadRow("labels must be -100 or the token of input_ids at the same place: those that name the next token are not read")
        found.append(np.array(labels) != -100)
    return np.logical_and.reduce([*found, *(mask for name in MASKS if (mask := _mask(row, name, ids)) is not None)])


def _mask(row: dict[str, Any], name: str, ids: list[int]) -> np.ndarray | None:
    """A row's mask, or None if it has no mask of this name. Raises BadRow for a wrong length, or for values other than 0 and 1."""
    if (mask := row.get(name)) is None:
        return None
    if not isinstance(mask, list) or len(mask) != len(ids) or not all(value in (0, 1) for value in mask):
        raise BadRow(f"{name} must be a list of 0 and 1 as long as input_ids")
    return np.array(mask, dtype=np.bool_)
