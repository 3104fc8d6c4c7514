"""One writer per folder: a lock that the system takes back when its process ends, however it ends."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from headstart.heads.errors import UserError

NAME = ".lock"
POLL = 0.2  # seconds
_held: set[BinaryIO] = set()  # locks of this process


@contextmanager
def locked(folder: Path, key: str = "out", name: str = NAME) -> Iterator[None]:
    """Make ``folder`` if need be, and hold it against other processes. A folder that was made and stayed empty is removed at the end.
    ``name``: the lock's file, where a folder has several.

    Raises UserError, naming ``key``, where it cannot be written or another process holds it. On a file system without locks a line says so,
    and nothing is held. (The lock is ``flock``'s: between machines it holds over NFS as Linux mounts it, but not with ``nolock`` or
    ``local_lock``. Systems without it, like Windows, hold nothing.)
    """
    folder, made = folder.absolute(), list[Path]()
    with suppress(OSError, ValueError):  # a name too long, or one with a null: it is said below
        made = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        with waiting(folder / name, key):
            yield
    finally:
        _remove(made)


@contextmanager
def waiting(path: Path, key: str, what: str = "") -> Iterator[None]:
    """Hold the file ``path``, after waiting for other processes to let go of it; a line says ``what`` is waited for. Its folder is made.
    Without ``what`` nobody waits.

    Raises UserError, naming ``key``, where it cannot be written, or (without ``what``) another process holds it.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = _take(path, key, what)
    except UserError:
        raise
    except (OSError, ValueError) as e:  # a name too long, or one with a null
        raise UserError(f"the folder {key}={str(path.parent)!r} cannot be written: {e}") from e
    try:
        if file is not None:
            _held.add(file)
        yield
    finally:
        if file is not None and file in _held:  # a process forked from here leaves it alone
            _held.discard(file)
            path.unlink(missing_ok=True)  # while it is held: who has opened it meanwhile finds that it is gone
            file.close()


def _take(path: Path, key: str, wait: str = "") -> BinaryIO | None:
    """Lock a file. ``wait``: what to wait for where another process holds it; "": raise UserError then. None where there are no locks."""
    try:
        import fcntl
    except ImportError:
        return None
    told = False
    while True:
        file = path.open("a+b", buffering=0)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with file:
                file.seek(0)
                who = file.read(200).decode(errors="replace").strip() or "another process"
            if wait:
                if not told:
                    print(f"waiting for {wait}, which {who} makes", flush=True)
                told = True
                time.sleep(POLL)
                continue
            raise UserError(f"{key}={path.parent} is being written by {who}: wait for it, end it, or choose another folder") from None
        except OSError as e:  # Lustre without flock, some NFS servers
            print(f"{key}={path.parent} cannot be locked ({e.strerror}): see to it that no other process writes there")
            return file
        if _same(path, file):
            break
        file.close()  # its holder has gone, and has taken the file along
    with suppress(OSError):  # a full disk: the lock holds without saying whose it is
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M')}".encode())
    return file


def _not_the_childs() -> None:
    """A forked process has the same open files, and would hold the locks for as long as it lives, without its parent too."""
    for file in _held:
        file.close()  # which lets nothing go that the parent holds
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_not_the_childs)


def _same(path: Path, file: BinaryIO) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _remove(made: list[Path]) -> None:
    for folder in made:
        with suppress(OSError, ValueError):  # there is something in it; it cannot be
            folder.rmdir()
