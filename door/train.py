"""The main door: target, drafter, data, trainer; fit, export, decode, report.

python train.py                                                           a drafter for the shipped target, in minutes
python train.py doctor                                                    is everything here that a run needs?
python train.py target=folder target.path=DIR data=text path=MY_TEXTS     your own target and text
python train.py data=chat path=FILE.jsonl head=[NAME,NAME]                conversations; several drafters, compared
python train.py target=NAME trainer=full plan=true gpu=h100               what a real run would take; nothing is loaded
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from headstart.door import check_head, compose_again, enter, load_torch, loading
from headstart.door.arguments import command_of, end, examples
from headstart.door.idle import needs, of_trees, refuse, said_of
from headstart.door.launch import launch
from headstart.door.places import check_out, check_paths, check_speculator
from headstart.door.slurm import JOB, submit, submit_all
from headstart.door.sweep import Done, again, changed, compare_runs, given, out_of, overrides, swept, together
from headstart.heads.errors import UserError
from headstart.heads.override import typed

OWN = ("head", "loss", "trainer")  # what an arm may have of its own
PLANS = ("nodes", "gpus", "gpu", "gpu_hour")
# a setting of the trainer -> the other setting, the value of it without which this one changes nothing, and whose setting it is
OF_OTHERS = {
    **dict.fromkeys(("trainer.muon_lr", "trainer.momentum", "trainer.ns_steps"), ("optimizer", "muon", "Muon's")),
    "trainer.floor": ("schedule", "cosine", "the cosine's"),
}


def main(config: dict[str, Any]) -> None:
    """Train, export and measure, in as many processes as asked for; or submit the run to a cluster, or plan it."""
    config["out"], composed = out_of("config", config), config["out"]
    if config["out"] != composed:  # other settings may refer to ${out}
        config = compose_again("config", [*overrides(), f"out={typed(config['out'])}"])
    if config["arms"]:
        config = _side_by_side(config)
    launcher = config["launcher"]
    config, processes = {key: value for key, value in config.items() if key != "launcher"}, launcher["processes"]
    check_idle(config, said := said_of(overrides()), swept())
    about = {key: config.pop(key) for key in PLANS}
    if config.pop("plan"):
        from headstart.trainers.plan_text import show_plan

        return show_plan(config | about | gpus_of(launcher, said))
    check_places(config)
    if config["tracker"].get("group", "") is None:
        config["tracker"]["group"] = together("config")
    config.pop("path", None)  # shorthand of data.path
    loading(config, f" for {config['out']}")
    command = [sys.executable, "-m", "headstart.door.train", *again(config["out"], config["tracker"].get("group"))]
    if "nodes" in launcher and JOB not in os.environ:
        return submit(launcher, command, config["out"], later=bool(swept()))
    if processes > 1 and "WORLD_SIZE" not in os.environ and JOB not in os.environ:
        if code := launch(command, processes):
            raise SystemExit(code)
        return
    load_torch()
    from headstart.trainers.run import run  # imported here: wrong settings are reported before torch is loaded

    check_contents(config)
    run(**config, changed={name: changed("config", config | arm) for name, arm in (config["arms"] or {"": {}}).items()})


def gpus_of(launcher: Mapping[str, Any], said: Mapping[str, str]) -> dict[str, int]:
    """The ``nodes`` and ``gpus`` of a plan if ``launcher`` starts processes (one per GPU), without those that ``said`` gives."""
    if launcher["processes"] == 1 and "nodes" not in launcher:
        return {}
    found = {"nodes": launcher.get("nodes", 1), "gpus": launcher["processes"]}
    return {key: value for key, value in found.items() if key not in said}


def check_places(config: dict[str, Any]) -> None:
    """Raises UserError for files and folders that are not there or cannot be written."""
    check_out(config["out"])
    if config["capture"]["out"] is not None:
        check_out(config["capture"]["out"], "capture.out", url=True)
    check_paths(config["decode"])
    for name, arm in (config["arms"] or {"": config}).items():
        if arm["trainer"]["start"] is not None and not (Path(config["out"]) / name / "checkpoints").is_dir():  # else they hold all weights
            check_speculator(arm["trainer"]["start"], "trainer.start")


def check_contents(config: dict[str, Any]) -> None:
    """Raises UserError for what can be checked with torch before the target is loaded: data, a drafter's settings, a damaged folder."""
    from headstart.data.source import check_source
    from headstart.heads.stored import read_json

    check_source(config["data"])
    for arm in (config["arms"] or {"": config}).values():
        kind = check_head(arm["head"])
        if (start := arm["trainer"]["start"]) is not None:
            check_head_of_start(start, arm["head"]["name"], given(overrides()), kind.only_trained)
            if (path := Path(start) / "config.json").is_file():
                read_json(path)


def check_idle(config: Mapping[str, Any], said: Mapping[str, str], several: Collection[str] = ()) -> None:
    """Raises UserError for a setting that the other settings make useless; the error names the key and what to give instead. Settings of an
    optimizer or a schedule that is not used are common in sweeps over these: for them only a line is printed. ``config``: the whole
    configuration of a training; ``said``: key -> value, as typed; ``several``: the keys that a --multirun tries several values of.
    """
    arms = [config | arm for arm in (config["arms"] or {"": {}}).values()]
    trainers = [arm["trainer"] for arm in arms]
    refuse(needs("config", arms), said, several)
    if "decode" in config:
        refuse(of_trees([config["decode"]]), said, several)
    if not config["plan"] and (key := next((key for key in said if key in PLANS), None)):
        raise UserError(f"{key}={said[key]} is of a plan (plan=true). A run is spread over GPUs by launcher=processes "
                        "launcher.processes=N, launcher=slurm, or torchrun")  # fmt: skip
    if (steps := said.get("trainer.steps")) and (epochs := next(filter(None, (t["epochs"] for t in trainers)), None)):
        raise UserError(f"trainer.steps={steps} and trainer.epochs={epochs:g} both say how long to train: give one of them")
    for key, (other, value, whose) in OF_OTHERS.items():
        if key in said and all(trainer[other] != value for trainer in trainers):
            print(f"{key}={said[key]} changes nothing: it is {whose}, and the {other} is {trainers[0][other]}")


def check_head_of_start(start: str, head: str, said: Mapping[str, str], may_change: tuple[str, ...]) -> None:
    """Raises UserError for head settings beside ``trainer.start``, whose folder fixes them. ``may_change``: those that it does not fix."""
    for key in (key for key in said if key.startswith("head.")):
        if key.removeprefix("head.") not in may_change:
            other = f"; of {head} another run may change head.{', head.'.join(may_change)}" if may_change else ""
            raise UserError(f"{key}={said[key]}: the drafter of trainer.start={Path(start)} is what it was saved as: leave it out{other}")


def _spread(arguments: list[str]) -> list[str]:
    """head=[a,b] is short for arms={a:'head=a',b:'head=b'}."""
    found = []
    for argument in arguments:
        if not (several := re.fullmatch(r"head=\[([\w,\s]+)\]", argument)):
            found.append(argument)
            continue
        names = [name.strip() for name in several[1].split(",") if name.strip()]
        if twice := [name for i, name in enumerate(names) if name in names[:i]]:
            end(f"{argument}: two arms are called {twice[0]}; give each a name of its own: "
                f"arms={{a:'head={twice[0]}',b:'head={twice[0]} loss=tv'}}")  # fmt: skip
        if any(a.lstrip("+").startswith("arms") for a in arguments):
            end(f"give either {argument} or arms=..., not both")
        found += [f"head={names[0]}", "arms={" + ",".join(f"{name}:'head={name}'" for name in names) + "}"]
    return found


def _side_by_side(config: dict[str, Any]) -> dict[str, Any]:
    """``config`` with every arm's head, loss and trainer, composed from the command line followed by the arm's words. Raises UserError."""
    shared = [*(o for o in overrides() if not o.lstrip("+").startswith("arms")), f"out={typed(config['out'])}"]
    arms: dict[str, Any] = {}
    for name, words in config["arms"].items():
        try:
            own = shlex.split(words)
            chosen = compose_again("config", [*(o for o in shared if not (o.startswith("head=") and "head=" in words)), *own])
            check_idle(chosen | {"plan": config["plan"], "arms": None}, said_of(own))
        except UserError as e:
            raise UserError("\n".join(f"arm {name}: {line}" for line in str(e).splitlines())) from e
        except ValueError as e:
            raise UserError(f"arms.{name} must be a string of overrides, like 'head=NAME loss=tv', found {words!r}") from e
        for key in (key for key in config if key not in ("arms", *OWN)):
            if chosen.get(key) != config[key]:
                raise UserError(f"arm {name} has a {key} of its own: arms are trained from one pass, so they share it")
        arms[name] = {group: chosen[group] for group in OWN}
    return config | {"arms": arms}


def finish(runs: list[Done], folder: Path) -> None:
    """At the end of a --multirun: submit the jobs for a cluster's queue together, and compare the runs that were run here."""
    launchers = [(run.config["launcher"], run.config["out"]) for run in runs if not run.error and not run.config["plan"]]
    if jobs := [(launcher, out) for launcher, out in launchers if "nodes" in launcher and launcher["submit"]]:
        submit_all(jobs, folder)
    compare_runs(runs, folder)


def start() -> None:
    """The door ``python train.py``."""
    if command_of("doctor"):
        from headstart.door.doctor import doctor

        raise SystemExit(doctor())
    sys.argv[1:] = _spread(sys.argv[1:])
    enter("config", main, examples(__doc__), at_end=finish)


if __name__ == "__main__":
    start()
