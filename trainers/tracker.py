"""Where a run's numbers go: always a JSON line per log step in the run folder, and Weights & Biases if asked."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from heads.errors import UserError


class Tracker:
    """``kind``: ``none`` or ``wandb``. ``mode``: wandb's online, offline, or auto (online when logged in, else offline)."""

    def __init__(
        self,
        run: Path,
        settings: Mapping[str, Any],
        *,
        main: bool = True,
        kind: str = "none",
        mode: str = "auto",
        project: str = "headstart",
    ) -> None:
        if kind not in ("none", "wandb"):
            raise UserError(f"tracker.kind must be none or wandb, found {kind!r}")
        self.file = (run / "metrics.jsonl").open("a") if main else None
        self.wandb = None
        if kind == "wandb" and main:
            import wandb

            if mode == "auto":
                logged_in = bool(os.environ.get("WANDB_API_KEY")) or wandb.api.api_key is not None
                mode = os.environ.get("WANDB_MODE") or ("online" if logged_in else "offline")
            if mode == "offline":
                print(f"wandb: offline, in {run / 'wandb'} (send it later with `wandb sync`)")
            # the id makes a resumed run continue the same curve
            self.wandb = wandb.init(project=project, name=run.name, id=run.name, resume="allow", dir=run, mode=mode, config=dict(settings))

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        if self.file is not None:
            self.file.write(json.dumps({"step": step, **numbers}) + "\n")
            self.file.flush()
        if self.wandb is not None:
            self.wandb.log(dict(numbers), step=step)

    def report(self, report: Mapping[str, Any], picture: Path) -> None:
        """The final figures, so that runs can be compared side by side."""
        if self.wandb is not None:
            import wandb

            for key in ("temperature_0", "temperature_1"):
                for name, value in report[key].items():
                    if isinstance(value, (int, float)):
                        self.wandb.summary[f"{key}/{name}"] = value
            self.wandb.log({"report": wandb.Image(str(picture))})

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
        if self.wandb is not None:
            self.wandb.finish()
