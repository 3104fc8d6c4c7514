"""results.jsonl: what an evaluation has made so far, a line as soon as it is there; and the same as Spec-Bench's scripts read it.

The first line says the settings: an evaluation of others is refused in the same folder. A line that a kill has cut is taken away.
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
    """What is measured together: so many sequences at once, at a temperature, the questions of these numbers."""

    sequences: int
    temperature: float
    questions: tuple[int, ...]


class Line(NamedTuple):
    """``made``: side -> ``seconds`` of each turn and ``talks``, of each question its answers (text, tokens, emitted: of each round)."""

    group: str
    made: dict[str, Any]
    differences: dict[str, list[dict[str, Any]]]  # side -> where it says something else than plain decoding, at temperature 0
    time: float


class Kept:
    """``lines``: what is there. Raises UserError where the file is damaged, or of an evaluation with other settings."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.path, self.lines = folder / NAME, dict[Key, Line]()
        settings = json.loads(json.dumps(settings))
        if self.path.is_file() and self._whole():
            self._read(settings)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            put_text(self.path, json.dumps({"version": VERSION, "settings": settings}) + "\n")

    def _whole(self) -> bool:
        """Takes away what stands behind the last line that is whole; whether there is any."""
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
        """A line that survives whatever comes: the disk has it."""
        without = [{k: v for k, v in turn.items() if k != "prompt"} for each in made.values() for talk in each["talks"] for turn in talk]
        turns = iter(without)
        made = {name: each | {"talks": [[next(turns) for _ in talk] for talk in each["talks"]]} for name, each in made.items()}
        self.lines[key] = line = Line(group, made, differences, time.time())
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(key._asdict() | line._asdict(), separators=(",", ":")) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def write_spec_bench(lines: Mapping[Key, Line], names: Sequence[Any], categories: Sequence[str], folder: Path, model: str) -> list[Path]:
    """Of what was decoded one at a time: a file for each side and temperature, as Spec-Bench's evaluation writes and evaluation/speed.py
    reads them. ``names``, ``categories``: of the questions; ``model``: what its ``model_id`` begins with.
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
    paths = []
    for name, records in files.items():
        paths.append(folder / SPEC_BENCH / f"{name}.jsonl")
        put_text(paths[-1], "".join(json.dumps(record) + "\n" for record in records))
    return paths
