"""trackio: a local file (`trackio show`), or a Space of Hugging Face."""

from __future__ import annotations

import contextvars
import json
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from headstart.heads.errors import UserError
from headstart.inference.reports.examples import COLUMNS
from headstart.trainers.sinks import Result, Watched, artifact_name


class TrackioRun:
    """A run of trackio. Its name ends in random digits, because trackio identifies runs by their names alone."""

    def __init__(
        self, watched: Watched, *, project: str = "headstart", group: str | None = None, space: str | None = None, artifact: bool = True
    ) -> None:
        """``space``: a Space of Hugging Face, NAME or OWNER/NAME; None: TRACKIO_SPACE_ID, else a local file. ``artifact``: upload the
        report and the exported folder. Raises UserError.
        """
        try:
            import trackio
        except ImportError:
            raise UserError("tracker=trackio needs `pip install trackio`, or take tracker=none") from None
        self.trackio, self.watched, self.artifact = trackio, watched, artifact
        name = watched.kept("trackio", f"{watched.name}-{uuid.uuid4().hex[:6]}")
        about = dict(project=project, name=name, group=group or watched.together, space_id=space, embed=False, resume="allow")
        config = json.loads(json.dumps(watched.settings, default=str))
        try:  # in a new context: ``init`` would end the run of another arm that it finds in the present one
            self.run = contextvars.Context().run(lambda: trackio.init(**about, config=config))
        except Exception as e:  # of any kind, for example errors of the hub
            raise UserError(f"trackio does not start ({' '.join(str(e).split())}): leave tracker.space away, or take tracker=none") from e

    def go_on_after(self, step: int) -> None:
        """Nothing: trackio deletes nothing, so repeated steps appear twice (with the same figures, unless the run was prolonged)."""

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Log figures of a step."""
        self.run.log(dict(numbers), step=step)

    def report(self, result: Result) -> None:
        """Log figures, picture and a table of decoded texts; with ``artifact`` also the report's files and the exported folder."""
        self.log(result.numbers, result.step)
        shown = {"report": self.trackio.Image(str(result.picture))}
        if result.examples:
            shown["decode/examples"] = self.trackio.Table(columns=list(COLUMNS), data=result.examples)
        self.run.log(shown, step=result.step)
        if self.artifact:
            self._made("report", "report", result.files)
            self._made("speculator", "model", sorted(result.speculator.iterdir()) if result.speculator.is_dir() else [])

    def _made(self, what: str, kind: str, paths: Sequence[Path]) -> None:
        made = self.trackio.Artifact(artifact_name(f"{self.watched.name}-{what}"), type=kind)
        for path in paths:
            made.add_file(str(path))
        if paths:
            self.run.log_artifact(made)

    def close(self) -> None:
        """Wait until everything is written or sent."""
        self.run.finish()


open = TrackioRun
