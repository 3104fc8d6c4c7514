"""What every setting may be: a frozen model for each group of conf/ and each door. What a setting means, its YAML says.

Doors check with these before anything large is loaded, and hand on plain dictionaries. Some stay open, so that what is new there is
a file and a YAML: a drafter, a source of data and a tracker have the keys of their YAMLs, a drafter's are checked against its
constructor (heads/hub.py), a proposer's where they are opened (inference/proposers/open.py), and the terms of a loss are those that
occur in conf/loss.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from door import values
from door.values import Above0, AtLeast0, Capacity, Count, Place, Probability, Seed, Whole, Word, choices, keys, of_yaml, said
from door.words import Says, near, shown

Skip = Literal["error", "skip"]


class Group(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


# ---- the groups ----


class Target(Group):
    name: Word
    path: Place
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    device: Word
    attention: Literal["sdpa", "eager"]  # the others take no mask, and a tree is one
    config: values.Published | None
    drafter: values.Fitting = {}


class Open(Group):
    """Any keys that the YAMLs of its group have: what takes them knows the rest."""

    model_config = ConfigDict(extra="allow")
    group: ClassVar[str]

    @model_validator(mode="after")
    def _of_some_yaml(self) -> Open:
        known = keys(self.group)
        for key in self.model_extra or {}:
            if key not in known:
                raise ValueError(f"there is no key {self.group}.{key}{near(key, known)}: it is in no YAML of conf/{self.group}")
        return self


class Head(Open):
    group = "head"
    name: Word

    @model_validator(mode="after")
    def _nothing_empty(self) -> Head:
        for key, value in (self.model_extra or {}).items():
            if value in ([], {}, ""):
                raise ValueError(f"head.{key} must not be empty, found {shown(value)}: null where its default is meant")
        return self


class Data(Open):
    group = "data"
    name: values.Source
    path: Place = ""
    on_bad: Skip = "error"
    on_long: Skip = "error"
    prompts_file: Place | None = None


class OnPolicy(Group):
    kind: Literal["samples", "rejected"]
    share: Annotated[float, Field(gt=0, lt=1)]
    rows: Whole
    every: Whole
    new_tokens: Annotated[int, Field(ge=3)]
    temperature: AtLeast0


class Loss(Group):
    depth: Whole
    terms: dict[str, AtLeast0]
    decay: AtLeast0
    weighting: Literal["decay", "dpace", "chain"]
    base_until: Annotated[float, Field(ge=0, le=1)]
    chunk: Whole
    on_policy: OnPolicy | None

    @model_validator(mode="after")
    def _teaches(self) -> Loss:
        known = sorted({term for terms in said("loss", "terms") for term in terms})
        for term in self.terms:
            if term not in known:
                raise ValueError(f"loss.terms has no {shown(term)}{near(term, known)}: there are {', '.join(known)}")
        if not any(self.terms.values()):
            raise ValueError("loss.terms: no weight is above 0, nothing would be learnt; loss.terms.kl=1 for example")
        own = "loss.terms.data_ce" if self.terms.get("data_ce") else "loss.weighting=dpace" if self.weighting == "dpace" else None
        if own and self.on_policy is not None:
            raise ValueError(f"{own} takes the tokens of the rows for right: with loss.on_policy they are the drafter's own, take kl or ce")
        return self


class Lora(Group):
    rank: Whole
    alpha: Above0
    names: Annotated[list[str], Field(min_length=1), Says("a list of names of linear modules")]
    lr: Above0
    start: Probability
    weight: AtLeast0


class Trainer(Group):
    steps: Whole
    rows: Whole
    length: Whole
    accumulate: Whole
    optimizer: Literal["muon", "adamw"]
    lr: Above0
    betas: Annotated[list[Probability], Field(min_length=2, max_length=2), Says("two numbers from 0 to below 1")]
    weight_decay: AtLeast0
    warmup: Count
    schedule: Literal["wsd", "cosine"]
    clip: AtLeast0
    precision: Literal["auto", "bf16", "fp32"]
    seed: Seed
    save_every: Whole
    keep: Whole
    eval_every: Whole
    resume: bool
    start: Place | None
    lora: Lora | None


class Decode(Group):
    proposer: values.ProposerSettings
    tuned: bool
    kind: Literal["auto", "chain", "fixed", "dynamic", "best_first"]
    depth: Whole
    nodes: Whole
    branch: Whole
    expand: Whole | None
    least: Probability
    paths: values.Paths
    rule: Literal["auto", "top_plus_one", "token", "block", "multi_round", "without_replacement"]
    top_k: Count
    top_p: Annotated[float, Field(gt=0, le=1)]
    min_p: Probability
    repetition_penalty: Above0
    prompts: Whole
    new_tokens: Whole
    seed: Annotated[int, Field(ge=0, lt=1 << 63)]

    @model_validator(mode="after")
    def _paths_of_a_fixed_tree(self) -> Decode:
        if bool(self.paths) != (self.kind == "fixed"):
            raise ValueError("decode.paths are given for kind fixed, and for no other: decode=fixed")
        return self


class Export(Group):
    dtype: Literal["auto", "float32", "bfloat16", "float16"]


class Tracker(Open):
    group = "tracker"
    project: Word = ""
    mode: Literal["auto", "online", "offline"] = "auto"


class Launcher(Group):
    processes: Whole


# ---- the doors ----


class Door(Group):
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
    data: Data
    path: Place | None = None  # shorthand of data.path

    @model_validator(mode="after")
    def _path_of_the_data(self) -> Reader:
        if self.path is not None and self.path != self.data.path:
            raise ValueError(f"path={self.path} is not what data={self.data.name} reads: give path alone, with one of {readers()}")
        return self


class Config(Reader):
    alone = "train: every process reads rows of its own"
    out: Place
    arms: values.Arms | None
    loss: Loss
    head: Head
    trainer: Trainer
    decode: Decode
    export: Export
    tracker: Tracker
    launcher: Launcher


class Capture(Reader):
    alone = "capture: every process reads rows of its own"
    loss: Any  # not used
    head: Head
    out: Place
    taps: Annotated[list[Count], Field(min_length=1), Says("a list of layers, [2, 6, 9] for example,")] | None
    length: Whole
    rows: Whole
    seed: Seed


class Regenerate(Reader):
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
    capacity: Capacity
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
    decode: Decode
    speculator: Place | None
    drafter_device: Word | None
    prompts: Place
    on_long: Skip
    out: Place | None


class Tune(Door):
    alone = "tune: each process would choose by its own clock"
    speculator: Place
    prompts: Place
    on_long: Skip
    count: Whole | None
    new_tokens: Whole
    sequences: Whole
    out: Place | None


class Chat(Door):
    alone = "chat: what is typed reaches one process only"
    decode: Decode
    speculator: Place | None
    temperature: AtLeast0
    new_tokens: Whole
    capacity: Capacity


class Serve(Door):
    alone = "serve: requests reach one process only"
    decode: Decode
    speculator: Place | None
    host: Word
    port: Annotated[int, Field(ge=0, le=65535)]
    rows: Whole
    capacity: Capacity
    max_body: Whole
    grace: AtLeast0


DOORS: dict[str, type[Door]] = {door.__name__.lower(): door for door in (Config, Capture, Regenerate, Inference, Tune, Chat, Serve)}
