"""``Job``, a run that is ready to train (made by ``prepare.prepare``), and ``Exported``, what it exports."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch
from accelerate import Accelerator

from headstart.data.batch import TargetBatch
from headstart.data.source import Source
from headstart.inference.decoding.info import TargetInfo
from headstart.inference.settings import Decode, Settings
from headstart.trainers.arm import Arm
from headstart.trainers.space import Room


@dataclass
class Job:
    """A run that is ready to train. As a context manager it closes its locks, trackers and connections at the end."""

    places: list[Path]  # the run folder, and the one on another disk if there is one
    target: TargetInfo
    source: Source
    accelerator: Accelerator
    several: bool  # whether arms have their own folders and a comparison, even if there is only one arm
    settings: Settings  # target, data, decode, export, tracker, parallel, served, and the trainer's settings that all arms share
    own: dict[str, Settings]  # arm -> head, loss, trainer
    taps: list[int]  # of all arms together
    decoding: Decode
    reported: bool  # whether the exported drafters are decoded with and reported on
    dtype: torch.dtype  # of the exported weights
    room: Room
    changed: dict[str, Settings] = field(default_factory=dict)  # arm -> key -> value and default, where they differ
    prompts: list[list[int]] = field(default_factory=list)  # token ids of the report's prompts
    held_out: list[TargetBatch] = field(default_factory=list)
    arms: list[Arm] = field(default_factory=list)
    held: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.held.close()


@dataclass
class Exported:
    """Where a drafter was exported (its run folder, or the one on another disk), and the target that it is served with."""

    place: Path
    target: TargetInfo
    changed: str | None = None  # the folder of the target, if training changed it
    step: int = 0  # the step whose weights were exported

    @property
    def speculator(self) -> Path:
        """The folder of the exported drafter."""
        return self.place / "speculator"
