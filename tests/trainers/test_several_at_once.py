"""A training whose report decodes several prompts at once: the figures are in its files, its curves and its tracker, under one name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headstart.trainers.metrics import read_metrics
from headstart.trainers.run import run
from tests.trainers.conftest import Composed
from tests.trainers.test_tracker import read_back


@pytest.mark.slow
def test_its_report_says_what_is_gained_with_two_at_once(composed: Composed, overrides: list[str], tmp_path: Path) -> None:
    # decode=auto is not tried in texts below 24 tokens
    out, asked = tmp_path / "run", ["decode.prompts=4", "decode.new_tokens=24", "decode.sequences=[2,1]", "tracker=wandb"]
    report = run(**composed(*overrides, *asked))[""]
    kept = json.loads((out / "report.json").read_text())["batches"]
    assert [(row["temperature"], row["sequences"]) for row in kept] == [(0, 1), (0, 2), (1, 1), (1, 2)] and report["batches"] == kept
    assert report["lossless"] and "several at once too" in (out / "report.md").read_text()
    assert "| at once | temperature |" in (out / "report.md").read_text() and "| at once |" in (out / "speculator/README.md").read_text()
    assert "Several sequences at once" in (out / "report.html").read_text()
    curves = {name: value for line in read_metrics(out) for name, value in line.items() if "/sequences/" in name}
    sent = read_back(out)["history"][4]
    assert len(curves) == 16 and curves == {name: pytest.approx(sent[name]) for name in sent if "/sequences/" in name}
    for row in kept:
        where = f"speed/T{row['temperature']}/sequences/{row['sequences']}"
        for key in ("speedup", "tokens_per_second", "plain_tokens_per_second", "accepted_length"):
            assert curves[f"{where}/{key}"] == pytest.approx(row[key]) and row[key] > 0
