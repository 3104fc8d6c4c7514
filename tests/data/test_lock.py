"""One writer per folder, whatever becomes of it."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headstart.data.lock import locked
from headstart.heads.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
HOLD = """
import sys, time
from pathlib import Path
from headstart.data.lock import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_one_at_a_time_and_nothing_is_left(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "one"
    with locked(folder):
        says = rf"^out={folder} is being written by process \d+ on .* since 20.*: wait for it, end it, or choose another folder$"
        with pytest.raises(UserError, match=says) as e, locked(folder):
            pass
        assert "\n" not in str(e.value)
        with locked(tmp_path / "runs" / "two"):
            pass
    assert not list(tmp_path.iterdir())  # what was made for nothing is taken away
    folder.mkdir(parents=True)
    with locked(folder):
        (folder / "kept").touch()
    assert [p.name for p in folder.iterdir()] == ["kept"]
    with pytest.raises(ZeroDivisionError), locked(folder):
        _ = 1 // 0
    with locked(folder):
        pass


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    with pytest.raises(UserError, match=f"being written by process {process.pid} on"), locked(tmp_path):
        pass
    process.kill()
    assert process.wait() == -signal.SIGKILL and [p.name for p in tmp_path.iterdir()] == [".lock"]
    with locked(tmp_path):
        pass
    assert not list(tmp_path.iterdir())


def test_what_a_killed_process_forked_holds_nothing(tmp_path: Path) -> None:
    """As the processes that tokenise, which the system leaves alone when it kills the one that started them."""
    forks = HOLD.replace('    print("held"', "    import os\n    os.fork() or print(os.getpid()")
    process = subprocess.Popen([sys.executable, "-c", forks, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())  # which says so itself: when the fork returns here, the child may not have begun
    try:
        with pytest.raises(UserError, match=f"being written by process {process.pid} on"), locked(tmp_path):
            pass  # that the child has closed it lets nothing go
        process.kill()
        process.wait()
        os.kill(child, 0)
        with locked(tmp_path):
            pass
    finally:
        os.kill(child, signal.SIGKILL)


def test_what_a_process_forked_takes_nothing_along_when_it_ends(tmp_path: Path) -> None:
    forks = HOLD.replace('    print("held"', '    import os\n    os.fork() or sys.exit()\n    os.wait()\n    print("held"')
    process = subprocess.Popen([sys.executable, "-c", forks, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "held\n" and (tmp_path / ".lock").exists()
        with pytest.raises(UserError, match=f"being written by process {process.pid} on"), locked(tmp_path):
            pass
    finally:
        process.kill()
        process.wait()


def test_who_opened_the_file_of_a_holder_that_leaves_holds_a_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between opening and locking: the lock on a file that is gone keeps nobody out."""
    first, real, calls = locked(tmp_path), fcntl.flock, []
    first.__enter__()

    def leaves(file: Any, how: int) -> None:
        calls.append(how)
        if len(calls) == 1:
            first.__exit__(None, None, None)
        real(file, how)

    monkeypatch.setattr(fcntl, "flock", leaves)
    with locked(tmp_path):
        assert len(calls) == 2 and (tmp_path / ".lock").exists()
        with pytest.raises(UserError, match="is being written"), locked(tmp_path):
            pass


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_said_to_be_one(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def without(*_: object) -> None:
        raise OSError(code, "no such thing here")

    monkeypatch.setattr(fcntl, "flock", without)
    with locked(tmp_path):
        said = capsys.readouterr().out
    assert said == f"out={tmp_path} cannot be locked (no such thing here): see to it that no other process writes there\n"


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("file", "file/run", "/dev/null/run", 300 * "x", "a\0b", "\ud800"):
        with (
            pytest.raises(UserError, match=r"^the folder elsewhere='.*' cannot be written: .*$") as e,
            locked(tmp_path / name, "elsewhere"),
        ):
            pass
        assert "\n" not in str(e.value)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
