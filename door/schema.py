"""What every setting may be: a frozen model for each door, of those of its groups (door/groups.py). What it means, its YAML says.

Doors check with these before anything large is loaded, and hand on plain dictionaries. Some stay open, so that what is new there is
a file and a YAML: a drafter, a source of data and a tracker have the keys of their YAMLs, a drafter's are checked against its
constructor (heads/hub.py), a proposer's where they are opened (inference/proposers/open.py), and the terms of a loss are those that
occur in conf/loss.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from headstart.door import values
from headstart.door.groups import Data, Decode, Export, Group, Head, Launcher, Loss, Skip, Target, Tracker, Trainer
from headstart.door.values import Above0, AtLeast0, Capacity, Count, Place, Seed, Whole, Word, choices, of_yaml
from headstart.door.words import Says


class Door(Group):
    """What every door has: a target."""

    target: Target
    alone: ClassVar[str] = ""  # what a target that processes share cannot do here, and why

    @model_validator(mode="after")
    def _not_shared(self) -> Door:
        if self.alone and self.target.device == "tp":
            raise ValueError(f"target.device=tp cannot {self.alone}; target.device=map spreads the layers over all GPUs instead")
        return self


def readers() -> str:
    """The choices of data that have a path."""
    return ", ".join(f"data={choice}" for choice in choices("data") if "path" in of_yaml("data", choice))


class Reader(Door):
    """A door that reads data."""

    data: Data
    path: Place | None = None  # shorthand of data.path

    @model_validator(mode="after")
    def _path_of_the_data(self) -> Reader:
        if self.path is not None and self.path != self.data.path:
            raise ValueError(f"path={self.path} is not what data={self.data.name} reads: give path alone, with one of {readers()}")
        return self


class Config(Reader):
    """conf/config.yaml: ``python train.py``."""

    alone = "train: every process reads rows of its own"
    out: Place
    out_fallback: Place | None
    out_wait: AtLeast0
    arms: values.Arms | None
    report: Literal["here", "none"]
    loss: Loss
    head: Head
    trainer: Trainer
    decode: Decode
    export: Export
    tracker: Tracker
    launcher: Launcher
    plan: bool
    nodes: Whole
    gpus: Whole
    gpu: Word
    gpu_hour: Above0 | None


class Capture(Reader):
    """conf/capture.yaml: ``python -m data``."""

    alone = "capture: every process reads rows of its own"
    loss: Any  # not used
    head: Head
    out: Place
    taps: Annotated[list[Count], Field(min_length=1), Says("a list of layers, [2, 6, 9] for example,")] | None
    length: Whole
    rows: Whole
    seed: Seed


class Regenerate(Reader):
    """conf/regenerate.yaml: ``python -m data regenerate``."""

    alone = "regenerate: each process would write the same lines; serve it and give url=, or"
    out: Place
    turns: Literal["all", "last"]
    prefix: Whole
    new_tokens: Whole
    temperature: AtLeast0
    top_p: Annotated[float, Field(gt=0, le=1)]
    top_k: Count
    seed: Seed
    limit: Whole | None
    rows: Whole
    max_length: Capacity
    speculator: Place | None
    url: values.Url | None
    model: Word | None
    key: Word | None
    retries: Count

    @model_validator(mode="after")
    def _one_of_two(self) -> Regenerate:
        if self.url is not None and self.speculator is not None:
            raise ValueError("speculator=DIR is for the engine here; the endpoint of url= has its own")
        return self


class Inference(Door):
    """conf/inference.yaml: ``python -m inference``."""

    decode: Decode
    speculator: Place | None
    drafter_device: Word | None
    prompts: Place
    on_long: Skip
    out: Place | None


class Tune(Door):
    """conf/tune.yaml: ``python -m inference tune``."""

    alone = "tune: each process would choose by its own clock"
    speculator: Place
    prompts: Place
    on_long: Skip
    count: Whole | None
    new_tokens: Whole
    sequences: Whole
    out: Place | None


class Chat(Door):
    """conf/chat.yaml: ``python -m inference chat``."""

    alone = "chat: what is typed reaches one process only"
    decode: Decode
    speculator: Place | None
    temperature: AtLeast0
    new_tokens: Whole
    max_length: Capacity


class Serve(Door):
    """conf/serve.yaml: ``python -m inference serve``."""

    alone = "serve: requests reach one process only"
    decode: Decode
    speculator: Place | None
    host: Word
    port: Annotated[int, Field(ge=0, le=65535)]
    rows: Whole
    max_length: Capacity
    max_body: Whole
    api_key: Place | None
    queue: Count
    read_timeout: Above0
    grace: AtLeast0


DOORS: dict[str, type[Door]] = {door.__name__.lower(): door for door in (Config, Capture, Regenerate, Inference, Tune, Chat, Serve)}
