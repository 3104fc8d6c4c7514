"""A report is frozen, is read back as it was, from any version, with what was decoded; and its rounds make its figures."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headstart.heads.errors import UserError
from headstart.inference.decoding import decoder
from headstart.inference.decoding.decode import generate
from headstart.inference.decoding.engine import Engine
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.sampling import SamplingParams
from headstart.inference.decoding.target import Target
from headstart.inference.proposers.ngram import Ngram
from headstart.inference.reports.measure import Contender, make_report, make_reports
from headstart.inference.reports.render import markdown, show, write_report
from headstart.inference.reports.report import NAME, ROUNDS, Report
from tests.drafters import learn_by_heart, make, random_tokens
from tests.inference.serving.calls import tokenizer
from tests.reports import a_report
from tests.tiny_targets import tiny_target

NEW, PROMPTS = 16, [random_tokens(n, seed=n) for n in (9, 12, 5)]
TREE = TreePolicy(depth=4, nodes=8, branch=3)
TARGET = functools.cache(tiny_target)


@functools.cache
def drafter() -> Any:
    texts = [(p + generate(TARGET(), None, p, new_tokens=NEW).tokens)[: 1 + NEW] for p in PROMPTS]
    return learn_by_heart(make("eagle", TARGET()), TARGET(), texts, depth=3, steps=12)


def lengths(value: Any) -> Iterator[int]:
    """Of all lists in a value that was read from JSON."""
    if isinstance(value, list):
        yield len(value)
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from lengths(each)


@functools.cache
def measured() -> Report:
    TARGET().tokenizer = tokenizer()
    return make_report(TARGET(), drafter(), PROMPTS, TREE, SamplingParams(seed=5), new_tokens=NEW, extra={"loss": {"kl": 1.0}})


@pytest.mark.parametrize("text", ["\u2028", "\u0085 and \u2029", "a\nb\r", "\ud800"])
def test_any_token_is_read_back(text: str, tmp_path: Path) -> None:
    """Some of these end a line for str.splitlines; the last is half of a pair, as slow tokenizers spell."""
    report = dataclasses.replace(measured(), spelling={**measured().spelling, 5: text})
    report.write(tmp_path)
    assert Report.read(tmp_path).spelling[5] == text and Report.read(tmp_path).texts == report.texts


def test_nothing_in_it_can_be_changed() -> None:
    report = measured()
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.lossless = False  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.temperature_0.speedup = 9.0  # type: ignore[misc]
    with pytest.raises(TypeError):
        report.tree["depth"] = 9  # type: ignore[index]
    with pytest.raises(TypeError):
        report["loss"] = {}  # type: ignore[index]
    for given in (report["tree"], report["temperature_0"]["acceptance_by_depth"], report["loss"]):
        given.clear()  # a copy
    assert report.tree["depth"] == 4 and len(report["temperature_0"]["acceptance_by_depth"]) == 4 and report["loss"] == {"kl": 1.0}
    more = report | {"c": 0.1, "drafter_parameters": 3}
    assert (more["c"], more.drafter_parameters, more.texts) == (0.1, 3, report.texts) and "c" not in report


def test_it_is_read_back_as_it_was(tmp_path: Path) -> None:
    report = measured()
    write_report(report, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {NAME, ROUNDS, "report.md", "report.png", "report.html"}
    again = Report.read(tmp_path)
    assert again == report == json.loads((tmp_path / NAME).read_text())
    assert (again.texts, again.asked, again.spelling) == (report.texts, report.asked, report.spelling) and again.texts
    assert markdown(again) == markdown(report)
    kept = json.loads((tmp_path / NAME).read_text())
    assert "texts" not in kept and max(lengths(kept)) < NEW, "neither tokens nor rounds of a text"
    (tmp_path / NAME).write_text((tmp_path / NAME).read_text().replace('"prompts": 3', '"prompts": 4'))
    assert Report.read(tmp_path).texts == (), "the rounds of another report"


def test_reports_of_before_are_read(tmp_path: Path) -> None:
    """A file without version, rounds, and keys that came later; with keys of a training."""
    old = a_report()
    (tmp_path / NAME).write_text(json.dumps(old))
    report = Report.read(tmp_path)
    assert report.version == 1 and measured().version == 3 and report == old | {"version": 1}
    assert (report.temperature_0.speedup, report.prompts_from, report["train_steps"]) == (1.6, "held-out text of chat", 7)
    assert markdown(report) == markdown(old) and report.texts == ()  # type: ignore[arg-type]


def test_names_with_brackets_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("model[v2]", "a[/b]"):
        show(Report.of(a_report(name, target=name)))
        assert f"{name} for {name}" in capsys.readouterr().out


def test_keys_that_lack_or_are_no_figures_are_named(tmp_path: Path) -> None:
    for change, word in (({"temperature_1": 5}, "temperature_1"), ({"temperature_0": {}}, "accepted_length"), ({"head": None}, "head")):
        (tmp_path / NAME).write_text(json.dumps({k: v for k, v in (a_report() | change).items() if v is not None}))
        with pytest.raises(UserError, match=f"a report is damaged: .*{word}"):
            Report.read(tmp_path)


@pytest.mark.parametrize("name", [NAME, ROUNDS])
@pytest.mark.parametrize("wrong", ["{", "[]", "{}", "[" * 100_000, "\n\n"])
def test_a_damaged_file_is_named(name: str, wrong: str, tmp_path: Path) -> None:
    write_report(measured(), tmp_path)
    (tmp_path / name).write_text(wrong)
    with pytest.raises(UserError) as raised:
        Report.read(tmp_path)
    assert "\n" not in str(raised.value) and ("report" in str(raised.value) or name in str(raised.value))


@pytest.mark.parametrize(
    "change", [{"tokens": [1] * 90}, {"rounds": [[1, [5], [0, 0], []]]}, {"rounds": [[1, [5], [], [7]]]}, {"rounds": 3}]
)
def test_rounds_that_do_not_fit_together_are_refused(change: dict[str, Any], tmp_path: Path) -> None:
    write_report(measured(), tmp_path)
    first, plain, tree, *rest = (tmp_path / ROUNDS).read_text().splitlines()
    (tmp_path / ROUNDS).write_text("\n".join([first, plain, json.dumps(json.loads(tree) | change), *rest]))
    with pytest.raises(UserError, match=ROUNDS):
        Report.read(tmp_path)


def test_its_rounds_make_its_figures() -> None:
    """Counted anew from what is kept of every round, for trees and chains, at both temperatures."""
    report, target = measured(), TARGET()
    assert len(report.texts) == len(PROMPTS) * 2 * 3 and [list(p) for p in report.asked] == PROMPTS
    for what, key in (("tree", "temperature"), ("chain", "chain_temperature")):
        for temperature in (0, 1):
            texts = [t for t in report.texts if (t.what, t.temperature) == (what, temperature)]
            figures, rounds = report[f"{key}_{temperature}"], [r for t in texts for r in t.rounds]
            assert figures["target_passes"] == len(rounds) and figures["new_tokens"] == sum(len(r.tokens) for r in rounds)
            assert figures["accepted_length"] == pytest.approx(sum(len(r.tokens) for r in rounds) / len(rounds))
            for depth, share in enumerate(figures["acceptance_by_depth"], start=1):
                assert share == pytest.approx(sum(len(r.accepted) >= depth for r in rounds) / len(rounds))
            for t in texts:
                assert list(t.tokens) == [t.tokens[0], *(token for r in t.rounds for token in r.tokens)]
    for i, prompt in enumerate(PROMPTS):
        said = generate(target, None, prompt, new_tokens=NEW).tokens
        cold = [t for t in report.texts if (t.prompt, t.temperature) == (i, 0)]
        assert [t.what for t in cold] == ["plain", "tree", "chain"] and all(list(t.tokens) == said for t in cold)
        expected = target.model(torch.tensor([prompt + said])).logits[0, len(prompt) - 1 : -1].softmax(-1)
        assert cold[0].probabilities == pytest.approx([float(p[t]) for p, t in zip(expected, said, strict=True)], abs=1e-4)
    used = {t for text in report.texts for r in text.rounds for t in (*r.tokens, *r.guesses)}
    assert used <= report.spelling.keys() and all(report.spelling[t] == tokenizer().decode([t]) for t in used)


def test_texts_up_to_the_last_position_there_is() -> None:
    """Of learned positions: one further has none."""
    from transformers import GPT2Config, GPT2LMHeadModel

    ends = dict(bos_token_id=None, eos_token_id=None)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=96, n_positions=64, n_embd=32, n_layer=2, n_head=2, **ends)).eval()
    how: dict[str, Any] = dict(new_tokens=4, proposer=Ngram(), name="ngram")
    report = make_report(
        Target(model, name="gpt2"), None, [random_tokens(60, seed=0)], TreePolicy("chain", depth=3), SamplingParams(), **how
    )
    assert report.lossless and len(report.texts[0].tokens) == 4


@pytest.mark.slow
def test_both_paths_keep_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "BY_ENGINE", ("cpu",))
    by_engine = make_report(TARGET(), drafter(), PROMPTS, TREE, SamplingParams(seed=5), new_tokens=NEW)
    chains = [[t for t in r.texts if t.what != "tree"] for r in (measured(), by_engine)]
    for a, b in zip(*chains, strict=True):
        assert a.tokens == b.tokens
        for one, other in zip(a.rounds, b.rounds, strict=True):  # alone, nothing is guessed beyond the end
            assert (one.tokens, one.accepted, one.guesses) == (other.tokens, other.accepted, other.guesses[: len(one.guesses)])


@pytest.mark.slow
def test_engines_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several drafters each has one engine, for its tree and its chain; a proposer has none; afterwards there is none."""
    import weakref

    monkeypatch.setattr(decoder, "BY_ENGINE", ("cpu",))
    made, init = list[weakref.ref[Engine]](), Engine.__init__

    def noting(self: Engine, *a: Any, **k: Any) -> None:
        made.append(weakref.ref(self))
        init(self, *a, **k)

    monkeypatch.setattr(Engine, "__init__", noting)
    contenders = [Contender(drafter(), TREE, name=name) for name in ("a", "b", "c")]
    contenders.append(Contender(None, TreePolicy("chain", depth=3), proposer=Ngram(), name="n-grams"))
    reports = make_reports(TARGET(), contenders, PROMPTS[:1], SamplingParams(), new_tokens=NEW)
    assert len(made) == 3 + 1 and all(there() is None for there in made)
    assert all(report.lossless for report in reports) and [len(report.texts) for report in reports] == [6, 6, 6, 4]
