"""Renamed settings: the old name keeps working in commands, YAMLs, runs and exported folders. For commands and YAMLs, a note names the new
one.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

# The conf/NAME.yaml of a command -> old dotted key -> new dotted key.
SETTINGS: dict[str, dict[str, str]] = {
    "config": {"trainer.rows": "trainer.batch_size"},
    "capture": {"rows": "batch_size"},
    "regenerate": {"rows": "sequences", "capacity": "max_length"},
    "serve": {"rows": "sequences", "capacity": "max_length"},
    "chat": {"capacity": "max_length"},
}
# The same for a drafter's own settings, which exported folders hold too: head -> old key -> new key.
ARGUMENTS: dict[str, dict[str, str]] = {head: {"heads": "guesses"} for head in ("medusa", "hydra", "mlp_speculator")}
_said = set[str]()


def arguments_of_now(head: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A drafter's settings under their current names."""
    new = ARGUMENTS.get(head, {}) if isinstance(head, str) else {}
    return {new.get(key, key): value for key, value in arguments.items()}


def override_of_now(argument: str, command: str, head: str) -> str:
    """``key=value`` of a command line under the key's current name. ``head``: the drafter that the command line chooses."""
    key, equals, value = argument.partition("=")
    bare = key.lstrip("+")
    new = _renamed(command, head).get(bare) if equals else None
    if new is None:
        return argument
    _say(bare, new)
    return f"{key[: len(key) - len(bare)]}{new}={value}"


def settings_of_now(settings: Mapping[str, Any], command: str, quiet: bool = False) -> dict[str, Any]:
    """The resolved settings of a command under their current names. Where a YAML or an earlier run has an old name, its value wins."""
    settings = dict(settings)
    head = settings.get("head")
    for old, new in _renamed(command, head.get("name", "") if isinstance(head, Mapping) else "").items():
        group, _, key = old.rpartition(".")
        within = settings.get(group) if group else settings
        if isinstance(within, Mapping) and key in within:
            changed = {**within, new.rpartition(".")[2]: within[key]}
            del changed[key]
            settings = settings | {group: changed} if group else changed
            if not quiet:
                _say(old, new)
    return settings


def _renamed(command: str, head: str) -> dict[str, str]:
    own = {f"head.{old}": f"head.{new}" for old, new in ARGUMENTS.get(head, {}).items()}
    return SETTINGS.get(command, {}) | own


def _say(old: str, new: str) -> None:
    if old not in _said:
        _said.add(old)
        print(f"{old} is called {new} now", file=sys.stderr, flush=True)
