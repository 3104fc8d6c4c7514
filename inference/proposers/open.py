"""Making a proposer from nested settings, as in conf/decode: {"kind": "union", "parts": [{"kind": "ngram"}, {"kind": "drafter"}]}.

A kind of proposer has one module and one YAML file: ``inference/proposers/KIND.py`` with a class of that name, ``conf/decode/KIND.yaml``
with its settings. The constructor determines the keys. Each keyword-only parameter is a key. Of the positional parameters, ``target`` is
the target (no key) and ``drafter`` is a drafter (key ``folder``; without it, the drafter that the caller gives). Any other positional
parameter is an inner proposer, or a list of them, under a key of its name, of the kinds that its annotation allows. The class attribute
``within`` holds the default settings of the inner proposers.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, get_args, get_type_hints

from headstart.heads.base import Drafter
from headstart.heads.errors import UserError, near
from headstart.inference.decoding.propose import Drafting, Proposer
from headstart.inference.decoding.target import Target
from headstart.inference.speculator import open_speculator

Settings = Mapping[str, Any]
HERE = Path(__file__).resolve().parent
CONF = HERE.parents[1] / "conf" / "decode"


def _takes(made: Any, by_place: bool) -> list[str]:
    """The names of a constructor's positional parameters, or of its keyword-only ones."""
    return [p.name for p in signature(made).parameters.values() if (p.kind is not Parameter.KEYWORD_ONLY) == by_place]


def _classes() -> dict[str, Any]:
    """kind -> class, in the order: the drafter's own trees, the kinds that need only the text, the others."""
    names = [path.stem for path in sorted(CONF.glob("*.yaml")) if (HERE / path.name).with_suffix(".py").is_file()]
    found = {name: getattr(importlib.import_module(f"{__package__}.{name}"), name.title().replace("_", "")) for name in names}
    return {"drafter": Drafting} | dict(sorted(found.items(), key=lambda each: bool(_takes(each[1], by_place=True))))


CLASSES = _classes()
PLACES = {kind: _takes(made, by_place=True) for kind, made in CLASSES.items()}
WORDS = {kind: _takes(made, by_place=False) for kind, made in CLASSES.items()}
KEYS: dict[str, list[str]] = {  # kind -> the keys that its settings may have
    kind: ["folder" if name == "drafter" else name for name in PLACES[kind] if name != "target"] + WORDS[kind] for kind in CLASSES
}


def open_proposer(settings: Settings, target: Target, drafter: Drafter | None = None, where: str = "proposer") -> Proposer:
    """Make the proposer that the settings describe. ``drafter``: used wherever they name a drafter without a folder. ``where``: the name of
    the settings in error messages.

    Raises UserError for an unknown kind or key (naming the nearest), for a wrong value, and for a drafter that is missing or has another
    vocabulary than the target.
    """
    kind, given = _check(settings, where)
    made = CLASSES[kind]

    def argument(name: str) -> Any:
        if name == "target":
            return target
        if name == "drafter":
            return _drafter(given.get("folder"), target, drafter, where)
        usual, place = made.within[name], f"{where}.{name}"
        inner = given.get(name, usual)
        if not isinstance(usual, list):
            _check_kind(inner, place, get_type_hints(made.__init__)[name])
            return open_proposer(inner, target, drafter, place)
        if not isinstance(inner, list | tuple):
            raise UserError(f"{place} must be a list of proposers, found {inner!r}")
        return [open_proposer(each, target, drafter, f"{place}[{i}]") for i, each in enumerate(inner)]

    proposer: Proposer = made(*map(argument, PLACES[kind]), **{name: given[name] for name in WORDS[kind] if name in given})
    return proposer


def check_proposer(settings: Settings, where: str = "proposer") -> None:
    """Check settings without a target. Raises UserError for an unknown kind or key, at any depth, and for a lookup's wrong values."""
    kind, given = _check(settings, where)
    if not PLACES[kind]:
        CLASSES[kind](**given)
    for key, inner in given.items():
        for i, each in enumerate(inner if isinstance(inner, list | tuple) else [inner]):
            if isinstance(each, Mapping):
                check_proposer(each, f"{where}.{key}[{i}]" if isinstance(inner, list | tuple) else f"{where}.{key}")


def takes_drafter(settings: Settings) -> bool:
    """Whether these settings, or those of a proposer within, use a drafter without a folder of its own: the one that the caller must give.
    Raises UserError for an unknown kind or key.
    """
    kind, given = _check(settings, "proposer")
    within = [given.get(name, CLASSES[kind].within[name]) for name in PLACES[kind] if name not in ("target", "drafter")]
    parts = [part for inner in within for part in (inner if isinstance(inner, list | tuple) else [inner])]
    return ("drafter" in PLACES[kind] and given.get("folder") is None) or any(takes_drafter(part) for part in parts)


def _drafter(folder: str | None, target: Target, given: Drafter | None, where: str) -> Drafter:
    if folder is not None:
        return open_speculator(folder, target)
    if given is None:
        raise UserError(f"{where}: which drafter? Give speculator=DIR, or its folder here: {{kind: drafter, folder: DIR}}")
    if given.shape.vocab_size != target.shape.vocab_size:
        raise UserError(f"{where}: the drafter has a vocabulary of {given.shape.vocab_size}, {target.name} of {target.shape.vocab_size}")
    return given


def _check(settings: object, where: str) -> tuple[str, Settings]:
    """The kind of the settings, and their other keys. Raises UserError for an unknown kind or key."""
    if not isinstance(settings, Mapping) or "kind" not in settings:
        raise UserError(f"{where} must be a dictionary with a kind, {{kind: ngram}} for example, found {settings!r}")
    kind = settings["kind"]
    if not isinstance(kind, str) or kind not in KEYS:
        raise UserError(f"{where}: there is no kind {kind!r}{near(str(kind), KEYS)}: choose one of {', '.join(KEYS)}")
    given = {key: value for key, value in settings.items() if key != "kind"}
    for key in given:
        if key not in KEYS[kind]:
            raise UserError(f"{where}: kind {kind} has no key {key!r}{near(str(key), KEYS[kind])}: it has {', '.join(KEYS[kind])}")
    return kind, given


def _check_kind(settings: object, where: str, wanted: Any) -> None:
    """Raises UserError where the annotation ``wanted`` of an inner proposer's parameter does not allow the kind of these settings."""
    allowed = [c for c in get_args(wanted) or (wanted,) if c is not type(None)]
    kinds = [kind for each in allowed for kind, made in CLASSES.items() if each is Proposer or issubclass(made, each)]
    if (found := _check(settings, where)[0]) not in kinds:
        raise UserError(f"{where}: kind must be {', '.join(kinds)} here, found {found!r}")
