"""Doors within this process: as `python train.py ...` and `python -m ...`, without another interpreter for each."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hydra._internal.hydra import Hydra

from headstart.door import data, infer, train

ROOT = Path(__file__).resolve().parent.parent
DOORS: dict[str, Callable[[], None]] = {"train": train.start, "data": data.main, "inference": infer.main}


def call(door: str, arguments: Sequence[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> int | str | None:
    """The exit code, in ``folder``."""
    if not {"-m", "--multirun"} & {*arguments}:
        monkeypatch.setattr(Hydra, "get_mode", lambda *_, **__: None)  # it composes everything for this alone
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")  # the door sets it: undone afterwards
    monkeypatch.chdir(folder)
    first, *command = door.split()
    monkeypatch.setattr(sys, "argv", [first, *command, *arguments])
    try:
        DOORS[first]()
    except SystemExit as ended:
        return ended.code
    return 0
