"""The types of the settings in each group of conf/: a frozen model for each group."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from headstart.door import values
from headstart.door.values import Above0, AtLeast0, Count, Place, Probability, Seed, Whole, Word, keys, said
from headstart.door.words import Says, shown
from headstart.heads.errors import near
from headstart.trainers.patience import too_much

Skip = Literal["error", "skip"]


class Group(BaseModel):
    """A frozen model that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


class Target(Group):
    """conf/target."""

    name: Word
    path: Place
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    device: Word
    attention: Literal["sdpa", "eager"]  # the others take no mask, which a tree needs
    config: values.Published | None
    drafter: values.Fitting = {}

    @property
    def shared(self) -> bool:
        """Whether several processes share the target."""
        return self.device == "fsdp" or self.device.partition(":")[0] == "tp"


class Served(Group):
    """``served`` of conf/config.yaml and conf/capture.yaml: the server that computes the target's states."""

    url: values.Url | None
    folder: Place | None
    layers: Annotated[list[Count], Field(min_length=1), Says("a list of layers, [2, 6, 12] for example,")] | None
    key: Word | None
    retries: Count

    @model_validator(mode="after")
    def _url_and_folder(self) -> Served:
        if (self.url is None) != (self.folder is None):
            raise ValueError("served.url and served.folder go together: the server, and the folder that it writes hidden states to")
        return self


class CaptureGroup(Group):
    """``capture`` of conf/config.yaml: where a training keeps the target's states that it computes."""

    out: Place | None
    storage: Literal["bf16", "fp8", "int8"]


class Open(Group):
    """A group with any keys that occur in its YAMLs. Their values are checked by the code that the settings are for."""

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
    """conf/head: the drafter's constructor checks the other keys."""

    group = "head"
    name: Word

    @model_validator(mode="after")
    def _nothing_empty(self) -> Head:
        for key, value in (self.model_extra or {}).items():
            if value in ([], {}, ""):
                raise ValueError(f"head.{key} must not be empty, found {shown(value)}: null where its default is meant")
        return self


class Data(Open):
    """conf/data: the source of data checks the other keys."""

    group = "data"
    name: values.Source
    path: Place = ""
    on_bad: Skip = "error"
    on_long: Skip = "error"
    prompts_file: Place | None = None
    turns: Literal["all", "last"] | None = None
    template: Place | None = None
    limit: Whole | None = None
    cache: Place | None = None
    workers: Whole | None = None
    stream: bool | None = None


class OnPolicy(Group):
    """``on_policy`` of conf/loss: training on the drafter's own guesses."""

    kind: Literal["samples", "rejected"]
    share: Annotated[float, Field(gt=0, lt=1)]
    rows: Whole
    every: Whole
    new_tokens: Annotated[int, Field(ge=3)]
    temperature: AtLeast0


class Loss(Group):
    """conf/loss."""

    depth: Whole
    terms: dict[str, AtLeast0]
    decay: AtLeast0
    weighting: Literal["decay", "dpace", "chain"]
    base_until: Annotated[float, Field(ge=0, le=1)]
    detach: bool
    constants: dict[str, dict[str, Count | AtLeast0]] = {}
    chunk: Whole
    kernel: Literal["auto", "torch", "triton", "native"]
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
    """``lora`` of conf/trainer: the target is trained too, beside the drafter."""

    rank: Whole
    alpha: Above0
    names: Annotated[list[str], Field(min_length=1), Says("a list of names of linear modules")]
    lr: Above0
    start: Probability
    weight: AtLeast0


class Trainer(Group):
    """conf/trainer."""

    steps: Whole
    epochs: Above0 | None
    batch_size: Whole
    length: Whole
    accumulate: Whole
    optimizer: Literal["muon", "adamw"]
    lr: Above0
    betas: Annotated[list[Probability], Field(min_length=2, max_length=2), Says("two numbers from 0 to below 1")]
    weight_decay: AtLeast0
    muon_lr: Above0 | None
    momentum: Probability
    ns_steps: Whole
    warmup: values.Warmup
    schedule: Literal["wsd", "cosine", "linear", "constant"]
    floor: Annotated[float, Field(ge=0, le=1)]
    clip: AtLeast0
    skips: Count
    spike: AtLeast0
    precision: Literal["auto", "bf16", "fp32"]
    gradient_checkpointing: bool
    seed: Seed
    save_every: Whole
    keep: values.Keep
    background: bool
    eval_every: Whole
    log_every: Whole
    decode_every: Count
    patience: Count
    resume: bool
    timeout: Above0
    profile: Count
    start: Place | None
    lora: Lora | None

    @model_validator(mode="after")
    def _best_is_decoded(self) -> Trainer:
        if self.keep == "best" and not self.decode_every:
            raise ValueError("trainer.keep=best needs decoding while it trains: set trainer.decode_every=N too")
        return self

    @model_validator(mode="after")
    def _patience_has_something_to_judge(self) -> Trainer:
        if self.epochs is None and (why := too_much(self.patience, self.steps, self.decode_every, self.eval_every)):
            raise ValueError(why)  # with epochs, trainers/prepare.py checks this once the steps are known
        return self


class Decode(Group):
    """conf/decode."""

    proposer: values.ProposerSettings
    kind: Literal["auto", "tuned", "chain", "fixed", "dynamic", "best_first"]
    depth: Whole
    nodes: Whole
    branch: Whole
    expand: Whole | None
    least: Probability
    paths: values.Paths
    rule: Literal["auto", "top_plus_one", "token", "block", "traversal", "multi_round", "without_replacement"]
    top_k: Count
    top_p: Annotated[float, Field(gt=0, le=1)]
    min_p: Probability
    repetition_penalty: Above0
    prompts: Whole
    new_tokens: values.NewTokens
    sequences: Annotated[list[Whole], Says("a list of numbers of sequences, [4, 8] for example")] = []
    seed: Annotated[int, Field(ge=0, lt=1 << 63)]

    @model_validator(mode="after")
    def _paths_of_a_fixed_tree(self) -> Decode:
        if bool(self.paths) != (self.kind == "fixed"):
            raise ValueError("decode.paths are given for kind fixed, and for no other: decode=fixed")
        return self


class Suite(Group):
    """conf/suite."""

    name: Word
    hub: Place | None
    where: Word | None
    subset: str
    split: Word
    turns: Word
    category: Word | None
    groups: dict[str, list[str]]


class Export(Group):
    """conf/export."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"]


class Tracker(Open):
    """conf/tracker: each service checks its own keys."""

    group = "tracker"
    project: Word = ""
    mode: Literal["auto", "online", "offline"] = "auto"


class Parallel(Group):
    """conf/parallel."""

    name: Literal["ddp", "zero1", "fsdp", "deepspeed"]
    stage: Literal[1, 2] = 2  # only of deepspeed
    offload: bool = False

    @model_validator(mode="after")
    def _only_of_deepspeed(self) -> Parallel:
        if self.name != "deepspeed" and (key := next(iter(sorted(self.model_fields_set - {"name"})), None)):
            raise ValueError(f"parallel.{key} is of parallel=deepspeed, and this is {self.name}: leave it out")
        return self


class Launcher(Group):
    """conf/launcher."""

    processes: Whole
    # only for a cluster's queue:
    nodes: Whole = 1
    time: Annotated[str, Field(pattern=r"^(\d+-)?\d+(:\d\d){0,2}$"), Says("a time as SLURM writes it, like 24:00:00")] = ""
    partition: Word | None = None
    account: Word | None = None
    gpus: bool = True
    cpus: Whole | None = None
    before: Whole = 1
    options: list[Annotated[str, Field(pattern=r"^--?\w")]] = []
    setup: list[str] = []
    submit: bool = True
