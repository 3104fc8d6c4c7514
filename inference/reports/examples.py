"""Some decoded texts as rows of a table for trackers: one text a row, its drafted and accepted tokens marked."""

from __future__ import annotations

from headstart.inference.reports.heatmap import CONTEXT, length, rejected
from headstart.inference.reports.report import Report, Text

COLUMNS = ("prompt", "temperature", "drafted as", "tokens a pass", "drafted", "accepted", "text")
PROMPTS = 8  # shown at most
ACCEPTED, REJECTED = "⟦{}⟧", "⟪{}⟫"  # brackets that do not occur in source code


def examples(report: Report) -> list[list[str | int | float]]:
    """Rows with the columns ``COLUMNS`` for the first prompts: the end of the prompt, how it was decoded, tokens a pass of the target, how
    many were drafted and accepted, and the text, in which ⟦...⟧ was drafted and accepted, ⟪...⟫ drafted and rejected for what follows, and
    the rest is the target's own. No rows where the report holds no texts.
    """
    drafted = [text for text in report.texts if text.rounds and text.what in ("tree", "chain")]
    shown = list(dict.fromkeys(text.prompt for text in drafted))[:PROMPTS]
    return [_row(report, text) for text in drafted if text.prompt in shown]


def _row(report: Report, text: Text) -> list[str | int | float]:
    counts = [sum(len(each) for each in column) for column in ([r.guesses for r in text.rounds], [r.accepted for r in text.rounds])]
    before = report.spelt(report.asked[text.prompt][-CONTEXT:])[-CONTEXT:]
    return [before, text.temperature, text.what, round(length(text), 4), *counts, marked(report, text)]


def marked(report: Report, text: Text) -> str:
    """A text in which every round shows what was guessed: ``⟦accepted⟧⟪rejected⟫own``."""
    parts = [report.spelt(text.tokens[:1])]
    for r in text.rounds:
        accepted, own = r.tokens[: len(r.accepted)], r.tokens[len(r.accepted) :]
        parts.append(ACCEPTED.format(report.spelt(accepted)) if accepted else "")
        parts.append(REJECTED.format(report.spelt([r.guesses[missed[0]]])) if own and (missed := rejected(r)) else "")
        parts.append(report.spelt(own))
    return "".join(parts)
