"""What a user may type wrong: one line, exit code 2, before a target is loaded, and nothing is written."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hydra._internal.hydra import Hydra

import data.__main__
import inference.__main__
import train
from inference.target import Target
from tests.hostile import HOSTILE, Hostile

DOORS: dict[str, Callable[[], None]] = {"train": train.start, "data": data.__main__.main, "inference": inference.__main__.main}


def names() -> list[str]:
    return [f"{each.door}: {' '.join(each.arguments)[:80]}" for each in HOSTILE]


@pytest.mark.parametrize("hostile", HOSTILE, ids=names())
def test_a_wrong_command_line_is_one_line(
    hostile: Hostile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("a target was loaded")

    monkeypatch.setattr(Hydra, "get_mode", lambda *_, **__: None)
    monkeypatch.setattr(Target, "load", load)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")  # the door sets it: undone afterwards
    monkeypatch.chdir(tmp_path)
    door, *command = hostile.door.split()
    monkeypatch.setattr(sys, "argv", [door, *command, *hostile.arguments])
    with pytest.raises(SystemExit) as ended:
        DOORS[door]()
    lines = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert len(lines) == 1 and lines[0].startswith("error: ") and hostile.says in lines[0], lines
    assert not [*tmp_path.iterdir()]


def test_there_are_enough_of_them() -> None:
    assert len(HOSTILE) >= 250 and len({(each.door, *each.arguments) for each in HOSTILE}) == len(HOSTILE)
