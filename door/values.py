"""The types of single settings: numbers with bounds, words, paths, and names that must occur in conf/."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from omegaconf import OmegaConf
from pydantic import AfterValidator, BeforeValidator, Field

from headstart.door.words import Says, listed, shown
from headstart.heads.errors import near
from headstart.inference.reports.lengths import FEWEST

CONF = Path(__file__).resolve().parent.parent / "conf"
LONGEST, DEEPEST = 255, 4095  # bytes of a name and of a path: what file systems take


def choices(group: str) -> list[str]:
    """The YAMLs of a group of conf/."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


@functools.cache
def of_yaml(group: str, choice: str) -> dict[str, Any]:
    """The settings in the YAML of a choice of a group; references to other settings stay as they are written."""
    found: Any = OmegaConf.to_container(OmegaConf.load(CONF / group / f"{choice}.yaml"))
    settings: dict[str, Any] = found.get(group, found)
    return {key: value for key, value in settings.items() if key != "defaults"}


def readers() -> str:
    """The choices of data that have a path."""
    return ", ".join(f"data={choice}" for choice in choices("data") if "path" in of_yaml("data", choice))


def said(group: str, key: str) -> list[Any]:
    """The values of a key in the YAMLs of a group."""
    return [settings[key] for choice in choices(group) if key in (settings := of_yaml(group, choice))]


def keys(group: str) -> set[str]:
    """All keys that occur in the YAMLs of a group."""
    return {key for choice in choices(group) for key in of_yaml(group, choice)}


# ---- values ----
# A ValueError without a message gives the error of the type: KEY must be ..., found ...


def _word(value: object) -> str:
    """A word or a number, as digits are a name too: target.name=7."""
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise ValueError
    text = str(value)
    if not text.isprintable():
        raise ValueError(f"has a character that cannot be printed: {shown(text)}")
    if (size := len(text.encode())) > LONGEST:
        raise ValueError(f"has a name of {size} bytes in it, file systems take {LONGEST}: {shown(text)}")
    return text


def _place(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int) or not str(value).strip():
        raise ValueError
    for part in str(value).split("/"):
        _word(part or "/")
    if (size := len(str(value).encode())) > DEEPEST:
        raise ValueError(f"has {size} bytes, file systems take {DEEPEST}")
    try:
        return str(Path(str(value)).expanduser()) if str(value).startswith("~") else str(value)  # no shell expands ~ behind key=
    except RuntimeError:
        raise ValueError(f"names a user who has no home folder here: {shown(str(value))}") from None


def _paths(value: object) -> object:
    """Lists of child ranks, or a file of them. Whether they make a tree is checked by TreePolicy (inference/decoding/policy.py)."""
    if isinstance(value, list) and all(isinstance(path, list) and all(type(rank) is int for rank in path) for path in value):
        return value
    if not isinstance(value, str):
        raise ValueError
    return _place(value)


def _keep(value: object) -> object:
    if value != "best" and (type(value) is not int or value < 1):
        raise ValueError
    return value


def _warmup(value: object) -> object:
    if (type(value) is int and value >= 0) or (type(value) is float and 0 < value < 1):
        return value
    raise ValueError


def _source(name: str) -> str:
    known = choices("data")
    if name not in known:
        raise ValueError(f"must be {listed(known)}, found {shown(name)}{near(name, known)}")
    return name


def _proposer(value: object, where: str = "decode.proposer") -> object:
    """A proposer whose kind occurs in conf/decode; so must the kinds of the proposers within it."""
    kinds = sorted({proposer["kind"] for proposer in said("decode", "proposer")})
    if not isinstance(value, Mapping) or "kind" not in value:
        raise ValueError(f"{where} must be a dictionary with a kind, {{kind: ngram}} for example, found {shown(value)}")
    if (kind := value["kind"]) not in kinds:
        raise ValueError(f"{where}.kind must be {listed(kinds)}, found {shown(kind)}{near(str(kind), kinds)}")
    for key, inner in value.items():
        for i, each in enumerate(inner if isinstance(inner, list) else [inner]):
            if isinstance(each, Mapping):
                _proposer(each, f"{where}.{key}" + (f"[{i}]" if isinstance(inner, list) else ""))
    return value


def _fitting(value: object) -> object:
    """Values under ``target.drafter``: only of keys that some YAML of conf/head refers to."""
    asked = {key for head in choices("head") for key in re.findall(r"target\.drafter\.(\w+)", (CONF / "head" / f"{head}.yaml").read_text())}
    for key in value if isinstance(value, Mapping) else ():
        if key not in asked:
            raise ValueError(f"target.drafter has no {shown(key)}{near(str(key), asked)}: drafters ask for {', '.join(sorted(asked))}")
    return value


def _published(value: object) -> object:
    if isinstance(value, Mapping) and not isinstance(value.get("model_type"), str):
        raise ValueError("needs model_type, as every config.json of Hugging Face has it")
    return value


def _arms(value: object) -> object:
    if not isinstance(value, Mapping) or not value:
        raise ValueError
    for name, words in value.items():
        if not re.fullmatch(r"\w[\w.+-]{0,99}", str(name)):
            raise ValueError(f"{shown(name)} cannot be the name of a folder: take up to 100 letters, digits, - and _")
        if not isinstance(words, str):
            raise ValueError(f"arms.{name} must be a string of overrides, like 'head=NAME loss=tv', found {shown(words)}")
    return {str(name): words for name, words in value.items()}


Whole = Annotated[int, Field(ge=1)]
NewTokens = Annotated[int, Field(ge=2)]  # the pass over the prompt gives the first token, the rounds that are measured give the others
Enough = Annotated[int, Field(ge=FEWEST)]  # new tokens
Count = Annotated[int, Field(ge=0)]
Taps = Annotated[list[Count], Field(min_length=1), Says("a list of layers, [2, 6, 9] for example,")] | None
Above0 = Annotated[float, Field(gt=0)]
AtLeast0 = Annotated[float, Field(ge=0)]
Probability = Annotated[float, Field(ge=0, lt=1)]
Seed = Annotated[int, Field(ge=0, lt=1 << 32)]  # what every random number generator takes
Length = Annotated[int, Field(ge=2)]  # tokens: at least one of a prompt and one of the answer
Word = Annotated[str, BeforeValidator(_word), Says("a word")]
Place = Annotated[str, BeforeValidator(_place), Says("a path")]
Paths = Annotated[Any, BeforeValidator(_paths), Says("a list of lists of child ranks, like [[0], [1], [0, 0]], or FILE.json")]
Keep = Annotated[Any, BeforeValidator(_keep), Says("a whole number of at least 1, or best")]
Warmup = Annotated[Any, BeforeValidator(_warmup), Says("a whole number of steps, or a share of them between 0 and 1")]
Url = Annotated[str, Field(pattern=r"^https?://[^\s/]+(/\S*)?$"), Says("an address that begins with http:// or https://")]
Source = Annotated[Word, AfterValidator(_source)]
ProposerSettings = Annotated[dict[str, Any], BeforeValidator(_proposer)]
Fitting = Annotated[dict[str, Whole], BeforeValidator(_fitting)]
Published = Annotated[dict[str, Any], BeforeValidator(_published)]
ARMS = "what each does otherwise, arms={a:'head=NAME',b:'head=NAME loss=tv'}, or head=[NAME,NAME]"
Arms = Annotated[dict[str, str], BeforeValidator(_arms), Says(ARMS)]
