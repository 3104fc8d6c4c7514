"""What is said on a command line and has no effect beside the rest of it: whoever says it means something by it, and is told."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headstart.heads.errors import UserError

PLANS = ("nodes", "gpus", "gpu", "gpu_hour")
MUONS = ("trainer.muon_lr", "trainer.momentum", "trainer.ns_steps")


def check_idle(config: Mapping[str, Any], said: Mapping[str, str]) -> None:
    """``config``: of a training, whole. ``said``: key -> value, as typed. Raises UserError naming the key, and what to say instead. Of
    settings of another optimizer, which sweeps over several have, a line is printed and no more.
    """
    trainers = [arm["trainer"] for arm in (config["arms"] or {"": config}).values()]
    if not config["plan"] and (key := next((key for key in said if key in PLANS), None)):
        raise UserError(f"{key}={said[key]} is of a plan (plan=true). A run is spread over GPUs by launcher=processes "
                        "launcher.processes=N, launcher=slurm, or torchrun")  # fmt: skip
    if (steps := said.get("trainer.steps")) and (epochs := trainers[0]["epochs"]) is not None:
        raise UserError(f"trainer.steps={steps} stands beside trainer.epochs={epochs:g}, which says how many there are: give one of them")
    if all(trainer["optimizer"] != "muon" for trainer in trainers):
        for key in (key for key in MUONS if key in said):
            print(f"{key}={said[key]} changes nothing: it is Muon's, and the optimizer is {trainers[0]['optimizer']}")


def check_head_of_start(start: str, head: str, said: Mapping[str, str], may_change: tuple[str, ...]) -> None:
    """Raises UserError for settings of a head beside ``trainer.start``, whose folder says what they are. ``may_change``: but for these."""
    for key in (key for key in said if key.startswith("head.")):
        if key.removeprefix("head.") not in may_change:
            other = f"; of {head} another run may change head.{', head.'.join(may_change)}" if may_change else ""
            raise UserError(f"{key}={said[key]}: the drafter of trainer.start={Path(start)} is what it was saved as: leave it out{other}")
