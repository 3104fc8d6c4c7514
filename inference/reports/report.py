"""A report: the measured figures of one drafter and the texts it decoded, as frozen objects. Modules that show a report only read it.

``report.json`` holds the figures. Its keys are public: later versions may add keys, and remove none. ``rounds.jsonl`` beside it is larger
and holds the decoded texts, round by round. Its first line has the version, the digest of the report.json it belongs to, the prompts and
the text of every token; every further line is one ``Text``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from headstart.heads.errors import UserError
from headstart.heads.files import put_text
from headstart.heads.stored import read_json
from headstart.inference.decoding.policy import TreePolicy

# Reports of version 1 have no ``version``. Up to version 2, temperature_0 and temperature_1 of decode=auto are auto's own figures; since
# version 3 they are its tree's.
VERSION = 3
NAME, ROUNDS, PICTURE = "report.json", "rounds.jsonl", "report.png"
FILES = (NAME, ROUNDS, "report.md", "report.html", PICTURE)  # all files of a report


class Frozen:
    """A base for frozen dataclasses: the values of the fields are frozen too (see ``frozen``)."""

    def __post_init__(self) -> None:
        for f in fields(self):  # type: ignore[arg-type]
            object.__setattr__(self, f.name, frozen(getattr(self, f.name)))


class Keyed(Frozen, Mapping[str, Any]):
    """A frozen dataclass that is also a mapping with the keys of its JSON: a field that is None is no key, entries of ``more`` are keys."""

    NOT_KEYS = ("more", "texts", "asked", "spelling")

    @classmethod
    def of(cls, keys: Mapping[str, Any]) -> Self:
        """Build it from the keys of its JSON; unknown ones go into ``more``. Raises UserError naming a key that is missing."""
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
    """The figures of decoding all prompts at one temperature, one at a time. ``more``: among others, the sampling settings."""

    accepted_length: float  # tokens per target pass, the target's own token counted
    acceptance_by_depth: Sequence[float]  # for depth d = 1, 2, ..: share of the rounds in which at least d guesses were accepted
    tokens_per_second: float
    plain_tokens_per_second: float
    speedup: float
    conditional_acceptance_by_depth: Sequence[float] | None = None
    intervals: Mapping[str, Any] | None = None  # [low, high] of accepted_length, speedup and each acceptance_by_depth, over prompts
    expected_length: float | None = None  # expected accepted length of a chain, from a teacher-forced pass
    target_passes: int | None = None
    new_tokens: int | None = None
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Batch(Keyed):
    """The figures of decoding ``sequences`` prompts at once at one temperature, beside plain decoding of the same prompts at once."""

    sequences: int
    temperature: int
    accepted_length: float
    tokens_per_second: float  # of all sequences together
    plain_tokens_per_second: float
    speedup: float
    intervals: Mapping[str, Any] | None = None  # [low, high] of accepted_length and speedup, over groups decoded together
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Round(Frozen):
    """One round of decoding. ``tokens``: the tokens it added to the text, the accepted guesses first. ``parents``: for each guess the index
    of its parent in ``guesses``; -1: it follows the text directly. ``accepted``: indices of the accepted guesses, in the order of the text.
    ``probabilities``: the drafter's probability of each guess, at temperature 1 without filters; None where it is not known (below a
    guess that was not accepted).
    """

    tokens: Sequence[int]
    guesses: Sequence[int]
    parents: Sequence[int]
    accepted: Sequence[int]
    probabilities: Sequence[float | None] = ()


@dataclass(frozen=True)
class Text(Frozen):
    """The decoded continuation of one prompt. Its first token belongs to no round: the pass over the prompt gives it. ``rounds`` is empty
    for plain decoding, where each round is one token.
    """

    prompt: int  # index into ``Report.asked``
    temperature: int
    what: str  # "plain", "tree" (the policy's tree), "chain" (a chain as deep), "auto" (the shapes that decode=auto chose)
    tokens: Sequence[int]
    rounds: Sequence[Round] = ()
    probabilities: Sequence[float] = ()  # the target's probability of each token, T = 1 without filters; empty for chain and auto
    seconds: float | None = None  # wall clock of decoding it, the pass over the prompt included


@dataclass(frozen=True, eq=False)
class Report(Keyed):
    """The report on one drafter, or on another proposer, for one target. ``more``: keys that only some reports have."""

    head: str
    target: str
    temperature_0: Figures
    temperature_1: Figures
    hf_generate_tokens_per_second: float
    lossless: bool
    differences: Sequence[Mapping[str, Any]]  # an entry for each prompt whose tokens differ from plain decoding's at T = 0
    prompts: int
    tree: Mapping[str, Any]
    drafter_parameters: int
    dtype: str
    device: str
    versions: Mapping[str, str]
    commit: str
    chain_temperature_0: Figures | None = None
    chain_temperature_1: Figures | None = None
    auto_temperature_0: Figures | None = None  # of decode=auto, which chooses round by round: tree, chain or no guesses
    auto_temperature_1: Figures | None = None
    batches: Sequence[Batch] | None = None  # where prompts were decoded together too; sequences=1 is among the rows
    differing_prompts: int | None = None
    new_tokens: int | None = None  # of a prompt, at most
    prompt_tokens: int | None = None
    prompts_from: str = "these prompts"
    proposer: Mapping[str, Any] | None = None
    version: int = VERSION
    more: Mapping[str, Any] = field(default_factory=dict)
    texts: Sequence[Text] = ()
    asked: Sequence[Sequence[int]] = ()  # the prompts' tokens
    spelling: Mapping[int, str] = field(default_factory=dict)  # text of every token that occurs; empty without a tokenizer

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

    def spelt(self, tokens: Iterable[int]) -> str:
        """The text of these tokens; the number in ⟨⟩ where a token's text is not known."""
        return "".join(self.spelling.get(token, f"⟨{token}⟩") for token in tokens)

    def write(self, folder: Path) -> None:
        """Write report.json, and rounds.jsonl if there are texts; each file is written whole or not at all."""
        said = json.dumps(plain(self), indent=2) + "\n"
        if self.texts:
            first = {"version": 1, "report": _digest(said), "prompts": plain(self.asked), "spelling": plain(self.spelling)}
            lines = [json.dumps(x, separators=(",", ":")) for x in [first, *map(_line, self.texts)]]
            put_text(folder / ROUNDS, "\n".join(lines) + "\n")
        put_text(folder / NAME, said)

    @classmethod
    def read(cls, folder: Path) -> Report:
        """Read a report of any version, with its texts if rounds.jsonl belongs to report.json. Raises UserError naming a damaged file."""
        keys = {"version": 1} | read_json(folder / NAME)
        try:
            report = cls.of(keys)
        except UserError as e:
            raise UserError(f"{folder / NAME}: {e}") from e
        if not (path := folder / ROUNDS).is_file():
            return report
        try:
            whole = path.read_text(encoding="utf-8").split("\n")  # splitlines would also split at U+2028, which texts may hold
            first, *lines = (json.loads(line) for line in whole if line)
            if first["report"] == _digest((folder / NAME).read_text(encoding="utf-8")):
                spelling = {int(token): str(text) for token, text in first["spelling"].items()}
                return replace(report, texts=[_text(line) for line in lines], asked=first["prompts"], spelling=spelling)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as e:
            raise UserError(f"{path} is damaged ({type(e).__name__}: {e}): remove it, or report again") from e
        return report


def frozen(value: Any) -> Any:
    """A JSON value with its lists turned into tuples, and its dictionaries into read-only mappings."""
    if isinstance(value, dict | MappingProxyType):
        return MappingProxyType({k: frozen(v) for k, v in value.items()})
    return tuple(map(frozen, value)) if isinstance(value, list | tuple) else value


def plain(value: Any) -> Any:
    """The inverse of ``frozen``: a new value made of dictionaries and lists, as JSON takes it."""
    if isinstance(value, Mapping):
        return {k: plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, list | tuple) else value


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _line(text: Text) -> dict[str, Any]:
    """A text as a line of rounds.jsonl. Each round: how many tokens it added, its guesses, their parents ([] for a chain), which were
    accepted.
    """
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


def shape_of(about: Mapping[str, Any]) -> str:
    """The shape of the tree that was decoded, in words, from the keys of a report or of a comparison. An auto policy's tree may have
    another shape at temperature 1.
    """
    cold, warm = about["tree"], about.get("tree_temperature_1", about["tree"])
    return str(TreePolicy(**cold)) + (f"; at temperature 1 {TreePolicy(**warm)}" if warm != cold else "")
