"""Charts as inline SVG: lines with names at their ends, and points with names beside them. Sizes are in pixels, for a phone's width.

Colors and fonts are the page's (style.py): a chart gives things a class (``t0``, ``t1``, ``plain``), and the style says how they look.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import ceil, floor, log2, log10

from markupsafe import Markup

from headstart.inference.reports.page import h, joined

Point = tuple[float, float]
WIDTH, HEIGHT = 420, 258
LEFT, RIGHT, TOP, BOTTOM = 40, 92, 26, 40  # margins for: ticks, names of lines, the label of y, the label of x
LETTER, LINE = 6.7, 15  # of 12 pixel text: a letter's mean width, a line's height
KINDS = ((0, "t0", "circle"), (1, "t1", "diamond"))  # temperature, its CSS class, its mark
MOST = 160  # points of a line: where there are more, the means of neighbors are drawn


@dataclass(frozen=True)
class Series:
    """A line of a chart. ``kind``: ``t0``, ``t1`` or ``plain``. ``band``: [low, high] at every point. ``mark``: circle, diamond or none.
    ``style``: thin, dash, dots (marks without a line), or none.
    """

    name: str
    kind: str
    points: Sequence[Point]
    band: Sequence[Sequence[float]] = ()
    mark: str = ""
    style: str = ""


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) between low and high, about ``count`` of them."""
    raw = max(high - low, 1e-12) / count
    power = 10 ** floor(log10(raw))
    step = next(s * power for s in (1, 2, 2.5, 5, 10) if s * power >= raw * 0.999)
    return [round(i * step, 12) for i in range(ceil(low / step - 1e-9), floor(high / step + 1e-9) + 1)]


def short(value: float) -> str:
    """A number as an axis shows it: 1200, 0.5, 12k, 3M."""
    for size, sign in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if sign == 'k' else size):g}{sign}"
    return f"{value:g}"


def lines(
    series: Sequence[Series], said: str, *, x: str, y: str, floor_y: float | None = None, top_y: float | None = None,
    whole_x: bool = False, doubling_x: bool = False,
) -> Markup:  # fmt: skip
    """A chart of lines; empty where there are no points. ``said``: the chart in words. ``x``, ``y``: labels with units. ``doubling_x``: x
    is logarithmic, and its ticks are the points' own values.
    """
    series = [s for s in series if s.points]
    if not series:
        return Markup()
    xs = [p[0] for s in series for p in s.points]
    ys = [v for s in series for v in (*(p[1] for p in s.points), *(b for pair in s.band for b in pair))]
    low, high = min(ys) if floor_y is None else floor_y, max(ys) if top_y is None else top_y
    low_x, high_x = min(xs), max(xs)
    high, high_x = high + (high == low), high_x + (high_x == low_x)
    inner, tall = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    wide: Callable[[float], float] = log2 if doubling_x else float

    def at(p: Point) -> Point:
        across = (wide(p[0]) - wide(low_x)) / (wide(high_x) - wide(low_x))
        return LEFT + inner * across, TOP + tall * (high - p[1]) / (high - low)

    x_ticks = [t for t in ticks(low_x, high_x) if not whole_x or t == int(t)]
    if doubling_x:
        x_ticks = spaced(sorted({*xs}), lambda x: at((x, low))[0])
    parts = [grid_y(ticks(low, high), lambda v: at((low_x, v))[1], LEFT, WIDTH - RIGHT, short, y)]
    parts.append(grid_x(x_ticks, lambda v: at((v, low))[0], HEIGHT - BOTTOM, LEFT, WIDTH - RIGHT, x))
    parts += [drawn(s, at) for s in series]
    ends = apart([(at(s.points[-1])[1], s) for s in series], TOP, HEIGHT - BOTTOM)
    parts += [h('<text class="{}" x="{}" y="{:.1f}">{}</text>', s.kind, WIDTH - RIGHT + 9, y_end + 4, s.name) for y_end, s in ends]
    return svg(said, WIDTH, HEIGHT, parts)


def spaced(values: Sequence[float], to: Callable[[float], float], least: float = 24) -> list[float]:
    """The last value, and each one before it that is at least ``least`` pixels from the next one kept. ``to``: value -> pixels."""
    kept = list(values[-1:])
    for value in reversed(values[:-1]):
        if to(kept[0]) - to(value) >= least:
            kept.insert(0, value)
    return kept


def svg(said: str, width: float, height: float, parts: Iterable[Markup], kind: str = "") -> Markup:
    return h('<svg class="{}" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>', kind, width, height, said, joined(parts))


def grid_y(
    values: Sequence[float], to: Callable[[float], float], left: float, right: float, form: Callable[[float], str], label: str
) -> Markup:
    line = '<line class="grid" x1="{0}" x2="{1}" y1="{2:.1f}" y2="{2:.1f}"/><text x="{3}" y="{4:.1f}" text-anchor="end">{5}</text>'
    found = [h(line, left, right, to(v), left - 7, to(v) + 4, form(v)) for v in values]
    return joined([*found, h('<text x="0" y="11">{}</text>', label)])


def grid_x(values: Sequence[float], to: Callable[[float], float], bottom: float, left: float, right: float, label: str) -> Markup:
    found = [h('<text x="{:.1f}" y="{}" text-anchor="middle">{}</text>', to(v), bottom + 17, short(v)) for v in values]
    name = h('<text x="{}" y="{}" text-anchor="middle">{}</text>', (left + right) / 2, bottom + 35, label)
    return joined([*found, name])


def drawn(s: Series, at: Callable[[Point], Point]) -> Markup:
    """A line, its band, its marks."""
    points = [at(p) for p in thinned(s.points)]
    parts = []
    if s.band:
        edge = [at((p[0], b[1])) for p, b in zip(s.points, s.band, strict=True)]
        edge += [at((p[0], b[0])) for p, b in zip(reversed(s.points), reversed(s.band), strict=True)]
        parts.append(h('<polygon class="band {}" points="{}"/>', s.kind, path(edge)))
    if s.style != "dots":
        parts.append(h('<polyline class="line {} {}" points="{}"/>', s.kind, s.style, path(points)))
    return joined([*parts, *(mark(s.mark, s.kind, p) for p in points if s.mark)])


def mark(shape: str, kind: str, p: Point, size: float = 4) -> Markup:
    """A circle (``hollow`` or not) or a diamond."""
    if shape == "diamond":
        corners = [(p[0], p[1] - size - 1), (p[0] + size + 1, p[1]), (p[0], p[1] + size + 1), (p[0] - size - 1, p[1])]
        return h('<polygon class="dot {}" points="{}"/>', kind, path(corners))
    return h('<circle class="{} {}" cx="{:.1f}" cy="{:.1f}" r="{}"/>', "hollow" if shape == "hollow" else "dot", kind, p[0], p[1], size)


def path(points: Iterable[Point]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def thinned(points: Sequence[Point]) -> list[Point]:
    """The points; where there are more than ``MOST``, the means of neighbors."""
    each = ceil(len(points) / MOST)
    if each <= 1:
        return list(points)
    parts = [points[i : i + each] for i in range(0, len(points), each)]
    return [(sum(p[0] for p in part) / len(part), sum(p[1] for p in part) / len(part)) for part in parts]


def apart(ends: Sequence[tuple[float, Series]], top: float, bottom: float) -> list[tuple[float, Series]]:
    """Heights for the names at the ends of lines, so that no two names overlap: moved down first, then up from the chart's lower edge."""
    placed, least = list[tuple[float, Series]](), top
    for y, s in sorted(ends, key=lambda end: end[0]):
        placed.append((max(y, least), s))
        least = placed[-1][0] + LINE
    below = bottom
    for i in range(len(placed) - 1, -1, -1):
        placed[i] = (min(placed[i][0], below), placed[i][1])
        below = placed[i][0] - LINE
    return placed


# Points with names -------------------------------------------------------------------------------------------------------

Box = tuple[float, float, float, float]  # left, top, right, bottom


def beside(points: Sequence[Point], names: Sequence[str], within: Box, others: Sequence[Box] = ()) -> list[tuple[float, float, bool]]:
    """A place for every name: its left end, its middle height, and whether it is so far from its point that a line must lead to it. As
    long as there is room, a name covers no point, no other name and none of ``others``. The first names choose first.
    """
    taken: list[Box] = [*others, *((x - 6, y - 6, x + 6, y + 6) for x, y in points)]
    found = []
    for (x, y), name in zip(points, names, strict=True):
        wide = LETTER * len(name)
        ring = [(9.0, 0.0), (-9 - wide, 0.0), (-wide / 2, -15.0), (-wide / 2, 15.0)]
        for far in range(14, 150, 8):
            for dy in (-far, far, -far / 2, far / 2):  # right of the point, left of it, above or below it
                ring += [(0.8 * far, dy), (-0.8 * far - wide, dy), (-wide / 2, dy)]
        boxes = [(dx, dy, (x + dx - 2, y + dy - 7, x + dx + wide + 2, y + dy + 7)) for dx, dy in ring]
        free = (one for one in boxes if inside(one[2], within) and not any(overlap(one[2], other) for other in taken))
        dx, dy, box = next(free, boxes[0])
        taken.append(box)
        found.append((x + dx, y + dy, abs(dy) > 16 or dx > 20 or dx + wide < -20))
    return found


def inside(box: Box, within: Box) -> bool:
    return box[0] >= within[0] and box[1] >= within[1] and box[2] <= within[2] and box[3] <= within[3]


def overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
