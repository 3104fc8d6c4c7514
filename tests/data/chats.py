"""Documents of the conversations of a file, as ``data=chat`` makes them in memory."""

from __future__ import annotations

from typing import Any

from headstart.data import reader
from headstart.data.chat import Reader
from headstart.data.packed import Document


def documents(source: str, tokenizer: Any, split: str = "train", on_bad: str = "error", subset: str = "") -> list[Document]:
    """Raises UserError for a row that is no conversation (``on_bad="skip"`` drops it), and where the masks cannot be trusted."""
    return reader.in_memory(Reader(tokenizer, on_bad=on_bad), source, split, subset, None)
