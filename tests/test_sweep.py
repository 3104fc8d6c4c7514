"""Names of run folders, and --multirun: a folder for each run, one that fails is named and the others go on, and all are compared."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure

from headstart.data import source
from headstart.door import infer
from headstart.door.arguments import check_overrides
from headstart.door.launch import free_port
from headstart.door.sweep import WATCHED, folder_of_all, is_watched, joined, part, short
from headstart.heads.errors import UserError
from headstart.trainers import processes, resume
from tests.doors import call
from tests.reports import a_report, an_evaluation, figures


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What was trained with: a training writes a report, which is the faster the smaller trainer.lr is, and fails above 1."""
    done: list[dict[str, Any]] = []

    def run(**config: Any) -> None:
        done.append(config)
        lr = config["trainer"]["lr"]
        if lr == 5:
            raise ZeroDivisionError("a bug")
        if lr > 1:
            raise UserError("training diverged")
        for name in config["arms"] or [""]:
            folder = Path(config["out"]) / name
            folder.mkdir(parents=True)
            report = a_report() | {"temperature_0": figures(3.0, 1 / lr)}
            (folder / "report.json").write_text(json.dumps(report))

    monkeypatch.setattr("headstart.trainers.run.run", run)
    monkeypatch.setattr(
        "headstart.inference.reports.compare.comparison_picture", lambda rows: Figure(figsize=(1, 1))
    )  # drawing takes longest
    return done


# ---- names ----


@pytest.mark.parametrize(
    ("arguments", "out"),
    [
        ([], "eagle-tiny-stdlib"),
        (["head=eagle", "trainer.steps=350", "loss=kl"], "eagle-tiny-stdlib"),  # the defaults
        (["head=eagle1", "loss=feature"], "eagle1-tiny-stdlib"),  # its default
        (["head=eagle1", "loss=kl"], "eagle1-tiny-stdlib-loss=kl"),
        (["trainer.lr=4e-3"], "eagle-tiny-stdlib-lr=4e-3"),
        (["trainer.lr=0.004"], "eagle-tiny-stdlib-lr=4e-3"),  # the same number
        (["trainer.lr=1e-3", "loss.decay=1"], "eagle-tiny-stdlib-decay=1-lr=1e-3"),
        (["loss.decay=1", "trainer.lr=1e-2", "trainer.lr=1e-3"], "eagle-tiny-stdlib-decay=1-lr=1e-3"),  # the same run
        (["loss.depth=5"], "eagle-tiny-stdlib-loss.depth=5"),  # there is a decode.depth too
        (["+loss.terms.tv=0.5"], "eagle-tiny-stdlib-tv=0.5"),
        (["head.taps=[1,2]"], "eagle-tiny-stdlib-taps=1+2"),
        (["experiment=smoke"], "smoke-eagle-tiny-stdlib"),
        (["experiment=smoke", "trainer.steps=8"], "smoke-eagle-tiny-stdlib"),
        (["experiment=smoke", "trainer.steps=350"], "smoke-eagle-tiny-stdlib-steps=350"),
        (["experiment=compare_quick"], "compare_quick-tiny-stdlib"),
        (["arms={eagle:'head=eagle',mtp:'head=mtp'}"], "eagle+mtp-tiny-stdlib"),
        (["head=mtp", "arms={a:'head=eagle',b:'head=mtp'}"], "a+b-a53bea-tiny-stdlib"),
        (["head=mtp", "arms={a:'loss=kl',b:'loss=tv'}"], "a+b-cf3a03-mtp-tiny-stdlib"),  # arms of this head
        (["tracker=wandb", "target.device=cpu", "trainer.resume=false", "trainer.keep=5"], "eagle-tiny-stdlib"),  # how it is watched
        (["decode=chain", "decode.prompts=2", "export.dtype=bfloat16"], "eagle-tiny-stdlib"),  # and reported: no other training
        (["trainer.patience=0", "trainer.precision=fp32", "loss.chunk=64"], "eagle-tiny-stdlib"),  # what is advised resumes
        (["data=text", "path=a.txt", "data.workers=2", "data.cache=kept"], "eagle-tiny-text-path=a.txt"),  # how data are read
        (["launcher=processes", "launcher.processes=1"], "eagle-tiny-stdlib-launcher=processes-processes=1"),
        (["target=folder", "target.path=/models/mine"], "eagle-folder-stdlib-target.path=mine-fc3fe5"),
        (["out=elsewhere", "trainer.lr=1"], None),
    ],
)
def test_a_run_is_called_after_what_differs(
    arguments: list[str], out: str | None, trained: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("some words")
    assert call("train", arguments, tmp_path, monkeypatch) == 0
    assert trained[0]["out"] == ("elsewhere" if out is None else f"runs/{out}")


def test_settings_of_the_trainer_that_may_change_in_a_resumed_run_keep_its_folder() -> None:
    """Else the run would not find its checkpoints. trainer.epochs stands for a number of steps, which is part of the name."""
    assert {key.removeprefix("trainer.") for key in WATCHED if key.startswith("trainer.")} == {*resume.FREE} - {"epochs"}
    assert all(is_watched(f"data.{key}") for key in source.HOW)


def test_what_refers_to_the_folder_is_within_the_one_that_is_named(
    trained: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States that a run captures: of a run of another length they would be refused."""
    (tmp_path / "said.txt").write_text("some words")
    for more in ([], ["trainer.length=256"], ["head=[eagle,mtp]"], ["out=mine"]):
        assert call("train", ["experiment=laptop", "data=text", "path=said.txt", *more], tmp_path, monkeypatch) == 0
        assert trained[-1]["capture"]["out"] == f"{trained[-1]['out']}/states"
    assert len({config["out"] for config in trained}) == 4
    again = ["--multirun", "experiment=laptop", "data=text", "path=said.txt", "trainer.lr=0.1,0.2"]
    assert call("train", again, tmp_path, monkeypatch) == 0
    assert [config["capture"]["out"] for config in trained[-2:]] == [f"{config['out']}/states" for config in trained[-2:]]


@pytest.mark.parametrize(
    ("words", "key"),
    [("report=none", "report"), ("parallel=zero1", "parallel"), ("capture.out=kept", "capture"), ("out_wait=1", "out_wait"),
     ("out=mine", "out"), ("launcher=processes", "launcher"), ("data=text path=.", "data"), ("export.dtype=float32", "export")],
)  # fmt: skip
def test_what_arms_share_is_refused_of_one(
    words: str, key: str, trained: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "a.txt").write_text("some words")
    assert call("train", [f"arms={{a:'head=eagle',b:'head=mtp {words}'}}"], tmp_path, monkeypatch) == 2
    assert capsys.readouterr().err == f"error: arm b has a {key} of its own: arms are trained from one pass, so they share it\n"
    assert not trained


def test_settings_of_another_parallel_are_refused(
    trained: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for way in ("ddp", "zero1", "fsdp"):
        for key, value in (("stage", 1), ("offload", "false")):
            assert call("train", [f"parallel={way}", f"+parallel.{key}={value}"], tmp_path, monkeypatch) == 2
            assert capsys.readouterr().err == f"error: parallel.{key} is of parallel=deepspeed, and this is {way}: leave it out\n"
    assert not trained
    assert call("train", ["parallel=deepspeed", "parallel.stage=1", "trainer.optimizer=adamw"], tmp_path, monkeypatch) == 0


def test_arms_that_do_something_else_are_another_run(
    trained: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for words in ("head=eagle", "head=eagle loss=tv", "head=eagle loss=ce"):
        assert call("train", [f"arms={{eagle:'{words}'}}"], tmp_path, monkeypatch) == 0
    assert trained[0]["out"] == "runs/eagle-tiny-stdlib" and len({config["out"] for config in trained}) == 3


def test_names_fit_every_file_system() -> None:
    assert (
        part("4e-3") == part("0.004") == part(".004") == "4e-3" and part("0.5") == "0.5" and part("350") == "350" and part("1.0") == "1.0"
    )
    for value in ("/data/one.jsonl", "/data/two/one.jsonl", "a b", "a/b", "é", "x" * 300, "{kl: 1}", "*", "'"):
        assert part(value).isascii() and len(part(value)) < 40 and not set(part(value)) & set("/\\:*?\"<>|'{} ")
    assert part("/data/one.jsonl") != part("/data/two/one.jsonl") and part("/data/one.jsonl").startswith("one-")
    assert short("trainer.lr", ["trainer.lr", "trainer.lora.lr"]) == "trainer.lr" and short("a.b.c", ["a.b.c", "d.c"]) == "b.c"
    first, second = (joined(["x" * 100, "y" * 100, end]) for end in ("a", "b"))
    assert len(first) == len(second) <= 120 and first != second


@pytest.mark.parametrize(
    ("arguments", "changed"),
    [
        ([], {}),
        (["trainer.steps=350", "decode=auto", "out=elsewhere", "tracker=none"], {}),  # the defaults, and what makes no figure
        (["trainer.lr=5e-3"], {"trainer.lr": (5e-3, 8e-3)}),
        (["head=medusa"], {"head": ("medusa", "eagle")}),  # with all that its YAML says
        (["decode=chain"], {"decode.kind": ("chain", "auto")}),
        (["data=text", "path=."], {"data": ("text", "stdlib"), "data.path": (".", None)}),
        (["loss=tv"], {"loss.terms.tv": (1.0, None)}),
    ],
)
def test_a_report_is_told_what_was_changed(
    arguments: list[str], changed: dict[str, Any], trained: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("some words")
    assert call("train", arguments, tmp_path, monkeypatch) == 0
    found = {key: (each["value"], each["default"]) for key, each in trained[0]["changed"][""].items()}
    assert {key: found.get(key) for key in changed} == changed and (changed or found == {})


def test_arms_are_told_their_own(trained: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert call("train", ["arms={a:'head=eagle',b:'head=eagle trainer.lr=5e-3'}", "trainer.steps=20"], tmp_path, monkeypatch) == 0
    steps = {"trainer.steps": {"value": 20, "default": 350}}
    assert trained[0]["changed"] == {"a": steps, "b": steps | {"trainer.lr": {"value": 5e-3, "default": 8e-3}}}


# ---- several runs ----


def test_runs_of_a_sweep_have_folders_of_their_own_and_are_compared(
    trained: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("train", ["--multirun", "trainer.lr=4e-3,8e-3"], tmp_path, monkeypatch) == 0
    assert [config["out"] for config in trained] == ["runs/eagle-tiny-stdlib-lr=4e-3", "runs/eagle-tiny-stdlib-lr=8e-3"]
    folder = tmp_path / "runs" / "sweep-lr=4e-3+8e-3"
    assert {path.name for path in folder.iterdir()} == {*(f"comparison.{kind}" for kind in ("json", "md", "png", "html")), "multirun.yaml"}
    compared = json.loads((folder / "comparison.json").read_text())
    assert [row["name"] for row in compared["arms"]] == ["lr=4e-3", "lr=8e-3"] and compared["failed"] == {}  # the fastest first
    assert compared["target"] == "tiny" and "lr=8e-3" in (folder / "comparison.md").read_text()
    said = capsys.readouterr()
    assert said.out.startswith("2 runs, runs/sweep-lr=4e-3+8e-3\n") and "\nlr=4e-3:\nloading tiny " in said.out and said.err == ""


def test_where_nothing_was_reported_nothing_is_compared(
    trained: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for lr, code in (("0.1,0.2", 0), ("0.1,3", 2)):
        assert call("train", ["--multirun", f"trainer.lr={lr}", "report=none", f"out={code}"], tmp_path, monkeypatch) == code
        assert capsys.readouterr().out.count("nothing to compare (report=none)\n") == 1
    assert not list(tmp_path.rglob("comparison.json"))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("3", "training diverged"),  # in the middle of it
        ("-1", "trainer.lr must be a number above 0, found -1"),  # before anything begins
        ("5", "a bug"),
    ],
)
def test_one_that_fails_is_named_and_the_others_go_on(
    wrong: str, says: str, trained: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert call("train", ["-m", f"trainer.lr=0.1,{wrong},0.2"], tmp_path, monkeypatch) == 2
    said = capsys.readouterr()
    assert f"error: lr={wrong}: {says}\n" in said.err and said.err.endswith(f"error: 1 of 3 runs failed: lr={wrong}\n")
    assert ("Traceback" in said.err) == (says == "a bug")  # where a bug is, is said
    (compared,) = (tmp_path / "runs").glob("sweep-*/comparison.json")
    found = json.loads(compared.read_text())
    assert [row["name"] for row in found["arms"]] == ["lr=0.1", "lr=0.2"] and found["failed"] == {f"lr={wrong}": says}
    assert [config["trainer"]["lr"] for config in trained if config["trainer"]["lr"] != float(wrong)] == [0.1, 0.2]


@pytest.mark.parametrize("alone", [True, False])
def test_of_several_processes_all_must_fail_for_the_others_to_go_on(
    alone: bool, trained: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A process that has failed alone would meet those of this run in the next one."""
    monkeypatch.setattr(processes, "PATIENCE", 0.5 if alone else 60.0)
    port = free_port()
    kept = torch.distributed.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    for key, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": 2}.items():
        monkeypatch.setenv(key, str(value))
    with ThreadPoolExecutor(1) as other:
        if not alone:
            other.submit(processes.failed_alike, "lr=2.0")
        assert call("train", ["-m", "trainer.lr=0.1,2.0,0.2"], tmp_path, monkeypatch) == 2
    del kept
    assert [config["trainer"]["lr"] for config in trained] == ([0.1, 2.0] if alone else [0.1, 2.0, 0.2])
    said = capsys.readouterr().err
    assert "error: lr=2.0: training diverged\n" in said
    assert said.endswith("the remaining runs do not begin\n" if alone else "error: 1 of 3 runs failed: lr=2.0\n")


@pytest.mark.parametrize(
    ("arguments", "outs"),
    [
        (["head=eagle,medusa", "loss=kl,tv"], ["eagle-tiny-stdlib-loss=kl", "eagle-tiny-stdlib-loss=tv", "medusa-tiny-stdlib-loss=kl",
                                                "medusa-tiny-stdlib-loss=tv"]),
        (["experiment=smoke,compare_quick"], ["smoke-eagle-tiny-stdlib", "compare_quick-tiny-stdlib"]),
        (["tracker=none,wandb"], ["eagle-tiny-stdlib-tracker=none", "eagle-tiny-stdlib-tracker=wandb"]),
    ],
)  # fmt: skip
def test_over_heads_and_losses_and_experiments(
    arguments: list[str], outs: list[str], trained: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert call("train", ["--multirun", *arguments], tmp_path, monkeypatch) == 0
    assert [config["out"] for config in trained] == [f"runs/{out}" for out in outs]
    (compared,) = (tmp_path / "runs").glob("sweep-*/comparison.json")
    names = [row["name"] for row in json.loads(compared.read_text())["arms"]]
    assert len(names) == sum(len(config["arms"] or [""]) for config in trained)
    assert all(any(word in name for name in names) for word in ("eagle", "medusa")) or arguments == ["tracker=none,wandb"]


def test_sweeps_over_other_arms_are_compared_in_other_folders() -> None:
    rates = "trainer.lr=0.1,0.2"
    arms = ["arms={a:'head=eagle',b:'head=mtp'}", "arms={a:'head=eagle',b:'head=medusa'}", "arms={a:'loss=kl',b:'loss=tv'}"]
    found = [folder_of_all("config", [rates, *more]).name for more in ([], *([each] for each in arms), [arms[-1], "head=mtp"])]
    assert found[0] == "sweep-lr=0.1+0.2" and len({*found}) == 5
    spread = ["head=eagle", "arms={eagle:'head=eagle',mtp:'head=mtp'}", rates]  # of head=[eagle,mtp]
    assert folder_of_all("config", spread).name == "sweep-eagle+mtp-lr=0.1+0.2"
    assert folder_of_all("config", ["arms=null", "head=mtp", rates]).name == "sweep-head=mtp-lr=0.1+0.2"
    assert folder_of_all("config", ["arms={a:'head=mtp'},{a:'head=eagle'}"]).name.startswith("sweep-arms=")


@pytest.mark.parametrize("argument", ["experiment=null,smoke", "tracker=wandb, null", "head=,eagle", "head='',eagle"])
def test_a_sweep_over_no_choice_is_refused(argument: str) -> None:
    with pytest.raises(UserError, match=f"^{argument}: {argument.partition('=')[0]} is one of .*, or left out$"):
        check_overrides("config", ["trainer.lr=0.1,0.2", argument])


def test_a_folder_that_is_given_holds_all_of_them(trained: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert call("train", ["--multirun", "trainer.lr=0.1,0.2", "out=all"], tmp_path, monkeypatch) == 0
    assert [config["out"] for config in trained] == ["all/lr=0.1", "all/lr=0.2"] and (tmp_path / "all" / "comparison.md").is_file()
    assert not (tmp_path / "runs").exists()


def test_reports_of_a_sweep_do_not_overwrite_one_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m inference` too."""
    made = []

    def report(config: dict[str, Any]) -> None:
        folder = infer.report_folder(config)
        made.append(str(folder))
        folder.mkdir(parents=True)
        (folder / "report.json").write_text(json.dumps(a_report()))

    monkeypatch.setattr(infer, "report", report)
    (tmp_path / "run" / "speculator").mkdir(parents=True)
    (tmp_path / "run" / "speculator" / "config.json").write_text("{}")
    (tmp_path / "asked.jsonl").write_text("")
    arguments = ["--multirun", "decode=chain,dynamic", "speculator=run/speculator", "prompts=asked.jsonl"]
    assert call("inference", arguments, tmp_path, monkeypatch) == 0
    assert call("inference", [*arguments, "out=all"], tmp_path, monkeypatch) == 0
    beside = [f"run/report-asked-decode={kind}" for kind in ("chain", "dynamic")]
    assert made == [*beside, "all/decode=chain", "all/decode=dynamic"] and (tmp_path / "all" / "comparison.json").is_file()


def test_evaluations_of_a_sweep_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def decoded(config: dict[str, Any]) -> None:
        found = an_evaluation()
        for row in found["rows"]:
            row["speedup"] *= config["new_tokens"]
        Path(config["out"]).mkdir(parents=True)
        (Path(config["out"]) / "evaluate.json").write_text(json.dumps(found))

    monkeypatch.setattr(infer, "evaluate", decoded)
    (tmp_path / "speculator").mkdir()
    (tmp_path / "speculator" / "config.json").write_text("{}")
    (tmp_path / "mine.jsonl").write_text("")
    arguments = ["--multirun", "new_tokens=2,3", "speculator=speculator", "suite=mine.jsonl", "out=all"]
    assert call("inference evaluate", arguments, tmp_path, monkeypatch) == 0
    rows = json.loads((tmp_path / "all" / "comparison.json").read_text())["rows"]
    whole = [row for row in an_evaluation()["rows"] if row["category"] == "overall" and row["name"] != "plain"]
    expected = sorted([row["speedup"] * n for row in whole for n in (2, 3)], reverse=True)
    assert [row["speedup"] for row in rows] == expected and rows[0]["name"].startswith("new_tokens=3: ")
    assert f"new_tokens=2: {whole[0]['name']}" in capsys.readouterr().out


def test_runs_of_a_sweep_are_one_group_of_the_tracker(
    trained: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for more in ([], ["tracker.group=mine"]):
        assert call("train", ["--multirun", "trainer.lr=0.1,0.2", "tracker=wandb", f"out={len(more)}", *more], tmp_path, monkeypatch) == 0
    assert call("train", ["tracker=wandb"], tmp_path, monkeypatch) == 0
    assert [config["tracker"]["group"] for config in trained] == ["0", "0", "mine", "mine", None]


def test_a_sweep_that_is_interrupted_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = []

    def run(**config: Any) -> None:
        begun.append(config)
        raise SystemExit(130)

    monkeypatch.setattr("headstart.trainers.run.run", run)
    assert call("train", ["--multirun", "trainer.lr=0.1,0.2"], tmp_path, monkeypatch) == 130
    assert len(begun) == 1


def test_processes_of_a_run_get_its_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each is a command line of its own, which does not know that it belongs to a sweep."""
    started: list[list[str]] = []

    class Process:
        returncode = 0

        def __init__(self, command: list[str], **_: Any) -> None:
            started.append(command)

        def poll(self) -> int:
            return 0

    monkeypatch.setattr("subprocess.Popen", Process)
    assert call("train", ["launcher=processes", "trainer.lr=4e-3"], tmp_path, monkeypatch) == 0
    assert [command[-1] for command in started] == ["out=runs/eagle-tiny-stdlib-launcher=processes-lr=4e-3"] * 2
    started.clear()
    words = ["--multirun", "launcher=processes", "tracker=wandb", "trainer.lr=0.1,0.2", "out=a b"]
    assert call("train", words, tmp_path, monkeypatch) == 0
    assert [command[-4:] for command in started[::2]] == [
        ["tracker=wandb", f"trainer.lr={lr}", "tracker.group='a b'", f"out='a b/lr={lr}'"] for lr in (0.1, 0.2)
    ]
