"""What a user may type wrong: one line, exit code 2, before a target is loaded, and nothing is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from headstart.inference.decoding.target import Target
from tests.doors import call
from tests.hostile import HOSTILE, Hostile


def named(i: int, each: Hostile) -> Any:
    """One in three of each door; hydra takes its time for the others, which are slow."""
    return pytest.param(each, id=f"{each.door}: {' '.join(each.arguments)[:80]}", marks=pytest.mark.slow if i % 3 else ())


@pytest.mark.parametrize("hostile", [named(i, each) for i, each in enumerate(HOSTILE)])
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
    """At once: hydra would read 100,000 of them for half a minute."""
    monkeypatch.setattr(OverridesParser, "parse_override", None)
    for value in ("[" * 5000, "[" * 5000 + "]" * 5000, "{a:" * 30_000 + "1" + "}" * 30_000, "[" * 100_000):
        assert call("train", [f"head.taps={value}"], tmp_path, monkeypatch) == 2
        assert capsys.readouterr().err == "error: head.taps: more than 100 brackets lie within each other\n"


def test_there_are_enough_of_them() -> None:
    assert len(HOSTILE) >= 250 and len({(each.door, *each.arguments) for each in HOSTILE}) == len(HOSTILE)
