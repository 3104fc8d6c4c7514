"""TensorBoard, in RUN/tensorboard."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from headstart.heads.errors import UserError
from headstart.trainers.sinks import Result, Watched


class Board:
    """A TensorBoard writer, opened with the first figures. Raises UserError if tensorboard is missing."""

    def __init__(self, watched: Watched) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UserError("tracker=tensorboard needs `pip install tensorboard`, or take tracker=none") from None
        self.open, self.folder, self.settings = SummaryWriter, watched.run / "tensorboard", dict(watched.settings)
        self.writer: Any = None
        self.after = 0

    def go_on_after(self, step: int) -> None:
        """Hide later steps of an earlier process (applied when the writer is opened)."""
        self.after = step

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Log figures of a step. The first call writes the settings too."""
        if self.writer is None:  # purge_step hides what an earlier process wrote after the step from which this one resumes
            self.writer = self.open(str(self.folder), purge_step=self.after + 1)
            text = json.dumps(self.settings, indent=2, default=str)
            self.writer.add_text("config", "\n".join(f"    {line}" for line in text.splitlines()), 0)
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)

    def report(self, result: Result) -> None:
        """Log the figures and the report's picture."""
        from matplotlib.image import imread

        self.log(result.numbers, result.step)
        self.writer.add_image("report", imread(result.picture)[..., :3], result.step, dataformats="HWC")

    def close(self) -> None:
        """Flush and close the writer."""
        if self.writer is not None:
            self.writer.close()


open = Board
