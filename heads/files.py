"""Files and folders that are whole or not there: written beside their place, then put into it."""

from __future__ import annotations

import os
import shutil
import tempfile
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


def put_folder(folder: Path, write: Callable[[Path], object]) -> None:
    """The same with a folder: ``write`` fills an empty one, which takes the place of ``folder``."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside, old = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent)), folder.with_name(f".{folder.name}-old")
    try:
        write(beside)
        beside.chmod(0o755)
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            folder.rename(old)
        try:
            beside.rename(folder)
        except OSError:
            if old.exists():
                old.rename(folder)
            raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)
