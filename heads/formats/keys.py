"""Checks of a foreign config.json: each key that engines read is either taken over or must have the one value that fits our drafter."""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Mapping
from typing import Any

from headstart.heads.errors import UserError

ABSENT = object()
_short = reprlib.Repr()
_short.maxstring = _short.maxother = 80
_short.maxdict = _short.maxlist = 12
shown = _short.repr  # repr of a value from a file for an error message, never pages long


def architecture(config: Mapping[str, Any]) -> str:
    """The first name in ``architectures``; "" where the key is absent. Raises UserError where it is not a list of names."""
    names = config.get("architectures")
    if names is None:
        return ""
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise UserError(f"architectures must be a list of names, found {shown(names)}")
    return str(names[0])


def need(config: Mapping[str, Any], wanted: Mapping[str, Collection[Any]], where: str = "") -> None:
    """Raises UserError for a key that is present with none of the wanted values. ``where``: prefix of the key in the error message."""
    for key, values in wanted.items():
        found = config.get(key, ABSENT)
        if found is not ABSENT and not any(alike(found, value) for value in values):
            raise UserError(f"the folder has {where}{key}={shown(found)}, this drafter needs {' or '.join(map(repr, values))}")


def flag(config: Mapping[str, Any], key: str) -> bool:
    """A true or false value; False where the key is absent. Raises UserError for any other value."""
    need(config, {key: (True, False, None)})
    return bool(config.get(key))


def part(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    """A dictionary within the config; empty where the key is absent. Raises UserError for any other value."""
    found = config.get(key)
    if not isinstance(found, dict | None):
        raise UserError(f"{key} must be a dictionary, found {shown(found)}")
    return found or {}


def layers(found: Any, key: str) -> list[int]:
    """``found`` as a list of layer numbers. Raises UserError for anything else, and for an empty list."""
    if not (isinstance(found, list) and found and all(type(k) is int and k >= 0 for k in found)):
        raise UserError(f"the folder has {key}={shown(found)}, expected a list of layers")
    return found


def agree(key: str, value: Any, other_key: str, other: Any) -> None:
    """Raises UserError where two keys that mean the same have different values."""
    if not alike(value, other):
        raise UserError(f"the folder has {key}={shown(value)}, but {other_key}={shown(other)}: engines read one or the other")


def alike(a: Any, b: Any) -> bool:
    """Whether two values are equal at every level of nesting. Unlike in Python, True does not equal 1."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(alike(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(alike, a, b))
    return isinstance(a, bool) == isinstance(b, bool) and bool(a == b)
