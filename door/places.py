"""Checks of files and folders that settings name, before anything large is loaded: whether they are there, and can be written."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from headstart.heads.errors import UserError
from headstart.heads.files import URL, check_exported


def check_file(path: str, key: str) -> None:
    """Raises UserError where there is no regular file that can be read. (Opening a pipe may block, and a pipe can be read only once.)"""
    place = Path(path).expanduser()
    try:
        if not stat.S_ISREG(place.stat().st_mode):
            raise UserError(f"{key}={path} is {'a folder' if place.is_dir() else 'no file'}: give a file")
        place.open("rb").close()
    except FileNotFoundError:
        raise UserError(f"{key}={path}: no such file") from None
    except OSError as e:
        raise UserError(f"{key}={path} cannot be read ({e.strerror}): give a file") from None


def check_paths(decode: Mapping[str, Any]) -> None:
    """Raises UserError where decode.paths names a file that cannot be read."""
    if isinstance(decode["paths"], str):
        check_file(decode["paths"], "decode.paths")


def check_speculator(folder: str | None, key: str = "speculator") -> None:
    """Raises UserError for a folder that is not there, or that holds no model. None is fine."""
    if folder is not None:
        check_exported(folder, key)


def check_out(path: str, key: str = "out", *, file: bool = False, url: bool = False) -> None:
    """Raises UserError where a folder (``file``: a file) cannot be made or written. Makes nothing. ``url``: the path may be a URL; what it
    leads to is not checked.
    """
    if URL.match(path):
        if not url:
            raise UserError(f"{key}={path}: give a {'file' if file else 'folder'} of this machine")
        return
    place = Path(path).absolute()
    above = place.parent if file else place
    try:
        if file and place.is_dir():
            raise UserError(f"{key}={path} is a folder: give a file")
        above = next(folder for folder in (above, *above.parents) if folder.exists())
        with TemporaryFile(dir=above):
            pass
    except OSError as e:
        why = f"{above} is a file" if isinstance(e, NotADirectoryError) else e.strerror
        raise UserError(f"{key}={path} cannot be written ({why}): give another place") from None


def called(target: dict[str, Any]) -> str:
    """The name of a target in what is shown. For target=folder without a name of its own that is the last part of the path, as in every
    report (``Target.name`` is the path there).
    """
    return Path(target["path"]).absolute().name if target["name"] == "folder" else str(target["name"])


def name_of(kind: str, drafter: Any, proposer: Any) -> str:
    """The name in reports: a drafter's head, whatever device it is on; any other proposer's kind."""
    proposer = getattr(proposer, "inner", proposer)  # a drafter on another device is wrapped
    drafter = getattr(proposer, "drafter", drafter)
    return kind if kind != "drafter" or drafter is None else drafter.config["head"]
