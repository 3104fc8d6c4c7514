"""The types of all settings: a frozen model for each door, made of those of its groups (door/groups.py). Their meaning is in the YAMLs.

Doors check settings with these before anything large is loaded, and hand on plain dictionaries. Some groups stay open, so that an addition
is a file and a YAML: a drafter, a source of data and a tracker have the keys of their YAMLs. A drafter's settings are checked against its
constructor (heads/hub.py), a proposer's where it is opened (inference/proposers/open.py); the terms of a loss must occur in conf/loss/.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from headstart.door import groups, values
from headstart.door.groups import (
    Data,
    Decode,
    Group,
    Head,
    Loss,
    Served,
    Skip,
    Target,
    Trainer,
)
from headstart.door.values import Above0, AtLeast0, Count, Length, Place, Seed, Taps, Whole, Word
from headstart.door.words import Says


class Door(Group):
    """What every door has: a target."""

    target: Target
    trains: ClassVar[bool] = False
    alone: ClassVar[str] = ""  # for the error: what cannot be done here with a target that processes share, and why
    not_taken: ClassVar[dict[str, str]] = {}  # keys of a group that this door does not use -> text of the error

    @model_validator(mode="after")
    def _not_shared(self) -> Door:
        device = self.target.device
        if self.target.shared and self.alone:
            raise ValueError(f"target.device={device} cannot {self.alone}; target.device=map spreads the layers over all GPUs instead")
        if self.target.shared and device != "tp" and not self.trains:
            raise ValueError(f"target.device={device} is for training; target.device=tp shares the layers here")
        return self


class Endpoint(Group):
    """The settings of a door that may ask an endpoint: ``url`` (null: none is asked), and what belongs to it."""

    url: values.Url | None
    model: Word | None
    key: Word | None

    @model_validator(mode="after")
    def _of_the_endpoint(self) -> Endpoint:
        if self.url is None and (alone := [key for key in ("model", "key", "guesses") if getattr(self, key, None) is not None]):
            raise ValueError(f"{alone[0]} belongs to url=: give url too, or leave it out")
        return self


class Reader(Door):
    """A door that reads data."""

    data: Data
    path: Place | None = None  # shorthand of data.path

    @model_validator(mode="after")
    def _path_of_the_data(self) -> Reader:
        if self.path is not None and self.path != self.data.path:
            raise ValueError(f"path={self.path} is not what data={self.data.name} reads: give path alone, with one of {values.readers()}")
        return self


class Config(Reader):
    """conf/config.yaml: ``python train.py``."""

    trains = True
    out: Place
    out_fallback: Place | None
    out_wait: AtLeast0
    arms: values.Arms | None
    report: Literal["here", "none"]
    served: Served
    capture: groups.CaptureGroup
    loss: Loss
    head: Head
    trainer: Trainer
    decode: Decode
    export: groups.Export
    tracker: groups.Tracker
    parallel: groups.Parallel
    launcher: groups.Launcher
    plan: bool
    nodes: Whole
    gpus: Whole
    gpu: Word
    gpu_hour: Above0 | None

    @model_validator(mode="after")
    def _reported_elsewhere(self) -> Config:
        if self.target.shared and self.report == "here":
            raise ValueError(f"target.device={self.target.device} is shared by all processes, and one of them reports: "
                             "take report=none, which prints the command that reports")  # fmt: skip
        return self


class Capture(Reader):
    """conf/capture.yaml: ``python -m data``."""

    alone = "capture: every process reads rows of its own"
    loss: Any  # not used
    head: Head
    out: Place
    taps: Taps
    storage: Literal["bf16", "fp8", "int8"]
    length: Whole
    batch_size: Whole
    seed: Seed
    served: Served


class Engine(Door):
    """conf/engine.yaml: ``python -m data engine``."""

    loss: Any  # not used
    head: Head
    folder: Place
    taps: Taps
    length: Whole
    port: Annotated[int, Field(ge=1, le=65535)]


class Verify(Group):
    """conf/verify.yaml: ``python -m data verify``."""

    path: Place
    drop: bool


class Regenerate(Reader, Endpoint):
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
    sequences: Whole
    max_length: Length
    speculator: Place | None
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
    prompts: Place | None
    shards: Place | None
    costs: Place | None
    on_long: Skip
    count: Whole | None
    new_tokens: values.Enough
    sequences: Whole
    out: Place | None

    @model_validator(mode="after")
    def _over_some_text(self) -> Tune:
        if self.prompts is not None and self.shards is not None:
            raise ValueError("give prompts=FILE.jsonl or shards=DIR, not both: prompts are decoded here, captured rows need no target")
        if self.costs is not None and self.shards is None:
            raise ValueError("costs=FILE goes with shards=DIR: with prompts=FILE.jsonl rounds are timed here")
        return self


class Diagnose(Door, Endpoint):
    """conf/diagnose.yaml: ``python -m inference diagnose``."""

    alone = "diagnose: layers are read one by one"
    speculator: Place
    run: Place | None
    prompts: Place | None
    on_long: Skip
    count: Whole
    new_tokens: values.Enough
    temperature: AtLeast0
    guesses: Annotated[int, Field(ge=1, le=64)] | None

    @model_validator(mode="after")
    def _asks_something(self) -> Diagnose:
        if self.run is None and self.prompts is None:
            raise ValueError("give prompts=FILE.jsonl, or run=DIR, whose held-out prompts are taken")
        return self


class Expect(Door):
    """conf/expect.yaml: ``python -m inference expect``."""

    alone = "expect: nothing of it is shared"
    not_taken = {"decode.prompts": "expect takes count=..."} | dict.fromkeys(("decode.new_tokens", "decode.sequences"), "texts are whole")
    decode: Decode
    speculator: Place
    path: Place
    count: Whole


class Evaluate(Door):
    """conf/evaluate.yaml: ``python -m inference evaluate``."""

    alone = "evaluate: each process would measure its own"
    not_taken = {f"decode.{key}": f"an evaluation takes {own}=..."
                 for key, own in {"prompts": "count", "new_tokens": "new_tokens", "sequences": "sequences"}.items()}  # fmt: skip
    decode: Decode
    suite: groups.Suite
    speculator: Place
    path: Place | None
    against: Annotated[list[Place], Says("a list of choices of decode=, assisted, and folders of drafters")]
    assistant: Place | None
    temperatures: Annotated[list[AtLeast0], Field(min_length=1), Says("a list of temperatures, [0.0, 1.0] for example")]
    sequences: Annotated[list[Whole], Field(min_length=1), Says("a list of numbers of sequences, [1, 8, 32] for example")]
    new_tokens: values.NewTokens
    count: Whole | None
    raw: bool
    on_long: Literal["error", "skip", "cut"]
    out: Place | None


class Chat(Door):
    """conf/chat.yaml: ``python -m inference chat``."""

    alone = "chat: what is typed reaches one process only"
    not_taken = {"decode.prompts": "they are typed", "decode.sequences": "chat has one", "decode.new_tokens": "chat takes new_tokens=..."}
    decode: Decode
    speculator: Place | None
    temperature: AtLeast0
    new_tokens: Whole
    max_length: Length


class Serve(Door):
    """conf/serve.yaml: ``python -m inference serve``."""

    alone = "serve: requests reach one process only"
    not_taken = {
        f"decode.{key}": "here each request says its own"
        for key in ("prompts", "new_tokens", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
    } | {"decode.sequences": "serve takes sequences=..."}
    decode: Decode
    speculator: Place | None
    host: Word
    port: Annotated[int, Field(ge=0, le=65535)]
    sequences: Whole
    max_length: Length
    max_body: Whole
    api_key: Place | None
    log: Place | None
    sampling_defaults: Literal["model", "openai"]
    queue: Count
    read_timeout: Above0
    grace: AtLeast0


class Advise(Door):
    """conf/advise.yaml: ``python -m inference advise``."""

    report: Place | None
    task: Literal["chat", "code", "math"]
    published: dict[str, Any]
    sequences: Annotated[list[Whole], Field(min_length=1), Says("a list of numbers of sequences, [1, 8, 32] for example")]
    context: Whole
    gpu: Word
    gpus: Whole


ALL = (Config, Capture, Engine, Verify, Regenerate, Inference, Tune, Diagnose, Expect, Evaluate, Advise, Chat, Serve)
DOORS: dict[str, type[Group]] = {door.__name__.lower(): door for door in ALL}
