"""What --help says: the groups of a door with their choices, its settings with their values, and the comments of conf/ on all of them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from headstart.door.schema import DOORS
from headstart.door.values import CONF, choices

KEY = re.compile(r"( *)(\w+):(?: (.*))?$")
HOW = """key=value changes a setting. group=choice takes another choice, and group=choice --help shows the settings of that choice.
--multirun key=a,b makes one run for each value. --cfg job prints the settings of a run without running it.
--hydra-help shows what else Hydra can do."""
ONE_LINE, WIDTH = 60, 40  # characters: of a dictionary on one line, at most; of the left column


def opening(path: Path) -> str:
    """The first comment of a YAML, which says what it is."""
    lines = (line[1:].strip() for line in path.read_text().splitlines() if line.startswith("#"))
    return next((line for line in lines if not line.startswith("@package")), "")


def groups(config_name: str) -> dict[str, str]:
    """The groups in the defaults list of a door -> the comment on each."""
    found: dict[str, str] = {}
    last = ""
    for line in (CONF / f"{config_name}.yaml").read_text().splitlines():
        if item := re.match(r"  - (\w+): \S+(?:\s+# (.*))?$", line):
            last = item[1]
            found[last] = item[2] or ""
        elif last and (more := re.match(r"\s+# (.*)$", line)):  # the comment goes on
            found[last] += f" {more[1]}"
        elif not line.startswith("  "):
            last = ""
    return found


def not_taken(config_name: str) -> dict[str, str]:
    """Keys of a door's groups that it does not use -> the error for whoever gives one."""
    return getattr(DOORS.get(config_name), "not_taken", {})


def comments(path: Path, package: str) -> dict[str, str]:
    """Dotted key -> its comments, above it and on its line, in this YAML and in those of its defaults list."""
    source = path.read_text()
    package = "" if "# @package _global_" in source else package
    found: dict[str, str] = {}
    settings: Any = OmegaConf.load(path)
    for base in settings.get("defaults", ()):
        if isinstance(base, str) and base != "_self_":
            found |= comments(path.with_name(f"{base}.yaml"), package)
    within: list[tuple[int, str]] = []
    above: list[str] = []
    began = False  # the comments that a file begins with are about the file
    for line in source.splitlines():
        if line.lstrip().startswith("#"):
            above += [line.strip("# ")] if began else []
        elif key := KEY.match(line):
            began, indent = True, len(key[1])
            within = [*(word for word in within if word[0] < indent), (indent, key[2])]
            behind = re.search(r"(?:^|\s)# (.*)$", key[3] or "")
            if said := " ".join([*above, *([behind[1]] if behind else [])]):
                found[".".join([*filter(None, [package]), *(word for _, word in within)])] = said
            above = []
        else:
            above, began = [], began or not line.strip()
    return found


def text(config_name: str, commands: str, arguments: Sequence[str]) -> str:
    """The text of --help. ``commands``: examples, shown first. ``arguments``: the command line, whose choices of groups are shown."""
    known = groups(config_name)
    pairs = (argument.partition("=")[::2] for argument in arguments)
    chosen = {group: choice for group, choice in pairs if group in known and choice in choices(group)}
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        config = hydra.compose(config_name, [f"{group}={choice}" for group, choice in chosen.items()], return_hydra_config=True)
    header, picked = config.hydra.help.header, config.hydra.runtime.choices
    said = about(config_name, picked)
    unused = [group for group, about in known.items() if about.startswith("not used")]
    with read_write(config), open_dict(config):
        for key in ("hydra", *unused):
            del config[key]
    settings = [(key, value) for key, value in _settings(config, said, known) if key not in not_taken(config_name)]
    lines = [header, "", *([commands.strip(), ""] if commands else []), HOW, ""]
    for group, choice in chosen.items():  # what was asked for comes first
        lines.append(_columns(f"{group}={choice}", opening(CONF / group / f"{choice}.yaml")))
        lines += [_columns(f"  {key}={value}", said.get(key, "")) for key, value in settings if key.startswith(f"{group}.")] + [""]
    lines += ["Groups:"] if known else []
    for group in (group for group in known if group not in unused):
        lines.append(_columns(f"  {group}={picked[group] or 'null'}", known[group]))
        lines += [_columns(f"      {choice}", opening(CONF / group / f"{choice}.yaml")) for choice in choices(group)]
    lines += [""] if known else []
    lines += ["Settings:", *(_columns(f"  {key}={value}", said.get(key, "")) for key, value in settings)]
    return "\n".join(lines)


def about(config_name: str, picked: Mapping[str, str]) -> dict[str, str]:
    """Dotted key -> the comment on it, with the choices of groups in ``picked``."""
    said = comments(CONF / f"{config_name}.yaml", "")
    for group in groups(config_name):
        if (chosen := picked.get(group)) in choices(group):
            said |= comments(CONF / group / f"{chosen}.yaml", group)
    return said


def _columns(left: str, right: str) -> str:
    return f"{left:<{WIDTH}}{'' if len(left) < WIDTH else '  '}{right}".rstrip()


def _settings(config: DictConfig, said: Collection[str], groups: Collection[str], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield dotted keys and values. A large dictionary gives a pair for each of its keys, and first one for itself if it has a comment."""
    for key in map(str, config):
        name, shown = prefix + key, _shown(config, key)
        if OmegaConf.is_dict(config._get_node(key)) and (shown == "???" or len(shown) > ONE_LINE or name in groups):
            if name in said:
                yield name, "{...}"
            yield from _settings(config[key], said, groups, f"{name}.")
        else:
            yield name, shown


def _shown(config: DictConfig, key: str) -> str:
    try:
        value: Any = "???" if OmegaConf.is_missing(config, key) else config[key]
        plain = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    except OmegaConfBaseException:  # it refers to a setting without a value
        return "???"
    return flow(plain)


def flow(value: Any) -> str:
    """A value as YAML writes it on one line."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {flow(each)}' for key, each in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(flow, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
