"""The frame of report.html and comparison.html: one file that needs no other, for screens, keyboards, screen readers and paper.

Everything is put together by ``Markup.format``, which escapes what it is given: no text from a file can become markup of the page."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from markupsafe import Markup, escape

from headstart.inference.reports.style import SCRIPT, STYLE

CONTROLS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")  # characters that no page may hold

POLICY = Markup("default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:")  # a page loads nothing

PAGE = Markup("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<a class="skip" href="#main">to the figures</a>
<header><h1>{title}</h1>{lead}</header>
<main id="main">{sections}</main>
<footer>{footer}</footer>
<script>{script}</script>
</body>
</html>
""")


def safe(text: Any) -> Markup:
    """Text of a file within a page: escaped, and without control characters."""
    return escape(CONTROLS.sub("\ufffd", str(text)))


def h(template: str, *values: Any, **named: Any) -> Markup:
    """``template`` with these values in it. The template is trusted; values are escaped, except numbers and Markup."""

    def of(value: Any) -> Any:
        return value if isinstance(value, Markup | int | float) else safe(value)

    return Markup(template).format(*map(of, values), **{key: of(value) for key, value in named.items()})


def joined(parts: Iterable[Markup]) -> Markup:
    return Markup("\n").join(parts)


def page(title: str, lead: Markup, sections: Iterable[Markup], footer: Markup) -> str:
    """A whole page. Sections that are empty are left out."""
    parts = dict(title=safe(title), style=Markup(STYLE), script=Markup(SCRIPT), policy=POLICY)
    return str(PAGE.format(lead=lead, sections=joined(filter(None, sections)), footer=footer, **parts))


def section(title: str, *parts: Markup) -> Markup:
    """A section with a heading; empty where all its parts are."""
    name = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
    inside = joined(filter(None, parts))
    if not inside:
        return Markup()
    return h('<section aria-labelledby="{0}"><h2 id="{0}">{1}</h2>\n{2}</section>', name, title, inside)


def figure(caption: str, drawn: Markup, *, scrolls: bool = False) -> Markup:
    """A drawing with its caption; empty without a drawing. ``scrolls``: what is too wide for a phone can be scrolled, by keyboard too."""
    inside = h('<div class="scroll" tabindex="0" role="group" aria-label="{}">{}</div>', caption, drawn) if scrolls else drawn
    return h("<figure><figcaption>{}</figcaption>{}</figure>", caption, inside) if drawn else Markup()


def table(
    caption: str, head: Sequence[str], rows: Iterable[Sequence[Any]], numbers: Sequence[int] = (), *, scrolls: bool = False,
    tight: bool = False,
) -> Markup:  # fmt: skip
    """A table; empty without rows. The first cell of each row is its heading. ``numbers``: indices of the columns that are aligned to the
    right. Cells that are ``<td>`` already stay as they are. ``scrolls``: as for a figure; ``tight``: for tables of many columns.
    """

    def cell(at: int, value: Any) -> Markup:
        if isinstance(value, Markup) and value.startswith("<td"):
            return value
        kind = Markup(' class="n"') if at in numbers else Markup()
        return h('<th scope="row"{}>{}</th>', kind, value) if at == 0 else h("<td{}>{}</td>", kind, value)

    body = joined(h("<tr>{}</tr>", joined(cell(at, value) for at, value in enumerate(row))) for row in rows)
    if not body:
        return Markup()
    top = joined(h('<th scope="col"{}>{}</th>', Markup(' class="n"') if at in numbers else Markup(), x) for at, x in enumerate(head))
    kind = Markup(' class="tight"') if tight else Markup()
    made = h("<table{}><caption><span>{}</span></caption><thead><tr>{}</tr></thead><tbody>{}</tbody></table>", kind, caption, top, body)
    return h('<div class="scroll" tabindex="0" role="region" aria-label="{}">{}</div>', caption, made) if scrolls else made


def bar(share: float, kind: str) -> Markup:
    """A cell with a bar; its value stands in a cell beside it."""
    return h('<td class="bar"><span class="{}" style="width:{:.1f}%"></span></td>', kind, 100 * max(0.0, min(share, 1.0)))


def about(facts: Mapping[str, Any]) -> Markup:
    """A list of names and values, without those that are empty."""
    return h('<dl class="about">{}</dl>', joined(h("<dt>{}</dt><dd>{}</dd>", k, v) for k, v in facts.items() if v not in ("", None)))


def folded(summary: str, *inside: Markup, opened: bool = False) -> Markup:
    """Content that is hidden until the reader opens it."""
    return h("<details{}><summary>{}</summary>{}</details>", Markup(" open") if opened else Markup(), summary, joined(inside))


def shortened(name: str, most: int) -> str:
    """The name without its middle where it has more than ``most`` letters: the names of a sweep often differ in their ends alone."""
    return name if len(name) <= most else f"{name[: (most - 1) // 2]}…{name[-(most // 2) :]}"


def interval(figures: Mapping[str, Any], key: str) -> Any:
    """The interval [low, high] of a figure, or a list of them; None where there is none."""
    return (figures.get("intervals") or {}).get(key)


def between(interval: Sequence[float] | None, form: str = "{:.2f}") -> str:
    """An interval in words; nothing where there is none."""
    return "" if not interval else f"{form.format(interval[0])} to {form.format(interval[1])}"
