"""Settings of the command line that the other settings make useless. They are refused, so that nobody believes that they were at work.

If a --multirun varies the setting that decides this, the useless one works in some of its runs. In the others only a line is printed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from hydra.core.override_parser.overrides_parser import OverridesParser

from headstart.door.sweep import given, swept
from headstart.heads.errors import UserError
from headstart.inference.decoding.used import UNREAD, idle

Settings = Mapping[str, Any]
SERVED = {f"served.{key}": "served.url" for key in ("layers", "key", "retries")}
NEEDS = {  # door -> a setting -> the one without which it has no effect
    "config": SERVED | {"head.window_causal": "head.window", "head.window_slides": "head.window", "capture.storage": "capture.out"},
    "capture": SERVED,
    "regenerate": dict.fromkeys(("model", "key", "retries"), "url"),
}
BESIDE = {  # door -> a setting -> the one beside which it has no effect
    "tune": dict.fromkeys(("on_long", "new_tokens", "sequences"), "shards"),
    "advise": {"task": "report"},
    "evaluate": dict.fromkeys(("suite.hub", "suite.split", "suite.subset"), "path"),
}
TREES = ("decode", *(f"decode.{key}" for key in ("kind", "depth", "nodes", "branch", "expand", "least", "paths", "rule")))
DRAWN = {  # door -> the settings that have no effect at temperature 0
    "chat": tuple(f"decode.{key}" for key in ("top_k", "top_p", "min_p", "rule", "seed")),
    "regenerate": ("top_p", "top_k"),
}


class Idle(NamedTuple):
    """A setting without effect."""

    key: str
    why: str  # after "has no effect "
    instead: str  # what to do
    by: tuple[str, ...]  # the settings that make it so


def said_of(arguments: Sequence[str]) -> dict[str, str]:
    """key -> value, as typed. A dictionary stands there under its own key, and its values under theirs: ``served={retries:3}`` says
    served.retries too.
    """
    found = given(arguments)
    for key, value in [*found.items()]:
        if value.startswith("{"):
            found |= _inside(key, OverridesParser.create().parse_override(f"{key}={value}").value())
    return found


def _inside(key: str, value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        return {key: str(value)}
    return {name: text for word, inner in value.items() for name, text in _inside(f"{key}.{word}", inner).items()}


def check(door: str, config: Settings, arguments: Sequence[str]) -> None:
    """Raises UserError for a setting of the command line without effect at this door. ``python train.py`` has arms: it asks by itself, and
    so does ``evaluate``, which has several trees.
    """
    said = said_of(arguments)
    refuse(beside(door, config), said, swept())
    if door == "config":
        return
    refuse(needs(door, [config]), said, swept())
    if "decode" in config and door != "evaluate":
        refuse(of_trees([config["decode"]]), said, swept())


def refuse(found: Iterator[Idle], said: Mapping[str, str], several: Collection[str]) -> None:
    """Raises UserError for the first setting without effect that ``said`` has. ``several``: the keys that a --multirun tries several
    values of.
    """
    for each in found:
        if each.key in said:
            if {*each.by} & {*several}:
                print(f"{each.key}={said[each.key]} changes nothing {each.why}", flush=True)
            else:
                raise UserError(f"{each.key}={said[each.key]} has no effect {each.why}: {each.instead}")


def needs(door: str, arms: Sequence[Settings]) -> Iterator[Idle]:
    """Settings that need another one (``NEEDS``) which no arm has. ``arms``: the settings of each arm; of a door without arms, its settings
    alone.
    """
    for key, other in NEEDS.get(door, {}).items():
        if all(_value(arm, other) is None for arm in arms):
            yield Idle(key, f"without {other}", "give that too, or leave it out", (other,))


def beside(door: str, config: Settings) -> Iterator[Idle]:
    """Settings that another given setting replaces or makes useless."""
    for key, other in BESIDE.get(door, {}).items():
        if config[other] is not None:
            yield Idle(key, f"beside {other}=", "give one of them", (other,))
    if door == "tune" and config["shards"] is not None and config["costs"] is None:
        yield Idle("out", "with shards= alone, which writes nothing", "give costs=FILE too, or leave it out", ("costs",))
    if door in DRAWN and config["temperature"] == 0:
        for key in DRAWN[door]:
            yield Idle(key, "at temperature=0", "give temperature=1 for example, or leave it out", ("temperature",))
    if door == "regenerate":
        name = config["data"]["name"]
        key = "prefix" if name == "chat" else "turns"
        if name in ("chat", "text", "stdlib"):
            yield Idle(key, f"with data={name}", "leave it out", ("data",))
    if door in ("chat", "serve") and config["speculator"] is None and config["decode"]["proposer"] == {"kind": "drafter"}:
        for key in TREES:
            yield Idle(
                key, "without speculator=DIR, because nothing is drafted", "give that too, or leave it out", ("speculator", "decode")
            )


def of_trees(decodes: Sequence[Settings]) -> Iterator[Idle]:
    """Settings of conf/decode that change the trees of none of ``decodes``, the first of which is the door's own."""
    kind, proposer = decodes[0]["kind"], decodes[0]["proposer"]["kind"]
    for key in (key for key in idle(decodes[0]) if all(key in idle(decode) for decode in decodes)):
        chosen = kind if proposer == "drafter" else proposer
        how = f"decode={chosen}" if proposer == "drafter" or key in UNREAD.get(proposer, ()) else f"decode.kind={kind}"
        yield Idle(f"decode.{key}", f"with {how}", "leave it out", ("decode", "decode.kind", "decode.proposer.kind"))


def _value(config: Any, key: str) -> Any:
    """The value of a dotted key; None where a part of it is missing or null."""
    for word in key.split("."):
        config = config.get(word) if isinstance(config, Mapping) else None
    return config
