"""From nested settings to a proposer, as conf/decode has them: {"kind": "union", "parts": [{"kind": "ngram"}, {"kind": "drafter"}]}."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping
from inspect import Parameter, signature
from typing import Any

from headstart.heads.base import Drafter
from headstart.heads.errors import UserError
from headstart.inference.decoding.propose import Drafting, Proposer
from headstart.inference.decoding.target import Target
from headstart.inference.proposers.base import Lookup
from headstart.inference.proposers.cascade import Cascade
from headstart.inference.proposers.early_exit import EarlyExit
from headstart.inference.proposers.hybrid import Hybrid
from headstart.inference.proposers.ngram import Ngram
from headstart.inference.proposers.pipelined import Pipelined
from headstart.inference.proposers.suffix import Suffix
from headstart.inference.proposers.swift import Swift
from headstart.inference.proposers.union import Union
from headstart.inference.speculator import open_speculator

Settings = Mapping[str, Any]

TEXT: dict[str, Callable[..., Lookup]] = {"ngram": Ngram, "suffix": Suffix}
ITSELF: dict[str, Callable[..., Proposer]] = {"early_exit": EarlyExit, "swift": Swift}
KEYWORD = Parameter.KEYWORD_ONLY
KEYS: dict[str, Collection[str]] = {
    "drafter": ("folder",),
    "pipelined": ("folder", "threads"),
    "cascade": ("folder", "small"),
    "union": ("parts",),
    "hybrid": ("lookup", "otherwise", "match"),
} | {kind: [p.name for p in signature(made).parameters.values() if p.kind is KEYWORD] for kind, made in (*TEXT.items(), *ITSELF.items())}


def open_proposer(settings: Settings, target: Target, drafter: Drafter | None = None, where: str = "proposer") -> Proposer:
    """``drafter`` is meant wherever the settings name a drafter without its folder. ``where``: what errors call the settings.

    Raises UserError for an unknown kind or key (naming the nearest), a wrong value, a drafter that is not there or that has
    another vocabulary.
    """
    kind, given = _check(settings, where)
    if kind in TEXT:
        return TEXT[kind](**given)
    if kind in ITSELF:
        return ITSELF[kind](target, **given)

    def part(key: str, default: str, kinds: Collection[str] = KEYS) -> Any:
        inner = given.get(key, {"kind": default})
        if (found := _check(inner, f"{where}.{key}")[0]) not in kinds:
            raise UserError(f"{where}.{key}: kind must be {', '.join(kinds)} here, found {found!r}")
        return open_proposer(inner, target, drafter, f"{where}.{key}")

    if kind == "union":
        parts = given.get("parts", [{"kind": "suffix"}, {"kind": "drafter"}])
        if not isinstance(parts, list | tuple):
            raise UserError(f"{where}.parts must be a list of proposers, found {parts!r}")
        return Union([open_proposer(inner, target, drafter, f"{where}.parts[{i}]") for i, inner in enumerate(parts)])
    if kind == "hybrid":
        return Hybrid(part("lookup", "suffix", TEXT), part("otherwise", "drafter"), match=given.get("match", 3))
    model = _drafter(given.get("folder"), target, drafter, where)
    if kind == "pipelined":
        return Pipelined(model, threads=given.get("threads", 1))
    if kind == "cascade":
        small = part("small", "ngram", (*TEXT, "cascade", "drafter"))
        return Cascade(model, Cascade(small.drafter) if isinstance(small, Drafting) else small)
    return Drafting(model)


def check_proposer(settings: Settings, where: str = "proposer") -> None:
    """Raises UserError for an unknown kind or key, here or in a proposer within, and for what a lookup cannot be told: no target needed."""
    kind, given = _check(settings, where)
    if kind in TEXT:
        TEXT[kind](**given)
    for key, inner in given.items():
        for i, each in enumerate(inner if isinstance(inner, list | tuple) else [inner]):
            if isinstance(each, Mapping):
                check_proposer(each, f"{where}.{key}[{i}]" if isinstance(inner, list | tuple) else f"{where}.{key}")


def _drafter(folder: str | None, target: Target, given: Drafter | None, where: str) -> Drafter:
    if folder is not None:
        return open_speculator(folder, target)
    if given is None:
        raise UserError(f"{where}: which drafter? Give speculator=DIR, or its folder here: {{kind: drafter, folder: DIR}}")
    if given.shape.vocab_size != target.shape.vocab_size:
        raise UserError(f"{where}: the drafter has a vocabulary of {given.shape.vocab_size}, {target.name} of {target.shape.vocab_size}")
    return given


def _check(settings: object, where: str) -> tuple[str, Settings]:
    """The kind, and the other keys. Raises UserError for what is not known."""
    if not isinstance(settings, Mapping) or "kind" not in settings:
        raise UserError(f"{where} must be a dictionary with a kind, {{kind: ngram}} for example, found {settings!r}")
    kind = settings["kind"]
    if not isinstance(kind, str) or kind not in KEYS:
        raise UserError(f"{where}: there is no kind {kind!r}{_near(kind, KEYS)}: choose one of {', '.join(KEYS)}")
    given = {key: value for key, value in settings.items() if key != "kind"}
    for key in given:
        if key not in KEYS[kind]:
            raise UserError(f"{where}: kind {kind} has no key {key!r}{_near(key, KEYS[kind])}: it has {', '.join(KEYS[kind])}")
    return kind, given


def _near(word: object, known: Collection[str]) -> str:
    near = difflib.get_close_matches(str(word), known, n=1, cutoff=0.6)
    return f" (did you mean {near[0]}?)" if near else ""
