"""Several prompts at once in a report: its figures are those of real batches, its verdict covers them, older reports are shown without."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch

from headstart.heads.errors import UserError
from headstart.inference.decoding import auto as auto_module
from headstart.inference.decoding.auto import WORTH
from headstart.inference.decoding.decode import generate
from headstart.inference.decoding.decoder import Decoder
from headstart.inference.decoding.engine import Engine
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.sampling import SamplingParams
from headstart.inference.decoding.target import Target
from headstart.inference.proposers.ngram import Ngram
from headstart.inference.reports.compare import figures
from headstart.inference.reports.comparison_page import comparison_page
from headstart.inference.reports.figures import bootstrap
from headstart.inference.reports.measure import Contender, make_report, make_reports
from headstart.inference.reports.render import markdown, show
from headstart.inference.reports.report import NAME, Report
from headstart.inference.reports.report_page import report_page, sentence
from headstart.inference.reports.summary import summary
from headstart.inference.reports.verdict import advice, headline
from headstart.trainers.metrics import decoded
from tests.drafters import random_tokens
from tests.inference.reports.test_pages import check_whole
from tests.inference.reports.test_report import NEW, PROMPTS, TARGET, TREE, drafter
from tests.reports import a_report, some_batches

ASKED = [*PROMPTS, random_tokens(7, seed=4), random_tokens(6, seed=7)]
SIZES = [1, 4, 2, 2]  # as a user may write them; one at a time there is anyway
Call = tuple[bool, int, list[list[int]], list[Any], float]  # drafted, sequences, prompts, what was made, seconds


@functools.cache
def measured() -> tuple[Report, list[Call], dict[int, int]]:
    """A report; every batch behind the first calls of a size, by the decoder itself; and the most sequences that an engine held at once."""
    calls, held = list[Call](), dict[int, int]()
    timed, step = Decoder.timed_many, Engine.step

    def noting(self: Decoder, prompts: Sequence[Sequence[int]], *, sequences: int, **how: Any) -> Any:
        held[sequences] = held.get(sequences, 0)
        now.append(sequences)
        made, took = timed(self, prompts, sequences=sequences, **how)
        calls.append((self.drafter is not None, sequences, [list(p) for p in prompts], made, took))
        return made, took

    def counting(self: Engine) -> Any:
        if now:
            held[now[-1]] = max(held[now[-1]], len(self.active))
        return step(self)

    now = list[int]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Decoder, "timed_many", noting)
        patch.setattr(Engine, "step", counting)
        report = make_report(TARGET(), drafter(), ASKED, TREE, SamplingParams(seed=5), new_tokens=NEW, sequences=SIZES)
    return report, calls, held


def units(calls: list[Call], size: int, drafted: bool, warm: bool) -> list[Call]:
    """Without the first call of each kind, which nothing is measured of."""
    here = [c for c in calls if c[:2] == (drafted, size) and (c[3][0].sampling.temperature > 0) is warm]
    return here[1:]


@pytest.mark.slow
def test_figures_are_those_of_batches_that_were_decoded_together() -> None:
    report, calls, held = measured()
    assert report.batches is not None and held == {2: 2, 4: 4}, "so many at once, in the engine"
    assert [(row.temperature, row.sequences) for row in report.batches] == [(t, n) for t in (0, 1) for n in (1, 2, 4)]
    for row in report.batches:
        if row.sequences == 1:  # the figures of every report
            alone = report[f"temperature_{row.temperature}"]
            assert all(row[key] == alone[key] for key in ("accepted_length", "tokens_per_second", "speedup")) and row.intervals
            continue
        mine, plain = (units(calls, row.sequences, drafted, bool(row.temperature)) for drafted in (True, False))
        whole = [ASKED[i : i + row.sequences] for i in range(0, len(ASKED) - row.sequences + 1, row.sequences)]
        assert [c[2] for c in mine] == [c[2] for c in plain] == whole, "the same prompts, as many at once; no fewer at the end"
        speeds = [sum(len(g.tokens) for c in side for g in c[3]) / sum(c[4] for c in side) for side in (mine, plain)]
        assert [row.tokens_per_second, row.plain_tokens_per_second] == pytest.approx(speeds)
        assert row.speedup == pytest.approx(speeds[0] / speeds[1])
        rounds = [n for c in mine for g in c[3] for n in g.emitted]
        assert row.accepted_length == pytest.approx(sum(rounds) / len(rounds))
        assert ("speedup" in (row.intervals or {})) == (len(whole) > 1), "of one batch nobody knows how far chance goes"
    assert report.batches[1].accepted_length > 1.2, "guesses are right among others too"


@pytest.mark.slow
def test_each_says_what_it_says_alone() -> None:
    """Greedily what plain decoding says, and under a fixed tree above temperature 0 what it says alone: whatever is beside it."""
    report, calls, _ = measured()
    alone = {(t.prompt, t.temperature, t.what): list(t.tokens) for t in report.texts}
    for drafted, size, prompts, made, _ in (u for n in (2, 4) for d in (True, False) for w in (True, False) for u in units(calls, n, d, w)):
        for prompt, row in zip(prompts, made, strict=True):
            temperature, place = int(row.sampling.temperature), ASKED.index(prompt)
            assert row.tokens == alone[place, temperature, "tree" if drafted else "plain"], (size, drafted)
            assert temperature or row.tokens == generate(TARGET(), None, prompt, new_tokens=NEW).tokens
    assert report.lossless and report.differing_prompts == 0


@pytest.mark.slow
def test_sides_take_turns_at_going_first() -> None:
    _, calls, _ = measured()
    cold = [c[0] for c in calls if c[1] == 2 and c[3][0].sampling.temperature == 0]
    assert cold == [False, True] + [False, True] + [True, False], "first calls, then batch by batch"


@pytest.mark.slow
def test_of_an_auto_policy_it_is_what_auto_chose() -> None:
    auto = dataclasses.replace(TREE, kind="auto", depth=2)
    report = make_report(TARGET(), drafter(), ASKED[:2], auto, SamplingParams(), new_tokens=WORTH, sequences=[2])
    assert report.batches is not None and report.lossless
    for row in report.batches:
        if row.sequences == 1:
            assert row.speedup == report[f"auto_temperature_{row.temperature}"]["speedup"]
    assert "By decode=auto, which leaves guessing out" in report_page(report)


def test_where_texts_are_too_short_for_decode_auto_nothing_is_concluded_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """No round is timed, so its rounds would be plain ones: no rows, and no verdict on the drafter."""
    monkeypatch.setattr(auto_module, "KNOWN", WeakKeyDictionary())
    auto = dataclasses.replace(TREE, kind="auto", depth=2)
    report = make_report(TARGET(), drafter(), ASKED[:2], auto, SamplingParams(), new_tokens=WORTH - 1, sequences=[2])
    assert not {"auto", "auto_temperature_0", "auto_temperature_1", "batches"} & {*report} and report.lossless
    assert {text.what for text in report.texts} == {"plain", "tree", "chain"}
    report |= {f"{shape}temperature_{t}": report[f"{shape}temperature_{t}"] | {"speedup": 0.5, "intervals": {}}
               for shape in ("", "chain_") for t in (0, 1)}  # fmt: skip
    said, row = "decode=auto was not tried: texts below 24 tokens are not worth measuring", figures("eagle", report)
    assert said in summary(report) and said in sentence(report) and said in headline([row])
    assert [line for line in advice([row]) if "for " in line.lower() and said in line] == [
        f"For greedy decoding here, one sequence at a time: {said}.",
        f"For sampling at temperature 1: {said}.",
    ]
    whole = " ".join([report_page(report), markdown(report), comparison_page([row], {}, {})])
    assert "speed-up, this tree in every round" in whole
    for verdict in ("leaves guessing out", "no drafter is faster", "decode=auto:"):
        assert verdict not in whole, verdict


@pytest.mark.parametrize("drafted", [True, False])
def test_the_verdict_covers_them(drafted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One token of one prompt, among others only."""
    timed = Decoder.timed_many

    def wrong(self: Decoder, prompts: Sequence[Sequence[int]], *, sequences: int, **how: Any) -> Any:
        made, took = timed(self, prompts, sequences=sequences, **how)
        if (self.drafter is not None) is drafted and ASKED[1] in prompts:
            row = made[list(prompts).index(ASKED[1])]
            row.tokens[3:4] = [(row.tokens[3] + 1) % TARGET().shape.vocab_size] if len(row.tokens) > 3 else []
        return made, took

    monkeypatch.setattr(Decoder, "timed_many", wrong)
    report = make_report(TARGET(), drafter(), ASKED[:2], TREE, SamplingParams(), new_tokens=6, sequences=[2])
    assert not report.lossless and report.differing_prompts == 1 and report.differences[0]["token"] == 3
    assert summary(report)[0].startswith("lossless: NO, 1 differ") and "several at once too" in summary(report)[0]


def test_without_them_nothing_is_decoded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Decoder, "timed_many", None)
    for sequences in ([], [1]):
        report = make_report(TARGET(), drafter(), ASKED[:1], TREE, SamplingParams(), new_tokens=4, sequences=sequences)
        assert report.batches is None and "batches" not in report and "at once" not in markdown(report) + report_page(report)


def test_what_does_not_fit_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    how: dict[str, Any] = dict(new_tokens=4)
    with pytest.raises(UserError, match=r"decode.sequences: 6 at once take as many prompts, there are 5: raise decode.prompts"):
        make_report(TARGET(), drafter(), ASKED, TREE, SamplingParams(), sequences=[2, 6], **how)
    contenders = [Contender(None, TreePolicy("chain", depth=3), proposer=Ngram(), name="n-grams")]
    with pytest.raises(UserError, match=r"decode.sequences: n-grams guesses for one sequence at a time, set it to \[\]"):
        make_reports(TARGET(), contenders, ASKED, SamplingParams(), sequences=[2], **how)
    timed = Decoder.timed_many

    def full(self: Decoder, prompts: Sequence[Sequence[int]], *, sequences: int, **how: Any) -> Any:
        if sequences > 2:
            raise torch.OutOfMemoryError
        return timed(self, prompts, sequences=sequences, **how)

    monkeypatch.setattr(Decoder, "timed_many", full)
    report = make_report(TARGET(), drafter(), ASKED, TREE, SamplingParams(), sequences=[2, 3, 4], **how)
    assert [row["sequences"] for row in report["batches"]] == [1, 2, 1, 2] and report.lossless
    assert "3 sequences do not fit into the device's memory" in capsys.readouterr().out


def test_where_processes_share_the_target_too_little_memory_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them may be the only one with too little. The others would wait for it in their next pass."""

    def full(*_: Any, **how: Any) -> Any:
        monkeypatch.setattr(Target, "sharded", True)
        raise torch.OutOfMemoryError

    monkeypatch.setattr(Decoder, "timed_many", full)
    with pytest.raises(UserError, match=r"decode\.sequences: 3 at once do not fit .*every process: leave 3 and more out"):
        make_report(TARGET(), drafter(), ASKED, TREE, SamplingParams(), new_tokens=4, sequences=[3])


# ---- what is made of them ----


def test_they_are_read_back_and_damaged_ones_refused(tmp_path: Path) -> None:
    report = measured()[0]
    report.write(tmp_path)
    again = Report.read(tmp_path)
    assert again == report and again.batches == report.batches and json.loads((tmp_path / NAME).read_text())["batches"]
    with pytest.raises(AttributeError):
        again.batches[0].speedup = 9.0  # type: ignore[index, misc]
    assert (again | {"c": 0.1}).batches == report.batches
    rows = json.loads((tmp_path / NAME).read_text())
    for wrong in (5, [5], [{"sequences": 2}], "x"):
        (tmp_path / NAME).write_text(json.dumps(rows | {"batches": wrong}))
        with pytest.raises(UserError, match="a report is damaged"):
            Report.read(tmp_path)


def test_they_stand_in_every_form(capsys: pytest.CaptureFixture[str]) -> None:
    rows = some_batches((1, 4, 16), (1.6, 1.2, 0.8), (0.9, 0.7, 0.5))
    rows[1]["intervals"] = {"speedup": [0.95, 1.4]}
    report = Report.of(a_report(batches=rows))
    for text in (markdown(report), markdown(a_report(batches=rows))):  # type: ignore[arg-type]
        assert "| at once | temperature | accepted length | tokens/s with the drafter | without | speed-up |" in text
        assert "| 16 | 0 | 2.00 | 80 | 100 | 0.80 |" in text
        assert "- several sequences at once, at temperature 0: drafting is faster than plain decoding with 1, not with 4, 16," in text
        assert "- several sequences at once, at temperature 1: drafting is not faster with any of 1, 4, 16," in text
    show(report)
    assert "several sequences at once" in capsys.readouterr().out
    numbers = decoded(report)
    assert numbers["speed/T0/sequences/4/speedup"] == 1.2 and numbers["speed/T1/sequences/16/plain_tokens_per_second"] == 100.0
    assert len([name for name in numbers if name.startswith("speed/")]) == 6 * 4


def test_the_page_draws_them() -> None:
    rows = some_batches((1, 2, 8), (1.5, 1.25, 0.75), (1.0, 0.75, 0.5))
    page = check_whole(report_page(Report.of(a_report(batches=rows))))
    (part,) = [s for s in page.root.all("section") if s.all("h2")[0].text == "Several sequences at once"]
    (svg,) = part.all("svg")
    assert "T = 0: 1.50 times with 1, 1.25 times with 2, 0.75 times with 8; T = 1: " in svg.attributes["aria-label"]
    level = next(e for e in svg.all("polyline") if "dash" in e.attributes["class"])
    heights = [float(c.attributes["cy"]) for c in svg.all("circle")]
    ((left, y), *_, (right, y_end)) = [tuple(map(float, p.split(","))) for p in level.attributes["points"].split()]
    assert y == y_end and heights[0] < heights[1] < y < heights[2] and right > left, "0.75 lies below break-even"
    across = [float(c.attributes["cx"]) for c in svg.all("circle")]
    assert (across[2] - across[0]) == pytest.approx(3 * (across[1] - across[0]), abs=0.2), "a doubling is as wide as the last"
    names = [t.text for t in svg.all("text")]
    assert {"1", "2", "8", "T = 0", "T = 1", "break-even", "sequences at once"} <= {*names}
    cells = [[c.text for c in tr.all() if c.name in ("th", "td")] for tr in part.all("tr")]
    assert cells[3] == ["8, T = 0", "0.75×", "", "75", "100", "2.00"] and not part.all("polygon", class_="band")
    sure = [row | {"intervals": {"speedup": [row["speedup"] - 0.1, row["speedup"] + 0.1]}} for row in rows]
    banded = report_page(Report.of(a_report(batches=sure)))
    assert banded.count('class="band') == 2 and "0.65 to 0.85" in banded
    assert "Several sequences at once" not in report_page(Report.of(a_report())), "of reports that have none"


def test_intervals_are_over_what_was_decoded_together() -> None:
    report, calls, _ = measured()
    assert report.batches is not None
    (row,) = [row for row in report.batches if (row.sequences, row.temperature) == (2, 0)]
    mine, plain = (units(calls, 2, drafted, False) for drafted in (True, False))
    made = [[sum(len(g.tokens) for g in c[3]), c[4]] for c in (*mine, *plain)]
    table = torch.tensor(made, dtype=torch.float64).reshape(2, len(mine), 2).transpose(0, 1).flatten(1).numpy()
    assert row.intervals is not None
    assert list(row.intervals["speedup"]) == bootstrap(table, lambda x: (x[:, 0] / x[:, 1]) / (x[:, 2] / x[:, 3]))
