"""A --multirun for good: two small trainings, each with a folder of its own, and what their reports say side by side."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.doors import call


@pytest.mark.slow
def test_two_learning_rates_are_trained_and_compared(overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert call("train", ["--multirun", *overrides, "trainer.lr=4e-3,8e-3"], tmp_path, monkeypatch) == 0
    out = tmp_path / "run"
    compared = {row["name"]: row for row in json.loads((out / "comparison.json").read_text())["arms"]}
    assert sorted(compared) == ["lr=4e-3", "lr=8e-3"] and (out / "comparison.png").is_file()
    for name, row in compared.items():
        report = json.loads((out / name / "report.json").read_text())
        assert json.loads((out / name / "config.json").read_text())["trainer"]["lr"] == float(name.partition("=")[2])
        assert row["speedup"] == report["temperature_0"]["speedup"] and row["t1_tree"] == report["temperature_1"]["accepted_length"]
