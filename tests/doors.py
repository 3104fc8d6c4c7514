"""Runs command lines (`python train.py ...`, `python -m ...`) in this process, without starting an interpreter for each."""

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
    """Run a command line in ``folder`` and return its exit code."""
    if not {"-m", "--multirun"} & {*arguments}:
        monkeypatch.setattr(Hydra, "get_mode", lambda *_, **__: None)  # it would compose the whole config only to find the mode
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")  # the command sets it; monkeypatch undoes that afterwards
    monkeypatch.chdir(folder)
    first, *command = door.split()
    monkeypatch.setattr(sys, "argv", [first, *command, *arguments])
    try:
        DOORS[first]()
    except SystemExit as ended:
        return ended.code
    return 0
