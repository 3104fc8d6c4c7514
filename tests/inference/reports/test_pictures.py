"""What is written in a picture can be read: nothing lies over anything else or beyond the edge, however many arms there are."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from headstart.inference.reports.pictures import COLD, LONGEST_NAME, PLAIN, THEIRS, WARM, comparison_picture, report_picture
from tests.reports import a_report, a_row

HEADS = [p.stem for p in sorted((Path(__file__).resolve().parents[3] / "conf" / "head").glob("*.yaml"))]
MANY = [*HEADS, "eagle_depth_1", "eagle_lk", "eagle_tv"]


def labels(axis: Any) -> list[Any]:
    """Those of ticks within the limits: the others are not drawn."""
    low, high = sorted(axis.get_view_interval())
    return [label for place, label in zip(axis.get_majorticklocs(), axis.get_majorticklabels(), strict=False) if low <= place <= high]


def check_readable(figure: Any) -> None:
    """By the extents of the layout: texts against texts and the edge, legends against what is drawn."""
    figure.draw_without_rendering()
    texts = [t for axes in figure.axes for axis in (axes.xaxis, axes.yaxis) for t in [axis.label, *labels(axis)]]
    texts += [t for axes in figure.axes for t in [*axes.texts, axes.title]] + figure.texts
    legends = [legend for holder in (figure, *figure.axes) for legend in (holder.legends if holder is figure else [holder.get_legend()])]
    texts += [t for legend in legends if legend for t in legend.get_texts()]
    boxes = [(t.get_text(), t.get_window_extent()) for t in texts if t.get_visible() and t.get_text()]
    assert len(boxes) > 8
    for name, box in boxes:
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1, f"{name} lies beyond the edge"
    for (a, one), (b, other) in itertools.combinations(boxes, 2):
        across, along = min(one.x1, other.x1) - max(one.x0, other.x0), min(one.y1, other.y1) - max(one.y0, other.y0)
        assert across < 1 or along < 1, f"{a!r} lies over {b!r}"
    for legend in filter(None, legends):
        box = legend.get_window_extent()
        assert not any(box.overlaps(axes.bbox) for axes in figure.axes), "a legend lies over what is drawn"


@pytest.mark.parametrize("arms", [MANY[:1], MANY[:2], MANY, ["a" * 60, "b"]], ids=["1", "2", "17", "long names"])
def test_a_comparison_can_be_read(arms: list[str]) -> None:
    figure = comparison_picture([a_row(name, i) for i, name in enumerate(arms)])
    check_readable(figure)
    speed, length, shares = figure.axes
    named = [t.get_text() for t in speed.get_yticklabels()]
    assert len(named) == len(arms) and named[-1][: LONGEST_NAME - 1] == arms[-1][: LONGEST_NAME - 1]
    assert len(shares.texts) == 6 * len(arms)
    for axes in (speed, length):  # a mark for every arm, each within its own line
        for line in axes.lines:
            if len(line.get_ydata()) == len(arms) and line.get_linestyle() == "None":
                assert [round(y) for y in line.get_ydata()] == list(range(len(arms)))
    assert figure.get_size_inches()[0] == pytest.approx(8.6)  # however many: a page is as wide as it is


def test_names_are_no_formulas_and_keep_what_sets_them_apart() -> None:
    for name in (r"a$\foo$b", "$x$"):
        figure = comparison_picture([a_row(name, 0)])
        figure.draw_without_rendering()
        assert figure.axes[0].get_yticklabels()[0].get_text() == name
        report_picture(a_report(head=name, target=name)).draw_without_rendering()
    figure = comparison_picture([a_row(f"a_long_name_of_a_sweep,lr={lr}", 0) for lr in ("4e-3", "8e-3")])
    assert len({label.get_text() for label in figure.axes[0].get_yticklabels()}) == 2


def test_arms_that_lack_a_figure_and_guess_less_deep() -> None:
    rows = [a_row("deep", 0, depth=15), a_row("flat", 1, depth=4, predicted_speedup=None, t0_chain=None, t1_chain=None)]
    check_readable(comparison_picture(rows))


@pytest.mark.parametrize("changes", [{}, {"depth": 15}, {"depth": 1}, {"head": "x" * 50}], ids=str)
def test_a_report_shows_every_alternative(changes: dict[str, Any]) -> None:
    report = a_report(**changes)
    figure = report_picture(report)
    check_readable(figure)
    said = [t.get_text().replace("\n", " ") for t in figure.axes[1].get_yticklabels()]
    assert said[:2] == ["transformers' generate, T = 0", "plain, T = 0"] and said[3] == "plain, T = 1"
    assert all(label.endswith(f"T = {t}") for label, t in zip(said, (0, 0, 0, 1, 1), strict=True))
    assert [bar.get_width() for bar in figure.axes[1].patches] == pytest.approx([90, 100, 160, 100, 90])


def test_colours_differ_in_grey() -> None:
    """And to eyes that see no difference of red and green: what sets them apart is their lightness."""

    def grey(colour: str) -> float:
        red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
        return (0.299 * red + 0.587 * green + 0.114 * blue) / 255

    assert abs(grey(COLD) - grey(WARM)) > 0.3 and abs(grey(PLAIN) - grey(THEIRS)) > 0.2 and abs(grey(COLD) - grey(PLAIN)) > 0.2


def test_the_published_comparison_is_drawn_from_its_figures() -> None:
    results = Path(__file__).resolve().parents[3] / "benchmarks" / "results" / "drafters.json"
    if not results.is_file():
        pytest.skip("benchmarks/results/drafters.json is not there (benchmarks/drafters.py makes it)")
    check_readable(comparison_picture(json.loads(results.read_text())["drafters"]))
