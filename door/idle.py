"""Settings of a command line that have no effect beside its other settings: whoever gives one expects an effect, and is told."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headstart.heads.errors import UserError

PLANS = ("nodes", "gpus", "gpu", "gpu_hour")
MUONS = ("trainer.muon_lr", "trainer.momentum", "trainer.ns_steps")


def check_idle(config: Mapping[str, Any], said: Mapping[str, str]) -> None:
    """Raises UserError for a setting without an effect, naming the key and what to give instead. For settings of an optimizer that is not
    used, as sweeps over optimizers give them, only a line is printed. ``config``: the whole configuration of a training; ``said``: key ->
    value, as typed.
    """
    trainers = [arm["trainer"] for arm in (config["arms"] or {"": config}).values()]
    if not config["plan"] and (key := next((key for key in said if key in PLANS), None)):
        raise UserError(f"{key}={said[key]} is of a plan (plan=true). A run is spread over GPUs by launcher=processes "
                        "launcher.processes=N, launcher=slurm, or torchrun")  # fmt: skip
    if (steps := said.get("trainer.steps")) and (epochs := next(filter(None, (t["epochs"] for t in trainers)), None)):
        raise UserError(f"trainer.steps={steps} stands beside trainer.epochs={epochs:g}, which says how many there are: give one of them")
    if all(trainer["optimizer"] != "muon" for trainer in trainers):
        for key in (key for key in MUONS if key in said):
            print(f"{key}={said[key]} changes nothing: it is Muon's, and the optimizer is {trainers[0]['optimizer']}")


def check_head_of_start(start: str, head: str, said: Mapping[str, str], may_change: tuple[str, ...]) -> None:
    """Raises UserError for head settings beside ``trainer.start``, whose folder fixes them. ``may_change``: those that it does not fix."""
    for key in (key for key in said if key.startswith("head.")):
        if key.removeprefix("head.") not in may_change:
            other = f"; of {head} another run may change head.{', head.'.join(may_change)}" if may_change else ""
            raise UserError(f"{key}={said[key]}: the drafter of trainer.start={Path(start)} is what it was saved as: leave it out{other}")
