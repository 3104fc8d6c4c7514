"""Weights & Biases."""

from __future__ import annotations

import json
import netrc
import os
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from headstart.heads.errors import UserError
from headstart.inference.reports.examples import COLUMNS
from headstart.trainers.metrics import BEST, read_metrics
from headstart.trainers.sinks import Input, Result, Watched, artifact_name

RATE = "train/lr"


def open(
    watched: Watched,
    *,
    mode: str = "auto",
    project: str = "headstart",
    group: str | None = None,
    tags: Sequence[str] = (),
    artifact: bool = True,
) -> WandbRun:
    """Open a W&B run. ``mode``: online, offline, or auto (WANDB_MODE if set, else online if logged in, else offline). ``group``, ``tags``:
    for finding runs again; arms that train side by side form a group if none is given. ``artifact``: log inputs and results as artifacts.
    Raises UserError.
    """
    arm, settings, together = watched.arm, watched.settings, watched.together
    own_tags = [settings.get(key, {}).get("name") for key in ("head", "target", "data")]
    own_tags += list((settings.get("loss") or {}).get("terms") or ())
    own_tags += [f"arm:{arm}", together] if arm else []
    all_tags = list(dict.fromkeys(str(tag)[:64] for tag in [*tags, *own_tags] if tag))  # W&B's limit of characters
    about = dict(project=project, name=watched.name, group=group or together, tags=all_tags, config=dict(settings))
    return WandbRun(watched, mode, artifact, **about)


class WandbRun:
    """A run of Weights & Biases. Tables of runs show the best value that each run has reached (see ``metrics.BEST``). Artifacts record the
    inputs (target and data: their digests and settings, and references if they are files) and the results: the exported folder, the
    report, the settings. Several arms can have runs in one process at the same time.
    """

    def __init__(self, watched: Watched, mode: str, artifact: bool, **about: Any) -> None:
        self.watched, self.run, self.inputs, self.had = watched, watched.run, watched.inputs, dict[int, float]()
        if mode == "auto":
            mode = os.environ.get("WANDB_MODE") or ("online" if logged_in() else "offline")
        if mode == "offline":
            print(f"wandb: offline, in {self.run / 'wandb'} (send it later with `wandb sync`)")
        self.name, self.artifact, self.about = about["name"], artifact, about | {"mode": mode}
        self.wandb = self._begin(watched)

    def _begin(self, watched: Watched, **more: Any) -> Any:
        import wandb

        # with the same id a resumed run continues the same curve (`wandb agent` sets its own id)
        about = self.about | {"id": watched.kept("wandb", uuid.uuid4().hex[:12])} | more
        try:
            begun = wandb.init(**about, resume="allow", reinit="create_new" if watched.arm else None, dir=self.run)
        except (wandb.errors.Error, ValueError) as e:
            reason = " ".join(str(e).split())
            raise UserError(f"wandb does not start ({reason}): log in with `wandb login`, or take tracker.mode=offline") from e
        for name, best in BEST.items():
            begun.define_metric(name, summary=best)
        return begun

    def go_on_after(self, step: int) -> None:
        """W&B knows the run by its id, and keeps the figures that it already has of a step. So when later steps are repeated, nothing is to
        be done, unless they have other learning rates (the run was prolonged): see ``log``.
        """
        self.had = {line["step"]: line[RATE] for line in read_metrics(self.run) if RATE in line and line["step"] > step}

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Log figures under W&B's own step. If W&B has other learning rates of the steps up to this one, a run of a new id takes over, with
        the curve as it is in metrics.jsonl, these figures included: W&B would drop them, for they are of steps before its latest.
        """
        had = {at: self.had.pop(at) for at in sorted(self.had) if at <= step and RATE in numbers}
        if not had or had == {step: numbers[RATE]}:
            return self.wandb.log(dict(numbers), step=step)
        before, first, self.had = self.wandb.id, min(had), {}
        self.wandb.finish()
        self.wandb = self._begin(self.watched._replace(resume=False), notes=f"Run {before}, prolonged: from step {first} on it is another")
        print(f"wandb: run {self.wandb.id} takes over from {before}, which has other figures of step {first} and later")
        for line in read_metrics(self.run):
            self.wandb.log({name: value for name, value in line.items() if name != "step"}, step=line["step"])

    def report(self, result: Result) -> None:
        """Log figures, picture and a table of decoded texts; with ``artifact`` also the run's inputs and results.

        They are logged under W&B's present step if that is later than the result's: W&B drops figures of earlier steps, and a resumed run
        starts after its last step.
        """
        import wandb

        step = max(result.step, self.wandb.step)
        self.log(result.numbers, step)
        shown: dict[str, Any] = {"report": wandb.Image(str(result.picture))}
        if result.examples:
            shown["decode/examples"] = wandb.Table(columns=list(COLUMNS), data=result.examples)
        self.wandb.log(shown, step=step)
        if not self.artifact:
            return
        for each in self.inputs:
            self._use(each)
        self._made("report", result.files)
        self._made("config", [path for path in [self.run / "config.json"] if path.is_file()])
        self._made("speculator", [result.speculator] if result.speculator.is_dir() else [], kind="model", metadata=dict(result.numbers))

    def _use(self, given: Input) -> None:
        """Record an input of the run. Only its digests and settings are sent; its files are referenced, not uploaded."""
        import wandb

        made = wandb.Artifact(artifact_name(f"{given.kind}-{given.name}"), type=given.kind, metadata={"places": list(given.places)})
        with made.new_file("about.json") as file:  # so that other content makes another version, wherever the files lie
            json.dump(given.about, file, indent=2, sort_keys=True, default=str)
        for i, place in enumerate(map(Path, given.places)):
            if place.exists():
                made.add_reference(place.resolve().as_uri(), name=f"{i}-{place.name}", checksum=False)
        if self.wandb.offline:  # ``use_artifact`` refuses offline: write the record that it would write, for `wandb sync`
            self.wandb._log_artifact(made, is_user_created=True, use_after_commit=True)
        else:
            self.wandb.use_artifact(made)

    def _made(self, what: str, paths: Iterable[Path], kind: str = "", **about: Any) -> None:
        import wandb

        made = wandb.Artifact(artifact_name(f"{self.name}-{what}"), type=kind or what, **about)
        for path in paths:
            made.add_dir(str(path)) if path.is_dir() else made.add_file(str(path))
        if made.manifest.entries:
            self.wandb.log_artifact(made)

    def close(self) -> None:
        """Wait until everything is sent, or stored if offline."""
        self.wandb.finish()


def logged_in() -> bool:
    """Whether there is a key for the server of W&B (WANDB_BASE_URL): in WANDB_API_KEY, or in the netrc file."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "")).hostname or "api.wandb.ai"
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
