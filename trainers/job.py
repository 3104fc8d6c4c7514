"""A run that is ready to train (``run.prepare``), and what it has exported."""

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
    """As a context it gives back what it holds: locks, trackers."""

    places: list[Path]  # the run folder, and the one on another disk
    target: TargetInfo
    source: Source
    accelerator: Accelerator
    several: bool  # arms with folders of their own and a comparison, be it one
    settings: Settings  # target, data, decode, export, tracker, parallel, and a trainer with what all arms share
    own: dict[str, Settings]  # of each arm: head, loss, trainer
    taps: list[int]
    decoding: Decode
    reported: bool  # what is exported is decoded with
    dtype: torch.dtype  # of the exported weights
    room: Room
    changed: dict[str, Settings] = field(default_factory=dict)  # of each arm: key -> value and default, where they differ
    prompts: list[list[int]] = field(default_factory=list)  # of the report
    held_out: list[TargetBatch] = field(default_factory=list)
    arms: list[Arm] = field(default_factory=list)
    held: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.held.close()


@dataclass
class Exported:
    """Where a drafter was put, its run folder or that on another disk, and the target that it is served with."""

    place: Path
    target: TargetInfo
    changed: str | None = None  # where that one is, if training made it

    @property
    def speculator(self) -> Path:
        """The exported drafter."""
        return self.place / "speculator"
