"""The conclusions of a comparison in sentences, from its rows (compare.figures) alone: the fastest drafter, and which is best for whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

from headstart.inference.decoding.auto import MARGIN, WORTH
from headstart.inference.reports.page import between

Row = Mapping[str, Any]

NOT_TRIED = f"decode=auto was not tried: texts below {WORTH} tokens are not worth measuring"
NEAR = 0.95  # share of the best speed-up from which a smaller drafter is advised too

LENGTHS = (  # figure, for whom it decides, its unit
    ("t0_tree", "targets whose passes are expensive, where accepted length decides", "tokens a pass"),
    ("t0_chain", "engines that draft chains", "tokens a pass"),
    ("off_policy_expected_length", "text that the target did not write itself", "expected"),
)


def best(rows: Sequence[Row], key: str) -> Row | None:
    """The row with the largest ``key``; None where no row has one."""
    return max((row for row in rows if row.get(key) is not None), key=lambda row: row[key], default=None)


def gain(row: Row, key: str) -> str:
    within = between(row.get(f"{key}_interval"))
    return f"{row[key]:.2f} times as fast as plain decoding" + (f", {within}" if within else "")


def level(rows: Sequence[Row], first: Row, key: str) -> list[str]:
    """The names of the rows that these prompts do not tell apart from ``first``: their intervals (or figures, where they have none) reach
    into its interval. Empty if it has no interval.
    """
    low, _ = first.get(f"{key}_interval") or (inf, inf)
    others = (row for row in rows if row is not first and row.get(key) is not None)
    return [row["name"] for row in others if (row.get(f"{key}_interval") or [row[key]])[-1] >= low]


def as_served(row: Row) -> Row:
    """The row, with decode=auto's speed-ups instead of the tree's if they were measured: drafters are ranked by these. Where decode=auto
    leaves guessing out, it is plain decoding, so its speed-up is set to 1: a measured one would differ from 1 by noise alone.
    """
    served = dict(row)
    for key, length in (("speedup", "t0_auto"), ("t1_speedup", "t1_auto")):
        if row.get(f"auto_{key}") is not None:
            rests = plain_at(row.get(length))
            served |= {key: 1.0 if rests else row[f"auto_{key}"], f"{key}_interval": None if rests else row.get(f"auto_{key}_interval")}
    return served


def plain_at(tokens_per_pass: float | None) -> bool:
    """Whether decode=auto with so few tokens for each pass of the target is plain decoding: the number bounds its speed-up, since no round
    takes less time than a plain one.
    """
    return tokens_per_pass is not None and tokens_per_pass < MARGIN


def order(rows: Sequence[Row]) -> str:
    """By what the rows of a comparison are ordered, in words."""
    none_gains = rows and all(as_served(row)["speedup"] == 1 for row in rows)
    return "the longest accepted length first" if none_gains else "the fastest first"


def rests(row: Row, key: str) -> bool:
    """Whether ``key`` is a speed-up of decode=auto that stands for plain decoding, so that it differs from 1 by noise alone."""
    return plain_at(row.get({"auto_speedup": "t0_auto", "auto_t1_speedup": "t1_auto"}.get(key, "")))


def headline(rows: Sequence[Row]) -> str:
    """A sentence that names the fastest at temperature 0, and claims no more than the intervals allow."""
    rows = [as_served(row) for row in rows]
    first = best(rows, "speedup")
    assert first is not None
    if first["speedup"] <= 1 and (untried := not_tried(rows)):
        return f"With the same tree in every round, none is faster than plain decoding at temperature 0; {untried}."
    if first["speedup"] <= 1:
        near = f"{first['name']} comes nearest ({first['speedup']:.2f} of its speed)"
        near = f"decode=auto leaves guessing out with {first['name']}" if plain_at(first.get("t0_auto")) else near
        return f"None is faster than plain decoding at temperature 0; {near}."
    same = level(rows, first, "speedup") + ["plain decoding"] * (not gains(first, "speedup"))
    also = f" These prompts do not tell it apart from {listed(same)}." if same else ""
    if not first.get("speedup_interval") and len(rows) > 1:
        also = " Its interval is not known (that takes two prompts): others may turn this round."
    return f"At temperature 0 {first['name']} is the fastest: {gain(first, 'speedup')}.{also}"


def advice(rows: Sequence[Row]) -> list[str]:
    """Which is best for whom, from the numbers alone: a line for each drafter that is best for somebody."""
    rows = [as_served(row) for row in rows]
    found: dict[str, list[str]] = {}

    def say(row: Row | None, whom: str, figure: str) -> None:
        if row is not None:
            found.setdefault(row["name"], []).append(f"{whom} ({figure.format(**row)})")

    cold, warm, none = best(rows, "speedup"), best(rows, "t1_speedup"), []
    if cold and gains(cold, "speedup"):
        say(cold, "greedy decoding here, one sequence at a time", "{speedup:.2f}×")
        near = [row for row in rows if (row.get("speedup") or 0.0) >= NEAR * cold["speedup"]]
        least = min(near, key=lambda row: row.get("parameters") or 0)
        if least is not cold and least.get("parameters"):
            how = f"the same with the smallest drafter that is within {1 - NEAR:.0%} of that"
            say(least, how, "{speedup:.2f}×, {parameters:,} weights")
    elif cold:
        none.append(f"For greedy decoding here, one sequence at a time: {in_vain(rows, cold, 'speedup')}.")
    if warm and gains(warm, "t1_speedup"):
        say(warm, "sampling at temperature 1", "{t1_speedup:.2f}×")
    elif warm:
        none.append(f"For sampling at temperature 1: {in_vain(rows, warm, 't1_speedup')}.")
    for key, whom, unit in LENGTHS:
        row = best(rows, key)
        say(row if row and round(row[key], 2) > 1 else None, whom, f"{{{key}:.2f}} {unit}")  # at 1.00 no guess was ever accepted
    return [f"{name}: for {'; for '.join(whom)}." for name, whom in found.items()] + none


def cautions(about: Mapping[str, Any]) -> list[str]:
    """What to know before ranking the drafters. ``about``: the keys of comparison.json beside its rows."""
    changed = [f"{name}: its training changed the target; it is measured with the changed one" for name in about.get("changed", ())]
    return [*about.get("apart", ()), *changed]


def gains(row: Row, key: str) -> bool:
    """Whether a row is faster than plain decoding: by the low end of its interval, or by the figure where it has none."""
    return bool((row.get(f"{key}_interval") or [row[key]])[0] > 1)


def in_vain(rows: Sequence[Row], row: Row, key: str) -> str:
    """What is advised where the best ``row`` does not gain, and why: plain decoding, unless the texts were too short to tell."""
    why = "no drafter is faster" if row[key] <= 1 else f"these prompts do not tell {row['name']} apart from it ({gain(row, key)})"
    return not_tried(rows) or f"plain decoding; {why}"


def not_tried(rows: Sequence[Row]) -> str:
    """The sentence on decode=auto if it was asked for but could not be tried with some drafter; else empty."""
    return next((row["auto_not_tried"] for row in rows if row.get("auto_not_tried")), "")


def listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if len(names) < 6 else f"{len(names)} others"
