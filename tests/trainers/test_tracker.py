"""Numbers have one name everywhere; what W&B keeps offline is read back and holds all that runs are compared by."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from headstart.door import doctor
from headstart.heads.errors import UserError
from headstart.inference.reports.examples import COLUMNS
from headstart.inference.reports.report import Report
from headstart.trainers import metrics
from headstart.trainers.clock import Clock
from headstart.trainers.metrics import best_of, decoded, read_metrics
from headstart.trainers.run import run
from headstart.trainers.sinks import Input
from headstart.trainers.sinks.mlflow import MlflowRun
from headstart.trainers.tracker import Tracker
from tests.reports import a_report
from tests.trainers.conftest import ROOT

CURVES = {
    *(f"train/{name}" for name in ("loss", "expected_length", "lr", "gradient_norm", "tokens", "epoch")),
    *("heldout/loss", "heldout/expected_length", "heldout/depth/1/acceptance", "heldout/depth/2/acceptance"),
    *("speed/tokens_per_second", "speed/data_share", "speed/target_share", "speed/step_share", "system/memory_gib"),
}
FINAL = {f"decode/{where}/{name}" for where in ("T0", "T0/chain", "T1", "T1/chain")
         for name in ("accepted_length", "speedup", "tokens_per_second", "depth/1/acceptance", "depth/2/acceptance")}  # fmt: skip
FINAL |= {"decode/lossless", "decode/hf_generate_tokens_per_second"}


@pytest.fixture(autouse=True)
def nobody_is_logged_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    for name in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "wandb-own"))
    monkeypatch.setenv("NETRC", str(tmp_path / "nobody-is-logged-in"))
    monkeypatch.setenv("WANDB_SILENT", "true")


def records(path: Path) -> Iterator[Any]:
    """What W&B has written: its protocol's records, in blocks of 32 KiB as LevelDB's log has them (record: checksum, size, kind)."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts = path.read_bytes(), 7, b""
    assert data.startswith(b":W&B")
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # too little for another one: zeros up to the next block
            at += 32768 - at % 32768
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        if at + 7 + size > len(data):  # not written yet
            return
        parts, at = (b"" if kind in (1, 2) else parts) + data[at + 7 : at + 7 + size], at + 7 + size
        if kind in (1, 4):  # whole, or the last part
            record = Record()
            record.ParseFromString(parts)
            yield record


def read_back(run: Path, id: str = "") -> dict[str, Any]:
    """Of the newest offline run of a folder (with this id): its config, history by step, summary, artifacts, and what it is called."""
    (path,) = sorted((run / "wandb").glob(f"offline-run-*{id}"))[-1].glob("*.wandb")
    found: dict[str, Any] = {"history": {}, "summary": {}, "config": {}, "artifacts": {}, "used": set(), "metrics": {}}
    end = time.monotonic() + 120
    while not (written := list(records(path))) or written[-1].WhichOneof("record_type") != "exit":  # a process of its own writes it
        assert time.monotonic() < end
        time.sleep(0.01)
    for record in written:
        kind = record.WhichOneof("record_type")
        body = getattr(record, kind)
        if kind == "run":
            found["run"] = body
            found["config"] |= {item.key: json.loads(item.value_json) for item in body.config.update}
        elif kind in ("history", "summary"):
            items = body.item if kind == "history" else body.update
            made = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}
            if kind == "history":
                found["history"].setdefault(made["_step"], {}).update(made)
            else:
                found["summary"] |= made
        elif kind == "artifact":
            found["artifacts"][body.name] = body
            found["used"] |= {body.name} if body.use_after_commit else set()
        elif kind == "metric":
            found["metrics"][body.name or body.glob_name] = body.summary
    return found


@pytest.mark.slow
def test_an_offline_run_holds_all_that_runs_are_compared_by(composed, overrides, tmp_path, capsys):
    out, more = tmp_path / "run", ["tracker=wandb", "tracker.group=sweep-1", "tracker.tags=[mine]"]
    settings = composed(*overrides, *more)
    report = run(**settings)[""]
    said = capsys.readouterr().out
    assert "wandb: offline" in said and "goes on without it" not in said
    kept = read_back(out)
    assert (kept["run"].display_name, kept["run"].run_group, kept["run"].project) == ("run", "sweep-1", "headstart")
    assert set(kept["run"].tags) >= {"mine", "eagle", "folder", "chat", "kl"}
    for group in ("target", "head", "data", "loss", "trainer", "decode", "export", "tracker"):  # the whole configuration
        assert kept["config"][group] == json.loads(json.dumps(settings[group]))
    assert kept["config"]["out"] == str(out) and kept["config"]["provenance"]["commit"]

    history = kept["history"]
    assert {1, 4} <= history.keys() and history[1].keys() >= {name for name in CURVES if not name.startswith("heldout")}
    assert history[4].keys() >= CURVES | FINAL
    assert history[4]["decode/T0/accepted_length"] == pytest.approx(report["temperature_0"]["accepted_length"])
    assert history[4]["decode/T1/chain/accepted_length"] == pytest.approx(report["chain_temperature_1"]["accepted_length"])
    assert history[4]["decode/T0/depth/2/acceptance"] == pytest.approx(report["temperature_0"]["acceptance_by_depth"][1])
    assert sum(history[4][f"speed/{part}_share"] for part in ("data", "target", "step")) == pytest.approx(1)
    assert history[4]["report/_type"] == "image-file"
    assert history[4]["train/epoch"] == pytest.approx(4 * 2 * 64 / (len(rows_of(settings)) * 64))

    # tables of runs sort by the best
    assert kept["summary"]["decode/T0/accepted_length"]["max"] == history[4]["decode/T0/accepted_length"]
    assert kept["summary"]["heldout/loss"]["min"] == history[4]["heldout/loss"]
    assert kept["metrics"]["decode/*"].max and kept["metrics"]["heldout/expected_length"].max and kept["metrics"]["train/loss"].min

    speculator = kept["artifacts"]["run-speculator"]
    assert speculator.type == "model" and {f.path for f in speculator.manifest.contents} == {p.name for p in (out / "speculator").iterdir()}
    assert {f.path for f in speculator.manifest.contents} >= {"README.md", "config.json", "model.safetensors"}

    # what it comes from, what it has made
    assert kept["used"] == {"model-folder", "dataset-chat-counting"} and kept["artifacts"].keys() >= {"run-report", "run-config"}
    inputs = {"model-folder": ("model", settings["target"]["path"]), "dataset-chat-counting": ("dataset", settings["data"]["path"])}
    for name, (kind, place) in inputs.items():
        entries = {entry.path: entry for entry in kept["artifacts"][name].manifest.contents}
        about = json.loads(Path(entries.pop("about.json").local_path).read_text())
        files = list(Path(place).rglob("*")) if Path(place).is_dir() else [Path(place)]
        assert kept["artifacts"][name].type == kind and {entry.ref for entry in entries.values()} == {each.as_uri() for each in files}
        assert about["weights"] == target_of(settings).fingerprint["weights"] if kind == "model" else about["rows"]
    wanted = {"run-report": {"report.json", "rounds.jsonl", "report.md", "report.html", "report.png"}, "run-config": {"config.json"}}
    for name, files in wanted.items():
        assert {entry.path for entry in kept["artifacts"][name].manifest.contents} == files and name not in kept["used"]

    # some of what was decoded, with what was drafted and accepted
    assert history[4]["decode/examples/_type"] == "table-file"
    (path,) = sorted((out / "wandb").glob("offline-run-*/files/media/table/decode/examples*.table.json"))
    table = json.loads(path.read_text())
    assert len(table["data"]) == 4  # a prompt: tree and chain at two temperatures
    for row in table["data"]:
        shown = dict(zip(table["columns"], row, strict=True))
        (text,) = [t for t in report.texts if (t.temperature, t.what) == (shown["temperature"], shown["drafted as"])]
        counts = [sum(map(len, column)) for column in ([r.guesses for r in text.rounds], [r.accepted for r in text.rounds])]
        assert [shown["drafted"], shown["accepted"]] == counts
        said = "".join(report.spelling[token] for token in text.tokens)
        assert re.sub("⟪.*?⟫|[⟦⟧]", "", shown["text"], flags=re.DOTALL) == said
        assert shown["text"].count("⟦") == sum(bool(r.accepted) for r in text.rounds)

    # metrics.jsonl is the local truth: the same names, the same numbers
    lines = read_metrics(out)
    assert set().union(*lines) - {"step"} >= CURVES | FINAL
    for line in lines:
        made = {name: value for name, value in line.items() if name != "step"}
        assert {name: history[line["step"]][name] for name in made} == pytest.approx(made, rel=1e-6)

    run(**settings)  # a finished run reports again: under the same id, and metrics.jsonl does not grow
    assert len(read_metrics(out)) == len(lines) and read_back(out)["run"].run_id == kept["run"].run_id
    assert read_back(out)["history"][4].keys() >= FINAL
    folders = list((out / "wandb").glob("offline-run-*"))
    assert len(folders) == 2 and all((out / "wandb_id").read_text() in p.name for p in folders)


def target_of(settings: dict[str, Any]) -> Any:
    from headstart.inference.settings import open_target

    return open_target(settings["target"])


def rows_of(settings: dict[str, Any]) -> Any:
    from headstart.data.source import open_source

    return open_source(settings["data"], target_of(settings), length=64, seed=0).packed


@pytest.mark.slow
def test_arms_are_a_group(tmp_path: Path) -> None:
    settings = {"head": {"name": "medusa"}, "loss": {"terms": {"tv": 1.0}}}
    trackers = []
    for name, group in (("a", None), ("b", "sweep")):  # side by side
        (tmp_path / "several" / name).mkdir(parents=True)
        trackers.append(Tracker(tmp_path / "several" / name, settings, arm=name, wandb=True, group=group))
    for i, tracker in enumerate(trackers):
        tracker.log({"loss": float(i)}, 1)
    for tracker in trackers:
        tracker.close()
    a, b = (read_back(tmp_path / "several" / name) for name in "ab")
    assert (a["run"].display_name, b["run"].display_name) == ("several/a", "several/b")
    assert (a["run"].run_group, b["run"].run_group) == ("several", "sweep")
    assert set(a["run"].tags) == {"medusa", "tv", "arm:a", "several"} and set(b["run"].tags) == {"medusa", "tv", "arm:b", "several"}
    assert (a["history"][1]["train/loss"], b["history"][1]["train/loss"]) == (0, 1)


def test_several_trackers_are_composed_and_each_hears_of_everything(composed, tmp_path, monkeypatch):
    settings = composed("tracker=[wandb,tensorboard]", "tracker.mode=offline")["tracker"]
    assert settings["wandb"] and settings["tensorboard"] and settings["mode"] == "offline"
    more = composed("tracker=[wandb,mlflow,trackio]")["tracker"]
    assert more["wandb"] and more["mlflow"] and more["trackio"]
    shared = dict[str, set[str]]()
    for name in ("wandb", "mlflow", "trackio", "tensorboard"):
        for key, value in composed(f"tracker={name}")["tracker"].items():
            shared.setdefault(key, set()).add(str(value))
    assert all(len(values) == 1 for values in shared.values()), "hydra lays one over the other"
    assert composed()["tracker"] == {} == composed("tracker=none")["tracker"]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UserError, match=r"tracker=tensorboard needs `pip install tensorboard`"):
        Tracker(tmp_path, {}, **settings)


def test_a_setting_that_no_tracker_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no setting tracker\.colour: there are .*tensorboard.*wandb.*project"):
        Tracker(tmp_path, {}, wandb=False, colour="red")
    assert Tracker(tmp_path, {}, wandb=False, tensorboard=False, mode="offline").sinks == []


def test_final_figures_of_a_run_that_wandb_takes_up_again_behind_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Killed at its report: W&B begins at the step behind the last, and drops what comes for the last."""
    torch_picture(tmp_path / "report.png")
    tracker = Tracker(tmp_path, {}, wandb=True, mode="offline", project="p")
    tracker.log({"loss": 1.0}, 7)
    tracker.report(Report.of(a_report(train_steps=6)), tmp_path)
    tracker.close()
    kept = read_back(tmp_path)
    assert kept["history"][7].keys() >= FINAL | {"train/loss", "report/_type"} and kept["history"].keys() == {7}
    assert kept["metrics"]["decode/c"].min and not kept["metrics"]["decode/c"].max and "goes on without" not in capsys.readouterr().out


def test_a_branch_that_comes_out_differently_is_a_run_of_its_own_in_wandb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run of four steps whose rate falls after the second is killed and repeats a step alike, then is prolonged to five."""
    ids = []
    for after, rates in ((0, (1, 1, 0.5, 0.1)), (3, (0.1,)), (2, (1, 1, 0.5))):
        tracker = Tracker(tmp_path, {}, wandb=True, mode="offline")
        tracker.go_on_after(after)
        for step, rate in enumerate(rates, after + 1):
            tracker.log({"lr": float(rate), "loss": 10.0 * step}, step)
        tracker.close()
        ids.append((tmp_path / "wandb_id").read_text())
    first, again, branch = ids
    assert first == again != branch and (said := capsys.readouterr().out).count("takes over") == 1
    assert f"wandb: run {branch} takes over from {first}" in said and "goes on without it" not in said
    kept = read_back(tmp_path, branch)
    assert {step: row["train/lr"] for step, row in kept["history"].items()} == {1: 1, 2: 1, 3: 1, 4: 1, 5: 0.5}
    assert kept["run"].notes == f"Run {first}, prolonged: from step 3 on it is another"


def test_tensorboard_is_read_back(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    torch_picture(tmp_path / "report.png")
    for first, last in ((1, 5), (3, 6)):  # resumed from step 2: what was written beyond it is not shown
        tracker = Tracker(tmp_path, {"head": {"name": "eagle"}}, tensorboard=True)
        tracker.go_on_after(first - 1)
        for step in range(first, last + 1):
            tracker.log({"loss": 10.0 * first + step}, step)
        tracker.report(Report.of(a_report(train_steps=last)), tmp_path)
        tracker.close()
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    losses = [(e.step, e.value) for e in board.Scalars("train/loss")]
    assert losses == [(1, 11), (2, 12), (3, 33), (4, 34), (5, 35), (6, 36)]
    assert set(board.Tags()["scalars"]) >= FINAL and board.Tags()["images"] == ["report"]
    assert b'"eagle"' in board.Tensors("config/text_summary")[0].tensor_proto.string_val[0]


def torch_picture(path: Path) -> None:
    from headstart.inference.reports.pictures import report_picture

    report_picture(a_report()).savefig(path, format="png")


def test_names_of_earlier_files_are_read(tmp_path: Path) -> None:
    old = {"step": 10, "loss": 1.5, "expected_length": 2.0, "lr": 0.1, "on_policy_acceptance": 0.5}
    held_out = {"step": 10, "heldout_loss": 1.7, "heldout_expected_length": 1.9}
    new = {"step": 20, "train/loss": 1.0, "heldout/depth/1/acceptance": 0.5}
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, (old, held_out, new))) + '\n{"step": 3')
    assert read_metrics(tmp_path) == [
        {"step": 10, "train/loss": 1.5, "train/expected_length": 2.0, "train/lr": 0.1, "train/on_policy_acceptance": 0.5},
        {"step": 10, "heldout/loss": 1.7, "heldout/expected_length": 1.9},
        new,
    ]


@pytest.mark.parametrize("server", ["api.wandb.ai", "wandb.mine.org"])
def test_who_is_logged_in_to_wandb(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By `python train.py doctor`, as tracker=wandb finds it: at the server and in the file that the environment names."""
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    (tmp_path / "netrc").write_text(f"machine {server} login user password key\n")
    for host, known in (("api.wandb.ai", server == "api.wandb.ai"), ("wandb.mine.org", server != "api.wandb.ai")):
        monkeypatch.setenv("WANDB_BASE_URL", f"https://{host}:8443")
        (found,) = doctor._wandb()
        assert (found.kind == "ok") == known and ("not logged in" in found.said) != known


def test_the_best_of_a_number_is_the_better_one() -> None:
    assert [best_of(f"train/{name}") for name in ("loss", "target_kl", "expected_length")] == ["min", "min", "max"]
    better = {
        "heldout/loss": "min", "heldout/loss_depth/2": "min", "heldout/depth/2/accuracy": "max", "train/depth/1/acceptance": "max",
        "train/loss_depth/1": "min", "decode/T0/speedup": "max", "decode/c": "min", "decode/v": "min", "speed/mfu": "mean",
        "system/memory_gib": "max",
    }  # fmt: skip
    assert {name: best_of(name) for name in better} == better
    assert metrics.__doc__ is not None and all(name in metrics.__doc__ for name in ("target_kl", "on_policy_acceptance"))


def test_every_figure_of_a_report_has_its_place() -> None:
    made = decoded(a_report(off_policy_expected_length=1.5, c=0.2, v=1.4, predicted_speedup=1.7))
    assert made.keys() >= FINAL and all(isinstance(value, float) for value in made.values())
    assert made["decode/T0/chain/expected_length"] == 3.0 and made["decode/T0/predicted_speedup"] == 1.7 and made["train/seconds"] == 3.0
    assert "decode/T0/chain/accepted_length" not in decoded({"temperature_0": {"accepted_length": 2.0}, "lossless": True})


def test_a_tracker_that_fails_costs_no_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Broken:
        def __getattr__(self, name: str) -> Any:
            raise ConnectionError("the service\nis gone")

    tracker = Tracker(tmp_path, {})
    tracker.sinks = [Broken()]
    for step in (1, 2):
        tracker.log({"loss": 1.0}, step)
    tracker.close()
    assert capsys.readouterr().out == "Broken failed, the run goes on without it (the service is gone)\n"
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]


def test_the_clock_puts_seconds_where_they_went(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.trainers.clock.time", SimpleNamespace(perf_counter=lambda: 100.0))
    clock = Clock(torch.device("cpu"))
    clock.since(100.0 - 3, "data", ["a", "b"])  # both had to wait for it
    clock.since(100.0 - 6, "target", ["a"])
    clock.since(100.0 - 1, "step", ["a"])
    clock.count("a", 500)
    made = clock.figures("a")
    assert [made[f"speed/{part}_share"] for part in ("data", "target", "step")] == pytest.approx([0.3, 0.6, 0.1])
    assert made["speed/tokens_per_second"] == pytest.approx(50) and made["system/memory_gib"] > 0.05
    usage = SimpleNamespace(RUSAGE_SELF=0, getrusage=lambda _: SimpleNamespace(ru_maxrss=3 << 20))  # on Linux in KiB
    monkeypatch.setattr("headstart.trainers.clock.resource", usage)
    assert clock.figures("c")["system/memory_gib"] == 3
    assert clock.figures("b")["speed/data_share"] == 1 and clock.figures("a")["speed/tokens_per_second"] == 0  # since it was last asked


DAMAGED = {
    "noise": b"\xff\xfe\x00" * 20, "latin-1": "é".encode("latin-1"), "brackets": b"[" * 100_000, "braces": b'{"step":' * 100_000,
    "a long number": b'{"step": 1' + b"0" * 400 + b"}", "no number": b'{"step": null}',
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGED)
def test_what_is_damaged_of_the_curves_costs_no_training(what: str, tmp_path: Path) -> None:
    """The lines that can be read stay."""
    lines = [json.dumps({"step": step, "train/loss": 1.0}).encode() for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([lines[0], DAMAGED[what], *lines[1:]]) + b"\n")
    tracker = Tracker(tmp_path, {})
    tracker.go_on_after(2)
    tracker.log({"loss": 0.5}, 3)
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3] and read_metrics(tmp_path)[-1]["train/loss"] == 0.5


@pytest.mark.parametrize("what", ["a pipe", "a folder", "a file that cannot be read"])
def test_where_the_curves_cannot_be_written_it_is_said(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "metrics.jsonl"
    os.mkfifo(path) if what == "a pipe" else path.mkdir() if what == "a folder" else path.write_text("{}\n")
    if what == "a file that cannot be read":  # root may read everything: as others meet it

        def refuse(self: Path, *_: object, **__: object) -> str:
            raise PermissionError(13, "Permission denied", str(self))

        monkeypatch.setattr(Path, "read_text", refuse)
        monkeypatch.setattr(Path, "open", refuse)
    tracker = Tracker(tmp_path, {})
    tracker.go_on_after(2)
    tracker.log({"loss": 0.5}, 3)
    said = capsys.readouterr().out.splitlines()
    assert said and all(line.startswith(f"{path}: [Errno ") for line in said)


def followed(run: Path, what: str, **settings: Any) -> None:
    """Two arms side by side, of which the first is resumed and reports."""
    from headstart.inference.reports.render import write_report
    from headstart.inference.reports.report import Round, Text

    inputs = [Input("model", "tiny", ["assets/tiny"], {"weights": "abc"}), Input("dataset", "chat-x", ["x.jsonl"], {"rows": "def"})]
    about = {"head": {"name": "eagle", "layers": 1}, "trainer": {"lr": 0.1}}
    for arm in "ab":
        (run / arm).mkdir(parents=True)
    trackers = [Tracker(run / arm, about, arm=arm, inputs=inputs, **{what: True}, **settings) for arm in "ab"]
    for step in (1, 2):
        for i, tracker in enumerate(trackers):
            tracker.log({"loss": 10.0 * i + step}, step)
    for tracker in trackers:
        tracker.close()
    (again,) = [Tracker(run / "a", about, arm="a", inputs=inputs, **{what: True}, **settings)]
    again.go_on_after(2)
    again.log({"loss": 3.0}, 3)
    text = Text(0, 0, "tree", [1, 2, 3, 4], [Round([2, 3], [2, 9], [-1, -1], [0]), Round([4], [5], [-1], [])])
    report = Report.of(a_report(train_steps=3))
    report = dataclasses.replace(report, texts=[text], asked=[[7, 8]], spelling={i: f" {i}" for i in range(10)})
    write_report(report, run / "a")
    (run / "a" / "speculator").mkdir()
    (run / "a" / "speculator" / "config.json").write_text("{}")
    again.report(report, run / "a")
    again.close()


EXAMPLE = [" 7 8", 0, "tree", 1.5, 3, 1, " 1⟦ 2⟧ 3⟪ 5⟫ 4"]


def test_mlflow_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    followed(tmp_path / "several", "mlflow", uri=f"sqlite:///{tmp_path}/store.db", project="mine")
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/store.db")
    runs = {run.info.run_name: run for run in client.search_runs([client.get_experiment_by_name("mine").experiment_id])}
    assert runs.keys() == {"several/a", "several/b"} and {run.data.tags["group"] for run in runs.values()} == {"several"}
    a, b = runs["several/a"], runs["several/b"]
    losses = [(point.step, point.value) for run in (a, b) for point in client.get_metric_history(run.info.run_id, "train/loss")]
    assert losses == [(1, 1), (2, 2), (3, 3), (1, 11), (2, 12)]
    assert a.data.metrics.keys() >= FINAL and a.data.params == {"head.name": "eagle", "head.layers": "1", "trainer.lr": "0.1"}
    assert a.data.tags["input.model"].startswith("tiny ") and a.inputs.dataset_inputs[0].dataset.name == "chat-x"
    assert {run.info.status for run in runs.values()} == {"FINISHED"}
    names = {file.path for folder in ("", "report", "speculator") for file in client.list_artifacts(a.info.run_id, folder)}
    assert names >= {"examples.json", "report/report.html", "report/rounds.jsonl", "speculator/config.json"}
    table = json.loads(Path(client.download_artifacts(a.info.run_id, "examples.json")).read_text())
    assert table["columns"] == list(COLUMNS) and table["data"] == [EXAMPLE]
    with pytest.raises(UserError, match=r"mlflow does not start .*: give tracker\.uri"):
        Tracker(tmp_path, {}, mlflow=True, uri="pigeon://post")


def test_steps_that_are_made_again_are_in_mlflow_once(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path}/store.db"
    for after, steps in ((0, (1, 2, 3)), (1, (2, 3, 4))):
        tracker = Tracker(tmp_path, {}, mlflow=True, uri=uri, project="mine")
        tracker.go_on_after(after)
        for step in steps:
            tracker.log({"loss": float(step), **({"heldout_loss": 1.0} if step == 3 and after else {})}, step)
        tracker.close()
    client = mlflow.MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    points = {name: client.get_metric_history(run.info.run_id, f"{name}/loss") for name in ("train", "heldout")}
    assert [(p.step, p.value) for p in points["train"]] == [(1, 1), (2, 2), (3, 3), (4, 4)]
    assert [(p.step, p.value) for p in points["heldout"]] == [(3, 1)], "what it had not, it has now"


class Store:
    """As much of MLflow's client as a curve takes."""

    def __init__(self) -> None:
        self.points: list[Any] = []

    def get_run(self, _: str) -> Any:
        return SimpleNamespace(data=SimpleNamespace(metrics={p.key: p.value for p in self.points}))

    def get_metric_history(self, _: str, name: str) -> list[Any]:
        return [p for p in self.points if p.key == name]

    def log_batch(self, _: str, metrics: list[Any]) -> None:
        self.points += metrics


def test_a_branch_that_comes_out_differently_is_sent_to_mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of four steps whose rate falls after the second is prolonged to six, and killed and repeated on its way."""
    entities: Any = ModuleType("mlflow.entities")
    entities.Metric = lambda key, value, timestamp, step: SimpleNamespace(key=key, value=value, step=step)
    monkeypatch.setitem(sys.modules, "mlflow", ModuleType("mlflow"))
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    store = Store()
    for after, rates in ((0, (1, 1, 0.5, 0.1)), (2, (1, 1)), (3, (1, 1, 0.5))):
        run: Any = object.__new__(MlflowRun)
        run.client, run.id, run.had = store, "run", set()
        run.go_on_after(after)
        for step, rate in enumerate(rates, after + 1):
            run.log({"train/lr": rate}, step)
    seen = [(p.step, p.value) for p in store.points]
    assert seen == [(1, 1), (2, 1), (3, 0.5), (4, 0.1), (3, 1), (4, 1), (5, 1), (6, 0.5)]


def test_a_tracker_that_cannot_go_on_costs_no_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Silent:
        def go_on_after(self, step: int) -> None:
            raise ConnectionError("the server is gone")

    tracker = Tracker(tmp_path, {})
    tracker.sinks = [Silent()]  # type: ignore[list-item]
    tracker.go_on_after(2)
    assert not tracker.sinks and "Silent failed, the run goes on without it (the server is gone)" in capsys.readouterr().out


def test_trackio_is_read_back(tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    begin = "from pathlib import Path; from tests.trainers.test_tracker import followed"
    code = f"{begin}; followed(Path('several').absolute(), 'trackio', project='mine')"  # elsewhere: it looks for its folder when imported
    own = os.environ | {"TRACKIO_DIR": str(tmp_path / "trackio"), "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=own, check=True, timeout=200)
    read = (
        "import json; from trackio.sqlite_storage import SQLiteStorage as S; import trackio;"
        "runs = [r.name for r in trackio.Api().runs('mine')];"
        "print(json.dumps({n: S.get_logs('mine', n) for n in runs}))"
    )
    told = subprocess.run([sys.executable, "-c", read], env=own, check=True, timeout=200, capture_output=True, text=True).stdout
    logs = {name.rpartition("-")[0]: lines for name, lines in json.loads(told.splitlines()[-1]).items()}
    losses = {name: [(line["step"], line["train/loss"]) for line in lines if "train/loss" in line] for name, lines in logs.items()}
    assert losses == {"several/a": [(1, 1), (2, 2), (3, 3)], "several/b": [(1, 11), (2, 12)]}
    assert set().union(*logs["several/a"]) >= FINAL | {"report", "decode/examples"}
    (table,) = [line["decode/examples"]["_value"] for line in logs["several/a"] if "decode/examples" in line]
    assert table == [dict(zip(COLUMNS, EXAMPLE, strict=True))]
    kept = {path.read_bytes() for path in (tmp_path / "trackio" / "artifacts").rglob("*") if path.is_file()}
    assert {(tmp_path / "several" / "a" / name).read_bytes() for name in ("report.html", "rounds.jsonl")} <= kept


@pytest.mark.parametrize("what", ["mlflow", "trackio"])
def test_a_service_that_is_not_installed_is_named(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, what, None)
    with pytest.raises(UserError, match=rf"^tracker={what} needs `pip install {what}`, or take tracker=none$"):
        Tracker(tmp_path, {}, **{what: True})
