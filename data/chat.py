"""A source of conversations. In their documents, only the assistant's tokens are supervised.

Rows are ``{"messages": [{"role", "content"}]}`` or ShareGPT's ``{"conversations": [{"from", "value"}]}``. They come from a file, one per
line or all in one array, or from a Hugging Face data set. data/forms.py handles other columns and tool calls. data/masks.py finds the
supervised tokens. Large sources are tokenised once by many processes and read from disk (data/arrow.py).
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from headstart.data import reader
from headstart.data.forms import in_columns, preset, talk_of
from headstart.data.mask_check import check_masks
from headstart.data.masks import Talk, Template, masked
from headstart.data.packed import Document, Documents
from headstart.data.rows import Row, file_path, kept, read_text
from headstart.data.source import Source
from headstart.heads.errors import UserError
from headstart.heads.seal import tokenizer_file_sha
from headstart.inference.decoding.target import Target
from headstart.inference.serving.text import BadRow

T = TypeVar("T")


def open(
    target: Target, *, length: int, seed: int, path: str, split: str, on_bad: str, subset: str = "", columns: list[str] | None = None,
    turns: str | None = None, template: str | None = None, limit: int | None = None, cache: str | None = None, workers: int | None = None,
    stream: bool | None = None, held_out: str | None = None,
) -> Source:  # fmt: skip
    """Conversations in which the assistant's tokens are supervised. Whole conversations are held out.

    Raises UserError for a bad row or template, wrong loss masks, and fewer than two conversations (without ``held_out``).
    """
    where = preset(path, split, subset, columns)
    how = Reader(target.tokenizer, where.columns, turns, template, on_bad)
    more: dict[str, Any] = dict(limit=limit, cache=cache, workers=workers, stream=stream, held_out=held_out)
    return reader.open_rows(target, how, where.path, where.split, where.subset, length=length, seed=seed, **more)


def check(
    *, path: str, split: str, subset: str, columns: list[str] | None, turns: str | None, template: str | None, stream: bool | None,
    held_out: str | None = None, **_: Any,
) -> None:  # fmt: skip
    """Raises UserError for a wrong setting, and for a source or template that is missing or cannot be read. Reads the first row only."""
    if turns not in (None, "all", "last"):
        raise UserError(f"data.turns must be all or last, found {turns!r}")
    if columns is not None and len(columns) not in (1, 2):
        raise UserError(f"data.columns must be one column, or two: a question's and an answer's; found {columns!r}")
    if template is not None:
        _template(template)
    where = preset(path, split, subset, columns)
    reader.check_rows(where.path, where.split, where.subset, stream, held_out)


def conversations(
    read: Callable[[dict[str, Any]], T], most: int | None = None, /, *, path: str, split: str, subset: str, on_bad: str,
    columns: list[str] | None = None, limit: int | None = None, **_: Any,
) -> list[tuple[Row, T]]:  # fmt: skip
    """Up to ``most`` rows, each with the result of ``read`` for its conversation. ``limit``: use only so many first rows of the source.

    Bad rows raise UserError or are dropped, see ``rows.each``.
    """
    where = preset(path, split, subset, columns)

    def read_columns(row: dict[str, Any]) -> T:
        return read(in_columns(row, where.columns))

    return kept(where.path, where.split, where.subset, on_bad, read_columns, "conversations", most, limit)


def with_template(tokenizer: Any, path: str) -> Any:
    """A copy of the tokenizer with the chat template of a file. Raises UserError if the file cannot be read as text."""
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = _template(path)
    return tokenizer


def _template(path: str) -> str:
    try:
        return read_text(file_path(path, "data.template"))
    except BadRow as error:
        raise UserError(f"data.template={path}: {error}") from None


class Reader(reader.Reader):
    """Reads conversations from the ``columns`` of rows, and makes documents of them with the tokenizer's chat template."""

    what = "conversations"

    def __init__(
        self, tokenizer: Any, columns: tuple[str, ...] = (), turns: str | None = None, template: str | None = None, on_bad: str = "error"
    ) -> None:
        """``turns``: "last" supervises only the text after the last question. ``template``: a file with a chat template to use instead of
        the tokenizer's. Raises UserError if there is no usable template.
        """
        if template is not None:
            tokenizer = with_template(tokenizer, template)
        self.tokenizer, self.columns, self.on_bad = tokenizer, columns, on_bad
        self.template = Template(tokenizer, last=turns == "last")

    def about(self) -> dict[str, Any]:
        """The digests of the template and the tokenizer, and the settings that the documents depend on."""
        template = hashlib.sha256(self.template.content().encode()).hexdigest()
        how = {"columns": self.columns, "last": self.template.last, "on_bad": self.on_bad}
        return {"tokenizer": tokenizer_file_sha(self.tokenizer), "template": template, **how}

    def read(self, row: dict[str, Any]) -> Talk:
        """The rendered conversation of a row. Raises BadRow for a malformed row, or one that the template cannot render."""
        return self.template.talk(*talk_of(row, self.columns))

    def made(self, read: Sequence[Talk]) -> Iterator[Document]:
        """A document of each conversation, with its loss mask."""
        return masked(self.tokenizer, read)

    def check(self, documents: Documents, read: Sequence[Talk], names: Sequence[str]) -> None:
        """Raises UserError if the loss masks are empty, full or shifted."""
        messages = reader.Lazy(len(read), lambda i: read[i].messages)
        check_masks(self.tokenizer, messages, documents, names, last=self.template.last)
