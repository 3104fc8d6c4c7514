"""Where a run's numbers go: always a JSON line per log step in the run folder, and Weights & Biases and TensorBoard if asked.

What the numbers are called, in all of them: trainers/metrics.py.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from headstart.heads.files import put_text
from headstart.trainers.metrics import FILE, decoded, named
from headstart.trainers.sinks import Board, Sink, WandbRun


class Tracker:
    """``wandb``, ``tensorboard``: which are asked for. ``mode``: wandb's online, offline, or auto (online when logged in, else offline).
    ``group``, ``tags``: how its runs are found again; arms, which are trained side by side, make a group of their own where none is given.
    ``epoch``: tokens that the training data has, where that is known.

    ``run`` is an existing folder. Raises UserError for a wrong setting, and where one of them refuses to start; one that fails later
    is told of and not used any more: no training is lost by its tracker.
    """

    def __init__(
        self,
        run: Path,
        settings: Mapping[str, Any],
        *,
        main: bool = True,
        resume: bool = True,
        arm: str = "",
        epoch: int | None = None,
        wandb: bool = False,
        tensorboard: bool = False,
        mode: str = "auto",
        project: str = "headstart",
        group: str | None = None,
        tags: Sequence[str] = (),
        artifact: bool = True,
    ) -> None:
        self.run, self.epoch, self.main = run, epoch, main
        self.sinks: list[Sink] = []
        if not main:
            return
        if tensorboard:
            self.sinks.append(Board(run, settings))
        if wandb:
            name, together = (f"{run.parent.name}/{arm}", run.parent.name) if arm else (run.name, None)
            found = [settings.get(key, {}).get("name") for key in ("head", "target", "data")]
            found += list((settings.get("loss") or {}).get("terms") or ())
            found += [f"arm:{arm}", together] if arm else []
            labels = list(dict.fromkeys(str(tag)[:64] for tag in [*tags, *found] if tag))  # its limit
            about = dict(project=project, name=name, group=group or together, tags=labels, config=dict(settings))
            self.sinks.append(WandbRun(run, mode, resume, artifact, several=bool(arm), **about))

    def go_on_after(self, step: int) -> None:
        """Forget the lines of steps that a resumed (0: a fresh) run will make again."""
        self._keep_lines(lambda line: _number(line, "step") <= step)
        for sink in self.sinks:
            sink.go_on_after(step)

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        made = named(numbers)
        if self.epoch and "train/tokens" in made:
            made["train/epoch"] = made["train/tokens"] / self.epoch
        self._write(made, step)
        self._each(lambda sink: sink.log(made, step))

    def report(self, report: Mapping[str, Any], picture: Path, speculator: Path | None = None) -> None:
        """The final figures, and with them what runs are compared by; again where a finished run reports anew."""
        made, step = decoded(report), int(report.get("train_steps", 0))
        self._keep_lines(lambda line: "decode/lossless" not in line)
        self._write(made, step)
        self._each(lambda sink: sink.log(made, step))
        self._each(lambda sink: sink.report(made, step, picture, speculator or self.run / "speculator"))

    def close(self) -> None:
        self._each(lambda sink: sink.close())

    def _each(self, call: Callable[[Sink], None]) -> None:
        for sink in list(self.sinks):
            try:
                call(sink)
            except Exception as e:  # a service, a disk, a process of its own: whatever it is, the numbers are in metrics.jsonl too
                self.sinks.remove(sink)
                print(f"{type(sink).__name__} failed, the run goes on without it ({' '.join(str(e).split())})")

    def _write(self, numbers: Mapping[str, float], step: int) -> None:
        if self.main:
            line = json.dumps({"step": step, **numbers}) + "\n"
            self._try(lambda: _append(self.run / FILE, line))

    def _keep_lines(self, wanted: Callable[[str], bool]) -> None:
        path = self.run / FILE

        def keep() -> None:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            put_text(path, "".join(f"{line}\n" for line in lines if wanted(line)))

        if self.main and path.is_file():
            self._try(keep)

    def _try(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as e:  # a full disk: a line of numbers is not worth the training
            print(f"{self.run / FILE}: {e}")


def _append(path: Path, line: str) -> None:
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a file")  # a pipe would be waited for
    with path.open("a", encoding="utf-8") as file:
        file.write(line)


def _number(line: str, key: str) -> float:
    """Of a line of metrics.jsonl; infinity for one that a kill has cut in two, or that is damaged."""
    try:
        return float(json.loads(line)[key])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return float("inf")
