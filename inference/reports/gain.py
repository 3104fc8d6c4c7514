"""The section of a page about several sequences at once: the gain of drafting against their number."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from headstart.inference.reports.charts import KINDS, Series, lines
from headstart.inference.reports.page import between, figure, h, interval, table
from headstart.inference.reports.report import Report


def several(report: Report) -> list[Markup]:
    """A chart and a table of the speed-up against the number of sequences decoded at once; empty if all were decoded one at a time."""
    series, rows = list[Series](), report.batches or ()
    banded = all(interval(row, "speedup") for row in rows)
    for temperature, kind, shape in KINDS:
        here = [row for row in rows if row.temperature == temperature]
        band = [interval(row, "speedup") for row in here] if banded else ()
        series.append(Series(f"T = {temperature}", kind, [(float(row.sequences), row.speedup) for row in here], band, shape))
    why = "Tokens per second over those of plain decoding of the same prompts, as many at once. Below the dashed line drafting loses time."
    why += " By decode=auto, which leaves guessing out where it does not pay." if "auto_temperature_0" in report else ""
    why += " The band is the interval over what was decoded together." if banded else ""
    body = [
        [f"{row.sequences}, T = {row.temperature}", f"{row.speedup:.2f}×", between(interval(row, "speedup")),
         f"{row.tokens_per_second:,.0f}", f"{row.plain_tokens_per_second:,.0f}", f"{row.accepted_length:.2f}"]
        for row in rows
    ]  # fmt: skip
    caption = "Tokens per second of all sequences together, until the last of them has ended, the prompts' passes included"
    head = ["at once", "speed-up", "interval", "tokens/s", "plain", "accepted length"]
    numbers = table(caption, head, body, range(1, len(head)), scrolls=True, tight=True)
    return [h('<div class="pair">{}{}</div>', figure(why, by_sequences(series)), numbers)] if body else []


def by_sequences(series: Sequence[Series]) -> Markup:
    """Speed-ups against sequences at once, with the line below which drafting does not pay."""
    said = "; ".join(f"{s.name}: " + ", ".join(f"{y:.2f} times with {x:.0f}" for x, y in s.points) for s in series)
    level = Series("break-even", "plain", [(x, 1.0) for x in sorted({x for s in series for x, _ in s.points})], style="dash")
    what = "times as fast as plain decoding"
    return lines([*series, level], f"{what}, by sequences at once. {said}", x="sequences at once", y=what, doubling_x=True)
