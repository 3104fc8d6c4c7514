"""A file is whole or not there."""

from __future__ import annotations

import errno
import json
import os
import signal
import stat
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from headstart.heads import files
from headstart.heads.errors import UserError
from headstart.heads.files import UNFINISHED, put, put_folder, put_text, sealed, sha256


def test_what_is_put_takes_the_place_of_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    put_text(path, "one")
    put_text(path, "zwei: zwölf")
    assert path.read_text(encoding="utf-8") == "zwei: zwölf" and [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_others_may_read_what_safetensors_writes(tmp_path: Path) -> None:
    """It writes for the owner alone; a colleague who goes on with a run, or reads shards, could not."""
    from safetensors.torch import save_file

    usual = tmp_path / "usual"
    usual.touch()
    put(tmp_path / "one", lambda beside: save_file({"x": torch.ones(2)}, beside))
    put_folder(tmp_path / "folder", lambda beside: save_file({"x": torch.ones(2)}, beside / "one"))
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "one", tmp_path / "folder" / "one", usual)} == {0o666 & ~files.UMASK}
    put(tmp_path / "own", lambda beside: (beside.touch(), beside.chmod(0o640)))  # permissions that somebody chose
    assert stat.S_IMODE((tmp_path / "own").stat().st_mode) == 0o640


def test_a_failure_leaves_what_was_there_and_nothing_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    put_text(path, "one")

    def half(beside: Path) -> None:
        assert beside.parent == path.parent
        beside.write_text("ha")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        put(path, half)
    assert path.read_text() == "one" and [p.name for p in tmp_path.iterdir()] == ["a.json"]

    def refuses(_: int) -> None:
        raise OSError("the disk does not keep it")

    monkeypatch.setattr(os, "fsync", refuses)
    with pytest.raises(OSError, match="does not keep it"):
        put_text(path, "two")
    assert path.read_text() == "one" and [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_a_folder_is_whole_or_as_it_was(tmp_path: Path) -> None:
    place = tmp_path / "deeper" / "folder"
    put_folder(place, lambda beside: (beside / "a").write_text("first"))

    def fails(beside: Path) -> None:
        (beside / "b").write_text("half")
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        put_folder(place, fails)
    assert [p.name for p in place.parent.iterdir()] == ["folder"] and [p.name for p in place.iterdir()] == ["a"]
    put_folder(place, lambda beside: (beside / "c").write_text("second"))
    assert [p.name for p in place.parent.iterdir()] == ["folder"] and [p.name for p in place.iterdir()] == ["c"]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs the names of open files")
def test_the_disk_keeps_everything_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contents first, then entries, then the name, then the folder that has the name in it."""
    kept: list[str] = []
    sync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (kept.append(Path(f"/proc/self/fd/{handle}").resolve().name), sync(handle)))
    put_text(tmp_path / "a.json", "one")
    assert kept == [".a.json.part", tmp_path.name]
    kept.clear()

    def write(beside: Path) -> None:
        (beside / "deeper").mkdir()
        (beside / "deeper" / "b").write_text("b")
        (beside / "c").write_text("c")

    for _ in range(2):
        put_folder(tmp_path / "folder", write)
        assert sorted(kept[:-2]) == ["b", "c", "deeper"] and kept[-2:] == [".folder.part", tmp_path.name]
        kept.clear()


def test_the_name_of_tensors_that_are_being_written(tmp_path: Path) -> None:
    """By safetensors, in a process that is killed meanwhile."""
    tensors = {"a": torch.zeros(1 << 22)}
    if not (child := os.fork()):
        with suppress(BaseException):
            while True:
                save_file(tensors, tmp_path / "a")
        os._exit(1)
    try:
        while not (found := [path for path in tmp_path.iterdir() if path.name != "a"]):
            assert os.waitpid(child, os.WNOHANG) == (0, 0)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert [path for path in found if not UNFINISHED.fullmatch(path.name)] == []


@pytest.mark.parametrize("exchange", [True, False])
def test_a_folder_takes_the_place_of_another(exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "folder"
    real, steps = files._exchange, list[bool]()
    monkeypatch.setattr(files, "_exchange", lambda a, b: steps.append(exchange and real(a, b)) or steps[-1])
    for text in ("one", "two", "three"):
        (tmp_path / ".folder.part").mkdir()  # of a process that was killed
        (tmp_path / ".folder.part" / "half").touch()
        (tmp_path / ".folder.old").mkdir()
        (tmp_path / ".folder.old" / "zero").touch()
        put_folder(place, lambda beside, text=text: (beside / text).write_text(text))  # type: ignore[misc]
        assert [p.name for p in tmp_path.iterdir()] == ["folder"] and [p.name for p in place.iterdir()] == [text]
    if not exchange or not any(steps):  # here the file system cannot, as everywhere but on Linux
        assert steps == [False, False]
        return
    assert steps == [True, True]


def test_what_was_killed_between_two_renames_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_exchange", lambda a, b: False)
    place, old = tmp_path / "folder", tmp_path / ".folder.old"
    put_folder(old, lambda beside: (beside / "first").write_text("first"))

    def full(beside: Path) -> None:
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        put_folder(place, full)
    assert (old / "first").read_text() == "first"  # until there is another, it stays
    put_folder(place, lambda beside: (beside / "second").write_text("second"))
    assert [p.name for p in tmp_path.iterdir()] == ["folder"] and [p.name for p in place.iterdir()] == ["second"]


def test_a_folder_that_cannot_be_named_leaves_the_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_exchange", lambda a, b: False)
    put_folder(tmp_path / "folder", lambda beside: (beside / "first").write_text("first"))
    rename = Path.rename

    def refuses(path: Path, goal: Path) -> Path:
        if path.name == ".folder.part":
            raise OSError(errno.EIO, "Input/output error")
        return rename(path, goal)

    monkeypatch.setattr(Path, "rename", refuses)
    with pytest.raises(OSError, match="Input/output error"):
        put_folder(tmp_path / "folder", lambda beside: (beside / "second").write_text("second"))
    assert [p.name for p in tmp_path.iterdir()] == ["folder"] and [p.name for p in (tmp_path / "folder").iterdir()] == ["first"]


def test_a_link_to_a_folder_stays_one(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "folder")
    for text in ("one", "two"):
        put_folder(tmp_path / "link", lambda beside, text=text: (beside / text).write_text(text))  # type: ignore[misc]
        assert (tmp_path / "link").is_symlink() and [p.name for p in (tmp_path / "disk" / "folder").iterdir()] == [text]


def test_a_full_disk_is_one_error_whoever_finds_it(tmp_path: Path) -> None:
    """safetensors has an error of its own for it."""

    def full(beside: Path) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    for put_it in (put, put_folder):
        with pytest.raises(OSError, match="No space left") as caught:
            put_it(tmp_path / "a", full)
        assert caught.value.errno == errno.ENOSPC and not [*tmp_path.iterdir()]


def test_a_file_system_that_knows_no_such_request_is_no_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some refuse to keep a folder's entries; of a file's contents every refusal counts."""
    sync, code = os.fsync, errno.EBADF

    def some(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(code, os.strerror(code))
        sync(handle)

    monkeypatch.setattr(os, "fsync", some)
    put_folder(tmp_path / "a", lambda beside: (beside / "b").write_text("b"))
    put_text(tmp_path / "c", "c")
    code = errno.EDQUOT
    with pytest.raises(OSError, match="quota"):
        put_folder(tmp_path / "d", lambda beside: (beside / "b").write_text("b"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "c"]


def test_what_is_sealed_tells_of_every_change() -> None:
    content = {"b": [1, {"c": None}], "a": "ü"}
    whole = sealed(content)
    assert whole == {**content, "sha256": whole["sha256"]} == sealed(dict(reversed(whole.items()))) == sealed(json.loads(json.dumps(whole)))
    assert sealed({**whole, "a": "u"})["sha256"] != whole["sha256"] and sealed({**whole, "d": 1})["sha256"] != whole["sha256"]


def test_the_digest_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    (tmp_path / "b").write_bytes(b"bc")
    (tmp_path / "c").write_bytes(b"a")
    assert sha256(tmp_path / "c", tmp_path / "b") == sha256(tmp_path / "a")
    assert sha256(tmp_path / "a") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # FIPS 180-2, appendix B.1


def test_the_cache_may_lie_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HEADSTART_CACHE", "~/cache")  # as no shell expands it, behind an = or in a service's file
    assert files.cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("HEADSTART_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "~/xdg")
    assert files.cache_folder() == tmp_path / "xdg" / "headstart"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert files.cache_folder() == tmp_path / ".cache" / "headstart"


def test_damaged_lines_are_skipped_and_a_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    assert files.json_lines(path) == []
    path.write_bytes(b'{"step": 1}\n\xff\xfe\x00\n' + b"[" * 100_000 + b'\n7\n{"step": 2}\n{"ste')
    assert files.json_lines(path) == [{"step": 1}, {"step": 2}]

    def failing(*_: object, **__: object) -> str:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "read_text", failing)
    with pytest.raises(UserError, match=rf"^{path} cannot be read \(Input/output error\)$"):
        files.json_lines(path)


def test_lines_are_kept_in_their_order_before_new_ones(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    files.keep_lines(path, lambda line: True)
    assert not path.exists()  # of nothing, nothing is made
    files.keep_lines(path, lambda line: True, {"step": 1}, {"step": 2})
    with path.open("a", encoding="utf-8") as file:
        file.write('{"step": 3}\n7\n{"ste')
    files.keep_lines(path, lambda line: line["step"] != 2, {"step": 9})
    assert path.read_text() == '{"step": 1}\n{"step": 3}\n{"step": 9}\n'
    files.keep_lines(path, lambda line: False)
    assert path.read_text() == ""
