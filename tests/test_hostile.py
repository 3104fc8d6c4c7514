"""What a user may type wrong: one line, exit code 2, before a target is loaded, and nothing is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from inference.target import Target
from tests.doors import call
from tests.hostile import HOSTILE, Hostile


@pytest.mark.parametrize("hostile", HOSTILE, ids=[f"{each.door}: {' '.join(each.arguments)[:80]}" for each in HOSTILE])
def test_a_wrong_command_line_is_one_line(
    hostile: Hostile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("a target was loaded")

    monkeypatch.setattr(Target, "load", load)
    assert call(hostile.door, hostile.arguments, tmp_path, monkeypatch) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and hostile.says in lines[0], lines
    assert not [*tmp_path.iterdir()]


def test_brackets_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for value in ("[" * 5000, "[" * 5000 + "]" * 5000):
        assert call("train", [f"head.taps={value}"], tmp_path, monkeypatch) == 2
        said = capsys.readouterr().err
        assert said.startswith("error: ") and said.count("\n") == 1 and len(said) < 2100


def test_there_are_enough_of_them() -> None:
    assert len(HOSTILE) >= 250 and len({(each.door, *each.arguments) for each in HOSTILE}) == len(HOSTILE)
