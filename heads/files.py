"""Files that are whole or not there: written beside their place, then put into it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def put(path: Path, write: Callable[[Path], object]) -> None:
    """``write`` a file beside ``path``, have the disk keep it, and let it take its place.

    Whatever is raised (OSError: a full disk, say), what was at ``path`` before is untouched and nothing is left beside it.
    """
    beside = path.with_name(f".{path.name}.part")
    try:
        write(beside)
        with beside.open("rb+") as file:
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def put_text(path: Path, text: str) -> None:
    put(path, lambda beside: beside.write_text(text, encoding="utf-8"))
