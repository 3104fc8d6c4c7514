"""Finished runs, as their folders tell them: reports, settings, curves; and several of them side by side."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headstart.heads.errors import UserError
from headstart.heads.hub import read_json
from headstart.inference.reports.compare import compare
from headstart.inference.reports.report import NAME, Report
from headstart.trainers.metrics import read_metrics

GROUPS = ("head", "target", "data", "loss", "trainer", "decode", "export")  # of config.json: the settings that made a run


def reported(folder: Path) -> dict[str, Path]:
    """The folders with a report of a run: its own under "", or those of its arms under their names."""
    if (folder / NAME).is_file():
        return {"": folder}
    return {report.parent.name: report.parent for report in sorted(folder.glob(f"*/{NAME}"))}


def settings_of(folder: Path, report: Report) -> dict[str, Any]:
    """All that config.json says; where there is none (a report of an exported folder), what the report says was changed."""
    if (folder / "config.json").is_file():
        return {group: settings for group, settings in read_json(folder / "config.json").items() if group in GROUPS}
    return {key: each.get("value") for key, each in (report.get("changed_settings") or {}).items()}


def compare_folders(folders: Mapping[str, Path], failed: Mapping[str, str], out: Path) -> None:
    """comparison.json, .md, .png and .html in ``out`` of the reports in these folders, by name. Raises UserError where one is damaged."""
    reports = {name: Report.read(folder) for name, folder in folders.items()}
    settings = {name: settings_of(folder, reports[name]) for name, folder in folders.items()}
    curves = {name: read_metrics(folder) for name, folder in folders.items()}
    targets = ", ".join(dict.fromkeys(report.target for report in reports.values()))
    try:
        out.mkdir(parents=True, exist_ok=True)
        compare(targets, reports, failed, out, settings, curves)
    except OSError as e:
        raise UserError(f"{out} cannot be written ({e}): give out=DIR") from e
