"""Command lines that must be refused: with one line that begins with "error:" and names what is wrong, and with exit code 2, before a
target is loaded or anything is written.

``python -m pytest -m '' tests/test_hostile.py`` runs all of them within one process; a benchmark may run them as a user does.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
EAGLE, FILE, FOLDER = ROOT / "assets" / "tiny_eagle", ROOT / "LICENSE", ROOT / "conf"
LONG, ENTRY = "x" * 300, {"train": [str(ROOT / "train.py")], "data": ["-m", "data"], "inference": ["-m", "inference"]}


class Hostile(NamedTuple):
    door: str  # train, data, data regenerate, inference, inference tune, ...
    arguments: list[str]
    says: str  # what the line must name

    @property
    def command(self) -> list[str]:
        """For python, in any folder, with the checkout in PYTHONPATH."""
        first, *command = self.door.split()
        return [*ENTRY[first], *command, *self.arguments]


GIVEN = {  # settings that these doors require
    "inference": "speculator=EAGLE prompts=FILE ",
    "inference tune": "speculator=EAGLE prompts=FILE ",
    "inference evaluate": "speculator=EAGLE path=FILE ",
    "inference expect": "speculator=EAGLE path=FOLDER ",
}


def _read(door: str, lines: list[str]) -> list[Hostile]:
    found = []
    for line in lines:
        arguments, _, says = line.rstrip().rpartition("  ")
        for word, value in (("LONG", LONG), ("EAGLE", str(EAGLE)), ("FILE", str(FILE)), ("FOLDER", str(FOLDER))):
            arguments, says = arguments.replace(word, value), says.replace(word, value)
        found.append(Hostile(door, arguments.split(), says.strip()))
    return found


def _all() -> list[Hostile]:
    """Read tests/hostile.txt. It has a section for each door. A line has arguments and, after two spaces, a word of the error. The lines of
    the section "all" are tried with train, and some of them with each other door.
    """
    parts = re.split(r"^\[([a-z ]+)\]$", (ROOT / "tests" / "hostile.txt").read_text(), flags=re.MULTILINE)[1:]
    doors = {door: lines.strip().splitlines() for door, lines in zip(parts[::2], parts[1::2], strict=True)}
    common = doors.pop("all")
    found = _read("train", common)
    for i, (door, lines) in enumerate(doors.items()):
        few = [] if door == "train" else [GIVEN.get(door, "") + line for line in common[i :: len(doors)]]
        found += _read(door, [*lines, *few])
    return found


HOSTILE = _all()
