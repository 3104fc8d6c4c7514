"""Where a run's numbers go beside its folder: a file for each service, and a YAML of that name in conf/tracker, which says ``NAME: true``.

    open(watched, **settings) -> Sink       with the keys of the YAML as keywords

The library is imported there, and UserError raised where it is missing or does not start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from headstart.heads.files import put_text


class Input(NamedTuple):
    """What a run learns from: its target, its data."""

    kind: str  # model, dataset
    name: str
    places: Sequence[str]  # files, folders, names on a hub
    about: Mapping[str, Any]  # tells it from others of its name: digests, settings


class Watched(NamedTuple):
    """The run that is watched."""

    run: Path  # its folder
    settings: Mapping[str, Any]
    resume: bool  # whether it goes on where an earlier process of it was stopped
    arm: str  # "": it has the folder, and its process, for itself
    inputs: Sequence[Input] = ()

    @property
    def name(self) -> str:
        """What it is called."""
        return f"{self.together}/{self.arm}" if self.arm else self.run.name

    @property
    def together(self) -> str | None:
        """What it and the arms beside it are called."""
        return self.run.parent.name if self.arm else None

    def kept(self, service: str, new: str) -> str:
        """The name under which a service knows this run: it lies in the run folder, so that a resumed run goes on under it."""
        path = self.run / f"{service}_id"
        if not (self.resume and path.is_file()):
            put_text(path, new)
        return path.read_text(encoding="utf-8").strip()


class Sink(Protocol):
    """What is told of a run. Whatever it raises, it is not told anything more, and the training goes on."""

    def go_on_after(self, step: int) -> None:
        """Steps behind this one will be made (again)."""

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Figures of a step, under the names of trainers/metrics.py."""

    def report(self, numbers: Mapping[str, float], step: int, picture: Path, speculator: Path) -> None:
        """The final figures, a picture of them, beside which the report lies, and the exported folder."""

    def close(self) -> None:
        """The run has ended."""
