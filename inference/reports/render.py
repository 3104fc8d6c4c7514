"""A report as people read it: on the terminal, as report.md, report.png, report.html. Its figures are measured in measure.py."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from headstart.heads.files import put, put_text
from headstart.heads.serving import ASKS, asking_an_engine
from headstart.inference.reports.figures import GRAM
from headstart.inference.reports.page import between, interval
from headstart.inference.reports.pictures import report_picture
from headstart.inference.reports.report import PICTURE, Figures, Report
from headstart.inference.reports.report_page import NAME as PAGE
from headstart.inference.reports.report_page import Curves, report_page
from headstart.inference.reports.summary import summary


def write_report(report: Report, folder: Path, curves: Curves = ()) -> None:
    """Write report.json, rounds.jsonl, report.md, report.png and report.html, each whole or not at all. ``curves``: the lines of the
    training's metrics.jsonl.
    """
    folder.mkdir(parents=True, exist_ok=True)
    report.write(folder)
    put_text(folder / "report.md", markdown(report))
    put(folder / PICTURE, lambda beside: report_picture(report).savefig(beside, format="png"))
    put_text(folder / PAGE, report_page(report, curves))


def rows(report: Report) -> list[tuple[str, str, str]]:
    """The rows of the report's table, formatted: (name, value at temperature 0, value at temperature 1)."""
    cold, warm = report["temperature_0"], report["temperature_1"]
    by_auto = {"auto_temperature_0", "auto_not_tried"} & {*report}  # decode=auto, the default, has rows of its own, or was not tried
    always = ", this tree in every round" if by_auto else ""

    def both(name: str, key: str, unit: str = ".2f") -> tuple[str, str, str]:
        return name, f"{cold[key]:{unit}}", f"{warm[key]:{unit}}"

    return [
        ("accepted length (tokens per target pass)", sure(cold, "accepted_length"), sure(warm, "accepted_length")),
        *_over_first(report),
        ("acceptance by depth", shares(cold), shares(warm)),
        *([both("expected length of a chain, teacher-forced", "expected_length")] if "expected_length" in cold else []),
        *([both(f"repeated {GRAM}-grams of a text", "repetition", ".0%")] if "repetition" in cold else []),
        both(f"tokens/s with the drafter{always}", "tokens_per_second", ".0f"),
        both("tokens/s without, same engine", "plain_tokens_per_second", ".0f"),
        (f"speed-up{always}", sure(cold, "speedup"), sure(warm, "speedup")),
        *_beside(report, "chain_", f"a chain of {report['tree']['depth']}", "accepted length", "acceptance by depth", "speed-up"),
        *_beside(report, "auto_", "decode=auto", "rounds without guesses", "tokens per pass", "speed-up"),
    ]


def _over_first(report: Report) -> list[tuple[str, str, str]]:
    """The row for a drafter that was trained further: how many times as long its accepted length is as before. Empty for others."""
    if (first := report.get("began_with")) is None:
        return []
    return [("times that of the drafter it began with", sure(first["temperature_0"], "times"), sure(first["temperature_1"], "times"))]


def _beside(report: Report, shape: str, name: str, *what: str) -> list[tuple[str, str, str]]:
    """The rows ``what`` for another shape: the chain, which most engines draft, or decode=auto. Empty if it was not measured."""
    found: list[Figures] = [report[key] for t in (0, 1) if (key := f"{shape}temperature_{t}") in report]
    values = {
        "accepted length": [sure(figures, "accepted_length") for figures in found],
        "acceptance by depth": [shares(figures) for figures in found],
        "tokens per pass": [f"{figures['accepted_length']:.2f}" for figures in found],
        "rounds without guesses": [f"{auto['rounds'].get('no guesses', 0.0):.0%}" for auto in report.get("auto", {}).values()],
        "speed-up": [sure(figures, "speedup") for figures in found],
    }
    return [(f"{name}: {key}", *values[key]) for key in what if found and len(values[key]) == 2]  # type: ignore[misc]


def sure(figures: Mapping[str, Any], key: str) -> str:
    """The figure and, if there is one, its interval over prompts. (A busy machine widens the interval of a speed-up.)"""
    within = between(interval(figures, key))
    return f"{figures[key]:.2f}" + (f" ({within})" if within else "")


AT_ONCE = ("at once", "temperature", "accepted length", "tokens/s with the drafter", "without", "speed-up")


def at_once(report: Report) -> list[list[str]]:
    """Rows with the columns ``AT_ONCE`` for every temperature and number of sequences; none where all were decoded one at a time."""
    return [
        [f"{row['sequences']}", f"{row['temperature']}", f"{row['accepted_length']:.2f}", f"{row['tokens_per_second']:.0f}",
         f"{row['plain_tokens_per_second']:.0f}", f"{row['speedup']:.2f}"]
        for row in report.get("batches", [])
    ]  # fmt: skip


def shares(figures: Mapping[str, Any]) -> str:
    return "  ".join(f"{x:.0%}" for x in figures["acceptance_by_depth"])


def table(
    title: str, head: Sequence[str], body: Iterable[Sequence[str]], *, left: Collection[int] = (0,), whole: Collection[int] = ()
) -> Table:
    """A table for the terminal. Columns are aligned to the right, except those numbered in ``left``. They are wrapped, if necessary within
    a word, except those numbered in ``whole``.
    """
    made = Table(title=title, title_justify="left")
    for number, name in enumerate(head):
        made.add_column(name, justify="left" if number in left else "right", no_wrap=number in whole, overflow="fold")
    for row in body:
        made.add_row(*row)
    return made


def show(report: Report) -> None:
    """Print a report's figures as tables, and the sentences of its summary."""
    console = Console(markup=False)  # names may hold brackets
    console.print(table(f"{report['head']} for {report['target']}", ("", "temperature 0", "temperature 1"), rows(report)))
    if report.get("batches"):
        console.print(table("several sequences at once", AT_ONCE, at_once(report), left=()))
    for line in summary(report):
        console.print(line, highlight=False)


def show_serving(report: Report) -> None:
    """Print the commands that serve the folder, not wrapped, so that they can be copied."""
    if report.get("unserved"):
        print(f"no serving engine loads this folder: {report['unserved']}")
    for command in report.get("serving", []):
        if command["language"] == "bash":
            print(f"{command['engine']} ({command['needs']}):\n  {command['text']}")
    if report.get("otherwise"):
        print(report["otherwise"])
    if command := asking_an_engine(report):
        print(f"{ASKS}:\n  {command}")


def figures_table(report: Report) -> list[str]:
    """The lines of Markdown tables: the figures at both temperatures, and those of several sequences at once where they were measured."""
    lines = ["| | temperature 0 | temperature 1 |", "| --- | ---: | ---: |", *(f"| {a} | {b} | {c} |" for a, b, c in rows(report))]
    if several := at_once(report):
        lines += ["", f"| {' | '.join(AT_ONCE)} |", "|" + " ---: |" * len(AT_ONCE), *(f"| {' | '.join(cells)} |" for cells in several)]
    return lines


def serving_lines(report: Report) -> list[str]:
    """Lines of Markdown with the commands that serve the folder, or why no engine does."""
    lines = []
    if report.get("unserved"):
        lines += [f"No serving engine loads this folder: {report['unserved']}.", ""]
    for command in report.get("serving", []):
        lines += [f"{command['engine']} ({command['needs']}):", "", f"```{command['language']}", command["text"], "```", ""]
    if report.get("otherwise"):
        lines += [f"{report['otherwise']}.", ""]
    if command := asking_an_engine(report):
        lines += [f"{ASKS}:", "", "```bash", command, "```", ""]
    return lines


def markdown(report: Report) -> str:
    """The whole report as Markdown; its picture is report.png, beside it."""
    lines = [f"# {report['head']} for {report['target']}", "", *figures_table(report)]
    lines += ["", *(f"- {line}" for line in summary(report)), "", "![acceptance by depth and speed](report.png)", ""]
    if "serving" in report:
        lines += ["## How it is served", "", *serving_lines(report)]
    known = ", ".join(f"{k} {v}" for k, v in report["versions"].items())
    return "\n".join([*lines, f"Commit {report['commit']}; {known}.", ""])
