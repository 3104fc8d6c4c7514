"""Atomic files and folders: each is written beside its place, synced to disk, then moved there. So it is either complete or absent."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from headstart.heads.errors import UserError

URL = re.compile(r"[a-z][a-z0-9+.-]+(::[a-z][a-z0-9+.-]+)*://", re.IGNORECASE)  # what fsspec takes for a URL
UNFINISHED = re.compile(r"\.tmp\w{6}")  # safetensors' name of a file that it writes, beside its place: a killed process leaves it there
AT_FDCWD, RENAME_EXCHANGE = -100, 2  # Linux constants for renameat2
os.umask(UMASK := os.umask(0))  # the process's umask: setting it is the only way to read it
REFUSED = (errno.ENOSPC, errno.EDQUOT, errno.EIO)  # sync errors of a failing or full disk; others mean that syncing is not supported


def cache_folder() -> Path:
    """The cache, for what can be made again: the folder ``HEADSTART_CACHE``, else ``headstart`` in the user's cache folder. Raises
    UserError where the user has no home folder.
    """
    place = os.environ.get("HEADSTART_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "headstart")
    try:
        return Path(place).expanduser()
    except RuntimeError as e:
        raise UserError("this user has no home, where a cache would be kept: set HEADSTART_CACHE to a folder") from e


def check_exported(folder: str | Path, key: str = "") -> None:
    """Raises UserError unless ``folder`` has a config.json, as the folders of drafters and language models do. The error says what else it
    is: a file, or the folder of a run. ``key``: the setting that names the folder.
    """
    found, given = Path(folder), f"{key}=" * bool(key)
    try:
        if found.is_file():
            raise UserError(f"{given}{folder} is a file: give its folder")
        if not found.is_dir():
            of_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", str(folder)) and not found.parent.is_dir()
            hub = f". If it is on a hub: hf download {folder} --local-dir DIR" if of_hub else ""
            raise UserError(
                f"{given}{folder}: no such folder: give the exported folder of a drafter (RUN/speculator), or of a language model{hub}"
            )
        if (found / "speculator" / "config.json").is_file():
            raise UserError(f"{given}{folder} is the folder of a run: give {given}{found / 'speculator'}")
        if arms := sorted(place.parent for place in found.glob("*/speculator/config.json")):
            raise UserError(f"{given}{folder} is the folder of a run with several drafters: give one of {', '.join(map(str, arms))}")
        if not (found / "config.json").is_file():
            raise UserError(
                f"{given}{folder}: {found / 'config.json'} does not exist: not the exported folder of a drafter, nor of a language model"
            )
    except OSError as e:  # a name that no file system takes, a folder that may not be read
        raise UserError(f"{given}{str(folder)[:300]} cannot be read ({e.strerror}): give another folder") from None


def unfinished(path: Path) -> Path:
    """Where ``put`` and ``put_folder`` make a file or a folder before it gets to ``path``."""
    return path.with_name(f".{path.name}.part")


def put(path: Path, write: Callable[[Path], object]) -> None:
    """``write`` a file beside ``path``, sync it to disk, and move it to ``path``.

    If anything is raised before the move (OSError for a full disk, say), the earlier file stays untouched and nothing is left beside it.
    """
    beside = unfinished(path)
    try:
        with _disk_errors():
            write(beside)
        _open_up(beside)
        _keep(beside)
        beside.replace(path)
        _keep(path.parent)
    finally:
        beside.unlink(missing_ok=True)


def put_text(path: Path, text: str) -> None:
    """``put`` a text file in UTF-8."""
    put(path, lambda beside: beside.write_text(text, encoding="utf-8"))


def put_folder(folder: Path, write: Callable[[Path], object]) -> None:
    """``put`` for a folder: ``write`` fills an empty folder, which then takes the place of ``folder``."""
    folder = folder.resolve()  # of a link: the folder that it leads to
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside, old = unfinished(folder), folder.with_name(f".{folder.name}.old")
    shutil.rmtree(beside, ignore_errors=True)  # left by a process that was killed
    try:
        beside.mkdir()
        with _disk_errors():
            write(beside)
        for path in [*beside.rglob("*"), beside]:
            _open_up(path)
            _keep(path)
        if not (folder.exists() and _exchange(beside, folder)):
            _replace(folder, beside, old)
        _keep(folder.parent)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def _replace(folder: Path, new: Path, old: Path) -> None:
    """Replace ``folder`` in two steps. A process that is killed between them leaves the earlier folder at ``old``."""
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
    try:
        new.rename(folder)
    except OSError:
        if old.exists():
            old.rename(folder)
        raise


def _exchange(a: Path, b: Path) -> bool:
    """Swap two entries of the file system in one step. False where the system does not support that."""
    call = getattr(ctypes.CDLL(None), "renameat2", None)
    return call is not None and call(AT_FDCWD, os.fsencode(a), AT_FDCWD, os.fsencode(b), RENAME_EXCHANGE) == 0


def _open_up(path: Path) -> None:
    """Give a file the permissions that this process gives to files. safetensors lets only their owner read them."""
    if path.is_file() and stat.S_IMODE(path.stat().st_mode) == 0o600:
        path.chmod(0o666 & ~UMASK)


def _keep(path: Path) -> None:
    """Sync a file's contents or a folder's entries to disk. Raises OSError where a file cannot be synced, or the disk fails or is full."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as e:
        if path.is_file() or e.errno in REFUSED:  # a full disk or quota may show only here; failing to sync a folder is harmless
            raise
    finally:
        os.close(handle)


@contextmanager
def _disk_errors() -> Iterator[None]:
    """Turn safetensors' error for a full disk into an OSError."""
    try:
        yield
    except SafetensorError as e:
        code = re.search(r"os error (\d+)", str(e))
        raise OSError(int(code[1]) if code else 0, " ".join(str(e).split())) from e


def json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects in a file of JSON lines; [] where it does not exist. Damaged lines, such as one that a kill cut off, are skipped.
    Raises UserError where the file cannot be read.
    """
    try:
        return _objects(path)
    except OSError as e:
        raise UserError(f"{path} cannot be read ({e.strerror})") from e


def keep_lines(path: Path, wanted: Callable[[dict[str, Any]], bool], *more: Mapping[str, Any]) -> None:
    """``put`` the objects of a file of JSON lines that are ``wanted``, and then ``more``. Damaged lines are dropped. Raises OSError."""
    kept = [each for each in _objects(path) if wanted(each)]
    if more or path.is_file():
        put_text(path, "".join(f"{json.dumps(each)}\n" for each in [*kept, *more]))


def _objects(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    found = []
    for line in lines:
        with suppress(ValueError, RecursionError):
            found.append(json.loads(line))
    return [each for each in found if isinstance(each, dict)]


def sha256(*paths: Path) -> str:
    """The SHA-256 of the contents of these files, one after the other, read in pieces."""
    sha = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            hashlib.file_digest(file, lambda: sha)
    return sha.hexdigest()


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """``content`` plus the SHA-256 of all of it under the key ``sha256``. The order of keys, and spaces in a file, do not matter."""
    plain = {k: v for k, v in json.loads(json.dumps(content)).items() if k != "sha256"}
    return plain | {"sha256": hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()}
