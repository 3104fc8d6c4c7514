"""Verifies a capture: every file is read again, to find damaged and missing files and count the usable rows."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.progress import track

from headstart.data import index as indexes
from headstart.data.folder import Folder, open_folder
from headstart.data.index import File, Index, anew, check_size, files_in_all, files_of, name_of, open_file, rows_of, shards_of
from headstart.heads.errors import UserError

THREADS = 4  # files that are read at a time


def verify(place: str | Path, drop: bool = False) -> None:
    """Print which files of the capture are damaged or missing. ``drop``: remove damaged files, so that the same capture writes them anew.

    Raises UserError if any file is damaged or missing, and if one is to be removed while a process writes into the folder.
    """
    folder = open_folder(place)
    index = indexes.read(folder)
    wrong = damage(folder, index)
    for name, why in wrong.items():
        print(f"{name}: {why}")
    numbers = [n for n in range(files_in_all(index)) if name_of(index, n) not in wrong]
    rows, whole = sum(rows_of(index, n) for n in numbers if n < shards_of(index)), index["rows"]
    print(f"{folder}: {len(numbers)} of {files_in_all(index)} files are whole, {rows:,} of {whole:,} rows are usable ({rows / whole:.1%})")
    damaged = [file for file in index["files"] if file["name"] in wrong]
    if drop and damaged:
        _drop(folder, damaged)
    if wrong:
        how = "run the same capture again, which writes them" if drop or not damaged else "verify with drop=true and run the capture again"
        raise UserError(f"{folder}: {len(wrong)} of {files_in_all(index)} files are damaged or missing: {how}")


def damage(folder: Folder, index: Index, numbers: Sequence[int] | None = None) -> dict[str, str]:
    """What is wrong with each damaged or missing file (among ``numbers``): name -> reason."""
    files, sizes = files_of(index), folder.sizes()

    def look(number: int) -> str | None:
        if number not in files:
            return "not captured yet"
        try:
            check_size(folder, files[number], sizes.get(files[number]["name"]))
            open_file(folder, index, files[number])
        except UserError as e:
            return str(e).removeprefix(f"{folder.of(files[number]['name'])}: ").removesuffix(f": {anew(folder)}")
        return None

    numbers = range(files_in_all(index)) if numbers is None else numbers
    with ThreadPoolExecutor(THREADS) as pool:
        found = list(track(pool.map(look, numbers), description="verify", total=len(numbers)))
    return {name_of(index, number): why for number, why in zip(numbers, found, strict=True) if why is not None}


def _drop(folder: Folder, damaged: list[File]) -> None:
    """Remove damaged files. The index comes first: a file that it does not name is never used, even if it still exists.

    Raises UserError if the index cannot be written, or another process holds the folder.
    """
    with folder.alone("path"):
        index = indexes.read(folder)  # again: a capture may have written files while those here were checked
        gone = damage(folder, index, [number for number, file in files_of(index).items() if file in damaged])  # again, as nobody writes now
        kept = {number: file for number, file in files_of(index).items() if file["name"] not in gone}
        try:
            indexes.put_index(folder, indexes.NAME, index, kept)
        except OSError as e:
            raise UserError(f"{folder.of(indexes.NAME)}: not written ({e})") from e
        for name in [*(name for name in folder.sizes() if indexes.PART.fullmatch(name)), *gone]:
            folder.remove(name)
