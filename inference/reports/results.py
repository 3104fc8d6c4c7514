"""results.jsonl: the results of an evaluation, each written as soon as it is measured; and the same in the format of Spec-Bench.

The first line holds the settings: an evaluation with other settings is refused in the same folder. A last line that is incomplete,
because the process was killed, is removed.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from headstart.heads.errors import UserError
from headstart.heads.files import put_text

NAME, SPEC_BENCH, VERSION = "results.jsonl", "spec_bench", 1


class Key(NamedTuple):
    """A unit, which is measured as a whole: the number of sequences at once, the temperature, and the indices of the questions."""

    sequences: int
    temperature: float
    questions: tuple[int, ...]


class Line(NamedTuple):
    """The results of a unit. ``made``: side -> ``seconds`` of each turn, and ``talks``, for each question its answers: ``text``,
    ``tokens``, ``emitted``, how many tokens each round added, and ``accepted``, how many guesses each accepted.
    """

    group: str
    made: dict[str, Any]
    differences: dict[str, list[dict[str, Any]]]  # side -> answers that differ from plain decoding's at T = 0
    time: float


class Results:
    """The results in ``folder``; ``lines``: those measured so far. Raises UserError for a damaged file, or one with other settings."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.path, self.lines = folder / NAME, dict[Key, Line]()
        settings = json.loads(json.dumps(settings))
        if self.path.is_file() and self._whole():
            self._read(settings)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            put_text(self.path, json.dumps({"version": VERSION, "settings": settings}) + "\n")

    def _whole(self) -> bool:
        """Cut the file after its last complete line. Returns whether there is one. Raises UserError where the file cannot be changed."""
        try:
            with self.path.open("r+b") as file:
                data = file.read()
                if (end := data.rfind(b"\n") + 1) < len(data):
                    file.truncate(end)
        except OSError as e:
            raise UserError(f"{self.path} cannot be read and written ({e.strerror}): give another out=DIR") from e
        return end > 0

    def _read(self, settings: Mapping[str, Any]) -> None:
        number = 0
        try:
            with self.path.open(encoding="utf-8") as file:
                for number, text in enumerate(file, 1):
                    found = json.loads(text)
                    if number == 1:
                        if (version := found["version"]) not in range(1, VERSION + 1):
                            raise UserError(f"{self.path} has version {version!r:.20}, which is not known here: give another out=DIR")
                        there = dict(found["settings"])
                        continue
                    key = Key(found["sequences"], found["temperature"], tuple(found["questions"]))
                    self.lines[key] = Line(found["group"], found["made"], found["differences"], found["time"])
        except UserError:
            raise
        except (ValueError, KeyError, TypeError, RecursionError) as e:
            raise UserError(f"{self.path} line {number} is damaged ({type(e).__name__}): remove the line, or give another out=DIR") from e
        others = [key for key in dict.fromkeys([*settings, *there]) if settings.get(key) != there.get(key)]
        if others:
            each = "; ".join(f"{key} is {_short(there.get(key))} there and {_short(settings.get(key))} here" for key in others)
            raise UserError(f"out={self.path.parent} holds an evaluation with other settings: {each}. Give another out=DIR")

    def add(self, key: Key, group: str, made: dict[str, Any], differences: dict[str, list[dict[str, Any]]]) -> None:
        """Add the results of a unit, without the prompts. Returns once they are on the disk."""

        def bare(turn: dict[str, Any]) -> dict[str, Any]:
            return {k: v for k, v in turn.items() if k != "prompt"}

        made = {name: each | {"talks": [[bare(turn) for turn in talk] for talk in each["talks"]]} for name, each in made.items()}
        self.lines[key] = line = Line(group, made, differences, time.time())
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(key._asdict() | line._asdict(), separators=(",", ":")) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def write_spec_bench(lines: Mapping[Key, Line], names: Sequence[Any], categories: Sequence[str], folder: Path, model: str) -> None:
    """Write the results of one sequence at a time as Spec-Bench's evaluation does, for its evaluation/speed.py: a file for each side and
    temperature. ``names``, ``categories``: of the questions; ``model``: the beginning of ``model_id``.
    """
    files: dict[str, list[dict[str, Any]]] = {}
    for key, line in sorted(lines.items()):
        for side, each in line.made.items() if key.sequences == 1 else ():
            (number,), (talk,) = key.questions, each["talks"]
            name = f"{side}-T{key.temperature:g}"
            choice = {
                "index": 0,
                "turns": [turn["text"] for turn in talk],
                "decoding_steps": [len(turn["emitted"]) for turn in talk],
                "new_tokens": [len(turn["tokens"]) for turn in talk],
                "wall_time": each["seconds"],
                "accept_lengths": [n for turn in talk for n in turn["emitted"]],
            }
            about = {"question_id": names[number], "category": categories[number], "answer_id": f"{name}-{number}"}
            record = {**about, "model_id": f"{model}-{name}", "choices": [choice], "tstamp": line.time}
            files.setdefault(name, []).append(record)
    (folder / SPEC_BENCH).mkdir(exist_ok=True)
    for name, records in files.items():
        put_text(folder / SPEC_BENCH / f"{name}.jsonl", "".join(json.dumps(record) + "\n" for record in records))
