"""A lock that allows one writer per folder. The system releases it when its process ends, even by a kill."""

from __future__ import annotations

import fcntl
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from headstart.heads.errors import UserError

NAME = ".lock"
OF_RANK = re.compile(r"\.lock-\d+")  # locks of the other ranks, if several processes write into one folder
POLL = 0.2  # seconds between two attempts
_held: set[BinaryIO] = set()  # open lock files that this process holds


@contextmanager
def locked(folder: Path, key: str = "out", name: str = NAME) -> Iterator[None]:
    """Inside, lock ``folder`` against other processes. It is made if it does not exist, and removed at the end if it is still empty.
    ``name``: the lock file, for a folder with several.

    Raises UserError, naming the setting ``key``, if the folder cannot be written or another process holds the lock. On a file system
    without locks, a line says so and nothing is locked. (The lock uses ``flock``. Between machines it works over NFS with Linux's default
    mount options, but not with ``nolock`` or ``local_lock``.)
    """
    folder, made = folder.absolute(), list[Path]()
    with suppress(OSError, ValueError):  # a name too long, or one with a null: ``waiting`` reports it
        made = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        with waiting(folder / name, key):
            yield
    finally:
        for place in made:
            with suppress(OSError, ValueError):  # it is not empty, or its name is impossible
                place.rmdir()


@contextmanager
def alone(folder: Path, key: str) -> Iterator[None]:
    """Inside, no other process writes the folder: holds its lock, and those of all ranks that write into it. Raises as ``locked`` does."""
    with locked(folder, key), ExitStack() as stack:
        for path in sorted(folder.iterdir()):
            if OF_RANK.fullmatch(path.name):
                stack.enter_context(locked(folder, key, path.name))
        yield


@contextmanager
def waiting(path: Path, key: str, what: str = "") -> Iterator[bool]:
    """Inside, hold a lock on the file ``path``. First wait until other processes release it, and print ``what`` is waited for. The file's
    folder is made if it does not exist. With an empty ``what`` there is no wait. Yields whether it is locked: not on a file system without
    locks.

    Raises UserError, naming the setting ``key``, if the file cannot be written, or (without ``what``) if another process holds the lock.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file, held = _take(path, key, what)
    except UserError:
        raise
    except (OSError, ValueError) as e:  # a name too long, or one with a null
        raise UserError(f"the folder {key}={str(path.parent)!r} cannot be written: {e}") from e
    try:
        _held.add(file)
        yield held
    finally:
        if file in _held:  # not in a forked process: there the lock stays with the parent
            _held.discard(file)
            path.unlink(missing_ok=True)  # before it is released: a process that has opened it meanwhile sees that it is gone
            file.close()


def warn_unlockable(key: str, path: Path, error: OSError) -> None:
    """Print a warning that ``key=path`` lies on a file system without locks. The writer goes on without a lock."""
    print(f"{key}={path} cannot be locked ({error.strerror}): see to it that no other process writes there")


def _take(path: Path, key: str, wait: str = "") -> tuple[BinaryIO, bool]:
    """Lock a file. Returns it open, and whether it is locked. ``wait``: print this and wait if another process holds the lock. With ""
    raise UserError instead.
    """
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
        except OSError as e:  # Lustre without flock and some NFS servers
            warn_unlockable(key, path.parent, e)
            return file, False
        if _same(path, file):
            break
        file.close()  # its last holder has removed this file: try again with a new one
    with suppress(OSError):  # on a full disk the lock holds, but does not name its owner
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M')}".encode())
    return file, True


def _not_the_childs() -> None:
    """Close the parent's lock files in a forked process. Otherwise it would hold the locks as long as it lives, even after its parent."""
    for file in _held:
        file.close()  # does not release the parent's locks
    _held.clear()


os.register_at_fork(after_in_child=_not_the_childs)


def _same(path: Path, file: BinaryIO) -> bool:
    """Whether ``path`` still is the open file: its holder may have removed it meanwhile."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
