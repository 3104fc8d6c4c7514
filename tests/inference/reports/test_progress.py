"""Measurements that take minutes say so in a log file; and what a report says where decode=auto does not guess."""

from __future__ import annotations

import re
from typing import Any

import pytest

from headstart.inference.reports import progress
from headstart.inference.reports.render import figures_table, show
from headstart.inference.reports.report import Report
from headstart.inference.reports.report_page import report_page
from headstart.inference.reports.summary import summary
from tests.pages import Page
from tests.reports import a_report, figures

COSTS = {"chain of 6": 2.0}


def test_a_log_file_is_told_now_and_then(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    clock = iter(range(0, 900, 10))  # seconds: 10 before the first, and 10 an item
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    assert list(progress.watched(iter("abcdefg"), "letters", 7)) == list("abcdefg")
    assert re.findall(r"^letters: \d of 7$", capsys.readouterr().out, re.MULTILINE) == ["letters: 2 of 7", "letters: 5 of 7"]


def test_a_log_file_has_no_line_of_what_is_quick(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    clock = iter(range(0, 900, 10))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    assert list(progress.watched([1, 2], "numbers")) == [1, 2] and capsys.readouterr().out == ""


def idle(chain: float, low: float) -> Report:
    """One whose decode=auto did not guess at temperature 0; ``chain``: how fast a chain was, and at least is."""
    report = a_report(auto={f"temperature_{t}": {"costs": COSTS, "rounds": {"no guesses": 1.0 - t}} for t in (0, 1)})
    report |= {f"auto_temperature_{t}": report[f"temperature_{t}"] | {"accepted_length": 1.0 + t, "speedup": 1.01} for t in (0, 1)}
    report["chain_temperature_0"] |= {"speedup": chain, "intervals": {"speedup": [low, 9.0], "accepted_length": [1, 2]}}
    return Report.of(report)


def test_the_table_says_what_of_it_is_not_guessing_and_what_a_chain_gains(capsys: pytest.CaptureFixture[str]) -> None:
    table = figures_table(idle(1.22, 1.1))
    assert "| decode=auto: rounds without guesses | 100% | 0% |" in table
    assert "| a chain of 6: accepted length | 3.00 (1.00 to 2.00) | 2.00 |" in table
    assert [line for line in table if line.startswith("| a chain of 6: speed-up | 1.22 (1.10 to 9.00) |")]
    assert "| accepted length (tokens per target pass) | 3.20 | 2.10 |" in table, "of the tree, whatever was left out"
    assert "| decode=auto: tokens per pass | 1.00 | 2.00 |" in table and "| decode=auto: speed-up | 1.01 | 1.01 |" in table
    assert [line for line in table if line.startswith("| speed-up, this tree in every round |")], "it is not what is served"
    assert [line for line in figures_table(Report.of(a_report())) if line.startswith("| speed-up |")]
    show(idle(1.22, 1.1))
    assert "decode=auto: rounds" in (shown := capsys.readouterr().out) and "a chain of 6: accepted" in shown


def test_the_page_leads_with_what_is_guessed_and_with_the_speed_of_what_is_served() -> None:
    page = Page(report_page(idle(1.22, 1.1)))
    assert [e.text for e in page.root.all("dd", class_="big")] == ["1.01×", "3.20", "1.01×", "2.10"]
    rows = {row.all("th")[0].text: row.all("td")[-1].text for row in page.root.all("tr") if row.all("td", class_="bar")}
    assert rows["eagle, T = 0"] == "1.60×" and rows["a chain, T = 0"] == "1.22×" and rows["decode=auto, T = 0"] == "1.01×"


@pytest.mark.parametrize("chain, low, said", [(1.22, 1.1, True), (1.22, 0.9, False), (0.9, 0.8, False)])
def test_a_chain_that_is_faster_than_what_auto_chose_is_named(chain: float, low: float, said: bool) -> None:
    lines: Any = [line for line in summary(idle(chain, low)) if "faster here than what decode=auto chose" in line]
    assert len(lines) == said and all("decode=chain decode.depth=6" in line and "1.22 times" in line for line in lines)


@pytest.mark.parametrize("speedup, said", [(1.01, False), (0.75, True)])
def test_why_nothing_is_guessed_is_said(speedup: float, said: bool) -> None:
    """By the times of the report's table: 3.00 tokens at 0.75 are those of 4.0 plain rounds, whatever decode=auto believed."""
    report = idle(speedup, 0.7)
    report = Report.of(report | {"auto": {"temperature_0": {"costs": {"chain of 6": 9.2}, "rounds": {"no guesses": 1.0}}}})
    lines, chain = [line for line in summary(report) if "leaves guessing out" in line], report["chain_temperature_0"]["acceptance_by_depth"]
    assert len(lines) == said and all("yields 3.00 tokens and takes as long as 4.0 plain rounds" in line for line in lines)
    best = max((1 + sum(chain[:d])) / (1 + d / 20) for d in range(len(chain) + 1))
    assert all(f"would give {best:.1f} times" in line for line in lines)


@pytest.mark.parametrize("high, none, said", [(0.9, 0.25, True), (1.02, 0.25, False), (0.9, 0.95, False)])
def test_a_loss_of_auto_is_said(high: float, none: float, said: bool) -> None:
    """2.00 tokens at 0.50 are those of 4.00 plain rounds; a quarter without guesses and the rest at 2.0 make 1.75. Not where it hardly
    drafted: what is lost there is the spread of the machine.
    """
    auto = {"temperature_0": {"costs": {"chain of 3": 2.0, "chain of 6": 3.0}, "rounds": {"chain of 3": 1 - none, "no guesses": none}}}
    lost = figures(2.0, 0.5) | {"intervals": {"speedup": [0.4, high]}}
    lines = [line for line in summary(Report.of(a_report(auto=auto, auto_temperature_0=lost))) if "lost time" in line]
    assert len(lines) == said and all("took 4.00 plain rounds, and its measurement at the start said 1.75" in line for line in lines)


@pytest.mark.parametrize("off, data, said", [(3.2, "text", False), (4.5, "text", True), (4.5, "regenerated", False)])
def test_text_that_the_target_does_not_say_is_named(off: float, data: str, said: bool) -> None:
    report = Report.of(a_report(off_policy_expected_length=off, data=data))  # over its own text: 3.0
    assert any("python -m data regenerate" in line for line in summary(report)) == said


def test_a_drafter_that_was_trained_further_is_compared_with_the_one_it_began_with() -> None:
    def before(*sure: list[float]) -> Report:
        found = {f"temperature_{t}": {"accepted_length": 2.5, "times": 1.28, "intervals": {"times": x}} for t, x in enumerate(sure)}
        return Report.of(a_report(began_with={"speculator": "old/speculator", **found}))

    better = before([1.1, 1.4], [0.9, 1.6])
    assert "| times that of the drafter it began with | 1.28 (1.10 to 1.40) | 1.28 (0.90 to 1.60) |" in figures_table(better)
    said = "it began with old/speculator, whose accepted length over the same prompts is 2.50 at temperature 0 (longer now) and 2.50 at "
    said += "temperature 1 (these prompts do not tell them apart)"
    assert said in summary(better) and said in report_page(better)
    assert any("at temperature 0 (SHORTER now)" in line for line in summary(before([0.8, 0.99], [1.1, 1.2])))
    assert not any("began with" in line for line in [*figures_table(Report.of(a_report())), *summary(Report.of(a_report()))])
