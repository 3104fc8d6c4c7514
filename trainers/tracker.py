"""Logs the numbers of a run: always as JSON lines in the run folder, and to those services of trainers/sinks that the settings ask for.

trainers/metrics.py lists the names of the numbers, which are the same everywhere.
"""

from __future__ import annotations

import errno
import json
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from inspect import signature
from itertools import chain
from pathlib import Path
from typing import Any

from headstart.heads.errors import UserError
from headstart.heads.files import keep_lines
from headstart.inference.reports.examples import examples
from headstart.inference.reports.report import FILES, PICTURE, Report
from headstart.trainers import sinks
from headstart.trainers.metrics import FILE, decoded, named
from headstart.trainers.sinks import Input, Result, Sink


class Tracker:
    """Writes the numbers of a run to metrics.jsonl and to the chosen services.

    ``run``: the existing run folder. ``main``: whether this is the main process; the others write nothing. ``asked``: the settings of
    conf/tracker, ``NAME: true`` for each service and the services' own settings. ``epoch``: the number of tokens in the training data,
    if known. ``inputs``: what the run learns from.

    Raises UserError for a wrong setting, and if a service does not start. A service that fails later is named and no longer used, so
    that a tracker never ends a training.
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
        inputs: Sequence[Input] = (),
        **asked: Any,
    ) -> None:
        self.run, self.epoch, self.main = run, epoch, main
        self.after: int | None = None  # an earlier process's lines of later steps are still to be removed; None: they are gone
        opens = {each.name: import_module(f"{sinks.__name__}.{each.name}").open for each in pkgutil.iter_modules(sinks.__path__)}
        takes = {name: list(signature(made).parameters)[1:] for name, made in opens.items()}
        if unknown := sorted(asked.keys() - {*opens, *chain(*takes.values())}):
            raise UserError(f"there is no setting tracker.{unknown[0]}: there are {', '.join(chain(opens, *takes.values()))}")
        watched = sinks.Watched(run, settings, resume, arm, inputs)
        wanted = [name for name in opens if main and asked.get(name)]
        self.sinks: list[Sink] = [opens[name](watched, **{key: asked[key] for key in takes[name] if key in asked}) for name in wanted]

    def go_on_after(self, step: int) -> None:
        """The run goes on after ``step`` (0: it begins). Lines of later steps, which it repeats, are removed just before its first own
        line. So a run that fails earlier removes nothing.
        """
        self.after = step
        self._each(lambda sink: sink.go_on_after(step))

    def cut(self) -> None:
        """Remove the lines that ``go_on_after`` is about, if they are still there."""
        after, self.after = self.after, None
        if after is not None:
            self._keep_lines(lambda line: isinstance(line.get("step"), int) and line["step"] <= after)

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Log figures of a step, under the names of trainers/metrics.py."""
        self.cut()
        made = named(numbers)
        if self.epoch and "train/tokens" in made:
            made["train/epoch"] = made["train/tokens"] / self.epoch
        self._write(made, step)
        self._each(lambda sink: sink.log(made, step))

    def report(self, report: Report, folder: Path, speculator: Path | None = None) -> None:
        """Log the figures of a report. They replace those of an earlier report of the same run. ``folder``: of the report's files."""
        made, step = decoded(report), int(report.get("train_steps", 0))
        self._keep_lines(lambda line: "decode/lossless" not in line)
        self._write(made, step)
        files = [path for name in FILES if (path := folder / name).is_file()]
        result = Result(made, step, folder / PICTURE, files, examples(report), speculator or self.run / "speculator")
        self._each(lambda sink: sink.report(result))

    def close(self) -> None:
        """Tell the services that the run has ended."""
        self._each(lambda sink: sink.close())

    def _each(self, call: Callable[[Sink], None]) -> None:
        for sink in list(self.sinks):
            try:
                call(sink)
            except Exception as e:  # of any kind: the numbers are in metrics.jsonl too
                self.sinks.remove(sink)
                print(f"{type(sink).__name__} failed, the run goes on without it ({' '.join(str(e).split())})")

    def _write(self, numbers: Mapping[str, float], step: int) -> None:
        if self.main:
            line = json.dumps({"step": step, **numbers}) + "\n"
            self._try(lambda: _append(self.run / FILE, line))

    def _keep_lines(self, wanted: Callable[[Mapping[str, Any]], bool]) -> None:
        if self.main:
            self._try(lambda: keep_lines(self.run / FILE, wanted))

    def _try(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as e:  # for example a full disk: a missing line must not end the training
            print(f"{self.run / FILE}: {e}")


def _append(path: Path, line: str) -> None:
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a file")  # opening a pipe would block
    with path.open("a", encoding="utf-8") as file:
        file.write(line)
