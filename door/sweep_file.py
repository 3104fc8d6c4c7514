"""The door ``python -m trainers sweep``: a file for ``wandb sweep``, made of the command line of a --multirun.

python -m trainers sweep head=A,B trainer.lr=1e-3,4e-3                   every combination
python -m trainers sweep 'trainer.lr=tag(log,interval(1e-3,1e-1))'       a search within limits: method=bayes, or method=random
python -m trainers sweep ... file=sweep.yaml metric=heldout/expected_length

A setting with several values (as Hydra writes them: a,b or choice(a,b), range(1,9,2), interval(a,b)) becomes a parameter of the sweep;
the other settings are the same in every run. Then call `wandb sweep sweep.yaml`, and `wandb agent ID` on every machine that is to take
part. To run it here, without W&B's server: `python train.py --multirun` with the same words.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hydra
import yaml  # type: ignore[import-untyped]
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from headstart.door.arguments import check_overrides, chosen, door_of_words, explain
from headstart.door.frame import checked
from headstart.door.sweep import defaults, is_watched
from headstart.door.values import CONF
from headstart.heads.errors import UserError
from headstart.heads.files import put_text
from headstart.trainers.metrics import best_of

OWN = {"file": "sweep.yaml", "metric": "decode/T0/accepted_length", "method": "", "name": ""}  # words that are no setting of a run
METHODS = ("grid", "random", "bayes")


def main(words: Sequence[str]) -> Path:
    """Write the file that ``words`` ask for; returns where. Raises UserError for what no run, or no sweep, could do."""
    own, rest = dict(OWN), list[str]()
    for word in words:
        key, equals, value = word.partition("=")
        if key not in OWN:
            rest.append(word)
        elif equals and (value or not OWN[key]):
            own[key] = value
        else:
            raise UserError(f"{word}: give {key}=...")
    if own["method"] not in ("", *METHODS):
        raise UserError(f"method={own['method']}: a sweep is one of {', '.join(METHODS)}")
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        try:
            made = sweep(rest, own)
        except (HydraException, OmegaConfBaseException) as e:
            raise UserError(explain(e, "config", rest)) from e
    path = Path(own["file"])
    try:
        put_text(path, yaml.safe_dump(made, sort_keys=False))
    except (OSError, ValueError) as e:  # ValueError: file=. or file=/, which have no name
        raise UserError(f"file={path} cannot be written: {e}") from e
    return path


def sweep(words: Sequence[str], own: dict[str, str]) -> dict[str, Any]:
    """The sweep of these overrides, as W&B reads it. Every value is checked as a setting of a run. Raises UserError."""
    check_overrides("config", list(words))
    parsed = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader()).parse_overrides(list(words))
    for override in parsed:
        if override.key_or_group == "out":
            raise UserError("out=...: every run of a sweep has its own folder, leave it out")
        if override.key_or_group == "arms":
            raise UserError("arms=...: arms are one run, a sweep has a run for each: head=a,b")
    usual = defaults("config", chosen("config", [word.partition(",")[0] for word in words])).config  # of several heads: the first one's
    swept = {override.key_or_group: _parameter(override, usual) for override in parsed if override.is_sweep_override()}
    if not swept:
        raise UserError("there is nothing to try several values of: key=a,b, or 'key=interval(a,b)'")
    if watched := [key for key in swept if is_watched(key)]:
        raise UserError(f"{watched[0]} changes how a run is watched, not what it makes: nothing to sweep")
    fixed = [word for word, override in zip(words, parsed, strict=True) if not override.is_sweep_override()]
    for key, parameter in swept.items():
        for value in parameter.get("values") or (parameter["min"], parameter["max"]):
            first = [f"{other}={_first(swept[other])}" for other in swept if other != key]
            checked(hydra.compose("config", [*fixed, *first, f"{key}={value}"]), "config")
    lists = all("values" in parameter for parameter in swept.values())
    method = own["method"] or ("grid" if lists else "bayes")
    if method == "grid" and not lists:
        raise UserError("method=grid tries values one by one: give lists in the place of intervals, or method=bayes")
    tracker = [] if any(word.startswith("tracker=") for word in fixed) else ["tracker=wandb"]
    command = ["${env}", "${interpreter}", "-m", "headstart.door.train", *fixed, *tracker, "${args_no_hyphens}"]
    goal = "minimize" if best_of(own["metric"]) == "min" else "maximize"
    about = {"name": own["name"]} if own["name"] else {}
    return about | {"program": "train.py", "method": method, "metric": {"name": own["metric"], "goal": goal},
                    "parameters": swept, "command": command}  # fmt: skip


def _parameter(override: Override, usual: DictConfig) -> dict[str, Any]:
    """A key with several values as a parameter of the sweep. ``usual``: the defaults, which tell whether it is a whole number."""
    value = override.value()
    if isinstance(value, IntervalSweep):
        ends: list[float] = [float(str(value.start)), float(str(value.end))]  # hydra makes floats of both
        whole = type(OmegaConf.select(usual, override.key_or_group)) is int and all(map(float.is_integer, ends))
        ends = [int(end) for end in ends] if whole else ends
        limits = {"min": ends[0], "max": ends[1]}
        if "log" in value.tags:  # with a whole step W&B draws whole numbers
            return {"distribution": "q_log_uniform_values", **limits, "q": 1} if whole else {"distribution": "log_uniform_values", **limits}
        return {"distribution": "int_uniform" if whole else "uniform", **limits}
    return {"values": [_value(text) for text in override.sweep_string_iterator()]}


def _value(text: str) -> Any:
    """A number as int or float, so that W&B draws it on an axis; any other value as it is typed."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _first(parameter: dict[str, Any]) -> Any:
    return parameter["values"][0] if "values" in parameter else parameter["min"]


def _say(words: Sequence[str]) -> None:
    path = main(words)
    print(f"{path}: wandb sweep {path}, then wandb agent with the id that it says")


if __name__ == "__main__":
    door_of_words("sweep", __doc__, _say)
