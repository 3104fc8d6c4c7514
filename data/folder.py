"""A folder of captured states, on this machine or anywhere that fsspec reaches (s3://, gs://, ...).

A file is written completely or not at all: a local file is put in place by a rename, and an object store takes objects as a whole. Files
are always read locally: a remote file is first copied into a temporary folder (below TMPDIR).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from headstart.data.lock import NAME, alone, locked, waiting
from headstart.heads.errors import UserError, first_line
from headstart.heads.files import URL, put
from headstart.heads.stored import read_json

Write = Callable[[Path], object]


def open_folder(place: str | Path) -> Folder:
    """The folder at a path or URL. Raises UserError for a URL that no installed file system can open."""
    return Elsewhere(place) if isinstance(place, str) and URL.match(place) else Folder(Path(place))


class Folder:
    """A folder on this machine. ``name`` is always the name of a file in it, without a path."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def of(self, name: str) -> str:
        """The full name of a file in it, for messages."""
        return f"{self}/{name}"

    def sizes(self) -> dict[str, int]:
        """The size in bytes of each file in it, or {} if the folder does not exist. Raises UserError if it cannot be listed."""
        found: dict[str, int] = {}
        try:
            for path in self.path.iterdir():
                if (size := self.size(path.name)) is not None:
                    found[path.name] = size
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except OSError as e:
            raise UserError(f"{self} cannot be read ({e.strerror})") from e
        return found

    def size(self, name: str) -> int | None:
        """The size in bytes of one file, or None if it does not exist. For a URL, raises UserError if it cannot be read."""
        path = self.path / name
        with suppress(FileNotFoundError):  # another process may remove or rename it between the two questions
            return path.stat().st_size if path.is_file() else None
        return None

    def make(self) -> None:
        """Make the folder, with its parents. Raises UserError if that is not possible."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise UserError(f"{self}: {e}") from e

    def put(self, name: str, write: Write) -> None:
        """Write a file, completely or not at all. Raises OSError if the disk refuses."""
        put(self.path / name, write)

    @contextmanager
    def file(self, name: str) -> Iterator[Path]:
        """Inside, a local path from which the file can be read. For a URL, raises UserError if it cannot be read."""
        yield self.path / name

    def json(self, name: str, largest: int) -> dict[str, Any]:
        """The object in a JSON file of at most ``largest`` bytes. Raises UserError as ``heads.stored.read_json`` does."""
        with self.file(name) as path:
            try:
                return read_json(path, largest)
            except UserError as e:
                raise UserError(str(e).replace(str(path), self.of(name))) from None

    def remove(self, name: str) -> None:
        """Remove a file, if it exists."""
        (self.path / name).unlink(missing_ok=True)

    def locked(self, name: str = NAME, key: str = "out") -> AbstractContextManager[None]:
        """Lock the folder for this process. Raises UserError, naming the setting ``key``, if another process holds the lock."""
        return locked(self.path, key, name)

    def alone(self, key: str) -> AbstractContextManager[None]:
        """Lock the folder against every process, whichever lock in it is its own. Raises UserError as ``locked`` does."""
        return alone(self.path, key)

    def waiting(self, name: str, what: str) -> AbstractContextManager[object]:
        """Hold the lock ``name``, after waiting until other processes release it. ``what`` it waits for is printed."""
        return waiting(self.path / name, "out", what)


class Elsewhere(Folder):
    """A folder at a URL, accessed through fsspec. Locks do nothing there."""

    def __init__(self, url: str) -> None:
        import fsspec

        self.url = url.rstrip("/")
        try:
            self.fs, self.root = fsspec.core.url_to_fs(self.url)
        except Exception as e:  # ImportError names a missing package, ValueError an unknown protocol; file systems raise more kinds
            raise UserError(f"{url} cannot be opened: {first_line(e)}") from e
        self.root = self.root.rstrip("/")
        self._room = tempfile.TemporaryDirectory(prefix="headstart-", ignore_cleanup_errors=True)

    def __str__(self) -> str:
        return self.url

    def sizes(self) -> dict[str, int]:
        try:
            self.fs.invalidate_cache()
            found: list[Mapping[str, Any]] = self.fs.ls(self.root, detail=True)
        except FileNotFoundError:
            return {}
        except Exception as e:
            raise UserError(f"{self} cannot be read ({first_line(e)})") from e
        return {str(each["name"]).rpartition("/")[2]: int(each["size"] or 0) for each in found if each["type"] == "file"}

    def size(self, name: str) -> int | None:
        self.fs.invalidate_cache()
        try:
            return int(self.fs.info(f"{self.root}/{name}")["size"])
        except FileNotFoundError:
            return None
        except Exception as e:
            raise UserError(f"{self.of(name)} cannot be read ({first_line(e)})") from e

    def make(self) -> None:
        """Make the folder where the file system has any. Object stores have none. Other faults show when the first file is written."""
        with suppress(Exception):
            self.fs.makedirs(self.root, exist_ok=True)

    def put(self, name: str, write: Write) -> None:
        path = Path(self._room.name) / f"out-{name}"
        try:
            write(path)
            self.fs.put_file(str(path), f"{self.root}/{name}")
        except Exception as e:  # of botocore, aiohttp, google-auth, ...
            raise e if isinstance(e, OSError | UserError) else OSError(0, first_line(e)) from e
        finally:
            path.unlink(missing_ok=True)

    @contextmanager
    def file(self, name: str) -> Iterator[Path]:
        path = Path(tempfile.mkdtemp(dir=self._room.name)) / name
        try:
            try:
                self.fs.get_file(f"{self.root}/{name}", str(path))
            except FileNotFoundError:
                raise UserError(f"{self.of(name)} does not exist") from None
            except Exception as e:
                raise UserError(f"{self.of(name)} cannot be read ({first_line(e)})") from e
            yield path
        finally:
            path.unlink(missing_ok=True)  # a memory map of it stays valid
            path.parent.rmdir()

    def remove(self, name: str) -> None:
        try:
            self.fs.rm_file(f"{self.root}/{name}")
        except FileNotFoundError:
            return

    def locked(self, name: str = NAME, key: str = "out") -> AbstractContextManager[None]:
        return nullcontext()

    def alone(self, key: str) -> AbstractContextManager[None]:
        return nullcontext()

    def waiting(self, name: str, what: str) -> AbstractContextManager[object]:
        return nullcontext()
