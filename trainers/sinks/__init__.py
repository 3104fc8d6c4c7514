"""Services that a run's numbers can be logged to: one file each, NAME.py, and conf/tracker/NAME.yaml with ``NAME: true``. The file has

    open(watched, **settings) -> Sink       with the keys of the YAML as keywords

``open`` imports the service's library, and raises UserError if that is missing or does not start.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from headstart.heads.files import put_text


class Input(NamedTuple):
    """An input of a run: its target or its data."""

    kind: str  # "model" or "dataset"
    name: str
    places: Sequence[str]  # files, folders, names on a hub
    about: Mapping[str, Any]  # digests and settings that distinguish it from others of the same name


class Watched(NamedTuple):
    """The run whose numbers are logged."""

    run: Path  # its folder
    settings: Mapping[str, Any]
    resume: bool  # whether it resumes an interrupted run
    arm: str  # its name among several arms; "": it is the only one
    inputs: Sequence[Input] = ()

    @property
    def name(self) -> str:
        """The name of the run; of an arm RUN/ARM."""
        return f"{self.together}/{self.arm}" if self.arm else self.run.name

    @property
    def together(self) -> str | None:
        """The name of the group that this arm and those trained side by side with it form; None for a single arm."""
        return self.run.parent.name if self.arm else None

    def kept(self, service: str, new: str) -> str:
        """The id under which a service knows this run: the one stored in the run folder if the run resumes, else ``new``, which is stored.
        Raises OSError.
        """
        path = self.run / f"{service}_id"
        if not (self.resume and path.is_file()):
            put_text(path, new)
        return path.read_text(encoding="utf-8").strip()


class Result(NamedTuple):
    """What came of a run."""

    numbers: Mapping[str, float]  # the final figures
    step: int
    picture: Path  # the report's PNG
    files: Sequence[Path]  # of the report
    examples: Sequence[Sequence[str | int | float]]  # decoded texts: rows with the columns examples.COLUMNS; may be empty
    speculator: Path  # the exported folder; need not be there


def artifact_name(text: str) -> str:
    """A name that W&B and trackio take for an artifact: allowed characters only, at most 128."""
    return re.sub(r"[^\w.-]", "-", text, flags=re.ASCII)[-128:]


class Sink(Protocol):
    """A service that a run logs to. If it raises any error, it is not called again, and the training continues."""

    def go_on_after(self, step: int) -> None:
        """The run resumes after this step. Later steps, if already logged, are repeated."""

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Log figures of a step, under the names of trainers/metrics.py."""

    def report(self, result: Result) -> None:
        """Log the final figures, and what else of the result the service takes."""

    def close(self) -> None:
        """The run has ended."""
