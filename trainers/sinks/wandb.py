"""Weights & Biases."""

from __future__ import annotations

import netrc
import os
import re
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from headstart.heads.errors import UserError
from headstart.heads.files import put_text
from headstart.trainers.metrics import BEST
from headstart.trainers.sinks import Watched


def open(
    watched: Watched,
    *,
    mode: str = "auto",
    project: str = "headstart",
    group: str | None = None,
    tags: Sequence[str] = (),
    artifact: bool = True,
) -> WandbRun:
    """``mode``: online, offline, or auto (online when logged in, else offline). ``group``, ``tags``: how its runs are found again; arms,
    which are trained side by side, make a group of their own where none is given.
    """
    run, arm, settings = watched.run, watched.arm, watched.settings
    name, together = (f"{run.parent.name}/{arm}", run.parent.name) if arm else (run.name, None)
    found = [settings.get(key, {}).get("name") for key in ("head", "target", "data")]
    found += list((settings.get("loss") or {}).get("terms") or ())
    found += [f"arm:{arm}", together] if arm else []
    labels = list(dict.fromkeys(str(tag)[:64] for tag in [*tags, *found] if tag))  # its limit
    about = dict(project=project, name=name, group=group or together, tags=labels, config=dict(settings))
    return WandbRun(run, mode, watched.resume, artifact, several=bool(arm), **about)


class WandbRun:
    """A run of Weights & Biases. Tables of runs sort by the best that each has reached (see ``metrics.BEST``); the exported folder is an
    artifact of it. ``several``: runs that train side by side in one process.
    """

    def __init__(self, run: Path, mode: str, resume: bool, artifact: bool, *, several: bool, **about: Any) -> None:
        try:
            import wandb
        except ImportError:
            raise UserError("tracker=wandb needs `pip install wandb`, or take tracker=none") from None
        if mode == "auto":
            mode = os.environ.get("WANDB_MODE") or ("online" if _logged_in() else "offline")
        if mode == "offline":
            print(f"wandb: offline, in {run / 'wandb'} (send it later with `wandb sync`)")
        # the id, kept in the run folder, makes a resumed run continue the same curve
        kept = run / "wandb_id"
        if not (resume and kept.is_file()):
            put_text(kept, uuid.uuid4().hex[:12])
        try:
            about |= {"id": kept.read_text().strip(), "mode": mode, "reinit": "create_new" if several else None}
            self.wandb = wandb.init(**about, resume="allow", dir=run)
        except (wandb.errors.Error, ValueError) as e:
            reason = " ".join(str(e).split())
            raise UserError(f"wandb does not start ({reason}): log in with `wandb login`, or take tracker.mode=offline") from e
        self.name, self.artifact = about["name"], artifact
        for name, best in BEST.items():
            self.wandb.define_metric(name, summary=best)

    def go_on_after(self, step: int) -> None:
        """It knows by the id, and keeps what it has of a step."""

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Under the step as W&B's own."""
        self.wandb.log(dict(numbers), step=step)

    def report(self, numbers: Mapping[str, float], step: int, picture: Path, speculator: Path) -> None:
        """The picture, and the exported folder as an artifact where that is asked for."""
        import wandb

        self.wandb.log({"report": wandb.Image(str(picture))}, step=step)
        if self.artifact and speculator.is_dir():
            name = re.sub(r"[^\w.-]", "-", f"{self.name}-speculator", flags=re.ASCII)[-128:]
            made = wandb.Artifact(name, type="model", metadata=dict(numbers))
            made.add_dir(str(speculator))
            self.wandb.log_artifact(made)

    def close(self) -> None:
        """Wait until all is sent, or kept."""
        self.wandb.finish()


def _logged_in() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "")).hostname or "api.wandb.ai"
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
