"""Reads finished runs from their folders (reports, settings, curves) and compares several of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headstart.heads.errors import UserError
from headstart.heads.stored import read_json
from headstart.inference.reports.compare import compare
from headstart.inference.reports.report import NAME, Report
from headstart.trainers.metrics import read_metrics

GROUPS = ("head", "target", "data", "loss", "trainer", "decode", "export")  # groups of settings in config.json


def reported(folder: Path) -> dict[str, Path]:
    """The folders of a run that hold a report: the run's own under "", or those of its arms under their names."""
    if (folder / NAME).is_file():
        return {"": folder}
    return {report.parent.name: report.parent for report in sorted(folder.glob(f"*/{NAME}"))}


def settings_of(folders: Mapping[str, Path], reports: Mapping[str, Report]) -> dict[str, dict[str, Any]]:
    """Name -> the settings in that folder's config.json. If no folder has one (reports of exported folders): name -> the settings that the
    report lists as changed from their defaults.
    """
    made = {name: read_json(folder / "config.json") for name, folder in folders.items() if (folder / "config.json").is_file()}
    if made:
        return {name: {group: own for group, own in config.items() if group in GROUPS} for name, config in made.items()}
    told = {name: report.get("changed_settings") or {} for name, report in reports.items()}
    return {name: {key: each.get("value") for key, each in own.items()} for name, own in told.items()}


def compare_folders(folders: Mapping[str, Path], failed: Mapping[str, str], out: Path) -> None:
    """Write comparison.json, .md, .png and .html of the reports in ``folders`` (name -> folder) into ``out``. ``failed``: name -> error of
    runs that failed. Raises UserError for a damaged report, and if ``out`` cannot be written.
    """
    reports = {name: Report.read(folder) for name, folder in folders.items()}
    curves = {name: read_metrics(folder) for name, folder in folders.items()}
    targets = ", ".join(dict.fromkeys(report.target for report in reports.values()))
    try:
        out.mkdir(parents=True, exist_ok=True)
        compare(targets, reports, failed, out, settings_of(folders, reports), curves)
    except OSError as e:
        raise UserError(f"{out} cannot be written ({e}): give out=DIR") from e
