"""MLflow: a tracking server, or a local file."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping

from headstart.heads.errors import UserError
from headstart.inference.reports.compare import flat
from headstart.inference.reports.examples import COLUMNS
from headstart.trainers.sinks import Result, Watched

BATCH, LONGEST = 100, 500  # MLflow's limits: parameters per request, characters of a parameter


class MlflowRun:
    """A run of MLflow: settings as parameters, the data as its input, report and exported folder as artifacts."""

    def __init__(self, watched: Watched, *, project: str = "headstart", uri: str | None = None, artifact: bool = True) -> None:
        """``project``: the experiment. ``uri``: of the server or file; None: MLFLOW_TRACKING_URI, else MLflow's default. ``artifact``:
        upload the report and the exported folder. Raises UserError.
        """
        try:
            from mlflow import MlflowClient
            from mlflow.exceptions import MlflowException
        except ImportError:
            raise UserError("tracker=mlflow needs `pip install mlflow`, or take tracker=none") from None
        self.watched, self.artifact, self.had = watched, artifact, set[tuple[str, int, float]]()
        try:
            self.client = MlflowClient(uri)
            self.id = self._begun() or self._new(project)
        except (MlflowException, OSError) as e:
            raise UserError(f"mlflow does not start ({' '.join(str(e).split())}): give tracker.uri, or take tracker=none") from e
        if self.client.get_run(self.id).info.status != "RUNNING":
            self.client.update_run(self.id, status="RUNNING")

    def _begun(self) -> str:
        """The id of the run that an earlier process began; "" if there is none."""
        from mlflow.exceptions import MlflowException

        try:
            return str(self.client.get_run(self.watched.kept("mlflow", "none")).info.run_id)
        except MlflowException:
            return ""

    def _new(self, project: str) -> str:
        from mlflow.entities import Param

        watched, found = self.watched, self.client.get_experiment_by_name(project)
        experiment = found.experiment_id if found else self.client.create_experiment(project)
        tags = {"group": watched.together} if watched.together else {}
        made = str(self.client.create_run(experiment, run_name=watched.name, tags=tags).info.run_id)
        watched._replace(resume=False).kept("mlflow", made)
        parameters = [Param(key, str(value)[:LONGEST]) for key, value in flat(watched.settings).items()]
        for i in range(0, len(parameters), BATCH):
            self.client.log_batch(made, params=parameters[i : i + BATCH])
        self._inputs(made)
        return made

    def _inputs(self, run: str) -> None:
        """Log what the run learns from: the data as a data set, the target as a tag."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        for each in self.watched.inputs:
            about = json.dumps(each.about, sort_keys=True, default=str)
            digest = hashlib.sha256(about.encode()).hexdigest()[:32]
            if each.kind == "dataset":
                data = Dataset(each.name, digest, "local", json.dumps({"places": list(each.places)}))
                self.client.log_inputs(run, [DatasetInput(data, [InputTag("mlflow.data.context", "training")])])
            else:
                self.client.set_tag(run, f"input.{each.kind}", f"{each.name} {digest}")

    def go_on_after(self, step: int) -> None:
        """MLflow cannot delete metrics. So when later steps are repeated, points that it already has are not sent again. If a repeated step
        has other figures (the run was prolonged), they are sent, and MLflow shows them along with the earlier ones.
        """
        histories = (self.client.get_metric_history(self.id, name) for name in self.client.get_run(self.id).data.metrics)
        self.had = {(point.key, point.step, point.value) for history in histories for point in history if point.step > step}

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Log figures as metrics of that step."""
        from mlflow.entities import Metric

        points, now = {(name, step, float(value)) for name, value in numbers.items()}, int(time.time() * 1000)
        new = sorted(points - self.had)
        self.had -= points  # skip them only once: the final report may log the last step again
        if new:
            self.client.log_batch(self.id, metrics=[Metric(name, value, now, step) for name, _, value in new])

    def report(self, result: Result) -> None:
        """Log the figures and a table of decoded texts; with ``artifact`` also the report's files and the exported folder."""
        self.log(result.numbers, result.step)
        if result.examples:
            columns = zip(COLUMNS, zip(*result.examples, strict=True), strict=True)
            self.client.log_table(self.id, {name: list(column) for name, column in columns}, "examples.json")
        if self.artifact:
            for path in result.files:
                self.client.log_artifact(self.id, str(path), "report")
            if result.speculator.is_dir():
                self.client.log_artifacts(self.id, str(result.speculator), "speculator")

    def close(self) -> None:
        """Mark the run as finished."""
        self.client.set_terminated(self.id)


open = MlflowRun
