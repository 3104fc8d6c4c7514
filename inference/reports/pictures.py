"""report.png and comparison.png, legible on a page 800 pixels wide, to color-blind readers, and when printed without colors.

Temperature 0 is a dark blue circle, 1 a light orange diamond: they differ in shade and shape too. Labels stand beside the drawing, never
over it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from headstart.inference.reports.page import shortened

COLD, WARM, PLAIN, THEIRS = "#0b4f8a", "#e8a33d", "#8a8a8a", "#c8c8c8"
INK, LINE = "#333333", "#f1f1f1"
WIDTH, DPI = 8.6, 160  # inches, and dots per inch: 1376 pixels
LONGEST_NAME = 22  # letters


def figure_of(height: float) -> Any:
    """An empty figure, ``height`` inches tall."""
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH, height), dpi=DPI, layout="constrained")


def bare(axes: Any, *sides: str) -> None:
    """Remove the frame of ``axes`` on these sides (default: top and right), and make its labels small."""
    axes.spines[list(sides) or ["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8.5, color=INK, labelcolor=INK, length=3)
    axes.xaxis.label.set_size(8.5)
    axes.yaxis.label.set_size(8.5)


# One drafter ---------------------------------------------------------------------------------------------------------------


def report_picture(report: Mapping[str, Any]) -> Any:
    """Acceptance by depth, and tokens/s beside those of the alternatives, at both temperatures."""
    cold, warm = report["temperature_0"], report["temperature_1"]
    figure = figure_of(3.5)
    left, right = figure.subplots(1, 2, width_ratios=[1, 1.15])
    for figures, label, colour, mark in ((cold, "T = 0", COLD, "o"), (warm, "T = 1", WARM, "D")):
        shares = figures["acceptance_by_depth"]
        label = f"{label}: {figures['accepted_length']:.2f} tokens a pass"
        left.plot(range(1, len(shares) + 1), shares, mark + "-", color=colour, markersize=5, linewidth=1.6, label=label)
    depth = max(len(f["acceptance_by_depth"]) for f in (cold, warm))
    left.set(xlabel="depth of the guess", ylabel="rounds in which it was accepted", ylim=(0, 1.02), xlim=(0.7, depth + 0.3))
    left.set_xticks(range(1, depth + 1, 1 + depth // 11))
    left.legend(frameon=False, fontsize=8.5, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=1)
    name = shortened(report["head"], LONGEST_NAME)
    bars = [
        ("transformers' generate, T = 0", report["hf_generate_tokens_per_second"], THEIRS, ""),
        ("plain, T = 0", cold["plain_tokens_per_second"], PLAIN, ""),
        (f"{name}, T = 0", cold["tokens_per_second"], COLD, f" ({cold['speedup']:.2f}x)"),
        ("plain, T = 1", warm["plain_tokens_per_second"], PLAIN, ""),
        (f"{name}, T = 1", warm["tokens_per_second"], WARM, f" ({warm['speedup']:.2f}x)"),
    ]
    places = [0, 1, 2, 3.5, 4.5]  # a gap between the temperatures
    drawn = right.barh(places, [value for _, value, _, _ in bars], 0.8, color=[colour for _, _, colour, _ in bars])
    right.bar_label(drawn, [f"{value:.0f}{gain}" for _, value, _, gain in bars], padding=3, fontsize=8.5, color=INK)
    right.set_yticks(places, [textwrap.fill(label, 20) for label, _, _, _ in bars], parse_math=False)  # names may hold $
    right.invert_yaxis()
    right.set_xlim(0, 1.32 * max(value for _, value, _, _ in bars))  # room for the label of the longest bar
    right.set_xlabel("tokens/s (in brackets: over plain decoding)")
    bare(left)
    bare(right)
    right.tick_params(axis="y", length=0)
    figure.suptitle(f"{report['head']} for {report['target']}", fontsize=10, color=INK, parse_math=False)
    return figure


# Several ---------------------------------------------------------------------------------------------------------------------


def comparison_picture(rows: Sequence[Mapping[str, Any]]) -> Any:
    """A line for each arm: its speed-up, its accepted length, and how often each depth is accepted."""
    depth = max(len(row["acceptance_by_depth"]) for row in rows)
    figure = figure_of(1.45 + 0.27 * max(len(rows), 2))
    speed, length, shares = figure.subplots(1, 3, sharey=True, width_ratios=[1.25, 1.25, 1.5])
    places = range(len(rows))
    for axes in (speed, length):
        for place in places[::2]:
            axes.axhspan(place - 0.5, place + 0.5, color=LINE, zorder=0)
    _marks(speed, rows, {"predicted_speedup": ("|", COLD, 0), "speedup": ("o", COLD, 1), "t1_speedup": ("D", WARM, 1)})
    speed.axvline(1, color=INK, linewidth=0.8, zorder=1)
    speed.set_xlabel("speed-up over plain decoding")
    marks = {"t0_chain": ("o", COLD, 0), "t1_chain": ("D", WARM, 0), "t0_tree": ("o", COLD, 1), "t1_tree": ("D", WARM, 1)}
    _marks(length, rows, marks)
    length.set_xlabel("accepted length (tokens a pass)")
    _shares(shares, rows, depth)
    speed.set_yticks(places, [shortened(row["name"], LONGEST_NAME) for row in rows], parse_math=False)
    speed.set_ylim(len(rows) - 0.5, -0.5)
    for axes in (speed, length):
        low, high = axes.get_xlim()
        axes.set_xlim(low - 0.02 * (high - low), high + 0.02 * (high - low))
        bare(axes, "top", "right", "left")
        axes.tick_params(axis="y", length=0)
    figure.legend(*_legend(), loc="outside lower left", ncols=3, frameon=False, fontsize=8.5, labelcolor=INK, columnspacing=1.6)
    return figure


def _marks(axes: Any, rows: Sequence[Mapping[str, Any]], marks: Mapping[str, tuple[str, str, int]]) -> None:
    for key, (mark, colour, filled) in marks.items():
        aside = 0.16 if colour == WARM else -0.16  # the two temperatures at two heights: neither hides the other
        found = [(row[key], place + aside) for place, row in enumerate(rows) if row.get(key) is not None]
        if found:
            axes.plot(*zip(*found, strict=True), mark, zorder=2 + filled, clip_on=False, **_style(mark, colour, filled))


def _style(mark: str, colour: str, filled: int) -> dict[str, Any]:
    size = {"o": 5.6, "D": 4.6, "|": 8}[mark]
    return {"color": colour, "markerfacecolor": colour if filled else "white", "markersize": size, "markeredgewidth": 1.3}


def _shares(axes: Any, rows: Sequence[Mapping[str, Any]], depth: int) -> None:
    """A heat map of acceptance by depth: the darker, the more often accepted. Numbers stand in the cells where there is room."""
    table = [[*row["acceptance_by_depth"], *[float("nan")] * (depth - len(row["acceptance_by_depth"]))] for row in rows]
    axes.imshow(table, cmap="Blues", vmin=0, vmax=1.15, aspect="auto", interpolation="nearest")
    for place, row in enumerate(table):
        for i, share in enumerate(row):
            if share == share and depth <= 8:  # not NaN: the arm guesses less deep
                axes.text(i, place, f"{100 * share:.0f}", ha="center", va="center", fontsize=7.5, color="white" if share > 0.52 else INK)
    axes.set_xticks(range(0, depth, 1 + depth // 11), range(1, depth + 1, 1 + depth // 11))
    axes.set_xlabel("% of rounds, by depth (T = 0)")
    bare(axes, "top", "right", "left", "bottom")
    axes.tick_params(length=0)


def _legend() -> tuple[list[Any], list[str]]:
    from matplotlib.lines import Line2D

    shown = {
        "T = 0, tree": ("o", COLD, 1), "T = 1, tree": ("D", WARM, 1), "T = 0, a chain as deep": ("o", COLD, 0),
        "T = 1, a chain as deep": ("D", WARM, 0), "predicted, T = 0": ("|", COLD, 0),
    }  # fmt: skip
    return [Line2D([], [], linestyle="", marker=m, **_style(m, c, f)) for m, c, f in shown.values()], list(shown)
