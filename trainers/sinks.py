"""Weights & Biases and TensorBoard, each as the tracker sees it. Both are imported where they are used."""

from __future__ import annotations

import json
import netrc
import os
import re
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlparse

from headstart.heads.errors import UserError
from headstart.heads.files import put_text
from headstart.trainers.metrics import BEST


class Sink(Protocol):
    def go_on_after(self, step: int) -> None: ...
    def log(self, numbers: Mapping[str, float], step: int) -> None: ...
    def report(self, numbers: Mapping[str, float], step: int, picture: Path, speculator: Path) -> None: ...
    def close(self) -> None: ...


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
        self.wandb.log(dict(numbers), step=step)

    def report(self, numbers: Mapping[str, float], step: int, picture: Path, speculator: Path) -> None:
        import wandb

        self.wandb.log({"report": wandb.Image(str(picture))}, step=step)
        if self.artifact and speculator.is_dir():
            name = re.sub(r"[^\w.-]", "-", f"{self.name}-speculator", flags=re.ASCII)[-128:]
            made = wandb.Artifact(name, type="model", metadata=dict(numbers))
            made.add_dir(str(speculator))
            self.wandb.log_artifact(made)

    def close(self) -> None:
        self.wandb.finish()


class Board:
    """RUN/tensorboard."""

    def __init__(self, run: Path, settings: Mapping[str, Any]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UserError("tracker=tensorboard needs `pip install tensorboard`, or take tracker=none") from None
        self.open, self.folder, self.settings = SummaryWriter, run / "tensorboard", dict(settings)
        self.writer: Any = None
        self.after = 0

    def go_on_after(self, step: int) -> None:
        self.after = step

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        if self.writer is None:  # what an earlier process wrote beyond the step it resumes from is not shown
            self.writer = self.open(str(self.folder), purge_step=self.after + 1)
            text = json.dumps(self.settings, indent=2, default=str)
            self.writer.add_text("config", "\n".join(f"    {line}" for line in text.splitlines()), 0)
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)

    def report(self, numbers: Mapping[str, float], step: int, picture: Path, speculator: Path) -> None:
        from matplotlib.image import imread

        self.writer.add_image("report", imread(picture)[..., :3], step, dataformats="HWC")

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()


def _logged_in() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "")).hostname or "api.wandb.ai"
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
