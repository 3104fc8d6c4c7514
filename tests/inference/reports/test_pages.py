"""report.html and comparison.html, by a parser: whole, closed in themselves, and no text of a file is part of the page's own."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from headstart.inference.reports import charts, comparison_page, heatmap
from headstart.inference.reports.charts import Series, apart, beside, overlap, ticks
from headstart.inference.reports.comparison_page import comparison_page as page_of_all
from headstart.inference.reports.comparison_page import edge
from headstart.inference.reports.lengths import Lengths, compared
from headstart.inference.reports.report import Report, Round
from headstart.inference.reports.report_page import lead, report_page, sentence
from headstart.inference.reports.style import STYLE
from headstart.inference.reports.summary import summary
from headstart.inference.reports.verdict import advice, as_served, headline, rests
from tests.pages import HOSTILE, Page, a_shown_report
from tests.reports import a_report, a_row, figures

CURVES = [{"step": s, "train/loss": 5 / s, "train/expected_length": 1 + s / 40} for s in range(1, 41)]
CURVES += [{"step": s, "heldout/loss": 6 / s, "heldout/expected_length": 1 + s / 50} for s in range(10, 41, 10)]
CURVES += [{"step": 20, "decode/T0/chain/accepted_length": 1.7}]
ALLOWED = (
    "html head meta title link style body a header main footer script section h1 h2 h3 p dl dt dd div figure figcaption table caption "
    "thead tbody tr th td ul li details summary pre span b del u svg text line polyline polygon circle"
)
ABOUT = {"target": "tiny", "prompts": 4, "tree": {"kind": "chain", "depth": 3}, "device": "a CPU", "dtype": "float32", "commit": "abc",
         "versions": {"torch": "2"}}  # fmt: skip


def check_whole(text: str) -> Page:
    """Closed in itself, with a heading to every part; it asks for nothing and runs nothing but its own script."""
    page = Page(text)
    assert page.wrong == []
    (html,) = page.root.all("html")
    assert html.attributes["lang"] == "en" and len(page.root.all("script")) == len(page.root.all("style")) == len(page.root.all("h1")) == 1
    everything = page.root.all()
    assert {e.name for e in everything} <= {*ALLOWED.split()}
    ids = [e.attributes["id"] for e in everything if "id" in e.attributes]
    assert len(ids) == len(set(ids)) and {e.attributes["aria-labelledby"] for e in page.root.all("section")} <= {*ids}
    for element in everything:
        assert not any(key.startswith("on") for key in element.attributes), element.attributes
        assert element.attributes.get("href", "#main") in ("#main", "data:,") and "src" not in element.attributes
        assert element.name != "svg" or element.attributes["aria-label"]
        assert element.name != "table" or element.all("caption")[0].text
    (style,) = page.root.all("style")
    assert (
        "url(" not in style.text
        and "@import" not in style.text
        and "nan" not in "".join(e.attributes.get("points", "") for e in everything)
    )
    return page


def test_nothing_of_a_file_is_part_of_the_page() -> None:
    """Names, tokens, settings, commands and diagnoses that are markup; all of them can be read."""
    for word in HOSTILE:
        said = dict.fromkeys(("target", "device", "prompts_from", "commit", "dtype", "data"), word)
        settings = {word or "x": {"value": word, "default": [word]}}
        serving = [{"engine": word, "needs": word, "language": "bash", "text": word}]
        diagnosis = {"findings": [{"cause": word, "evidence": word, "cure": word}], word or "x": word}
        report = a_shown_report(head=word or "x", changed_settings=settings, serving=serving, diagnosis=diagnosis, unserved=word, **said)
        page = check_whole(report_page(report, [*CURVES, {"step": 3, word: word, "train/loss": word}]))
        assert len(page.root.all("script")) == 1 and (page.root.all("h1")[0].text.startswith(word or "x") or "\ufffd" in page.root.text)
        rows = [a_row(word or "x", 0), a_row("b" + word, 1)]
        about = ABOUT | {"target": word, "apart": [word], "changed": [word], "settings": {word or "x": {word or "x": word, "b" + word: 1}}}
        check_whole(page_of_all(rows, {word: word}, about, {word: CURVES}))


def test_the_text_is_the_text() -> None:
    """What stands in a text, without what was rejected, is what was decoded: token for token."""
    words = [f"<w{i}>" for i in range(40)]
    report = a_shown_report(words=words)
    page = check_whole(report_page(report))
    shown = [pre for pre in page.root.all("pre") if "tabindex" in pre.attributes]
    drafted = sorted(report.texts, key=lambda t: (t.prompt, t.temperature))
    assert len(shown) == len(drafted) == 6
    for pre, text in zip(shown, drafted, strict=True):
        tokens = [e.text for e in pre.all() if e.name in ("b", "u")]
        assert tokens == [words[t] for t in text.tokens]
        rounds = pre.all("span", class_="r")
        assert len(rounds) == len(text.rounds)
        for element, r in zip(rounds, text.rounds, strict=True):
            assert [e.text for e in element.all("b")] == [words[t] for t in r.tokens[: len(r.accepted)]]
            said = element.attributes["data-said"]
            assert all(words[g] in said for g in (r.guesses[i] for i in r.accepted)) and ("Nothing was guessed" in said) == (not r.guesses)
        struck = [e.text for e in pre.all("del")]
        assert set(struck) == {"<w39>", "<w8>"}  # the likelier of the tree's two
    assert "“<w8>” 40% (also guessed: “<w7>” 30%); the target took “<w" in page.root.all("span", class_="r")[1].attributes["data-said"]
    assert "“<w39>” <1%" in page.root.all("span", class_="r")[0].attributes["data-said"]


def test_a_large_report_is_a_small_page() -> None:
    report = a_shown_report(prompts=64, tokens=256, words=["some"] * 3 + [" token", "</script>"])
    text = report_page(report, CURVES)
    assert len(text.encode()) < 3e6
    page = check_whole(text)
    shown = len(page.root.all("details"))
    assert 4 <= shown < 64 and f"{shown} of the 64 prompts" in page.root.text.lower()
    texts = [t for t in report.texts if t.temperature == 0]
    longest = replace(texts[0], tokens=[5] * (heatmap.MOST + 1))
    assert heatmap.chosen([longest, *texts[1:9]]) == list(range(1, 9)), "and one that has none hides nothing"
    assert heatmap.chosen([t for t in report.texts if t.temperature == 0][:9]) == list(range(9)), "all, where there is room"


def test_which_prompts_are_shown_is_said_as_it_is() -> None:
    """From the best to the worst also where nothing but a single long text has no room."""
    report = a_shown_report(words=["a", "b"])
    first, worse = ([t for t in report.texts if t.prompt == prompt] for prompt in (0, 1))
    texts = [replace(t, tokens=[5] * (heatmap.MOST + 1)) for t in first]
    texts += [replace(t, rounds=[Round([token], [], [], []) for token in t.tokens[1:]]) for t in worse]
    texts += [t for t in report.texts if t.prompt == 2]
    shown = check_whole(report_page(replace(report, texts=texts)))
    assert "2 of the 3 prompts, from the best to the worst" in shown.root.text
    assert [e.text.partition(":")[0] for e in shown.root.all("summary")[:2]] == ["Prompt 3", "Prompt 2"]
    starts = [e.text for e in shown.root.all("span", class_="dim")]
    assert starts == ["ab" * 15] * 4, "no sign that something is left out where nothing is"
    long = check_whole(report_page(replace(report, asked=[[0] * (heatmap.CONTEXT + 1)] * 3)))
    assert {e.text for e in long.root.all("span", class_="dim")} == {"…" + "a" * heatmap.CONTEXT}


def test_a_report_without_any_round() -> None:
    """All texts ended with the token that the pass over the prompt gives: nothing is said of rounds that there were not."""
    nothing = figures(3.2, 1.0) | {"accepted_length": 0.0, "acceptance_by_depth": [0.0] * 6}
    of_all = {f"{shape}temperature_{t}": nothing for shape in ("", "chain_") for t in (0, 1)}
    page = check_whole(report_page(Report.of(a_report(**of_all, c=0.1, v=1.2, predicted_speedup=0.0))))
    assert "a round takes" not in page.root.text and "tokens/s" in page.root.text


def test_a_single_text_agrees_only_where_it_is_close() -> None:
    """It has no standard error: how far chance goes is not known."""
    row = compared(Lengths([30.0], [10.0]), Lengths([30.0], [15.0]))
    assert row["standard_error"] is None and not row["apart"]
    rows = {"tree": row, "chain": row | {"expected": 2.01}, "auto": row | {"standard_error": 0.9}}
    page = check_whole(report_page(Report.of(a_report(truth={"temperature_1": rows}))))
    cells = {tr.all("th")[0].text: tr.all("td")[-1].text for tr in page.root.all("tr") if tr.all("th")[0].text.endswith(", T = 1") and
             len(tr.all("td")) == 5}  # fmt: skip
    assert cells == {"tree, T = 1": "too few prompts to say", "chain, T = 1": "agree", "auto, T = 1": "agree"}


def test_a_report_of_before_has_no_empty_rows() -> None:
    given = {key: value for key, value in figures(3.2, 1.6).items() if not key.startswith("conditional")}
    page = check_whole(report_page(Report.of(a_report(temperature_0=given, temperature_1=given))))
    assert "T = 0, of all" in page.root.text and "if reached" not in page.root.text


@pytest.mark.parametrize(
    "changes",
    [{}, {"depth": 15}, {"depth": 1}, {"lossless": False, "differences": [{"tie": False}]}, {"train_steps": None},
     {"auto": {"temperature_0": {"costs": {"chain of 3": 2.0}, "rounds": {"chain of 3": 0.7, "no guesses": 0.3}}}},
     {"c": 0.1, "v": 1.4, "predicted_speedup": 1.7}, {"diagnosis": "the loss mask is shifted"},
     {"chain_temperature_0": None, "chain_temperature_1": None},
     {"truth": {"temperature_0": {"tree": {"expected": 3.0, "decoded": 2.0, "standard_error": float("inf"), "apart": True}}}}],
    ids=str,
)  # fmt: skip
def test_reports_of_all_kinds_are_shown(changes: dict[str, Any]) -> None:
    for curves in ([], CURVES):
        made = {k: v for k, v in a_report(**changes).items() if v is not None}
        page = check_whole(report_page(Report.of(made), curves))
        headings = [e.text for e in page.root.all("h2")]
        assert ("Training" in headings) == bool(curves) and "The decoded text" not in headings
    said = page.root.text
    assert ("NOT the target's own output" in said) == (made.get("lossless") is False) and ("chain of 3" in said) == ("auto" in changes)
    assert ("drafting" in said.split("Expected and decoded")[0]) == ("c" in changes) and ("Diagnosis" in said) == ("diagnosis" in changes)
    assert ("part" in [e.text for e in page.root.all("span", class_="bad")]) == ("truth" in changes)


@pytest.mark.parametrize("worst", [float("nan"), float("inf"), None, "x"])
def test_what_is_no_figure_is_not_drawn(worst: Any) -> None:
    lines = [*CURVES, {"step": 3, "heldout/loss": worst, "train/loss": worst, "heldout/expected_length": worst}, {"heldout/loss": 2.0}]
    text = report_page(Report.of(a_report()), lines)
    check_whole(text)
    assert "nan" not in text.split("<h2")[-1] and text == report_page(Report.of(a_report()), CURVES)
    assert page_of_all([a_row("a", 1)], {}, {}, {"a": lines}) == page_of_all([a_row("a", 1)], {}, {}, {"a": CURVES})


def test_figures_are_those_of_the_report() -> None:
    sure = {"accepted_length": [3.0, 3.4], "speedup": [1.41, 1.83], "acceptance_by_depth": [[0.1, 0.9]] * 6}
    report = Report.of(a_report(temperature_0=a_report()["temperature_0"] | {"intervals": sure}))
    page = check_whole(report_page(report, CURVES))
    assert [e.text for e in page.root.all("dd", class_="big")] == ["1.60×", "3.20", "0.90×", "2.10"]
    assert "between 1.41× and 1.83×" in page.root.text and "1.60 times as fast as plain decoding" in page.root.text
    widths = {
        row.all("th")[0].text: float(row.all("span")[0].attributes["style"][6:-1])
        for row in page.root.all("tr")
        if row.all("td", class_="bar")
    }
    assert widths == pytest.approx({"transformers' generate, T = 0": 56.2, "plain decoding, T = 0": 62.5, "eagle, T = 0": 100.0,
                                    "plain decoding, T = 1": 62.5, "eagle, T = 1": 56.2}, abs=0.1)  # fmt: skip
    (marks,) = [svg for svg in page.root.all("svg") if "tokens a pass over" in svg.attributes["aria-label"]]
    assert len(marks.all("circle")) == 2 and len(marks.all("polygon")) == 1, "decoded at step 20 and at the end"
    (losses,) = [svg for svg in page.root.all("svg") if "loss over" in svg.attributes["aria-label"]]
    spoken = marks.attributes["aria-label"], losses.attributes["aria-label"]  # each chart in words has its own figures
    assert [label.count("held-out text: ") for label in spoken] == [1, 1] and "decoded, T=0: " not in spoken[1]
    unsure = report_page(Report.of(a_report(temperature_0=a_report()["temperature_0"] | {"intervals": sure | {"speedup": [0.9, 1.8]}})))
    assert "not told apart from plain decoding" in unsure


def test_the_cost_of_every_shape_is_shown() -> None:
    """Also of those that decode=auto did not choose, with no share of the rounds."""
    auto = {"temperature_0": {"costs": {"chain of 3": 2.0, "chain of 6": 3.25}, "rounds": {"chain of 3": 0.7, "no guesses": 0.3}}}
    page = check_whole(report_page(Report.of(a_report(auto=auto))))
    rows = {tr.all("th")[0].text: [td.text for td in tr.all("td")[1:]] for tr in page.root.all("tr") if len(tr.all("td")) == 3}
    assert rows["chain of 3"] == ["70%", "2.00"] and rows["chain of 6"] == ["", "3.25"] and rows["no guesses"] == ["30%", "1.00"]


def test_a_cost_that_is_not_shown_is_not_explained() -> None:
    rows = json.loads((Path(__file__).resolve().parents[3] / "benchmarks/results/drafters.json").read_text())["drafters"][:2]
    for shown in (True, False):
        given = [row if shown else {key: value for key, value in row.items() if key != "c"} for row in rows]
        assert ("of one level of drafting" in str(comparison_page.ranking(given))) == shown


# ---- charts ----


def test_ticks_are_round_and_within() -> None:
    for low, high in ((0, 100), (0, 1), (1, 3.7), (0.02, 0.09), (0, 350), (1.5, 1.5001), (-3, 12)):
        found = ticks(low, high)
        assert 2 <= len(found) <= 12 and low - 1e-9 <= found[0] and found[-1] <= high + 1e-9
        assert len({round(b - a, 9) for a, b in zip(found, found[1:], strict=False)}) == 1


def test_names_lie_over_nothing() -> None:
    rows = json.loads((Path(__file__).resolve().parents[3] / "benchmarks/results/drafters.json").read_text())["drafters"]
    page = check_whole(page_of_all(sorted(rows, key=lambda r: -r["speedup"]), {}, ABOUT))
    (svg,) = [s for s in page.root.all("svg") if s.attributes["aria-label"].startswith("accepted length")]
    names = [t for t in svg.all("text") if t.attributes.get("class") == "name"]
    assert {t.text for t in names} == {r["name"] for r in rows}
    arms = OmegaConf.load(Path(__file__).resolve().parents[3] / "conf/experiment/compare.yaml").arms
    assert {r["name"] for r in rows} == {*arms} and len(rows) >= 18, "the table of all drafters is of other arms: make figures"
    boxes = []
    for t in names:
        x, y = float(t.attributes["x"]), float(t.attributes["y"])
        boxes.append((x, y - 9, x + charts.LETTER * len(t.text), y + 1))
    points = [(float(c.attributes["cx"]), float(c.attributes["cy"])) for c in svg.all("circle")]
    assert not any(overlap(a, b) for i, a in enumerate(boxes) for b in boxes[:i])
    assert not any(a[0] < x < a[2] and a[1] < y < a[3] for a in boxes for x, y in points)
    left, top, right, bottom = comparison_page.FRAME
    assert all(left <= a[0] and a[2] <= right and top <= a[1] and a[3] <= bottom for a in boxes)
    ends = apart([(100.0, Series(str(i), "t0", [])) for i in range(8)], 0, 200)
    assert all(b[0] - a[0] >= charts.LINE for a, b in zip(ends, ends[1:], strict=False))
    assert len(beside([(50.0, 50.0)], ["x"], (0, 0, 100, 100))) == 1


def test_who_is_on_the_edge() -> None:
    assert edge([(1, 2), (2, 3), (2, 2.5), (3, 3), (1.5, 2)]) == {0, 1} and edge([(1, 1), (1, 1)]) == {0, 1}


# ---- sentences ----


def test_best_for_whom() -> None:
    def row(name: str, **figures: Any) -> dict[str, Any]:
        return {"name": name, "parameters": 1000, "speedup": 1.0, "t1_speedup": 0.9, "t0_tree": 2.0, "acceptance_by_depth": [0.5]} | figures

    fast, small = row("fast", speedup=1.5, t0_tree=3.0), row("small", speedup=1.45, parameters=10)
    long = row("long", t0_tree=4.0, speedup=1.2, t0_chain=3.5)
    found = advice([fast, small, long])
    assert found[0].startswith("fast: for greedy decoding here") and "1.50×" in found[0]
    assert found[1].startswith("small: for the same with the smallest drafter") and "10 weights" in found[1]
    assert found[2].startswith("long: for targets whose passes are expensive") and "for engines that draft chains (3.50" in found[2]
    assert found[3] == "For sampling at temperature 1: plain decoding; no drafter is faster."
    idle = row("idle", t0_tree=1.0, t0_chain=4.5)  # decode=auto never guessed: nothing is said of what it was accepted for
    assert advice([idle])[0] == "idle: for engines that draft chains (4.50 tokens a pass)."
    useless = row("useless", t0_tree=1.0, t0_chain=1.004, off_policy_expected_length=1.0)
    assert advice([useless])[0].startswith("For greedy decoding"), "nothing was accepted: it is recommended for nothing"
    alone = "At temperature 0 fast is the fastest: 1.50 times as fast as plain decoding."
    assert headline([fast]) == alone and headline([fast, small]).startswith(f"{alone} Its interval is not known")
    sure = [fast | {"speedup_interval": [1.4, 1.6]}, small | {"speedup_interval": [1.3, 1.5]}, long | {"speedup_interval": [1.1, 1.3]}]
    assert headline(sure).endswith("1.40 to 1.60. These prompts do not tell it apart from small.")
    assert headline([row("slow", speedup=0.8), row("slower", speedup=0.7)]).startswith("None is faster than plain decoding")
    assert "no drafter is faster" in advice([row("slow", speedup=0.8)])[-2]
    unsure = advice([row("maybe", speedup=1.1, speedup_interval=[0.9, 1.3])])
    assert unsure[-2].startswith("For greedy decoding here, one sequence at a time: plain decoding; these prompts do not tell maybe apart")


def test_one_prompt_is_one() -> None:
    one, two = Report.of(a_report(prompts=1)), Report.of(a_report(prompts=2))
    assert "(1 prompt compared" in summary(one)[0] and "(2 prompts compared" in summary(two)[0]
    assert "1 prompt from" in str(lead(one)) and "2 prompts from" in str(lead(two))


def test_each_is_judged_as_it_is_served() -> None:
    """By decode=auto where that was measured, else by its tree: of runs with different settings of decode, too."""
    tree, auto = a_row("tree", 0, speedup=2.0), a_row("auto", 1, speedup=0.9, speedup_interval=[0.8, 1.0], auto_speedup=1.2)
    assert headline([auto, tree]).startswith("At temperature 0 tree is the fastest: 2.00 times")
    assert advice([auto, tree])[0].startswith("tree: for greedy decoding here, one sequence at a time (2.00×)")
    assert "auto is the fastest: 1.20 times as fast as plain decoding." in headline([auto]), "its tree's interval is not auto's"
    unsure = a_row("unsure", 0, speedup=1.1, speedup_interval=[0.9, 1.3])
    assert headline([unsure]).endswith("0.90 to 1.30. These prompts do not tell it apart from plain decoding.")
    assert headline([a_row("sure", 0, speedup_interval=[1.7, 1.9]), a_row("b", 0, speedup=1.75)]).endswith("do not tell it apart from b.")
    assert headline([unsure, unsure | {"name": "b", "speedup": 1.0}]).endswith("do not tell it apart from b and plain decoding.")


def test_each_temperature_rests_by_itself() -> None:
    """At temperature 0 decode=auto leaves guessing out, at 1 it gains."""
    measured = {"auto_speedup": 1.4, "t0_auto": 1.0, "auto_t1_speedup": 1.3, "auto_t1_speedup_interval": [1.2, 1.4], "t1_auto": 2.0}
    row = a_row("half", 0, speedup=0.5, **measured)
    served = as_served(row)
    assert (served["speedup"], served["speedup_interval"]) == (1.0, None)
    assert (served["t1_speedup"], served["t1_speedup_interval"]) == (1.3, [1.2, 1.4])
    assert [rests(row, key) for key in ("speedup", "auto_speedup", "auto_t1_speedup", "t1_speedup")] == [False, True, False, False]


def test_no_speed_is_claimed_where_nothing_is_drafted() -> None:
    """decode=auto is plain decoding then, however the clock went."""
    rested = {"auto_speedup": 1.45, "auto_speedup_interval": [1.11, 1.69], "t0_auto": 1.0}
    rested |= {"t1_speedup": 0.3, "auto_t1_speedup": 0.48, "auto_t1_speedup_interval": [0.32, 0.69], "t1_auto": 1.01}
    idle, real = a_row("idle", 0, speedup=0.24) | rested, a_row("real", 1, auto_speedup=1.2, auto_speedup_interval=[1.1, 1.3], t0_auto=2.5)
    nothing = "None is faster than plain decoding at temperature 0; decode=auto leaves guessing out with idle."
    assert headline([idle]) == nothing and not [line for line in advice([idle]) if "×" in line]
    assert headline([idle, real]).startswith("At temperature 0 real is the fastest: 1.20 times")
    assert as_served(idle)["t1_speedup"] == 1.0 and as_served(real)["speedup"] == 1.2
    report = Report.of(a_report(auto_temperature_0=figures(1.0, 1.45), auto_temperature_1=figures(2.0, 1.1)))
    assert "decode=auto is plain decoding, because it leaves guessing out, and" in sentence(report)
    assert str(lead(report)).count("plain decoding: what differs from 1 is the spread of the machine") == 1


def test_what_sets_a_run_apart_is_shown_of_every_run() -> None:
    """Also of the first, where no value is that of most."""
    names = [f"arm {i}" for i in range(7)]
    settings = {"lr": {name: i for i, name in enumerate(names)}, "steps": {name: 7 if i else 9 for i, name in enumerate(names)},
                "rank": {"arm 3": 2}}  # fmt: skip
    page = Page(str(comparison_page.differing(settings, names)))
    said = [e.text for e in page.root.all("td", class_="value")]
    assert said == ["lr=0 steps=9", "lr=1", "lr=2", "lr=3 rank=2", "lr=4", "lr=5", "lr=6"]


def test_lines_of_a_sweep_can_be_told_apart() -> None:
    points = {"eagle_lr=0.001": [], "eagle_lr=0.0001": [(1.0, 2.0)], "eagle_lr=0.0002": [(1.0, 2.0)]}
    shown = comparison_page.leading(points)
    assert len({s.name for s in shown}) == 2 and all(len(s.name) <= 13 for s in shown)
    assert [s.kind for s in shown] == ["plain", "plain"], "bold is the fastest alone, which has no curve here"
    assert len(comparison_page.leading({str(i): [(1.0, 2.0)] for i in range(20)})) == comparison_page.MANY


@pytest.mark.parametrize("count", [0, 1, 2, 17])
def test_comparisons_of_any_size(count: int) -> None:
    rows = [a_row(f"arm {i}", i, parameters=1000 + i) for i in range(count)]
    about = ABOUT | {"settings": {"head.name": {row["name"]: "x" * i for i, row in enumerate(rows)}}}
    page = check_whole(page_of_all(rows, {"lost": "no memory"} if count else {}, about, {row["name"]: CURVES for row in rows}))
    assert len([e for e in page.root.all("th") if e.attributes.get("scope") == "row" and e.text == "arm 0"]) >= min(count, 1)
    assert ("lost failed: no memory" in page.root.text) == (count > 0)


# ---- colours ----


def test_all_that_is_written_stands_out() -> None:
    """WCAG's contrast of 4.5 between every colour of letters and what they stand on, by light, in the dark and on paper."""

    def luminance(colour: str) -> float:
        colour = colour if len(colour) == 7 else "#" + "".join(2 * c for c in colour[1:])
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    schemes = re.findall(r":root \{ color-scheme[^}]*\}|prefers-color-scheme: dark\) \{ :root \{[^}]*\}", STYLE)
    assert len(schemes) == 3
    for scheme in schemes:
        colours = dict(re.findall(r"--(\w+): (#\w+)", scheme))
        for ground in ("paper", "fill"):
            for letters in {"ink", "soft", "cold", "warm", "good", "bad"} & colours.keys():
                light, dark = sorted((luminance(colours[letters]), luminance(colours[ground])), reverse=True)
                assert (light + 0.05) / (dark + 0.05) >= 4.5, (letters, ground, scheme[:40])


def test_the_step_that_was_exported_is_said() -> None:
    """With trainer.keep=best the figures are not of the last one."""
    report = Report.of(a_report(train_steps=4, train_tokens=768, exported_step=2, exported_tokens=384))
    curves = [{"step": step, "train/loss": 1.0, "train/expected_length": 2.0} for step in (1, 4)]
    page = report_page(report, curves)
    assert "4 steps, 768 tokens" in page and "Exported: step 2, which decoded best." in page
    assert "Exported" not in report_page(Report.of(a_report(train_steps=4)), curves)
