"""The words of errors about settings: what a type is called, what was found, which known word is nearest."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Callable, Collection, Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from headstart.heads.errors import near

NAMES: dict[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "a word", NoneType: "null", list: "a list"}
BOUNDS = {"ge": "of at least", "gt": "above", "le": "at most", "lt": "below"}


class Says(str):
    """A mark in an annotation: what the type is called in errors."""


ELSEWHERE = {  # a setting's name in other trainers -> here
    "learning_rate": "trainer.lr", "gradient_accumulation_steps": "trainer.accumulate", "per_device_train_batch_size": "trainer.batch_size",
    "micro_batch_size": "trainer.batch_size", "max_steps": "trainer.steps", "num_train_epochs": "trainer.epochs",
    "num_epochs": "trainer.epochs", "max_length": "trainer.length", "max_seq_length": "trainer.length", "seq_length": "trainer.length",
    "lr_scheduler_type": "trainer.schedule", "warmup_steps": "trainer.warmup", "warmup_ratio": "trainer.warmup",
    "max_grad_norm": "trainer.clip", "save_steps": "trainer.save_every", "eval_steps": "trainer.eval_every",
    "logging_steps": "trainer.log_every", "save_total_limit": "trainer.keep", "optim": "trainer.optimizer",
    "ttt_length": "loss.depth", "ttt_steps": "loss.depth", "output_dir": "out",
    "draft_vocab_size": "head.draft_vocab", "model": "target", "model_name_or_path": "target", "dataset": "data",
}  # fmt: skip


def near_key(key: str, known: Collection[str]) -> str:
    """``near`` for dotted keys. It looks for, in this order: a group with a similar name, the same last word in other groups, the name that
    other trainers use, a similar key of the same group.
    """
    group, _, last = key.rpartition(".")
    beside = {each.rpartition(".")[2]: each for each in known if each.rpartition(".")[0] == group}
    groups = {each.partition(".")[0] for each in known if "." in each}
    found = [] if group else difflib.get_close_matches(last, groups, n=1, cutoff=0.85)
    found = found or sorted(each for each in known if each.rpartition(".")[2] == last)
    found = found or [name for other, name in ELSEWHERE.items() if other == last and name in {*known, *groups}]
    found = found or [beside[word] for word in difflib.get_close_matches(last, beside, n=1, cutoff=0.6)]
    if not found and group not in known:  # the group may be what is misspelt
        found = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    return f" (did you mean {listed(found)}?)" if found else ""


def no_key(key: str, known: Collection[str], beside: Sequence[str]) -> str:
    """The error for an unknown key: with the key that may be meant, or, where none is similar, the keys ``beside`` it."""
    return f"there is no key {key!r}" + (near_key(key, known) or f"; beside it: {', '.join(beside)}")


def listed(words: Sequence[str], last: str = "or") -> str:
    """ "a, b or c"."""
    return f" {last} ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def shown(value: object) -> str:
    """A value as it is typed; long values are cut."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return reprlib.repr(value)


def bare(kind: Any) -> tuple[Any, list[Any]]:
    """A type without null, and the marks of its annotations."""
    marks: list[Any] = []
    while True:
        if get_origin(kind) is Annotated:
            kind, *more = get_args(kind)
            marks += [mark for each in more for mark in (each.metadata if isinstance(each, FieldInfo) else [each])]
        elif get_origin(kind) in (Union, UnionType) and NoneType in get_args(kind):
            kind = next(part for part in get_args(kind) if part is not NoneType)
        else:
            return kind, marks


def is_group(kind: Any) -> bool:
    """Whether a type is a model with keys of its own."""
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def described(kind: Any) -> str:
    """What a value of this type must be."""
    plain, marks = bare(kind)
    null = " or null" if get_origin(kind) in (Union, UnionType) else ""
    if own := next((mark for mark in marks if isinstance(mark, Says)), None):
        return own + null
    if get_origin(plain) is Literal:
        return listed([*map(str, get_args(plain)), *(["null"] if null else [])])
    if get_origin(plain) is list:
        return f"a list, each of it {described(get_args(plain)[0])}{null}"
    if get_origin(plain) is dict or is_group(plain):
        return f"a dictionary, {{key: value}}{null}"
    bounds = [f"{words} {getattr(mark, name)}" for mark in marks for name, words in BOUNDS.items() if hasattr(mark, name)]
    return " ".join(filter(None, [NAMES.get(plain, "a value"), " and ".join(bounds)])) + null


def explained(error: ValidationError, model: type[BaseModel], config: Mapping[str, Any], absent: Callable[[list[str]], str]) -> list[str]:
    """A line for each thing that is wrong. ``absent``: makes the line for keys without a value."""
    errors = error.errors(include_url=False)
    missing = [".".join(map(str, each["loc"])) for each in errors if each["type"] == "missing"]
    others = [each for each in errors if each["type"] != "missing"]
    if any(each["loc"] == ("data", "path") for each in others):  # its shorthand is wrong in the same way
        others = [each for each in others if each["loc"] != ("path",)]
    wrong = [str(each["input"]) for each in others if each["loc"] != ("out",)]
    if any(each["loc"] == ("out",) and any(value in str(each["input"]) for value in wrong) for each in others):
        others = [each for each in others if each["loc"] != ("out",)]  # wrong only because another wrong value is in its name
    return list(dict.fromkeys([*([absent(missing)] if missing else []), *(_line(each, model, config) for each in others)]))


def _line(error: Mapping[str, Any], model: type[BaseModel], config: Mapping[str, Any]) -> str:
    kind: Any = model
    value: Any = config
    place: list[str] = []
    for part in error["loc"]:
        plain, _ = bare(kind)
        if get_origin(plain) is list:  # the line is about the whole list
            break
        here = get_type_hints(plain, include_extras=True) if is_group(plain) else {}
        if error["type"] == "extra_forbidden" and part not in here:
            known = [".".join([*place, name]) for name in plain.model_fields]
            key = ".".join([*place, str(part)])
            if key == "experiment":  # hydra puts a file's settings below the name of its group, unless the file says otherwise
                return f'{key}: begin your {key}/NAME.yaml with the line "# @package _global_": its settings are those of the whole run'
            return no_key(key, known, known)
        kind = here[part] if part in here else get_args(plain)[-1] if get_origin(plain) is dict else Any
        value = value.get(part) if isinstance(value, Mapping) else None
        place.append(str(part))
    key = "path" if place == ["data", "path"] and "path" in config else ".".join(place)
    plain, _ = bare(kind)
    if error["type"] == "value_error" and (own := str(error["ctx"]["error"])):
        return own if is_group(plain) or own.startswith(key) else f"{key} {own}"
    nearest = near(value, get_args(plain)) if get_origin(plain) is Literal and isinstance(value, str) else ""
    return f"{key} must be {described(kind)}, found {shown(value)}{nearest}"
