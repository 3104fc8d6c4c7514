"""An evaluation as people read it: evaluate.json, evaluate.html, the tables on the terminal."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup
from rich.console import Console
from rich.table import Table

from headstart.heads.errors import counted
from headstart.heads.files import put_text
from headstart.heads.stored import read_json
from headstart.inference.reports import render
from headstart.inference.reports.evaluate import ALL, Question, figures, lossless
from headstart.inference.reports.figures import COVERED, GRAM, too_much
from headstart.inference.reports.page import about, bar, between, h, interval, joined, page, section, table
from headstart.inference.reports.results import Results, write_spec_bench
from headstart.inference.reports.sides import PLAIN

NAME, PAGE = "evaluate.json", "evaluate.html"

Row = Mapping[str, Any]


def write(results: Results, questions: Sequence[Question], folder: Path, depth: int, known: Mapping[str, Any]) -> dict[str, Any]:
    """Write evaluate.json, evaluate.html and Spec-Bench's files from the results. ``known``: keys of evaluate.json that hold for all
    rows. Returns the content of evaluate.json.
    """
    measured = Counter[tuple[int, float]]()
    for key in results.lines:
        measured[key[:2]] += len(key.questions)
    # Cut prompts are counted for plain decoding, at the setting with the most questions: the other settings cut almost the same prompts.
    fullest = max(measured, key=lambda kind: measured[kind])
    every = [line.made[PLAIN] for key, line in results.lines.items() if key[:2] == fullest]
    found = {
        "version": 1, **known, "prompts": len(questions), "turns": sum(len(q.turns) for q in questions),
        "cut": sum(each["cut"] for each in every), "left_out": sum(each["left_out"] for each in every),
        "rows": figures(results.lines, depth), "lossless": lossless(results.lines),
    }  # fmt: skip
    names, categories = [q.name for q in questions], [q.category for q in questions]
    write_spec_bench(results.lines, names, categories, folder, known["target"])
    put_text(folder / NAME, json.dumps(found, indent=2) + "\n")
    put_text(folder / PAGE, evaluation_page(found))
    return found


def kinds(found: Mapping[str, Any]) -> list[tuple[int, float]]:
    """The pairs of (sequences at once, temperature) that were measured."""
    return list(dict.fromkeys((row["sequences"], row["temperature"]) for row in found["rows"]))


def rows_of(found: Mapping[str, Any], sequences: int, temperature: float, category: str | None = None) -> list[Row]:
    """The rows of this number of sequences and temperature; with ``category``, of this category only."""
    here = [row for row in found["rows"] if (row["sequences"], row["temperature"]) == (sequences, temperature)]
    return [row for row in here if category in (None, row["category"])]


def categories(rows: Sequence[Row]) -> list[str]:
    """The categories in these rows, without the overall one."""
    return [c for c in dict.fromkeys(row["category"] for row in rows) if c != ALL]


def sides(rows: Sequence[Row]) -> list[str]:
    """The names of the sides in these rows, without plain decoding."""
    return [name for name in dict.fromkeys(row["name"] for row in rows) if name != PLAIN]


def called(sequences: int, temperature: float) -> str:
    """The heading for this number of sequences and temperature."""
    return f"Temperature {temperature:g}, {'one prompt at a time' if sequences == 1 else f'{sequences} prompts at once'}"


def sentences(found: Mapping[str, Any]) -> list[str]:
    """Lines to be read beside the figures: whether all is lossless, repetition, and prompts that were skipped or cut."""
    lines = []
    for name, each in found["lossless"].items():
        wrong = each["differing"] - each["ties"]
        ties = f", {each['ties']} of them where the target had a tie" if each["ties"] else ""
        verdict = "NOT lossless" if wrong else "lossless"
        lines.append(f"{name}: {verdict}, {each['differing']} of {each['compared']} answers at temperature 0 differ{ties}")
    for sequences in sorted({n for n, _ in kinds(found)}):
        if rest := found["prompts"] - max(row["prompts"] for row in found["rows"] if row["sequences"] == sequences):
            lines.append(f"{counted(rest, 'prompt')} not measured {sequences} at once: a category has fewer left over")
    for sequences, temperature in kinds(found):
        plain = next(row for row in rows_of(found, sequences, temperature, ALL) if row["name"] == PLAIN)
        lines += [line for line in too_much({temperature: plain}) if line not in lines]
    if found.get("auto_not_tried"):
        lines.append(f"{found['auto_not_tried']}: raise new_tokens, or take decode=dynamic or chain")
    elif found.get("auto"):
        lines.append("decode=auto drafts where it expects that to pay: its rounds without guesses count as one token. What a drafter "
                     "guesses is compared by decode=dynamic or chain")  # fmt: skip
    if found["skipped"]:
        lines.append(f"{counted(found['skipped'], 'prompt')} skipped: too long for the target's context")
    if found["cut"] or found["left_out"]:
        both = f"{counted(found['cut'], 'prompt')} without the beginning, {counted(found['left_out'], 'later turn')} left out"
        lines.append(f"{both}: too long for the target's context")
    return lines


def show(found: Mapping[str, Any]) -> None:
    """Print the tables and sentences on the terminal."""
    console = Console(markup=False, highlight=False)  # names of categories may hold brackets
    for sequences, temperature in kinds(found):
        rows = rows_of(found, sequences, temperature)
        title = f"{called(sequences, temperature)}: {rows[0]['prompts']} of {found['suite']}"
        console.print(_terminal(title, rows_of(found, sequences, temperature, ALL)))
        names, groups = sides(rows), categories(rows)
        if len(groups) > 1 and names:
            gains = {(row["category"], row["name"]): f"{row['speedup']:.2f}x" for row in rows}
            body = [[group, *(gains[group, name] for name in names)] for group in groups]
            console.print(render.table("speed-up, by category", ["", *names], body))
    for line in sentences(found):
        console.print(line)


def _terminal(title: str, rows: Sequence[Row]) -> Table:
    head = ("", "accepted", "tokens/s", "speed-up", f"{COVERED:.0%}", "repeats")
    body = []
    for row in rows:
        sure = between(interval(row, "speedup")) if row["name"] != PLAIN else ""
        cells = [f"{row['accepted_length']:.2f}", f"{row['tokens_per_second']:.0f}", f"{row['speedup']:.2f}x", sure]
        body.append([row["name"], *cells, f"{row['repetition']:.0%}"])
    return render.table(title, head, body, whole=range(len(head)))


def compare(evaluations: Mapping[str, Path], folder: Path) -> None:
    """Compare evaluations (name -> evaluate.json): print their overall rows, the fastest first, and write them to comparison.json."""
    found = {name: read_json(path) for name, path in evaluations.items()}
    rows = [row | {"name": f"{name}: {row['name']}"} for name, each in found.items() for row in each["rows"] if row["category"] == ALL
            and row["name"] != PLAIN]  # fmt: skip
    rows.sort(key=lambda row: -row["speedup"])
    console = Console(markup=False, highlight=False)
    for sequences, temperature in kinds({"rows": rows}):
        console.print(_terminal(called(sequences, temperature), rows_of({"rows": rows}, sequences, temperature)))
    folder.mkdir(parents=True, exist_ok=True)
    put_text(folder / "comparison.json", json.dumps({"rows": rows}, indent=2) + "\n")
    print(f"comparison: {folder / 'comparison.json'}")


def evaluation_page(found: Mapping[str, Any]) -> str:
    """The text of evaluate.html."""
    sections = []
    for sequences, temperature in kinds(found):
        rows, kind = rows_of(found, sequences, temperature), "t0" if temperature == 0 else "t1"
        sections.append(
            section(called(sequences, temperature), *_overall(rows_of(found, sequences, temperature, ALL), kind), *_categories(rows))
        )
    sections.append(section("More to know", h("<ul>{}</ul>", joined(h("<li>{}</li>", line) for line in sentences(found)))))
    versions = ", ".join(f"{k} {v}" for k, v in found["versions"].items())
    facts = {
        "suite": f"{found['suite']}: {counted(found['prompts'], 'prompt')}, {counted(found['turns'], 'turn')}, of up to "
                 f"{found['new_tokens']} new tokens each",
        "asked": "as plain text" if found["raw"] else "by the target's chat template",
        "target": found["target"], "speculator": found["speculator"], "machine": f"{found['device']}, {found['dtype']}",
        "the target's passes": found.get("passes", ""), "versions": versions, "commit": found["commit"],
    }  # fmt: skip
    sections.append(section("Where the figures are from", about(facts)))
    footer = (
        f"Intervals cover {COVERED:.0%}, by bootstrap over prompts (of several at once: over those that were decoded together). The "
        "figures are in evaluate.json, every answer in results.jsonl."
    )
    lead = h('<p class="lead">{}</p>', "Tokens per second over those of plain decoding, in the same run, prompt by prompt in turn.")
    return page(f"{found['suite']} for {found['target']}", lead, filter(None, sections), h("{}", footer))


def _overall(rows: Sequence[Row], kind: str) -> list[Markup]:
    most = max(row["speedup"] for row in rows)
    body = []
    for row in rows:
        body.append([
            row["name"], bar(row["speedup"] / most, "plain" if row["name"] == PLAIN else kind), f"{row['speedup']:.2f}×",
            "" if row["name"] == PLAIN else between(interval(row, "speedup")), f"{row['accepted_length']:.2f}",
            "" if row["name"] == PLAIN else between(interval(row, "accepted_length")), f"{row['tokens_per_second']:,.0f}",
            f"{row['repetition']:.0%}",
        ])  # fmt: skip
    head = ["", "", "speed-up", "interval", "accepted length", "interval", "tokens/s", f"repeated {GRAM}-grams"]
    caption = f"{counted(rows[0]['prompts'], 'prompt')}, {counted(rows[0]['answers'], 'answer')}"
    return [table(caption, head, body, range(2, len(head)), scrolls=True, tight=True)]


def _categories(rows: Sequence[Row]) -> list[Markup]:
    """Speed-up with its interval, and accepted length, of every category and side."""
    names, groups = sides(rows), categories(rows)
    if len(groups) < 2 or not names:
        return []
    body = []
    for group in groups:
        here = {row["name"]: row for row in rows if row["category"] == group}
        cells = [group, f"{here[PLAIN]['prompts']}"]
        for name in names:
            row = here[name]
            sure = between(interval(row, "speedup"))
            cells += [f"{row['speedup']:.2f}×" + (f" ({sure})" if sure else ""), f"{row['accepted_length']:.2f}"]
        body.append([*cells, f"{here[PLAIN]['repetition']:.0%}"])
    head = ["", "prompts", *(word for name in names for word in (f"{name}: speed-up", "accepted")), f"repeated {GRAM}-grams"]
    caption = "By category: speed-up (interval) and accepted length"
    return [table(caption, head, body, range(1, len(head)), scrolls=True, tight=True)]
