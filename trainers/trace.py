"""Some steps of a training, as torch's profiler sees them (trainer.profile).

RUN/profile/rank-0.json.gz, a file for each process, opens in https://ui.perfetto.dev or chrome://tracing. Its named ranges: data, target,
draft, loss, backward, optimiser.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from headstart.heads.files import put


class Trace:
    """As a context around the steps, of which the first is not recorded: it is not like the others. Without ``steps`` it is nothing."""

    def __init__(self, run: Path = Path(), steps: int = 0, rank: int = 0) -> None:
        self.path, self.seen = run / "profile" / f"rank-{rank}.json.gz", 0
        self.profiler: Any = None
        if steps:
            schedule = torch.profiler.schedule(wait=0, warmup=1, active=steps, repeat=1)
            self.profiler = torch.profiler.profile(schedule=schedule, on_trace_ready=self._write, acc_events=True)

    def __enter__(self) -> Trace:
        if self.profiler is not None:
            self.profiler.start()
        return self

    def step(self) -> None:
        """A step has ended."""
        if self.profiler is not None:
            self.seen += 1
            self.profiler.step()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.profiler is not None:
            self.profiler.stop()
            if self.seen < 2 and kind is None:
                print("trainer.profile: no step was recorded, the first one never is: take more steps")

    def _write(self, profiler: Any) -> None:
        if self.seen < 2:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            put(self.path, lambda beside: _export(profiler, beside))
        except OSError as e:  # a full disk: a trace is not worth the training
            print(f"{self.path}: {e}")
        else:
            print(f"profile: {self.path} (opens in https://ui.perfetto.dev or chrome://tracing)")


def _export(profiler: Any, path: Path) -> None:
    """torch compresses where a name ends in .gz, which that of a file that is not whole yet does not."""
    named = path.with_name(f"{path.name}.gz")
    try:
        profiler.export_chrome_trace(str(named))
        path.write_bytes(named.read_bytes())
    finally:
        named.unlink(missing_ok=True)
