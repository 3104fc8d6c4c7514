"""Records some training steps with torch's profiler (trainer.profile).

Each process writes a file, RUN/profile/rank-0.json.gz for the first, which opens in https://ui.perfetto.dev or chrome://tracing. Its named
ranges are data, target, draft, loss, backward, optimiser.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from headstart.heads.files import put


class Trace:
    """A context around the steps. It records ``steps`` steps after the first one, which is not typical. ``steps=0``: it does nothing."""

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
        """Note the end of a step."""
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
    """Write the trace compressed to ``path``. torch compresses only if the name ends in .gz; the temporary name of ``path`` does not."""
    named = path.with_name(f"{path.name}.gz")
    try:
        profiler.export_chrome_trace(str(named))
        path.write_bytes(named.read_bytes())
    finally:
        named.unlink(missing_ok=True)
