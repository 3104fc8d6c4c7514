"""A source of tokenised rows: ``{"input_ids": [...], "loss_mask": [...]}``, as other trainers prepare them, or with transformers'
``labels`` (-100 at unsupervised tokens). Without either, all tokens are supervised. The tokens must be those of the target's tokenizer. The
rows do not show which tokenizer made them, so this cannot be checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from headstart.data import reader
from headstart.data.packed import Document
from headstart.data.rows import passing, rows
from headstart.data.source import Source, apart
from headstart.inference.decoding.target import Target
from headstart.inference.serving.text import BadRow


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
    if held_out is not None:
        apart(held_out, path, split)
    next(passing(path, split, subset, 0, 1) if stream else rows(path, split, subset), None)


class Reader(reader.Reader):
    """Reads rows of tokens, which must be below ``vocab_size``."""

    what = "documents"

    def __init__(self, vocab_size: int, on_bad: str) -> None:
        self.vocab_size, self.on_bad = vocab_size, on_bad

    def about(self) -> dict[str, Any]:
        """The vocabulary size and the settings that the documents depend on."""
        return {"tokens below": self.vocab_size, "on_bad": self.on_bad}

    def read(self, row: dict[str, Any]) -> Document:
        """The document of a row. Raises BadRow for tokens outside the vocabulary, or a loss mask of another length."""
        ids, mask, labels = row.get("input_ids"), row.get("loss_mask"), row.get("labels")
        if not isinstance(ids, list):
            raise BadRow("not tokenised: no list input_ids")
        if not all(type(token) is int and 0 <= token < self.vocab_size for token in ids):
            raise BadRow(f"input_ids are not all tokens of the target, from 0 to {self.vocab_size - 1}")
        if mask is None and labels is None:
            return Document(np.array(ids, dtype=np.int32), np.ones(len(ids), dtype=np.bool_))
        if mask is None:
            mask = [label != -100 for label in labels] if isinstance(labels, list) else labels
        if not isinstance(mask, list) or len(mask) != len(ids) or not all(value in (0, 1) for value in mask):
            raise BadRow("loss_mask must be a list of 0 and 1 as long as input_ids, or labels such a list of tokens and -100")
        return Document(np.array(ids, dtype=np.int32), np.array(mask, dtype=np.bool_))

    def made(self, read: Sequence[Document]) -> Sequence[Document]:
        """The documents unchanged: ``read`` has made them."""
        return read
