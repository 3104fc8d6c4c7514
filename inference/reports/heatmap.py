"""The decoded texts on a page: tokens that were drafted and accepted, drafted tokens that were rejected, and the target's own tokens.

Accepted guesses are shaded (the darker, the surer the drafter was), a rejected one is struck out before the target's own token in its
place, the target's own tokens are underlined. The rest of a round (other guesses, probabilities) is said in a line below the text.
"""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from headstart.inference.reports.page import CONTROLS, folded, h, joined
from headstart.inference.reports.report import Report, Round, Text

MOST = 9000  # tokens on a page, for its size
CONTEXT = 160  # letters of the prompt before a text
OTHERS = 4  # rejected guesses that are named after the best one
LEGEND = Markup("""<ul class="legend"><li><b>shaded</b>: drafted and accepted, the darker the surer the drafter was</li>
<li><del>struck out</del>: drafted and rejected</li><li><u>underlined</u>: the target's own token</li></ul>""")


def texts(report: Report) -> list[Markup]:
    """Some texts of the report, prompt by prompt; nothing where it holds none. (A report reads its texts from rounds.jsonl.)"""
    drafted = [t for t in report.texts if t.what == "tree" and t.rounds]
    prompts = chosen(drafted)
    if not prompts:
        return []
    count = len({t.prompt for t in drafted})
    which = f"{len(prompts)} of the {count} prompts, from the best to the worst" if len(prompts) < count else "all prompts"
    hint = (
        "Point at a text, or move to it with Tab and on with the arrow keys, to see what was guessed in each round and how probable it was"
    )
    parts = [h('<p>{}. <span class="screen">{}.</span></p>', which.capitalize(), hint), LEGEND]
    for at, prompt in enumerate(prompts):
        own = sorted((t for t in drafted if t.prompt == prompt), key=lambda t: t.temperature)
        lengths = ", ".join(f"{length(t):.2f} at T = {t.temperature}" for t in own)
        shown = joined(one(report, t) for t in own)
        parts.append(folded(f"Prompt {prompt + 1}: tokens a pass {lengths}", h('<div class="pair">{}</div>', shown), opened=at == 0))
    return parts


def length(text: Text) -> float:
    """Tokens a pass of the target."""
    return sum(len(r.tokens) for r in text.rounds) / len(text.rounds)


def chosen(drafted: Sequence[Text]) -> list[int]:
    """The prompts that are shown: all in their order where there is room for all, else some, from the best accepted to the worst."""
    sizes, lengths = dict[int, int](), dict[int, float]()
    for text in drafted:
        sizes[text.prompt] = sizes.get(text.prompt, 0) + len(text.tokens)
        lengths.setdefault(text.prompt, length(text))  # of temperature 0, which stands first
    if sum(sizes.values()) <= MOST:
        return list(sizes)
    short = [prompt for prompt, size in sizes.items() if size <= MOST]  # one that is too long must not hide the others
    ranked = sorted(short, key=lambda prompt: -lengths[prompt])
    for count in range(len(ranked), 0, -1):
        some = [ranked[round(i * (len(ranked) - 1) / max(count - 1, 1))] for i in range(count)]
        if sum(sizes[prompt] for prompt in some) <= MOST:
            return some
    return []


def one(report: Report, text: Text) -> Markup:
    """A text with its rounds, the end of its prompt before it."""
    asked = report.spelt(report.asked[text.prompt])
    parts, at = [h('<span class="dim">{}{}</span>', "…" * (len(asked) > CONTEXT), asked[-CONTEXT:]), own(text.tokens[0], report)], 1
    for number, r in enumerate(text.rounds, start=1):
        said = text.probabilities[at + len(r.accepted)] if at + len(r.accepted) < len(text.probabilities) else None
        parts.append(h('<span class="r" data-said="{}">{}</span>', told(number, r, report, said), round_(r, report)))
        at += len(r.tokens)
    name = f"temperature {text.temperature}: {length(text):.2f} tokens a pass, {len(text.rounds)} passes"
    waits = "Point at the text, or use the arrow keys: each round is told here."
    return h(
        '<figure class="text"><figcaption>{0}</figcaption><pre tabindex="0" role="group" aria-label="decoded text, {0}">{1}</pre>'
        '<p class="said" role="status">{2}</p></figure>', name.capitalize(), Markup().join(parts), waits,
    )  # fmt: skip


def round_(r: Round, report: Report) -> Markup:
    """Accepted guesses, the best one that was rejected, and what the target said instead."""
    parts = []
    for token, node in zip(r.tokens, r.accepted, strict=False):
        sure = r.probabilities[node] if r.probabilities else None
        shade = Markup() if sure is None else h(' style="--q:{:.2f}"', sure)
        parts.append(h("<b{}>{}</b>", shade, shown(token, report)))
    rest = r.tokens[len(r.accepted) :]
    if rest and (missed := rejected(r)):
        parts.append(h("<del>{}</del>", shown(r.guesses[missed[0]], report)))
    return Markup().join([*parts, *(own(token, report) for token in rest)])


def rejected(r: Round) -> list[int]:
    """The guesses for the token that the target then said itself, the likeliest first."""
    last = r.accepted[-1] if r.accepted else -1
    found = [node for node, parent in enumerate(r.parents) if parent == last]
    return sorted(found, key=lambda node: -((r.probabilities[node] if r.probabilities else None) or 0.0))


def own(token: int, report: Report) -> Markup:
    return h("<u>{}</u>", shown(token, report))


def shown(token: int, report: Report) -> str:
    """The token's text, with signs for line ends and for characters that cannot be seen."""
    text = report.spelt([token])
    return CONTROLS.sub("\ufffd", text).replace("\r", "␍").replace("\n", "↵\n") or "∅"


def told(number: int, r: Round, report: Report, probability: float | None) -> str:
    """A round in words. ``probability``: that which the target gave to its own token."""

    def name(token: int, sure: float | None = None) -> str:
        text = "".join({" ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍"}.get(c, c) for c in report.spelt([token]))
        return f"“{text}”" + ("" if sure is None else f" {sure:.0%}" if sure >= 0.005 else " <1%")

    def guess(node: int) -> str:
        return name(r.guesses[node], r.probabilities[node] if r.probabilities else None)

    accepted, rest, missed = r.accepted[: len(r.tokens)], r.tokens[len(r.accepted) :], rejected(r)
    count = f"{len(r.tokens)} token{'s' * (len(r.tokens) != 1)}"
    parts = [f"Round {number}, {count}."]
    if accepted:
        parts.append(f"Accepted: {', '.join(map(guess, accepted))}.")
    if rest and missed:
        others = f" (also guessed: {', '.join(map(guess, missed[1 : 1 + OTHERS]))})" if len(missed) > 1 else ""
        parts.append(f"Rejected: {guess(missed[0])}{others}; the target took {name(rest[0], probability)}.")
    elif rest:
        why = "The target added" if r.guesses else "Nothing was guessed; the target said"
        parts.append(f"{why} {name(rest[0], probability)}.")
    return " ".join(parts)
