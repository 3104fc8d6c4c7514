"""Several drafters of one run side by side: the accepted length of each, its cost, and its speed-up on this machine."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from headstart.heads.files import put, put_text
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.target import Target
from headstart.inference.reports.card import NAME as CARD
from headstart.inference.reports.comparison_page import NAME as PAGE
from headstart.inference.reports.comparison_page import comparison_page
from headstart.inference.reports.figures import GRAM
from headstart.inference.reports.measure import Contender
from headstart.inference.reports.page import interval
from headstart.inference.reports.pictures import comparison_picture
from headstart.inference.reports.render import table
from headstart.inference.reports.report import Report, shape_of
from headstart.inference.reports.report_page import Curves
from headstart.inference.reports.timing import time_rounds
from headstart.inference.reports.verdict import advice, as_served, cautions, order, rests

COLUMNS = {  # of comparison.md: key -> format, and the heading on the terminal ("": not there)
    "parameters": ("{:,}", ""),
    "train_seconds": ("{:.0f}", ""),
    "t0_tree": ("{:.2f}", "tree, T=0"),
    "t0_chain": ("{:.2f}", "chain"),
    "t1_tree": ("{:.2f}", "tree, T=1"),
    "t1_chain": ("{:.2f}", ""),
    "repetition": ("{:.0%}", ""),
    "expected_t0_chain": ("{:.2f}", ""),
    "off_policy_expected_length": ("{:.2f}", ""),
    "c": ("{:.2f}", ""),
    "predicted_speedup": ("{:.2f}x", ""),
    "speedup": ("{:.2f}x", "speed-up"),
    "t1_speedup": ("{:.2f}x", "T=1"),
    "auto_speedup": ("{:.2f}x", "auto"),
    "auto_t1_speedup": ("{:.2f}x", "T=1"),
}
RANKED = {  # figures that a comparison ranks by, which have intervals over prompts: key -> where they are in a report
    "t0_tree": ("temperature_0", "accepted_length"),
    "t1_tree": ("temperature_1", "accepted_length"),
    "speedup": ("temperature_0", "speedup"),
    "t1_speedup": ("temperature_1", "speedup"),
    "auto_speedup": ("auto_temperature_0", "speedup"),
    "auto_t1_speedup": ("auto_temperature_1", "speedup"),
}
CONDITIONS = {"target": "target", "device": "machine", "dtype": "dtype", "prompts_from": "prompts from", "prompts": "number of prompts",
              "new_tokens": "new tokens of a prompt", "commit": "commit"}  # fmt: skip
# keys that are told once if all reports agree
ABOUT = ("prompts", "tree", "tree_temperature_1", "dtype", "device", "commit", "versions", "data", "train_steps")


def costs_of(target: Target, contender: Contender, prompts: Sequence[Sequence[int]], new_tokens: int) -> dict[str, float]:
    """What the parts of a round cost on this machine, in plain rounds: ``c``, a level of drafting in a chain; ``v``, verifying the tree.

    ``predicted_speedup`` is the accepted length over v + the cost of the levels that a round drafts. It leaves out the rest of a round
    (Python, caches), which the measured speed-up contains.
    """
    assert contender.drafter is not None
    short, long = TreePolicy("chain", depth=1), TreePolicy("chain", depth=contender.policy.depth)
    tree = replace(contender.shapes["tree", 0], least=0.0)
    shapes = list(dict.fromkeys([short, long, tree]))
    times = time_rounds(target, contender.drafter, shapes, prompts, 1, new_tokens)
    plain = times[None].verify
    begin = times[short].draft / plain  # the first level, absorbing the verified positions included
    levels = max(tree.depth - 1, 1)
    made = contender.made["tree", 0]
    depth = sum(sum(g.asked) for g in made) / max(sum(len(g.asked) for g in made), 1)  # levels drafted in a round
    tau = sum(sum(g.emitted) for g in made) / max(sum(len(g.emitted) for g in made), 1)
    v, c = times[tree].verify / plain, times[long].draft / plain / long.depth
    drafting = begin + max(depth - 1, 0) * max(times[tree].draft / plain - begin, 0.0) / levels
    return {"c": c, "v": v, "predicted_speedup": tau / (v + drafting)}


def figures(name: str, report: Report) -> dict[str, Any]:
    """One row of the comparison."""
    cold, ranked = report["temperature_0"], [(key, report.get(place, {}), figure) for key, (place, figure) in RANKED.items()]
    chain, chain_warm = report.get("chain_temperature_0", {}), report.get("chain_temperature_1", {})
    several = [[row["sequences"], row["speedup"]] for row in report.get("batches", []) if row["temperature"] == 0]
    return {
        "name": name,
        "head": report["head"],
        "loss": report.get("loss"),
        "parameters": report["drafter_parameters"],
        "train_seconds": report.get("train_seconds"),
        **{key: found.get(figure) for key, found, figure in ranked},
        "t0_chain": chain.get("accepted_length"),
        "t1_chain": chain_warm.get("accepted_length"),
        "t0_auto": report.get("auto_temperature_0", {}).get("accepted_length"),
        "t1_auto": report.get("auto_temperature_1", {}).get("accepted_length"),
        "expected_t0_chain": chain.get("expected_length"),
        "off_policy_expected_length": report.get("off_policy_expected_length"),
        "repetition": cold.get("repetition"),
        "acceptance_by_depth": cold["acceptance_by_depth"],
        "c": report.get("c"),
        "v": report.get("v"),
        "predicted_speedup": report.get("predicted_speedup"),
        "lossless": report["lossless"],
        "speedup_by_sequences": several or None,
        **({"auto_not_tried": report["auto_not_tried"]} if "auto_not_tried" in report else {}),
        **{f"{key}_interval": each for key, found, figure in ranked if (each := interval(found, figure))},
    }


def differing(settings: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The settings that are not the same in all arms: key -> arm -> value. Arms without the key are left out."""
    flat_ = {name: flat(each or {}) for name, each in settings.items()}
    keys = dict.fromkeys(key for each in flat_.values() for key in each)
    found = {key: {name: each[key] for name, each in flat_.items() if key in each} for key in keys}

    def alike(have: dict[str, Any]) -> bool:
        first, *others = have.values()
        return len(have) == len(flat_) and all(other == first for other in others)

    return {key: have for key, have in found.items() if not alike(have)}


def flat(settings: Any, prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as a single one with dotted keys."""
    if not isinstance(settings, Mapping) or not settings:
        return {prefix.removesuffix("."): settings} if prefix else {}
    return {key: value for name, inside in settings.items() for key, value in flat(inside, f"{prefix}{name}.").items()}


def conditions(reports: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A line for each condition (target, machine, prompts, ..) that differs between reports: a warning against ranking them."""
    found = []
    for key, name in CONDITIONS.items():
        values: dict[str, list[str]] = {}
        for arm, report in reports.items():
            values.setdefault(str(report.get(key)), []).append(arm)
        if len(values) > 1:
            each = "; ".join(f"{value} ({', '.join(arms[:4])}{' ...' * (len(arms) > 4)})" for value, arms in values.items())
            found.append(f"Not measured alike, so beware of ranking them: {name}: {each}")
    return found


def compare(
    target: str,
    reports: Mapping[str, Report],
    failed: Mapping[str, str],
    folder: Path,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    curves: Mapping[str, Curves] | None = None,
) -> None:
    """Write comparison.json, .md, .png and .html into ``folder`` and show the table, the fastest drafter first.

    ``failed``: arm -> why it failed. ``settings``: arm -> its settings, to show where they differ. ``curves``: arm -> the lines of its
    metrics.jsonl.
    """
    rows = [figures(name, report) for name, report in reports.items()]
    # Ranked as in the headline. Drafters that decode=auto leaves unused all have a speed-up of 1, so accepted length ranks them.
    rows.sort(key=lambda row: (-as_served(row)["speedup"], -row["t0_tree"]))
    about: Mapping[str, Any] = next(iter(reports.values()), {})
    kept: dict[str, Any] = {key: about[key] for key in ABOUT if key in about and all(r.get(key) == about[key] for r in reports.values())}
    if len({shape_of(report) for report in reports.values()}) > 1:
        kept.pop("tree", None)
    if target:  # unknown without any report
        kept["target"] = Path(target).name
    kept |= {"changed": [name for name, report in reports.items() if "target_changed" in report]}
    kept |= {"apart": conditions(reports), "settings": differing(settings or {})}
    put_text(folder / "comparison.json", json.dumps({"arms": rows, "failed": dict(failed), **kept}, indent=2) + "\n")
    put_text(folder / "comparison.md", markdown(rows, failed, kept))
    if rows:
        put(folder / "comparison.png", lambda beside: comparison_picture(rows).savefig(beside, format="png"))
    put_text(folder / PAGE, comparison_page(rows, failed, kept, curves))
    columns = known(rows, (key for key, (_, heading) in COLUMNS.items() if heading))
    head, body = ["", *(COLUMNS[key][1] for key in columns)], [[row["name"], *cells(row, columns)] for row in rows]
    console = Console(markup=False)  # names may hold brackets
    console.print(table(f"drafters for {Path(target).name}, {order(rows)}", head, body, whole=range(1, len(head))))
    for name, why in failed.items():
        console.print(f"{name} failed: {why}", style="red")
    for line in cautions(kept):
        console.print(line, style="yellow", highlight=False)
    for line in advice(rows):
        console.print(line, highlight=False)
    print(f"comparison: {folder / 'comparison.md'}, comparison.html{', comparison.png' * bool(rows)}")
    if rows and (card := folder / rows[0]["name"] / "speculator" / CARD).is_file():
        print(f"how {rows[0]['name']} is served: {card}")


def known(rows: Sequence[Mapping[str, Any]], columns: Iterable[str]) -> list[str]:
    """The columns in which some row has a value."""
    return [key for key in columns if any(row[key] is not None for row in rows)]


def cells(row: Mapping[str, Any], columns: Iterable[str]) -> list[str]:
    return ["" if row[key] is None else "plain" if rests(row, key) else COLUMNS[key][0].format(row[key]) for key in columns]


def markdown(rows: Sequence[Mapping[str, Any]], failed: Mapping[str, str], about: Mapping[str, Any]) -> str:
    """The text of comparison.md. ``about``: the other keys of comparison.json."""
    told = [*advice(rows), *cautions(about), *(f"{name} failed: {why}" for name, why in failed.items())]
    lines, points = [f"# Drafters for {about.get('target', 'a target')}, {order(rows)}", ""], [*(f"- {line}" for line in told), ""]
    if not rows:
        return "\n".join([*lines, *points])
    columns = known(rows, COLUMNS)
    lines += ["| | " + " | ".join(key.replace("_", " ") for key in columns) + " |", "| --- |" + " ---: |" * len(columns)]
    lines += [f"| {row['name']} | " + " | ".join(cells(row, columns)) + " |" for row in rows]
    lines += ["", *points]
    lines += [
        "t0, t1: accepted length (tokens per target pass, its own counted) at temperature 0 and 1, of the tree and of a chain as deep; "
        "expected: the chain's, from one teacher-forced pass over what was decoded; off policy: over held-out text. repetition: share of "
        f"the {GRAM}-grams of a text that stood earlier in it, at temperature 0: what repeats is easily guessed. c: the time of one level "
        "of drafting, divided by that of a plain pass of the target. Speed-up: of the tree, over plain decoding of the same prompts in the "
        "same run; predicted: from the times of verifying and drafting alone, without the rest of a round; auto: of decode=auto, which "
        "leaves guessing out where it does not pay (plain: everywhere here).",
        "",
        "![acceptance by depth, and speed-up](comparison.png)",
        "",
    ]
    words = {"prompts": "{} prompts", "tree": "shape: {}", "dtype": "{}", "device": "on {}", "commit": "commit {}"}
    known_of = {key: shape_of(about) if key == "tree" else about[key] for key in words if key in about}
    if known_of:
        lines += ["; ".join(words[key].format(value) for key, value in known_of.items()) + ".", ""]
    return "\n".join(lines)
