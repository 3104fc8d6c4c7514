"""A file is whole or not there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from heads.files import put, put_folder, put_text


def test_what_is_put_takes_the_place_of_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    put_text(path, "one")
    put_text(path, "zwei: zwölf")
    assert path.read_text(encoding="utf-8") == "zwei: zwölf" and [p.name for p in tmp_path.iterdir()] == ["a.json"]


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
