"""``python -m trainers compare RUN...``: what finished runs say, side by side, from their folders alone."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from headstart.door import compare
from headstart.inference.reports.compare import compare as compare_reports
from tests.pages import Page
from tests.reports import a_report, figures, some_batches

FILES = {f"comparison.{kind}" for kind in ("json", "md", "png", "html")}


@pytest.fixture(autouse=True)
def nothing_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.inference.reports.compare.comparison_picture", lambda rows: Figure(figsize=(1, 1)))


def a_run(folder: Path, speedup: float, lr: float = 4e-3, **changes: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "report.json").write_text(json.dumps(a_report(temperature_0=figures(3.0, speedup), **changes)))
    (folder / "config.json").write_text(
        json.dumps({"head": {"name": "eagle"}, "trainer": {"lr": lr, "steps": 7}, "provenance": {"commit": "a"}})
    )
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"step": s, "heldout/expected_length": 1 + s / 9}) + "\n" for s in (1, 5, 7)))
    return folder


def call(monkeypatch: pytest.MonkeyPatch, *words: object) -> int | str | None:
    monkeypatch.setattr(sys, "argv", ["compare", *map(str, words)])
    try:
        compare.start()
    except SystemExit as ended:
        return ended.code
    return 0


def test_runs_are_put_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = a_run(tmp_path / "runs/lr=4e-3", 1.2), a_run(tmp_path / "runs/lr=8e-3", 1.5, lr=8e-3)
    assert call(monkeypatch, a, b, f"{b}/", f"out={tmp_path / 'all'}") == 0
    assert {p.name for p in (tmp_path / "all").iterdir()} == FILES
    made = json.loads((tmp_path / "all/comparison.json").read_text())
    assert [(row["name"], row["speedup"]) for row in made["arms"]] == [("lr=8e-3", 1.5), ("lr=4e-3", 1.2)]
    assert made["settings"] == {"trainer.lr": {"lr=4e-3": 4e-3, "lr=8e-3": 8e-3}} and made["apart"] == []
    page = Page((tmp_path / "all/comparison.html").read_text())
    assert page.wrong == [] and page.root.all("h1")[0].text == "2 drafters for tiny"
    (curves,) = [s for s in page.root.all("svg") if "expected length over held-out" in s.attributes["aria-label"]]
    assert "lr=8e-3: 1.78; lr=4e-3: 1.78" in curves.attributes["aria-label"] and len(curves.all("polyline")) == 2
    line = "lr=8e-3: for greedy decoding here, one sequence at a time (1.50×)"
    said = capsys.readouterr().out
    assert line in said and line in (tmp_path / "all/comparison.md").read_text() and line in page.root.text
    assert call(monkeypatch, a, b) == 0
    (beside,) = (tmp_path / "runs").glob("compare-*")
    assert {p.name for p in beside.iterdir()} == FILES


def test_figures_are_read_beside_long_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On a terminal of 80 columns, or none."""
    monkeypatch.setenv("COLUMNS", "80")
    runs = [a_run(tmp_path / f"{head}-folder-text-path=tinystories_sample-0f0944-target.path=stories260K-214e1b", 1.23) for head in "ab"]
    assert call(monkeypatch, *runs, f"out={tmp_path / 'all'}") == 0
    table = capsys.readouterr().out.partition("└")[0]
    assert table.count("1.23x") == 2 and "…" not in table and max(map(len, table.splitlines())) <= 80


def test_the_first_is_the_one_that_the_headline_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one serves with decides: decode=auto, where it was measured."""
    a = a_run(tmp_path / "runs/tree", 1.4, auto_temperature_0=figures(1.0, 1.1))
    b = a_run(tmp_path / "runs/auto", 0.8, auto_temperature_0=figures(2.0, 1.3))
    assert call(monkeypatch, a, b, f"out={tmp_path / 'all'}") == 0
    made = json.loads((tmp_path / "all/comparison.json").read_text())
    assert [row["name"] for row in made["arms"]] == ["auto", "tree"]
    assert "At temperature 0 auto is the fastest: 1.30 times" in Page((tmp_path / "all/comparison.html").read_text()).root.text


def test_where_none_gains_accepted_length_orders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What decode=auto leaves out is plain decoding, whatever was measured: nothing is called the fastest."""
    runs = [a_run(tmp_path / f"runs/{name}", 0.5, auto_temperature_0=figures(1.0, noise)) for name, noise in (("a", 0.93), ("b", 1.07))]
    assert call(monkeypatch, *runs, f"out={tmp_path / 'all'}") == 0
    written = [(tmp_path / f"all/comparison.{kind}").read_text() for kind in ("md", "html")]
    for said in (capsys.readouterr().out, *written):
        assert "the longest accepted length first" in said and "fastest first" not in said
        assert "plain" in said and "0.93" not in said and "1.07" not in said, "what differs from 1 by noise alone is not shown"


def test_arms_are_runs_too_and_what_was_not_measured_alike_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for arm, speedup in (("x", 1.1), ("y", 1.3)):
        a_run(tmp_path / "several" / arm, speedup)
    other = a_run(tmp_path / "other", 2.0, device="a GPU", prompts=80, tree={"kind": "chain", "depth": 3})
    (other / "config.json").unlink()
    assert call(monkeypatch, tmp_path / "several", other, f"out={tmp_path / 'all'}") == 0
    made = json.loads((tmp_path / "all/comparison.json").read_text())
    assert [row["name"] for row in made["arms"]] == ["other", "several/y", "several/x"]
    assert [line.split(": ")[1] for line in made["apart"]] == ["machine", "number of prompts"]
    assert not {"device", "prompts", "tree"} & made.keys() and made["dtype"] == "float32", "said of all only where it is so of all"
    said = (tmp_path / "all/comparison.md").read_text()
    assert "shape: " not in said and "\nfloat32; commit " in said
    assert "a GPU (other)" in made["apart"][0] and "a CPU (several/x, several/y)" in made["apart"][0]
    assert made["apart"][0] in Page((tmp_path / "all/comparison.html").read_text()).root.text
    assert call(monkeypatch, tmp_path / "several", f"out={tmp_path / 'arms'}") == 0
    assert [row["name"] for row in json.loads((tmp_path / "arms/comparison.json").read_text())["arms"]] == ["y", "x"]


def test_lists_end_before_what_follows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else Markdown takes the next paragraph for a part of the last item."""
    assert call(monkeypatch, a_run(tmp_path / "a", 1.2), f"out={tmp_path / 'all'}") == 0
    lines = (tmp_path / "all/comparison.md").read_text().split("\n")
    last = max(i for i, line in enumerate(lines) if line.startswith("- "))
    assert lines[last + 1] == "" and lines[last + 2].startswith("t0, t1: ")


def test_a_comparison_of_nothing_names_what_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And neither shows nor names the picture that there is not."""
    compare_reports("models/tiny", {}, {"a": "no memory"}, tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == FILES - {"comparison.png"}
    assert (tmp_path / "comparison.md").read_text() == "# Drafters for tiny, the fastest first\n\n- a failed: no memory\n"
    assert Page((tmp_path / "comparison.html").read_text()).root.all("h1")[0].text == "0 drafters for tiny"
    said = capsys.readouterr().out
    assert "a failed: no memory" in said and "comparison.png" not in said


def test_gains_with_several_at_once_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the runs that decoded several prompts at once."""
    runs = [a_run(tmp_path / name, gain, batches=some_batches((1, 8), (gain, gain / 2), (0.9, 0.5)))
            for name, gain in (("x", 1.6), ("y", 1.2))]  # fmt: skip
    runs.append(a_run(tmp_path / "z", 1.1))
    assert call(monkeypatch, *runs, f"out={tmp_path / 'all'}") == 0
    page = Page((tmp_path / "all/comparison.html").read_text())
    said = [svg.attributes["aria-label"] for svg in page.root.all("svg")]
    gains = "x: 1.60 times with 1, 0.80 times with 8; y: 1.20 times with 1, 0.60 times with 8"
    assert f"times as fast as plain decoding, by sequences at once. {gains}" in said
    arms = {row["name"]: row for row in json.loads((tmp_path / "all/comparison.json").read_text())["arms"]}
    assert arms["x"]["speedup_by_sequences"] == [[1, 1.6], [8, 0.8]] and arms["z"]["speedup_by_sequences"] is None
    assert call(monkeypatch, runs[2], f"out={tmp_path / 'none'}") == 0
    assert "at once" not in (tmp_path / "none/comparison.html").read_text()


def test_what_is_wrong_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad, empty = a_run(tmp_path / "good", 1.2), a_run(tmp_path / "bad", 1.2), tmp_path / "empty"
    (bad / "report.json").write_text("{")
    empty.mkdir()
    (tmp_path / "file").touch()
    cases: list[tuple[list[object], str]] = [
        ([tmp_path / "none"], "there is no such folder"), ([good, empty], "no report.json"), ([good, bad], "bad"),
        (["out=x"], "give folders"), ([good, "out="], "out=DIR"), ([good, "out=a", "out=b"], "at most once"), ([good, "--fast"], "--fast"),
        ([good, f"out={tmp_path / 'file'}"], "out=DIR"),
    ]  # fmt: skip
    for words, says in cases:
        assert call(monkeypatch, *words) == 2
        said = capsys.readouterr()
        assert said.err.startswith("error: ") and said.err.count("\n") == 1 and says in said.err and "Traceback" not in said.err
    assert call(monkeypatch, "--help") == 0 and "RUN" in capsys.readouterr().out


def test_the_door_is_where_people_look(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for words, code, says in (
        (["compare", "--help"], 0, "runs/compare-a+b"),
        (["compaer"], 2, "compaer: there is no such folder"),
        ([], 0, "compare runs/a"),
        (["--help"], 0, "RUN"),
    ):
        monkeypatch.setattr(sys, "argv", ["trainers", *words])
        monkeypatch.delitem(sys.modules, "headstart.door.compare", raising=False)
        with pytest.raises(SystemExit) as ended:
            runpy.run_module("headstart.trainers", run_name="__main__", alter_sys=False)
        said = capsys.readouterr()
        assert ended.value.code == code and says in said.out + said.err
