"""report.html: one drafter for one target, in one file, made from the report and the curves of the training (if there are any)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from markupsafe import Markup

from headstart.heads.errors import counted
from headstart.heads.serving import ASKS, asking_an_engine
from headstart.inference.reports import heatmap
from headstart.inference.reports.charts import KINDS, Series, lines
from headstart.inference.reports.figures import COVERED, GRAM, too_much
from headstart.inference.reports.gain import several
from headstart.inference.reports.lengths import APART
from headstart.inference.reports.page import about, bar, between, figure, folded, h, interval, joined, page, section, table
from headstart.inference.reports.report import Report, shape_of
from headstart.inference.reports.summary import summary
from headstart.inference.reports.verdict import plain_at

NAME = "report.html"

Curves = Sequence[Mapping[str, Any]]  # the lines of metrics.jsonl


def report_page(report: Report, curves: Curves = ()) -> str:
    """The text of report.html."""
    title = f"{report.head} for {report.target}"
    sections = [
        section("Accepted guesses, by depth", *depths(report)),
        section("Speed", *speed(report)),
        section("Several sequences at once", *several(report)),
        section("Expected and decoded", *expected(report)),
        section("The decoded text", *heatmap.texts(report)),
        section("Training", *training(report, curves)),
        section("Settings that differ from the defaults", settings(report)),
        section("More to know", h("<ul>{}</ul>", joined(h("<li>{}</li>", line) for line in summary(report)))),
        section("How it is served", *served(report)),
        section("Where the figures are from", provenance(report)),
    ]
    footer = f"Intervals cover {COVERED:.0%}, by bootstrap over prompts. The figures are in report.json, the rounds in rounds.jsonl."
    return page(title, lead(report), sections, h("{}", footer))


def at(report: Report, temperature: int, chain: bool = False) -> Mapping[str, Any]:
    """The figures at temperature 0 or 1, of the tree or of the chain; empty where the report has none."""
    found: Mapping[str, Any] = report.get(f"{'chain_' * chain}temperature_{temperature}", {})
    return found


def as_served(report: Report, temperature: int) -> Mapping[str, Any]:
    """The figures of decode=auto where it was asked for, else of the tree."""
    found: Mapping[str, Any] = report.get(f"auto_temperature_{temperature}") or at(report, temperature)
    return found


def lead(report: Report) -> Markup:
    """The head of the page: speed-up and accepted length at both temperatures, and a sentence that sums them up."""
    tiles, fast = [], "Speed-up, decode=auto" if "auto_temperature_0" in report else "Speed-up"
    for temperature, kind, _ in KINDS:
        tree, served = at(report, temperature), as_served(report, temperature)
        lengths = ("Accepted length", tree, "accepted_length", "{:.2f}")
        for name, figures, key, unit in ((fast, served, "speedup", "{:.2f}×"), lengths):
            within = between(interval(figures, key), unit)
            note = f"between {within.replace(' to ', ' and ')}" if within else "no interval"
            if key == "speedup" and plain_at(figures["accepted_length"]):
                note = "plain decoding: what differs from 1 is the spread of the machine"
            value = unit.format(figures[key])
            tile = '<div class="{}"><dt>{}, T&nbsp;=&nbsp;{}</dt><dd class="big">{}</dd><dd>{}</dd></div>'
            tiles.append(h(tile, kind, name, temperature, value, note))
    where = (
        f"{counted(report.prompts, 'prompt')} from {report.prompts_from}; {report.dtype} on {report.device}; commit {report.commit[:12]}"
    )
    if "repetition" in at(report, 0):
        where += f"; repeated {GRAM}-grams: " + ", ".join(f"{at(report, t)['repetition']:.0%} at T = {t}" for t, *_ in KINDS)
    words = h('<p class="lead">{}</p><p class="soft small">{}</p>', sentence(report), where)
    words += joined(h('<p class="note">{}.</p>', line[0].upper() + line[1:]) for line in too_much({t: at(report, t) for t, *_ in KINDS}))
    return joined([words, h('<dl class="tiles">{}</dl>', joined(tiles))])


def sentence(report: Report) -> str:
    """A sentence on the figures at temperature 0 that claims no more than their interval allows."""
    figures = as_served(report, 0)
    gain, sure, length = figures["speedup"], interval(figures, "speedup"), at(report, 0)["accepted_length"]
    low, high = sure or (gain, gain)
    same = "not told apart from plain decoding by these prompts" if low <= 1 <= high else ""
    fast = same or (f"{gain:.2f} times as fast as plain decoding" if gain > 1 else f"slower than plain decoding ({gain:.2f} of its speed)")
    exact = "the target's own output" if report.lossless else "NOT the target's own output"
    if plain_at(figures["accepted_length"]):
        fast = "plain decoding, because it leaves guessing out"
    how = f"its tree says {length:.2f} tokens for every pass of the target, decode=auto is {fast}, and what it says is {exact}"
    if "auto_temperature_0" not in report:
        how = f"it is {fast}, with {length:.2f} tokens for every pass of the target, and what it says is {exact}"
    if "auto_not_tried" in report:
        return f"At temperature 0 with the same tree in every round {how}. {report['auto_not_tried']}."
    return f"At temperature 0 {how}."


def depths(report: Report) -> list[Markup]:
    """How often the guesses of every depth were accepted."""
    series, rows = [], []
    for temperature, kind, shape in KINDS:
        figures, sure = at(report, temperature), interval(at(report, temperature), "acceptance_by_depth") or ()
        shares = figures["acceptance_by_depth"]
        points = [(float(d), 100 * share) for d, share in enumerate(shares, start=1)]
        series.append(Series(f"T = {temperature}", kind, points, [[100 * x for x in pair] for pair in sure], shape))
        rows.append([f"T = {temperature}, of all", *(f"{share:.0%}" for share in shares)])
        if given := figures.get("conditional_acceptance_by_depth"):  # earlier reports have none
            rows.append([f"T = {temperature}, if reached", *(f"{share:.0%}" for share in given)])
    deepest = max(len(row) for row in rows) - 1
    rows = [[*row, *[""] * (deepest + 1 - len(row))] for row in rows]
    said = "; ".join(f"{s.name}: " + ", ".join(f"{p[1]:.0f} %" for p in s.points) for s in series)
    chart = lines(series, f"acceptance by depth. {said}", x="depth of the guess", y="% of rounds", floor_y=0, top_y=100, whole_x=True)
    which = "Share of rounds in which the guess of a depth was accepted: of all rounds, and of those in which all before it were"
    numbers = table(which, ["", *map(str, range(1, deepest + 1))], rows,
                    range(1, deepest + 1), scrolls=True, tight=True)  # fmt: skip
    why = "A guess counts as accepted when it and all before it were."
    why += " The band is the interval over prompts." if any(s.band for s in series) else ""
    return [h('<div class="pair">{}{}</div>', figure(why, chart), numbers)]


def speed(report: Report) -> list[Markup]:
    """Tokens per second beside those of the alternatives, and where the time of a round goes."""
    rows: list[tuple[str, float, str, str]] = [("transformers' generate, T = 0", report.hf_generate_tokens_per_second, "", "")]
    for temperature, kind, _ in KINDS:
        rows.append((f"plain decoding, T = {temperature}", at(report, temperature)["plain_tokens_per_second"], "", ""))
        others = {"chain_": "a chain", "auto_": "decode=auto"} if "auto_temperature_0" in report else {}
        for shape, name in ({"": report.head} | others).items():
            if figures := report.get(f"{shape}temperature_{temperature}"):
                rows.append((f"{name}, T = {temperature}", figures["tokens_per_second"], kind, f"{figures['speedup']:.2f}×"))
    most = max(value for _, value, _, _ in rows)
    body = [[name, bar(value / most, kind), f"{value:,.0f}", gain] for name, value, kind, gain in rows]
    caption = "Tokens per second of wall clock, the prompts' passes included, one prompt at a time, same run"
    return [table(caption, ["", "", "tokens/s", "over plain"], body, (2, 3)), *round_time(report)]


def round_time(report: Report) -> list[Markup]:
    """Where the time of a round goes, in passes of plain decoding, as far as it was measured."""
    cold, found = at(report, 0), list[Markup]()
    if not (tau := cold["accepted_length"]):  # every text ended with the token that the pass over the prompt gives: there was no round
        return []
    total = tau / cold["speedup"]
    plain = 1000 / cold["plain_tokens_per_second"]
    told = f"At temperature 0 a round takes {total * plain:,.3g} ms, as long as {total:.2f} plain passes of {plain:,.3g} ms (the time of "
    told += f"the prompts' passes is shared out among both): it pays when it gives more than {total:.2f} tokens, and it gives {tau:.2f}."
    found.append(h("<p>{}</p>", told))
    if "v" in report and "predicted_speedup" in report:
        drafting = max(tau / report["predicted_speedup"] - report["v"], 0.0)
        parts = {
            "a": ("the target's pass over one token", min(1.0, report["v"])),
            "b": ("its guesses in that pass", max(report["v"] - 1, 0.0)),
            "c": ("drafting", drafting),
            "d": ("the rest", max(total - report["v"] - drafting, 0.0)),
        }
        whole = sum(size for _, size in parts.values())
        spans = joined(h('<span class="{}" style="width:{:.1f}%"></span>', k, 100 * size / whole) for k, (_, size) in parts.items())
        keys = joined(h('<li><span class="key {}"></span>{} {:.2f}</li>', k, name, size) for k, (name, size) in parts.items())
        drawn = h('<div class="parts" aria-hidden="true">{}</div><ul class="legend">{}</ul>', spans, keys)
        found.append(figure("A round at temperature 0, in plain passes", drawn))
    for key, auto in (report.get("auto") or {}).items():
        costs, shares = {"no guesses": 1.0} | dict(auto["costs"]), auto["rounds"]
        rows = [[what, bar(share, f"t{key[-1]}"), f"{share:.0%}", f"{costs.get(what, 0):.2f}"] for what, share in shares.items()]
        rows += [[what, "", "", f"{cost:.2f}"] for what, cost in costs.items() if what not in shares]
        what = f"What decode=auto chose for the rounds at {key.replace('_', ' ')}, and what each shape costs"
        found.append(table(what, ["", "", "of the rounds", "plain passes each"], rows, (2, 3)))
    return found


def expected(report: Report) -> list[Markup]:
    """The expected accepted length, as training computes it, beside the decoded one; and the diagnosis, where the report holds one."""
    rows = truth(report)
    if rows and (off := report.get("off_policy_expected_length")) is not None:
        rows.append(["held-out text, not the target's own", f"{off:.3f}", *[""] * 4])
    caption = "Tokens a pass: expected from teacher-forced passes, as training does, and decoded with the exported folder"
    head = ["", "expected", "decoded", "apart", "by chance", ""]
    why = f"They part where they are more than {APART:.0%} apart and chance does not explain it. By chance: one standard error."
    found = [table(caption, head, rows, (1, 2, 3, 4), scrolls=True), h('<p class="small soft">{}</p>', why) if rows else Markup()]
    if (diagnosis := report.get("diagnosis")) is not None:
        found.append(h('<div class="note"><h3>Diagnosis</h3>{}</div>', said(diagnosis)))
    return found


def truth(report: Report) -> list[list[Any]]:
    """A row for each shape and temperature that was both expected and decoded."""
    found = []
    for temperature, _, _ in KINDS:
        figures = at(report, temperature, chain=True)
        compared = (report.get("truth") or {}).get(f"temperature_{temperature}", {})
        if not compared and "expected_length" in figures:  # earlier reports, which expect chains only
            sure, guess, decoded = interval(figures, "accepted_length"), figures["expected_length"], figures["accepted_length"]
            apart = abs(guess / decoded - 1) > APART and (None if not sure else not sure[0] <= guess <= sure[1])
            compared = {"chain": {"expected": guess, "decoded": decoded, "apart": apart, "chance": between(sure)}}
        for shape, row in compared.items():
            error, apart, off = row.get("standard_error", 0.0), row.get("apart"), row["expected"] / row["decoded"] - 1
            known = error is not None and isfinite(error)  # a single text has no standard error
            if not known and not apart and abs(off) > APART:
                apart = None
            chance = row.get("chance") or (f"± {error:.3f}" if known and error else "")
            kind, word_ = {False: ("ok", "agree"), True: ("bad", "part"), None: ("", "too few prompts to say")}[apart]
            cells = [f"{row['expected']:.3f}", f"{row['decoded']:.3f}", f"{off:+.2%}", chance]
            found.append([f"{shape}, T = {temperature}", *cells, h('<span class="{}">{}</span>', kind, word_)])
    return found


def said(value: Any) -> Markup:
    """A value of a report as HTML: text, a number, a list or a dictionary."""
    if isinstance(value, Mapping):
        return about({k.replace("_", " "): said(v) for k, v in value.items()})
    if isinstance(value, list | tuple):
        return h("<ul>{}</ul>", joined(h("<li>{}</li>", said(v)) for v in value)) if value else h("none")
    return h("{}", f"{value:.4g}" if isinstance(value, float) else value)


def points(curves: Curves, key: str) -> list[tuple[float, float]]:
    """(step, value) from the lines of metrics.jsonl that have ``key``. Values that are not finite are left out: they cannot be drawn."""
    found = [(line["step"], line[key]) for line in curves if key in line and "step" in line]
    return [(float(step), float(x)) for step, x in found if all(isinstance(n, int | float) and isfinite(n) for n in (step, x))]


def training(report: Report, curves: Curves) -> list[Markup]:
    """The curves of the training, with the decoded accepted lengths as marks on them."""

    last = report.get("train_steps")
    decoded = {t: dict(points(curves, f"decode/T{t}/chain/accepted_length")) for t in (0, 1)}
    for t, found in decoded.items():
        if last and (figures := at(report, t, chain=True)):
            found[float(report.get("exported_step", last))] = figures["accepted_length"]
    lengths = [
        Series("training text", "plain", points(curves, "train/expected_length"), style="thin"),
        Series("held-out text", "plain", points(curves, "heldout/expected_length"), style="dash"),
        *(Series(f"decoded, T={t}", kind, sorted(decoded[t].items()), mark=mark, style="dots") for t, kind, mark in KINDS),
    ]
    losses = [Series("training text", "plain", points(curves, "train/loss"), style="thin"),
              Series("held-out text", "plain", points(curves, "heldout/loss"), style="dash")]  # fmt: skip
    if not any(s.points for s in losses):
        return []

    def words(series: Sequence[Series]) -> str:
        return "; ".join(f"{s.name}: {s.points[-1][1]:.3g} at the end" for s in series if s.points)

    chart = lines(lengths, f"tokens a pass over the training. {words(lengths)}", x="steps", y="tokens a pass", whole_x=True)
    loss = lines(losses, f"loss over the training. {words(losses)}", x="steps", y="loss", whole_x=True)
    why = "Accepted length of a chain: expected from teacher-forced passes (lines), decoded with an export (marks)"
    cost = f"{counted(last, 'step')}, {report['train_tokens']:,} tokens, {report['train_seconds']:,.0f} seconds." if last else ""
    cost += f" Exported: step {report['exported_step']:,}, which decoded best." if "exported_step" in report else ""
    both = h('<div class="pair">{}{}</div>', figure(why, chart), figure("Loss per supervised guess", loss))
    return [h("<p>{}</p>", cost) if cost else Markup(), both]


def settings(report: Report) -> Markup:
    """A table of the settings that the command line changed, with their defaults."""
    changed = report.get("changed_settings") or {}
    rows = [
        [key, *(h('<td class="value">{}</td>', word(each.get(which))) for which in ("value", "default"))] for key, each in changed.items()
    ]
    return table("Everything else is as conf/ has it", ["", "here", "default"], rows, scrolls=True)


def word(value: Any, most: int = 200) -> str:
    """A setting as one would type it, cut after ``most`` characters."""
    text = "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= most else f"{text[:most]}…"


def served(report: Report) -> list[Markup]:
    """The commands that serve the folder."""
    found = [h("<p>No serving engine loads this folder: {}.</p>", report["unserved"])] if report.get("unserved") else []
    for command in report.get("serving", []):
        name = f"{command['engine']} ({command['needs']})"
        found.append(folded(name, h('<pre class="code">{}</pre>', command["text"])))
    if command := asking_an_engine(report):
        found.append(folded(ASKS, h('<pre class="code">{}</pre>', command)))
    return [*found, h("<p>{}.</p>", report["otherwise"])] if report.get("otherwise") else found


def provenance(report: Report) -> Markup:
    """Everything that one needs to make the figures again."""
    each = f" of up to {report.new_tokens} new tokens" if report.new_tokens else ""
    warm = ", ".join(f"{k} {v}" for k, v in at(report, 1).items() if k in ("top_k", "top_p", "min_p", "repetition_penalty", "rule", "seed"))
    return about({
        "target": report.target,
        "drafter": f"{report.head}, {report.drafter_parameters:,} weights",
        "prompts": f"{report.prompts}{each}, from {report.prompts_from}",
        "shape": shape_of(report),
        "sampling at T = 1": warm,
        "data of the training": report.get("data", ""),
        "machine": f"{report.device}, {report.dtype}",
        "the target's passes": report.get("passes", ""),
        "versions": ", ".join(f"{k} {v}" for k, v in report.versions.items()),
        "commit": report.commit,
    })  # fmt: skip
