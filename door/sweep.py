"""Runs and their names: a run folder is named after the settings that differ from the defaults; a --multirun compares its runs at the end.

python train.py                                       runs/HEAD-TARGET-DATA, those of conf/config.yaml
python train.py trainer.lr=4e-3                       runs/HEAD-TARGET-DATA-lr=4e-3
python train.py experiment=smoke                      runs/smoke-HEAD-TARGET-DATA
python train.py --multirun trainer.lr=4e-3,8e-3       a folder for each, and runs/sweep-lr=4e-3+8e-3 for the comparison
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import sys
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from headstart.door.values import CONF, choices
from headstart.heads.override import typed

NAMED = ("head", "target", "data", "experiment")  # what a folder's name begins with
# Settings that do not change what a run makes (as in trainers/resume.py), so its folder is not named after them: where the run is, how it
# is watched, kept and reported, how its data are read, and what changes rounding alone.
WATCHED = (
    "out", "out_fallback", "out_wait", "arms", "decode", "export", "report", "tracker", "target.device",
    *(f"trainer.{key}" for key in ("save_every", "keep", "background", "eval_every", "resume", "skips", "spike", "timeout", "profile")),
    *(f"trainer.{key}" for key in ("decode_every", "log_every", "gradient_checkpointing", "patience", "precision")), "loss.kernel",
    "loss.chunk", "data.cache", "data.workers", "plan", "nodes", "gpus", "gpu", "gpu_hour", "parallel", "served", "capture.out",
    *(f"launcher.{key}" for key in ("time", "partition", "account", "gpus", "cpus", "before", "options", "setup", "submit")),
)  # fmt: skip
REPORTED = ("out", "arms", "report", "plan", "launcher", "tracker")  # settings that a report does not list as changed
LONGEST = 120  # characters of a folder's name


class Done(NamedTuple):
    """A run of a --multirun."""

    label: str  # what tells it from the other runs
    config: dict[str, Any]
    error: str  # "" where there was none


def overrides() -> list[str]:
    """The command line of the run that is under way."""
    found: Any = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
    return list(found)


def again(out: str, group: str | None) -> list[str]:
    """The command line of the same run for another process: without ``launcher``, so that it starts no more processes, with the run folder
    ``out`` and the tracker's ``group`` of its --multirun.
    """
    hydra = HydraConfig.get()
    folders = [f"--config-dir={source.path}" for source in hydra.runtime.config_sources if source.provider == "command-line"]
    search = [word for word in hydra.overrides.hydra if word.startswith("hydra.searchpath=")]
    words = [word for word in overrides() if not word.lstrip("+").startswith(("launcher", "out="))]
    words += [f"tracker.group={typed(group)}"] if group is not None else []
    return [*folders, *search, *words, f"out={typed(out)}"]


def keys_of(config: Any, prefix: str = "") -> list[str]:
    """Dotted names of all settings, those that hold others included."""
    found: list[str] = []
    for key in map(str, config) if isinstance(config, DictConfig) and not config._is_none() else ():
        within = not (OmegaConf.is_missing(config, key) or OmegaConf.is_interpolation(config, key))
        found += [prefix + key, *(keys_of(config[key], f"{prefix}{key}.") if within else [])]
    return found


# ---- words of a name ----


def digest(text: str, digits: int = 6) -> str:
    """A few hexadecimal digits that name a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:digits]


def part(value: str) -> str:
    """A value as a part of a folder's name: as typed if it is short and plain, else its beginning (a path's last part) and a digest."""
    value = value.strip("'\"")
    if re.fullmatch(r"\d*\.?\d+(e[+-]?\d+)?", value, re.IGNORECASE) and not value.isdecimal():
        return number(float(value))
    if re.fullmatch(r"[\w.+-]{1,40}", value, re.ASCII):
        return value
    last = Path(value.rstrip("/")).stem if "/" in value else value
    return f"{re.sub(r'[^A-Za-z0-9_.+]+', '_', last)[:24].strip('_')}-{digest(value)}"


def number(value: float) -> str:
    """The shortest text of a number, so that 0.004 and 4e-3 have the same name."""
    digits = next(text for places in range(18) if float(text := f"{value:.{places}e}") == value)
    mantissa, _, exponent = digits.partition("e")
    return min(repr(value), f"{mantissa}e{int(exponent)}", key=len)


def short(key: str, known: Collection[str]) -> str:
    """The last words of a dotted key: as few as needed so that no other key ends with them."""
    parts = key.split(".")
    for count in range(1, len(parts)):
        tail = ".".join(parts[-count:])
        if sum(k == tail or k.endswith(f".{tail}") for k in {*known, key}) == 1:
            return tail
    return key


def joined(parts: Sequence[str]) -> str:
    """Words joined to the name of a folder; a name that is too long is cut, and ends in its digest."""
    name = "-".join(parts)
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 9]}-{digest(name, 8)}"


def given(arguments: Sequence[str]) -> dict[str, str]:
    """key -> value (the last one given), sorted by key, so that the order of the arguments does not matter."""
    pairs = (argument.lstrip("+").partition("=") for argument in arguments)
    return dict(sorted({key: value for key, _, value in pairs}.items()))


def words(settings: dict[str, str], config_name: str) -> list[str]:
    """The settings as words of a name: key=value, or key=a+b for several values (a list, or those of a --multirun)."""
    known = {*defaults(config_name, ()).keys, *settings, "path"}

    def parts(value: str) -> str:
        inside = value[1:-1] if re.fullmatch(r"\[[^\[\]{}]*\]", value) else value
        several = "+".join(part(each.strip()) for each in inside.split(","))
        return part(value) if re.search(r"[\[\]{}()]", inside) or len(several) > 60 else several

    return [f"{short(key, known)}={parts(value)}" for key, value in settings.items()]


class Defaults(NamedTuple):
    """The settings before the command line changes any value."""

    keys: list[str]
    config: DictConfig
    choices: dict[str, str]  # group -> choice


@functools.lru_cache(16)
def defaults(config_name: str, choices: tuple[str, ...]) -> Defaults:
    """The defaults of a door with these choices of groups, and nothing else from the command line."""
    at_work = GlobalHydra.instance().is_initialized()
    with nullcontext() if at_work else hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        config = hydra.compose(config_name, list(choices), return_hydra_config=True)
    chosen = {str(group): str(choice or "null") for group, choice in config.hydra.runtime.choices.items()}
    with read_write(config), open_dict(config):
        del config["hydra"]
    return Defaults(keys_of(config), config, chosen)


def _differ(settings: dict[str, str], config_name: str, config: dict[str, Any]) -> set[str]:
    """The keys of ``settings`` whose values differ from the defaults, without those of ``WATCHED``."""
    usual = defaults(config_name, tuple(f"{key}={value}" for key, value in settings.items() if key in NAMED)).choices
    groups = {key: value for key, value in settings.items() if key in usual}
    before = defaults(config_name, tuple(f"{key}={value}" for key, value in groups.items())).config
    found = {key for key, value in groups.items() if usual[key] != value}
    for key in settings.keys() - groups.keys():
        now: Any = config
        for word in key.split("."):
            now = now.get(word) if isinstance(now, dict) else None
        found |= {key} if now != _value(before, key) else set()
    return {key for key in found if not is_watched(key)}


def _value(config: DictConfig, key: str) -> Any:
    """The value of a dotted key; None where it has none, or refers to a setting that has none."""
    value = OmegaConf.select(config, key, throw_on_resolution_failure=False)
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def changed(config_name: str, config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The settings whose values differ from conf/, for a report: key -> ``value``, ``default``. For head, target and data: the choice
    itself, and the values that differ from that choice's YAML.
    """
    found, chosen = dict[str, dict[str, Any]](), []
    usual = defaults(config_name, ()).choices
    for group in ("head", "target", "data"):
        name = str((config.get(group) or {}).get("name"))
        if group in usual and name in choices(group):
            chosen.append(f"{group}={name}")
            if name != usual[group]:
                found[group] = {"value": name, "default": usual[group]}
    from headstart.inference.reports.compare import flat
    from headstart.inference.reports.report import plain

    before = defaults(config_name, tuple(chosen)).config
    for key, value in flat(plain(config)).items():
        if not key.startswith(REPORTED) and value != (default := _value(before, key)):
            found[key] = {"value": value, "default": default}
    return found


def is_watched(key: str) -> bool:
    """Whether a key changes how a run is watched, not what it makes."""
    return any(f"{key}.".startswith(f"{watched}.") for watched in WATCHED)


# ---- folders ----


def out_of(config_name: str, config: dict[str, Any]) -> str:
    """The run folder: ``out``, if the command line gives it (in a --multirun a folder within it for each run); else runs/ and a name made
    of the settings.

    ``config["arms"]``: as they were typed.
    """
    settings, several = given(overrides()), swept()
    if "out" in settings:
        alike = several and "out" not in several and "$" not in settings["out"]
        return str(Path(config["out"]) / label(config_name, overrides(), several)) if alike else str(config["out"])
    arms, experiment = config["arms"] or {}, settings.get("experiment", "null")
    names = [] if experiment == "null" else [part(experiment)]
    if not arms or "head" in several:
        names.append(part(config["head"]["name"]))
    elif "arms" in settings:
        names += _of_arms(arms)
        head = config["head"]["name"]  # that of arms which name none
        if any("head=" not in str(words) for words in arms.values()) and head != defaults(config_name, ()).choices["head"]:
            names.append(part(head))
    names += [part(config["target"]["name"]), part(config["data"]["name"])]
    different = (_differ(settings, config_name, config) | {*several}) - {*NAMED}
    return f"runs/{joined([*names, *words({key: settings[key] for key in sorted(different)}, config_name)])}"


def _of_arms(arms: dict[str, str]) -> list[str]:
    """The parts of a folder's name for arms: their names, and a digest unless every arm is just the head that it is named after."""
    plain = all(words == f"head={name}" for name, words in arms.items())
    return ["+".join(arms), *([] if plain else [digest(json.dumps(arms))])]


def swept() -> list[str]:
    """The keys that a --multirun tries several values of."""
    if HydraConfig.get().mode is not RunMode.MULTIRUN:
        return []
    return swept_in(_typed())


def _typed() -> list[str]:
    return [argument for argument in sys.argv[1:] if "=" in argument and not argument.startswith(("-", "hydra"))]


def swept_in(arguments: Sequence[str]) -> list[str]:
    """The keys that a --multirun gives several values."""
    return sorted(o.key_or_group for o in OverridesParser.create().parse_overrides(list(arguments)) if o.is_sweep_override())


def label(config_name: str, arguments: Sequence[str], several: Sequence[str]) -> str:
    """The name of a run within its --multirun: its values of the keys ``several``."""
    settings = given(arguments)
    return joined(words({key: settings[key] for key in several}, config_name))


def folder_of_all(config_name: str, arguments: Sequence[str]) -> Path:
    """The folder for what is written about all runs of a --multirun together."""
    settings, several = given(arguments), swept_in(arguments)
    if "out" in settings and "out" not in several and "$" not in settings["out"]:
        return Path(settings["out"].strip("'\"")).expanduser()
    named = {key: value for key, value in settings.items() if key in several or not is_watched(key)}
    names = [part(named.pop("experiment"))] if "experiment" in named and "experiment" not in several else []
    arms = OverridesParser.create().parse_override(f"arms={settings.get('arms', 'null')}").value()
    if isinstance(arms, dict) and "head" not in several:
        names += _of_arms(arms)
        if all("head=" in str(words) for words in arms.values()):
            named.pop("head", None)
    return Path("runs") / joined(["sweep", *names, *words(named, config_name)])


def together(config_name: str) -> str | None:
    """The common name of the run that is under way and the others of its --multirun; None for a single run."""
    return folder_of_all(config_name, _typed()).name if swept() else None


def compare_runs(runs: Sequence[Done], folder: Path) -> None:
    """Write comparison.json, .md, .png and .html from the reports that the runs have written. Runs that failed are named."""
    from headstart.trainers.finished import compare_folders

    asked = [run for run in runs if run.error or run.config.get("report") != "none"]
    if all(run.error for run in asked) and any(not run.config.get("plan") for run in runs if run not in asked):
        print("nothing to compare (report=none)")
    folders: dict[str, Path] = {}
    for run in (run for run in asked if not run.error):
        for name in run.config.get("arms") or [""]:
            if ((there := Path(run.config["out"]) / name) / "report.json").is_file():  # else it was only planned, or waits in a queue
                folders[f"{run.label} {name}".strip()] = there
    if folders:
        compare_folders(folders, {run.label: run.error for run in asked if run.error}, folder)
