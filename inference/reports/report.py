"""A report: what was measured of one drafter, frozen. Whoever shows it only reads it.

``report.json`` holds its figures. Its keys are public: later versions add some, and take none away. ``rounds.jsonl`` beside it holds what
was decoded, round by round, which is larger: a first line with the version, the digest of the report.json that it belongs to, the
prompts and the text of every token, then a line for each ``Text``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from headstart.heads.errors import UserError
from headstart.heads.files import put_text
from headstart.heads.hub import read_json

VERSION = 3  # 1 did not say so; until 2, temperature_0 and temperature_1 of decode=auto were of what it chose, not of its tree
NAME, ROUNDS = "report.json", "rounds.jsonl"
FILES = (NAME, ROUNDS, "report.md", "report.html", "report.png")  # of a report in a folder


class Frozen:
    """A frozen dataclass, with what it holds."""

    def __post_init__(self) -> None:
        for f in fields(self):  # type: ignore[arg-type]
            object.__setattr__(self, f.name, frozen(getattr(self, f.name)))


class Keyed(Frozen, Mapping[str, Any]):
    """A frozen dataclass that is read by the keys of its JSON too: what is None is not there, what ``more`` holds is."""

    NOT_KEYS = ("more", "texts", "asked", "spelling")

    @classmethod
    def of(cls, keys: Mapping[str, Any]) -> Self:
        """From JSON. Raises UserError naming a key that is missing."""
        own: dict[str, Any] = {f.name: f for f in fields(cls) if f.name not in cls.NOT_KEYS}  # type: ignore[arg-type]
        try:
            return cls(**{k: v for k, v in keys.items() if k in own}, more={k: v for k, v in keys.items() if k not in own})  # type: ignore[call-arg]
        except TypeError as e:
            raise UserError(f"a report is damaged: {e}") from e

    def _known(self) -> dict[str, Any]:
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in self.NOT_KEYS}  # type: ignore[arg-type]
        return {k: v for k, v in own.items() if v is not None} | dict(self.more)  # type: ignore[attr-defined]

    def __getitem__(self, key: str) -> Any:
        return plain(self._known()[key])

    def __iter__(self) -> Iterator[str]:
        return iter(self._known())

    def __len__(self) -> int:
        return len(self._known())


@dataclass(frozen=True, eq=False)
class Figures(Keyed):
    """Of decoding all prompts at one temperature. ``more``: its sampling settings."""

    accepted_length: float  # tokens per target pass, its own counted
    acceptance_by_depth: Sequence[float]  # share of the rounds in which so many guesses were accepted
    tokens_per_second: float
    plain_tokens_per_second: float
    speedup: float
    conditional_acceptance_by_depth: Sequence[float] | None = None
    intervals: Mapping[str, Any] | None = None  # [low, high] of accepted_length, speedup and each acceptance_by_depth, over prompts
    expected_length: float | None = None  # of a chain, teacher-forced
    target_passes: int | None = None
    new_tokens: int | None = None
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Batch(Keyed):
    """Of decoding so many prompts at once at one temperature, beside plain decoding of the same prompts at once."""

    sequences: int
    temperature: int
    accepted_length: float
    tokens_per_second: float  # of all of them together
    plain_tokens_per_second: float
    speedup: float
    intervals: Mapping[str, Any] | None = None  # [low, high] of accepted_length and speedup, over what was decoded together
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Round(Frozen):
    """``tokens``: what it added to the text, the accepted guesses first. ``parents``: of each guess, as its place among the guesses; -1: it
    follows the text directly. ``accepted``: the places of the guesses that were, in the text's order. ``probabilities``: the drafter's of
    each guess, at temperature 1 without filters; None where it is not known (behind a guess that was not accepted).
    """

    tokens: Sequence[int]
    guesses: Sequence[int]
    parents: Sequence[int]
    accepted: Sequence[int]
    probabilities: Sequence[float | None] = ()


@dataclass(frozen=True)
class Text(Frozen):
    """What was decoded of one prompt. The first token is no round's: the pass over the prompt says it. Plain texts have no rounds: theirs
    are of one token.
    """

    prompt: int  # its place in ``Report.asked``
    temperature: int
    what: str  # "plain", "tree" (of the policy), "chain" (as deep), "auto" (what decode=auto chose of them)
    tokens: Sequence[int]
    rounds: Sequence[Round] = ()
    probabilities: Sequence[float] = ()  # the target's of each token, at temperature 1 without filters; not of chains
    seconds: float | None = None  # that decoding it took, the pass over the prompt included


@dataclass(frozen=True, eq=False)
class Report(Keyed):
    """Of one drafter, or of whatever else guesses, for one target. ``more``: what only some reports have."""

    head: str
    target: str
    temperature_0: Figures
    temperature_1: Figures
    hf_generate_tokens_per_second: float
    lossless: bool
    differences: Sequence[Mapping[str, Any]]  # a line for each prompt whose tokens are not those of plain decoding at temperature 0
    prompts: int
    tree: Mapping[str, Any]
    drafter_parameters: int
    dtype: str
    device: str
    versions: Mapping[str, str]
    commit: str
    chain_temperature_0: Figures | None = None
    chain_temperature_1: Figures | None = None
    auto_temperature_0: Figures | None = None  # as decode=auto decoded: of tree, chains and no guesses what it chose
    auto_temperature_1: Figures | None = None
    batches: Sequence[Batch] | None = None  # where several at once were decoded too, one at a time first
    differing_prompts: int | None = None
    new_tokens: int | None = None  # of a prompt, at most
    prompt_tokens: int | None = None
    prompts_from: str = "these prompts"
    proposer: Mapping[str, Any] | None = None
    version: int = VERSION
    more: Mapping[str, Any] = field(default_factory=dict)
    texts: Sequence[Text] = ()
    asked: Sequence[Sequence[int]] = ()  # the prompts' tokens
    spelling: Mapping[int, str] = field(default_factory=dict)  # of every token there is; empty where the target has no tokenizer

    def __post_init__(self) -> None:
        for key in [f.name for f in fields(self) if "temperature" in f.name]:
            if isinstance(found := getattr(self, key), Mapping) and not isinstance(found, Figures):
                object.__setattr__(self, key, Figures.of(found))
            elif not isinstance(found, Figures | None):
                raise UserError(f"a report is damaged: {key} must hold figures, found {found!r:.40}")
        if self.batches is not None:
            if not isinstance(self.batches, list | tuple) or not all(isinstance(row, Mapping) for row in self.batches):
                raise UserError(f"a report is damaged: batches must be a list of figures, found {self.batches!r:.40}")
            object.__setattr__(self, "batches", [row if isinstance(row, Batch) else Batch.of(row) for row in self.batches])
        super().__post_init__()

    def __or__(self, more: Mapping[str, Any]) -> Report:
        """The same report, with other values for these keys."""
        return replace(Report.of({**self, **more}), texts=self.texts, asked=self.asked, spelling=self.spelling)

    def write(self, folder: Path) -> None:
        """report.json, and rounds.jsonl where there are texts; each whole or not at all."""
        said = json.dumps(plain(self), indent=2) + "\n"
        if self.texts:
            first = {"version": 1, "report": _digest(said), "prompts": plain(self.asked), "spelling": plain(self.spelling)}
            lines = [json.dumps(x, separators=(",", ":")) for x in [first, *map(_line, self.texts)]]
            put_text(folder / ROUNDS, "\n".join(lines) + "\n")
        put_text(folder / NAME, said)

    @classmethod
    def read(cls, folder: Path) -> Report:
        """Of any version; with its texts, where rounds.jsonl belongs to it. Raises UserError naming a file that is damaged."""
        keys = {"version": 1} | read_json(folder / NAME)
        try:
            report = cls.of(keys)
        except UserError as e:
            raise UserError(f"{folder / NAME}: {e}") from e
        if not (path := folder / ROUNDS).is_file():
            return report
        try:
            whole = path.read_text(encoding="utf-8").split("\n")  # splitlines parts at U+2028, too, which texts may hold
            first, *lines = (json.loads(line) for line in whole if line)
            if first["report"] == _digest((folder / NAME).read_text(encoding="utf-8")):
                spelling = {int(token): str(text) for token, text in first["spelling"].items()}
                return replace(report, texts=[_text(line) for line in lines], asked=first["prompts"], spelling=spelling)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as e:
            raise UserError(f"{path} is damaged ({type(e).__name__}: {e}): remove it, or report again") from e
        return report


def frozen(value: Any) -> Any:
    """Of JSON: tuples for lists, dictionaries that can only be read."""
    if isinstance(value, dict | MappingProxyType):
        return MappingProxyType({k: frozen(v) for k, v in value.items()})
    return tuple(map(frozen, value)) if isinstance(value, list | tuple) else value


def plain(value: Any) -> Any:
    """As JSON, new."""
    if isinstance(value, Mapping):
        return {k: plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, list | tuple) else value


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _line(text: Text) -> dict[str, Any]:
    """Of a round: how many tokens it added, its guesses, their parents (none of a chain), and which were accepted."""
    rounds = [[len(r.tokens), list(r.guesses), [] if _chain(r.parents) else list(r.parents), list(r.accepted)] for r in text.rounds]
    about = {"prompt": text.prompt, "temperature": text.temperature, "what": text.what, "tokens": list(text.tokens)}
    told: dict[str, Any] = {"probabilities": list(text.probabilities)} if text.probabilities else {}
    if text.seconds is not None:
        told["seconds"] = text.seconds
    if any(r.probabilities for r in text.rounds):
        told["guess_probabilities"] = [list(r.probabilities) for r in text.rounds]
    return about | told | {"rounds": rounds}


def _chain(parents: Sequence[int]) -> bool:
    return list(parents) == list(range(-1, len(parents) - 1))


def _text(line: Mapping[str, Any]) -> Text:
    tokens, rounds, at = line["tokens"], [], 1
    known = line.get("guess_probabilities") or [()] * len(line["rounds"])
    for (count, guesses, parents, accepted), sure in zip(line["rounds"], known, strict=True):
        parents = parents or range(-1, len(guesses) - 1)
        if len(parents) != len(guesses) or len(sure) not in (0, len(guesses)) or not all(0 <= i < len(guesses) for i in accepted):
            raise ValueError("a round whose tree does not fit together")
        rounds.append(Round(tokens[at : at + count], guesses, list(parents), accepted, sure))
        at += count
    if rounds and at != len(tokens):
        raise ValueError("a text that is longer than its rounds")
    told = line.get("probabilities", ())
    return Text(line["prompt"], line["temperature"], line["what"], tokens, rounds, told, line.get("seconds"))
