"""A folder of captured states: of this machine, or anywhere that fsspec reaches (s3://, gs://, ...).

What is written is whole or not there: here it is put in place by a rename, an object store takes objects as a whole. What is read is a
file of this machine: one from elsewhere is copied into a temporary folder (TMPDIR says where).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from headstart.data.lock import NAME, locked, waiting
from headstart.heads.errors import UserError, first_line
from headstart.heads.files import URL, put
from headstart.heads.stored import read_json

Write = Callable[[Path], object]


def open_folder(place: str | Path) -> Folder:
    """Raises UserError for a URL that nothing here can open."""
    return Elsewhere(place) if isinstance(place, str) and URL.match(place) else Folder(Path(place))


class Folder:
    """A folder of this machine. ``name`` is always the name of a file in it, without a path."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def of(self, name: str) -> str:
        """How messages call a file of it."""
        return f"{self}/{name}"

    def sizes(self) -> dict[str, int]:
        """The size in bytes of each file in it; {} where there is no such folder. Raises UserError where it cannot be listed."""
        try:
            return {path.name: path.stat().st_size for path in self.path.iterdir() if path.is_file()}
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except OSError as e:
            raise UserError(f"{self} cannot be read ({e.strerror})") from e

    def size(self, name: str) -> int | None:
        """The size in bytes of one file; None where it is not there."""
        path = self.path / name
        return path.stat().st_size if path.is_file() else None

    def make(self) -> None:
        """Make the folder. Raises UserError where that is not possible."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise UserError(f"{self}: {e}") from e

    def put(self, name: str, write: Write) -> int:
        """Write a file, whole or not at all. Returns its size in bytes. Raises OSError where the disk refuses."""
        put(self.path / name, write)
        return (self.path / name).stat().st_size

    @contextmanager
    def file(self, name: str) -> Iterator[Path]:
        """Inside, the path from which the file can be read."""
        yield self.path / name

    def json(self, name: str, largest: int) -> dict[str, Any]:
        """Raises UserError as ``heads.stored.read_json`` does."""
        with self.file(name) as path:
            try:
                return read_json(path, largest)
            except UserError as e:
                raise UserError(str(e).replace(str(path), self.of(name))) from None

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        (self.path / name).unlink(missing_ok=True)

    def locked(self, name: str = NAME, key: str = "out") -> AbstractContextManager[None]:
        """Hold the folder for this process. Raises UserError, naming ``key``, where another process holds it."""
        return locked(self.path, key, name)

    def waiting(self, name: str, what: str) -> AbstractContextManager[None]:
        """Hold the lock ``name``, after waiting for other processes to let go of it. ``what`` it waits for is printed."""
        return waiting(self.path / name, "out", what)


class Elsewhere(Folder):
    """A folder behind a URL, by fsspec. Nothing there can be locked."""

    def __init__(self, url: str) -> None:
        import fsspec

        self.url = url.rstrip("/")
        try:
            self.fs, self.root = fsspec.core.url_to_fs(self.url)
        except Exception as e:  # ImportError says what to install, ValueError that the protocol is none; each system has its own kinds
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
        """Object stores have no folders; what else is wrong shows when the first file is put."""
        with suppress(Exception):
            self.fs.makedirs(self.root, exist_ok=True)

    def put(self, name: str, write: Write) -> int:
        path = Path(self._room.name) / f"out-{name}"
        try:
            write(path)
            self.fs.put_file(str(path), f"{self.root}/{name}")
            return path.stat().st_size
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
            path.unlink(missing_ok=True)  # what is mapped into memory stays there
            path.parent.rmdir()

    def remove(self, name: str) -> None:
        try:
            self.fs.rm_file(f"{self.root}/{name}")
        except FileNotFoundError:
            return

    def locked(self, name: str = NAME, key: str = "out") -> AbstractContextManager[None]:
        return nullcontext()

    def waiting(self, name: str, what: str) -> AbstractContextManager[None]:
        return nullcontext()
