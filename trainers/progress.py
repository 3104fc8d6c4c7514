"""Shows the progress of a training: a bar on a terminal; in a log file a line now and then, without control characters."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from headstart.inference.reports.progress import EVERY


class Progress:
    """A context around the steps. Print through its ``console`` meanwhile, so that the bar stays intact. ``show=False`` prints nothing."""

    def __init__(self, steps: int, show: bool) -> None:
        columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[numbers]}"))
        self.console = Console(quiet=not show)
        self.lines = show and not self.console.is_terminal
        self.bar = Bar(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=self.console, disable=not show or self.lines)
        self.task = self.bar.add_task("", total=steps, completed=0, numbers="")
        self.steps, self.said = steps, 0.0
        self.seen: list[tuple[int, float]] = []  # (step, time) of every call of ``numbers``

    def __enter__(self) -> Progress:
        self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.bar.stop()

    def numbers(self, step: int, words: str, speed: Mapping[str, float]) -> None:
        """Show figures of a step. In a log file only the first call, the last step, and one call per EVERY seconds print a line."""
        self.bar.update(self.task, numbers=words)
        now = time.monotonic()
        self.seen.append((step, now))
        if len(self.seen) > 1 and step < self.steps and now - self.said < EVERY:
            return
        self.said = now
        if self.lines:
            self.console.print(self._line(step, words, speed, now), highlight=False, markup=False, soft_wrap=True)

    def at(self, step: int) -> None:
        """Note that ``step`` steps are done."""
        self.bar.update(self.task, completed=step)

    def _line(self, step: int, words: str, speed: Mapping[str, float], now: float) -> str:
        parts = [f"step {step:,} of {self.steps:,}", words]
        if "speed/tokens_per_second" in speed:
            parts.append(f"{speed['speed/tokens_per_second']:,.0f} tokens/s")
        if "speed/mfu" in speed:
            parts.append(f"MFU {speed['speed/mfu']:.2f}")
        if self.seen[0][0] < step < self.steps:
            # by the later half of the steps: the first epoch of a capture takes twice as long as the next
            before, then = next(each for each in self.seen if 2 * each[0] >= self.seen[0][0] + step)
            if before == step:
                before, then = self.seen[-2]
            parts.append(f"{timedelta(seconds=round((now - then) / (step - before) * (self.steps - step)))} left")
        return "  ".join(part for part in parts if part)
