"""Where a run's numbers go: always a JSON line per log step in the run folder, and Weights & Biases if asked."""

from __future__ import annotations

import json
import netrc
import os
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from heads.errors import UserError
from heads.files import put_text


class Tracker:
    """``kind``: ``none`` or ``wandb``. ``mode``: wandb's online, offline, or auto (online when logged in, else offline).

    ``run`` is an existing folder. Raises UserError for a wrong setting, and where wandb refuses to start.
    """

    def __init__(
        self,
        run: Path,
        settings: Mapping[str, Any],
        *,
        main: bool = True,
        kind: str = "none",
        mode: str = "auto",
        project: str = "headstart",
        resume: bool = True,
        name: str = "",
        group: str | None = None,
    ) -> None:
        if kind not in ("none", "wandb"):
            raise UserError(f"tracker.kind must be none or wandb, found {kind!r}")
        if mode not in ("auto", "online", "offline"):
            raise UserError(f"tracker.mode must be auto, online or offline, found {mode!r}")
        self.path = run / "metrics.jsonl" if main else None
        self.wandb = _start_wandb(run, settings, mode, project, resume, name or run.name, group) if kind == "wandb" and main else None

    def go_on_after(self, step: int) -> None:
        """Forget the lines of steps that a resumed (0: a fresh) run will make again."""
        if self.path is not None and self.path.is_file():
            lines = [line for line in self.path.read_text().splitlines() if _step(line) <= step]
            self._write(lambda path: put_text(path, "".join(f"{line}\n" for line in lines)))

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        if self.path is not None:
            line = json.dumps({"step": step, **numbers}) + "\n"
            self._write(lambda path: _append(path, line))
        if self.wandb is not None:
            self.wandb.log(dict(numbers), step=step)

    def _write(self, write: Callable[[Path], None]) -> None:
        assert self.path is not None
        try:
            write(self.path)
        except OSError as e:  # a full disk: a line of numbers is not worth the training
            print(f"{self.path}: {e}")

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
        if self.wandb is not None:
            self.wandb.finish()


def _append(path: Path, line: str) -> None:
    with path.open("a") as file:
        file.write(line)


def _step(line: str) -> float:
    """The step of a line of metrics.jsonl; infinity for one that a kill has cut in two."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")


def _start_wandb(run: Path, settings: Mapping[str, Any], mode: Any, project: str, resume: bool, name: str, group: str | None) -> Any:
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
        kept.write_text(uuid.uuid4().hex[:12])
    try:
        about: dict[str, Any] = dict(project=project, name=name, group=group, id=kept.read_text().strip(), config=dict(settings))
        # arms that train side by side are runs of their own in one process, and one group
        return wandb.init(**about, resume="allow", dir=run, mode=mode, reinit="create_new" if group else None)
    except (wandb.errors.Error, ValueError) as e:
        reason = " ".join(str(e).split())
        raise UserError(f"wandb does not start ({reason}): log in with `wandb login`, or take tracker.mode=offline") from e


def _logged_in() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "")).hostname or "api.wandb.ai"
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
