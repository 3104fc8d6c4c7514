"""comparison.html: several drafters side by side. Cost of a round against its tokens, a ranking, and which drafter is best for whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from markupsafe import Markup

from headstart.heads.errors import counted
from headstart.inference.reports.charts import LETTER, Box, Point, Series, beside, grid_x, grid_y, lines, mark, path, svg, ticks
from headstart.inference.reports.figures import GRAM
from headstart.inference.reports.gain import by_sequences
from headstart.inference.reports.page import about, bar, between, figure, h, joined, page, section, shortened, table
from headstart.inference.reports.report import shape_of
from headstart.inference.reports.report_page import Curves, points, word
from headstart.inference.reports.verdict import advice, cautions, headline, order, rests

NAME = "comparison.html"
Row = Mapping[str, Any]

WIDTH, HEIGHT = 760, 470
FRAME = (46.0, 30.0, 744.0, 424.0)  # of the chart: left, top, right, bottom
SPEEDS = (0.5, 0.75, 1, 1.25, 1.5, 2, 3, 4, 6)  # speed-ups for which lines are drawn
MANY, FEW = 8, 5  # at most: lines in one chart; drafters whose settings stand side by side


def comparison_page(
    rows: Sequence[Row], failed: Mapping[str, str], about_all: Mapping[str, Any], curves: Mapping[str, Curves] | None = None
) -> str:
    """The text of comparison.html. ``rows``: compare.figures of every arm, the best first. ``about_all``: comparison.json's other keys."""
    title = f"{counted(len(rows), 'drafter')} for {about_all.get('target', 'a target')}"
    warnings = [h('<p class="note">{}</p>', line) for line in cautions(about_all)]
    warnings += [h('<p class="note bad">{} failed: {}</p>', name, why) for name, why in failed.items()]
    sentences = joined(h("<li>{}</li>", line) for line in advice(rows))
    sections = [
        section("Best for whom", h("<ul>{}</ul>", sentences) if rows else Markup(), *warnings),
        section("What a round costs, and what it gives", *pareto(rows)),
        section("Ranking", ranking(rows)),
        section("Several sequences at once", *several(rows)),
        section("Accepted guesses, by depth", depths(rows)),
        section("Training", *training(rows, curves or {})),
        section("What differs between the runs' settings", differing(about_all.get("settings") or {}, [row["name"] for row in rows])),
        section("Where the figures are from", conditions(about_all)),
    ]
    words = h('<p class="lead">{}</p>', headline(rows)) if rows else h("<p>None has been measured.</p>")
    return page(title, words, sections, h("{}", "The figures are in comparison.json."))


def pareto(rows: Sequence[Row]) -> list[Markup]:
    """A chart of the tokens of a round against its cost, with lines of equal speed-up. Drafters on the Pareto front are filled."""
    rows = [row for row in rows if row.get("t0_tree") and row.get("speedup")]
    if not rows:
        return []
    values: list[Point] = [(row["t0_tree"] / row["speedup"], row["t0_tree"]) for row in rows]
    left, top, right, bottom = FRAME
    low_x, high_x = min(1.0, *(x for x, _ in values)) * 0.96, max(x for x, _ in values) * 1.06
    low_y, high_y = min(1.0, *(y for _, y in values)), max(y for _, y in values) * 1.06

    def at(x: float, y: float) -> Point:
        return left + (right - left) * (x - low_x) / (high_x - low_x), top + (bottom - top) * (high_y - y) / (high_y - low_y)

    parts = [grid_y(ticks(low_y, high_y), lambda v: at(low_x, v)[1], left, right, "{:g}".format, "accepted length (tokens a pass)")]
    parts.append(grid_x(ticks(low_x, high_x, 7), lambda v: at(v, low_y)[0], bottom, left, right, "cost of a round (plain passes)"))
    lines_, taken = equal_speed((low_x, high_x), (low_y, high_y), at)
    parts += lines_
    order = sorted(range(len(rows)), key=lambda i: -rows[i]["speedup"])
    front = edge(values)
    points, names = [at(*values[i]) for i in order], [shortened(rows[i]["name"], 26) for i in order]
    for (x, y), (label_x, label_y, far), i, name in zip(points, beside(points, names, FRAME, taken), order, names, strict=True):
        if far:
            near = min((label_x - 2, label_x + LETTER * len(name)), key=lambda end: abs(end - x))
            parts.append(h('<line class="lead-line" x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}"/>', x, y, near, label_y))
        parts.append(mark("circle" if i in front else "hollow", "t0" if i in front else "plain", (x, y), 5))
        parts.append(h('<text class="name" x="{:.1f}" y="{:.1f}">{}</text>', label_x, label_y + 4, name))
    said = "; ".join(f"{rows[i]['name']}: {values[i][1]:.2f} tokens for {values[i][0]:.2f} passes" for i in order)
    why = ("At temperature 0. Filled: no other drafter gives as many tokens at a lower cost, or more at the same cost. Lines: equal "
           "speed-up over plain decoding, which is the tokens of a round divided by its cost.")  # fmt: skip
    return [figure(why, svg(f"accepted length against the cost of a round. {said}", WIDTH, HEIGHT, parts, "wide"), scrolls=True)]


def equal_speed(xs: Point, ys: Point, at: Callable[[float, float], Point]) -> tuple[list[Markup], list[Box]]:
    """Lines of equal speed-up through the chart, and the boxes of their labels. A label stands above a line that leaves the chart at the
    top, else at the line's right end.
    """
    parts, boxes = [], []
    for speed in SPEEDS:
        low, high = max(xs[0], ys[0] / speed), min(xs[1], ys[1] / speed)
        if high - low < 0.12 * (xs[1] - xs[0]):  # it would only cross a corner
            continue
        (x, y), end = at(high, high * speed), at(low, low * speed)
        parts.append(h('<polyline class="line plain {}" points="{}"/>', "thin" if speed == 1 else "thin dash", path([end, (x, y)])))
        through_top, said = y <= FRAME[1] + 1, f"{speed:g}×"
        place, anchor = ((x, y - 6), "middle") if through_top else ((FRAME[2] - 4, y - 5), "end")
        parts.append(h('<text x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>', *place, anchor, said))
        boxes.append((place[0] - LETTER * len(said) - 2, place[1] - 12, place[0] + LETTER * len(said), place[1] + 4))
    return parts, boxes


def edge(values: Sequence[Point]) -> set[int]:
    """Indices of the Pareto front of (cost, tokens): no other point has at most the cost and at least the tokens."""

    def beaten(i: int) -> bool:
        x, y = values[i]
        return any(a <= x and b >= y and (a, b) != (x, y) for a, b in values)

    return {i for i in range(len(values)) if not beaten(i)}


COLUMNS = {  # of the ranking: key -> heading and format
    "speedup": ("speed-up, T = 0", "{:.2f}×"), "speedup_interval": ("interval", ""), "t1_speedup": ("speed-up, T = 1", "{:.2f}×"),
    "auto_speedup": ("auto, T = 0", "{:.2f}×"), "auto_t1_speedup": ("auto, T = 1", "{:.2f}×"),
    "t0_tree": ("accepted, T = 0", "{:.2f}"), "t1_tree": ("accepted, T = 1", "{:.2f}"), "t0_chain": ("chain, T = 0", "{:.2f}"),
    "off_policy_expected_length": ("held-out", "{:.2f}"), "repetition": ("repeats", "{:.0%}"),
    "c": ("a guess's cost", "{:.2f}"), "parameters": ("weights", "{:,}"), "train_seconds": ("training, s", "{:,.0f}"),
}  # fmt: skip


def ranking(rows: Sequence[Row]) -> Markup:
    """A table with a row for each drafter, in the order of ``rows``."""
    most = max([1.0, *(row["speedup"] for row in rows)])

    def cell(row: Row, key: str, form: str) -> str:
        value = row.get(key)
        if value is None or rests(row, key):
            return "" if value is None else "plain"
        return form.format(value) if form else between(value)

    shown = {key: how for key, how in COLUMNS.items() if any(row.get(key) is not None for row in rows)}
    body = [[row["name"], bar(row["speedup"] / most, "t0"), *(cell(row, key, form) for key, (_, form) in shown.items())] for row in rows]
    caption = (
        f"At temperature 0 {order(rows)}. Speed-up and accepted tokens a pass are of the tree; auto: speed-up of decode=auto (plain: it "
        "makes no guesses); held-out: tokens a pass that a chain is expected to have over text that the target did not write; repeats: "
        f"share of the {GRAM}-grams that stood earlier in their text, at T = 0"
    )
    if "c" in shown:
        caption += "; a guess's cost: of one level of drafting, in plain passes"
    head = ["", "", *(name.replace(" = ", "\u00a0=\u00a0") for name, _ in shown.values())]
    return table(caption, head, body, range(2, len(head)), scrolls=True, tight=True)


def depths(rows: Sequence[Row]) -> Markup:
    deepest = max((len(row["acceptance_by_depth"]) for row in rows), default=0)

    def heat(share: float) -> Markup:
        return h('<td class="heat" style="--p:{:.2f}">{:.0f}</td>', share, 100 * share)

    body = [[row["name"], *map(heat, row["acceptance_by_depth"]), *[""] * (deepest - len(row["acceptance_by_depth"]))] for row in rows]
    caption = "% of rounds in which the guess of a depth was accepted, at temperature 0"
    return table(caption, ["", *map(str, range(1, deepest + 1))], body, range(1, deepest + 1), scrolls=True, tight=True)


def several(rows: Sequence[Row]) -> list[Markup]:
    """A chart of the speed-up against the number of sequences decoded at once, for the first drafters in the ranking."""
    series = leading({row["name"]: [(float(n), gain) for n, gain in row.get("speedup_by_sequences") or ()] for row in rows})
    series = [replace(s, mark="circle") for s in series]
    why = f"Speed-up at temperature 0, over plain decoding of as many at once{few(rows)}"
    return [figure(why, by_sequences(series))] if series else []


def leading(points: Mapping[str, Sequence[Point]]) -> list[Series]:
    """A line for each of the first ``MANY`` names that has points. The line of the first name is bold."""
    found = zip(points.items(), [("t0", ""), *[("plain", "thin")] * (MANY - 1)], strict=False)
    return [Series(shortened(name, 13), kind, each, style=style) for (name, each), (kind, style) in found if each]


def few(rows: Sequence[Row]) -> str:
    return f", of the first {MANY} in the ranking" * (len(rows) > MANY) + "; that of the fastest is bold"


def training(rows: Sequence[Row], curves: Mapping[str, Curves]) -> list[Markup]:
    """A chart of the expected length over held-out text during the training, for the first drafters in the ranking."""
    series = leading({
        row["name"]: points(curves.get(row["name"], ()), "heldout/expected_length") for row in rows
    })  # fmt: skip
    said = "; ".join(f"{s.name}: {s.points[-1][1]:.2f}" for s in series)
    chart = lines(series, f"expected length over held-out text, at the end: {said}", x="steps", y="tokens a pass", whole_x=True)
    return [figure(f"Expected length of a chain over held-out text{few(rows)}", chart)]


def differing(settings: Mapping[str, Mapping[str, Any]], names: Sequence[str]) -> Markup:
    """The settings that differ. For up to ``FEW`` drafters: a row for each key, a column for each drafter. For more: a row for each
    drafter, with those of its settings that most others do not have.
    """

    def cell(value: str) -> Markup:
        return h('<td class="value">{}</td>', value)

    if len(names) <= FEW:
        body = [[key, *(cell(word(each[name], 60) if name in each else "") for name in names)] for key, each in settings.items()]
        return table("Settings that are not the same in all runs", ["", *names], body, scrolls=True, tight=True)
    counts = {key: Counter(map(str, each.values())) for key, each in settings.items()}

    def own(name: str) -> str:
        rare = {key: each[name] for key, each in settings.items() if name in each and 2 * counts[key][str(each[name])] <= len(names)}
        return " ".join(f"{key}={word(value, 60)}" for key, value in rare.items())

    body = [[name, cell(own(name))] for name in names] if settings else []
    return table("What a run has that most others have not", ["", "settings"], body, tight=True)


def conditions(about_all: Mapping[str, Any]) -> Markup:
    return about({
        "target": about_all.get("target"),
        "prompts": about_all.get("prompts"),
        "shape": shape_of(about_all) if "tree" in about_all else None,
        "data of the training": about_all.get("data"),
        "steps": about_all.get("train_steps"),
        "machine": about_all.get("device"),
        "dtype": about_all.get("dtype"),
        "versions": ", ".join(f"{k} {v}" for k, v in about_all.get("versions", {}).items()),
        "commit": about_all.get("commit"),
    })  # fmt: skip
