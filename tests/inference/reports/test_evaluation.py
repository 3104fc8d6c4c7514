"""An evaluation: what is asked, in which order, what a kill costs, what Spec-Bench's arithmetic makes of it; how much texts repeat."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch

from headstart.data import suite
from headstart.heads.errors import UserError
from headstart.inference.decoding.decode import generate
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.sampling import SamplingParams
from headstart.inference.decoding.target import Target
from headstart.inference.proposers.ngram import Ngram
from headstart.inference.reports import evaluate as module
from headstart.inference.reports import progress
from headstart.inference.reports.evaluate import ALL, How, Question, Words, evaluate, figures, lossless, units
from headstart.inference.reports.evaluation import evaluation_page, sentences, write
from headstart.inference.reports.figures import repetition, too_much
from headstart.inference.reports.generate import LOOKUP, assistant_of, hf_generate
from headstart.inference.reports.results import NAME, Results
from headstart.inference.reports.sides import PLAIN, Side, ours, transformers
from tests.inference.serving.calls import tokenizer
from tests.pages import Page
from tests.tiny_targets import tiny_target

NEW = 12
TARGET = functools.cache(tiny_target)
ASKED = [
    Question(81, "writing", "mt_bench", ["the cat sat", "on the mat"]), Question(82, "coding", "mt_bench", ["a mat", "the cat"]),
    Question(7, "qa", "qa", ["the the cat the the cat"]), Question(8, "qa", "qa", ["mat on cat"]), Question(9, "qa", "qa", ["sat sat"]),
]  # fmt: skip
KNOWN = {"suite": "five", "target": "tiny", "speculator": "DIR", "skipped": 0, "new_tokens": NEW, "raw": True, "dtype": "float32",
         "device": "a CPU", "versions": {"torch": "2"}, "commit": "abc"}  # fmt: skip


@functools.cache
def words() -> Words:
    TARGET().tokenizer = tokenizer()
    return suite.words(tokenizer(), raw=True)


def sides() -> list[Side]:
    how: dict[str, Any] = {"rule": "auto", "longest": 200}
    guessing = ours("ngram", TARGET(), Ngram(), TreePolicy("chain", depth=4), **how)
    return [ours(PLAIN, TARGET(), None, None, **how), guessing, transformers("prompt_lookup", TARGET(), LOOKUP)]


def how(**changes: Any) -> How:
    return How((0.0, 1.0), (1,), SamplingParams(), NEW, cut=False)._replace(**changes)


def evaluated(folder: Path, **changes: Any) -> Results:
    kept = Results(folder, {"new_tokens": NEW})
    evaluate(TARGET(), sides(), ASKED, words(), how(**changes), kept)
    return kept


# ---- what is asked ----


def test_every_side_ends_at_the_tokenizers_own_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fine-tunes that kept the generation_config.json of their base end so."""
    prompt = words().ask(ASKED[0].turns[:1], [])
    said, speech = generate(TARGET(), None, prompt, new_tokens=NEW, stop_ids=()).tokens, copy.deepcopy(tokenizer())
    speech.eos_token = speech.convert_ids_to_tokens(said[5])
    monkeypatch.setattr(TARGET(), "tokenizer", speech)
    for side in sides():
        for sequences in (1, 2) if side.batches else (1,):
            made, _ = side.decode([prompt], [SamplingParams()], NEW, sequences)
            assert made[0].tokens == said[: said.index(said[5]) + 1], side.name


def test_a_later_turn_stands_behind_the_sides_own_answer(tmp_path: Path) -> None:
    """As plain text: what decoding of turn, answer, an empty line, turn says, written out."""
    kept, tok = evaluated(tmp_path), tokenizer()
    for (_, temperature, (number,)), line in kept.lines.items():
        for name, made in line.made.items():
            (talk,), text = made["talks"], ""
            assert len(talk) == len(made["seconds"]) == len(ASKED[number].turns)
            for turn, said in zip(ASKED[number].turns, talk, strict=True):
                prompt = tok(text + turn)["input_ids"]
                sampling = SamplingParams(temperature=temperature, seed=number)
                if name == PLAIN or temperature == 0:  # (above it others say other samples of the same distribution)
                    assert said["tokens"] == generate(TARGET(), None, prompt, new_tokens=NEW, sampling=sampling).tokens
                assert said["text"] == tok.decode(said["tokens"]) and len(said["tokens"]) == NEW
                assert sum(said["emitted"]) == NEW - (name != "prompt_lookup")  # the prompt's own pass is no round; of theirs it is one
                text += turn + said["text"] + "\n\n"
    assert all(each["differing"] == 0 and each["compared"] == 7 for each in lossless(kept.lines).values())


def test_several_at_once_say_the_same_and_are_of_one_category(tmp_path: Path) -> None:
    alone, many = evaluated(tmp_path / "a"), evaluated(tmp_path / "b", sequences=(2,), temperatures=(0.0,))
    assert [key.questions for key in many.lines] == [(0, 1), (2, 3)], "fewer at once are another figure"
    for key, line in many.lines.items():
        assert list(line.made) == [PLAIN], "the others know no batches"
        for place, number in enumerate(key.questions):
            talk, theirs = (
                line.made[PLAIN]["talks"][place],
                alone.lines[key._replace(sequences=1, questions=(number,))].made[PLAIN]["talks"][0],
            )
            assert [said["tokens"] for said in talk] == [said["tokens"] for said in theirs]


def test_no_prompts_are_no_units() -> None:
    with pytest.raises(UserError, match="sequences=1: no category has as many prompts"):
        units([], how())


def test_a_chat_is_asked_by_the_template() -> None:
    tok = tokenizer()
    tok.chat_template = "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
    try:
        asked = suite.words(tok, raw=False).ask(["the cat", "sat"], ["on"])
        assert asked == tok("<u>the cat<a>on<u>sat<a>", add_special_tokens=False)["input_ids"]
        assert suite.words(tok, raw=True).ask(["the cat", "sat"], ["on"]) == tok("the caton\n\nsat")["input_ids"]
    finally:
        tok.chat_template = None


def test_what_becomes_too_long_loses_its_beginning_or_ends(tmp_path: Path) -> None:
    limit = TARGET().shape.max_positions
    long = [Question(1, "a", "a", ["the cat sat on the mat " * 60, "mat"])]
    for cut in (True, False):
        kept = Results(tmp_path / str(cut), {})
        plain = sides()[:1]
        evaluate(TARGET(), plain, long, words(), how(cut=cut, temperatures=(0.0,)), kept)
        (line,) = kept.lines.values()
        made = line.made[PLAIN]
        assert (made["cut"], made["left_out"], len(made["talks"][0])) == ((2, 0, 2) if cut else (0, 2, 0))
        if cut:
            prompt = tokenizer()(long[0].turns[0])["input_ids"][-(limit - NEW) :]
            assert made["talks"][0][0]["tokens"] == generate(TARGET(), None, prompt, new_tokens=NEW).tokens
    with pytest.raises(UserError, match=r"on_long=skip or cut"):
        suite.fitting(long, words(), TARGET(), NEW, "error", "FILE")
    with pytest.raises(UserError, match="no prompts in it that fit"):
        suite.fitting(long, words(), TARGET(), NEW, "skip", "FILE")
    found, longest = suite.fitting([*ASKED, *long], words(), TARGET(), NEW, "skip", "FILE")
    sizes = [len(tokenizer()("\n\n".join(q.turns))["input_ids"]) + len(q.turns) * NEW for q in ASKED]
    assert found == ASKED and longest == max(sizes)


@pytest.mark.parametrize("order", [(4, 1), (1, 4)])
def test_what_was_cut_is_counted_where_all_was_measured(order: tuple[int, int], tmp_path: Path) -> None:
    """Of six prompts the last two are cut, which four at once leave over."""
    kept, asked = Results(tmp_path, {}), [Question(i, "a", "a", ["t"]) for i in range(6)]
    for unit in units(asked, how(sequences=order, temperatures=(0.0,))):
        talks = [[{"text": "a", "tokens": [1, 2, 3], "emitted": [1, 1], "prompt": [5]}] for _ in unit.questions]
        made = {"seconds": [1.0], "talks": talks, "cut": sum(i >= 4 for i in unit.questions), "left_out": 0}
        kept.add(unit, "a", {PLAIN: made}, {})
    found = write(kept, asked, tmp_path, 2, KNOWN)
    assert (found["cut"], found["left_out"]) == (2, 0)
    assert any(line.startswith("2 prompts without the beginning, 0 later turns") for line in sentences(found))


def test_a_talk_that_would_cross_the_turn_of_a_longrope_target_is_cut_or_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Target, "rope_switch", 20)
    long = [Question(1, "a", "a", ["the cat sat on the mat " * 3])]
    size = len(words().ask(long[0].turns, []))
    assert size <= 20 < size + NEW
    for cut in (True, False):
        kept = Results(tmp_path / str(cut), {})
        evaluate(TARGET(), sides()[:1], long, words(), how(cut=cut, temperatures=(0.0,)), kept)
        (line,) = kept.lines.values()
        (talk,), made = line.made[PLAIN]["talks"], line.made[PLAIN]
        assert (made["cut"], made["left_out"], len(talk)) == ((1, 0, 1) if cut else (0, 1, 0))
        assert not cut or talk[0]["tokens"] == generate(TARGET(), None, words().ask(long[0].turns, [])[NEW - 20 :], new_tokens=NEW).tokens
    with pytest.raises(UserError, match=rf"prompt 1 \({size} tokens\) does not fit the target's context of 20 with {NEW} new tokens"):
        suite.fitting(long, words(), TARGET(), NEW, "error", "FILE")
    beyond = Question(2, "a", "a", ["the cat sat on the mat " * 3, "the cat sat on the mat " * 6])
    for turns, fits in ((beyond.turns, False), (beyond.turns[1:], True)):
        found, _ = suite.fitting([Question(3, "a", "a", ["mat"]), beyond._replace(turns=turns)], words(), TARGET(), NEW, "skip", "FILE")
        assert [q.name for q in found] == [3, 2][: 1 + fits], "its first turn would cross it"


# ---- files ----


def test_forms_of_files(tmp_path: Path) -> None:
    settings = {"name": "mine", "hub": None, "split": "test", "subset": "", "turns": "question", "category": "subject",
                "groups": {"both": ["b", "c"]}}  # fmt: skip
    rows = [{"question_id": 5, "category": "b", "turns": ["x", "y"]}, {"question": "z"}, {"id": "q", "prompt": "w", "subject": "c"}]
    (tmp_path / "f.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = suite.questions(settings, str(tmp_path / "f.jsonl"), None)
    assert found == [Question(5, "b", "both", ["x", "y"]), Question(2, "mine", "mine", ["z"]), Question("q", "c", "both", ["w"])]
    said = [{"role": role, "content": text} for role, text in (("user", "x"), ("assistant", "recorded"), ("user", "y"))]
    (tmp_path / "c.jsonl").write_text(json.dumps({"messages": said}))
    assert suite.questions(settings, str(tmp_path / "c.jsonl"), None) == [Question(1, "mine", "mine", ["x", "y"])]
    asked = {"messages": [{"role": "system", "content": "be short"}, *said]}
    for wrong, why in ((asked, "a message of system"), ({"text": "x"}, 'call it "prompt"')):
        (tmp_path / "w.jsonl").write_text(json.dumps(wrong))
        with pytest.raises(UserError, match=f"w.jsonl line 1: .*{why}"):
            suite.questions(settings, str(tmp_path / "w.jsonl"), None)
    for wrong in ({"turns": []}, {"turns": [1]}, {"turns": [" "]}, {}):
        (tmp_path / "w.jsonl").write_text(json.dumps(wrong))
        with pytest.raises(UserError, match=r"w.jsonl line 1"):
            suite.questions(settings, str(tmp_path / "w.jsonl"), None)
    (tmp_path / "w.jsonl").write_text(json.dumps({"turns": ["x"], "category": ALL}))  # its row would be taken for that of all of them
    with pytest.raises(UserError, match=r"w.jsonl line 1: its category is called overall, .* suite.groups="):
        suite.questions(settings, str(tmp_path / "w.jsonl"), None)
    (question,) = suite.questions(settings | {"groups": {"whole": [ALL]}}, str(tmp_path / "w.jsonl"), None)
    assert question.group == "whole"
    many = [{"turns": ["x"], "category": c} for c in "aaabbc"]
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, many)))
    for count, kept in ((1, "ab"), (2, "aabc"), (3, "aaabbc")):  # of each group, of its categories in turn
        assert [q.category for q in suite.questions(settings, str(tmp_path / "m.jsonl"), count)] == [*kept]


# ---- a kill ----


@pytest.mark.slow
def test_a_kill_costs_the_line_on_its_way_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = evaluated(tmp_path / "whole")
    calls, talk = 0, module._talk

    def dies(*a: Any, **k: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 14:  # (after 6 to warm up)
            raise KeyboardInterrupt
        return talk(*a, **k)

    monkeypatch.setattr(module, "_talk", dies)
    with pytest.raises(KeyboardInterrupt):
        evaluated(tmp_path / "cut")
    path, calls = tmp_path / "cut" / NAME, 100
    before = path.read_bytes()
    assert before.count(b"\n") == 1 + 2
    with path.open("ab") as file:
        file.write(before.splitlines()[-1][:50])  # as a kill within a line leaves it
    again = evaluated(tmp_path / "cut")
    assert path.read_bytes().startswith(before) and calls == 100 + 3 * (len(whole.lines) - 2) + 6, "nothing is decoded twice"

    def said(kept: Results) -> Any:
        return {
            (key, name): [[(turn["tokens"], turn["emitted"]) for turn in talk] for talk in made["talks"]]
            for key, line in kept.lines.items()
            for name, made in line.made.items()
        }

    assert said(again) == said(whole)


def test_a_log_says_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "EVERY", 0.0)
    evaluated(tmp_path, temperatures=(0.0,))
    assert "evaluated: 4 of 5\n" in capsys.readouterr().out


def test_other_settings_and_damage_are_refused(tmp_path: Path) -> None:
    Results(tmp_path, {"new_tokens": 4, "raw": True})
    with pytest.raises(UserError, match=r"other settings: new_tokens is 4 there and 5 here\. Give another out=DIR"):
        Results(tmp_path, {"new_tokens": 5, "raw": True})
    assert Results(tmp_path, {"new_tokens": 4, "raw": True}).lines == {}
    (tmp_path / NAME).write_text('{"version":1,"settings":[1]}\n')
    with pytest.raises(UserError, match=rf"{NAME} line 1 is damaged"):
        Results(tmp_path, {})
    for version in ("2", "0", "1.5", "1e999", '"1"', "null", "[1]"):
        (tmp_path / NAME).write_text('{"version":%s,"settings":{}}\n' % version)  # noqa: UP031
        with pytest.raises(UserError, match=r"has version .*, which is not known here"):
            Results(tmp_path, {})
    for wrong in ("{\n", "[]\n", '{"sequences": 1}\n', "[" * 100_000 + "\n"):
        (tmp_path / NAME).write_text('{"version":1,"settings":{}}\n' + wrong)
        with pytest.raises(UserError, match=rf"{NAME} line 2 is damaged"):
            Results(tmp_path, {})


# ---- figures ----


def spec_bench(file: Path, base: Path, categories: Sequence[str] | None) -> tuple[float, float, float]:
    """What Spec-Bench's evaluation/speed.py computes: mean accepted tokens, tokens per second, and over the baseline's, whose tokens it
    counts anew, without the first one that it takes for the beginning of a text.
    """

    def records(path: Path) -> list[Any]:
        every = [json.loads(line) for line in path.read_text().splitlines()]
        return [r["choices"][0] for r in every if categories is None or r["category"] in categories]

    drafted, plain = records(file), records(base)
    speeds = [sum(c["new_tokens"]) / sum(c["wall_time"]) for c in drafted]
    alone = [sum(len(tokenizer()(text)["input_ids"]) - 1 for text in c["turns"]) / sum(c["wall_time"]) for c in plain]
    return mean(n for c in drafted for n in c["accept_lengths"]), mean(speeds), mean(speeds) / mean(alone)


def test_spec_benchs_own_arithmetic_agrees(tmp_path: Path) -> None:
    kept = evaluated(tmp_path)
    made = write(kept, ASKED, tmp_path, 4, KNOWN)
    assert {p.name for p in (tmp_path / "spec_bench").iterdir()} == {
        f"{name}-T{t}.jsonl" for name in (PLAIN, "ngram", "prompt_lookup") for t in (0, 1)
    }
    for name in ("ngram", "prompt_lookup"):
        for t in (0, 1):
            for group, categories in ((ALL, None), ("mt_bench", ("writing", "coding")), ("qa", ("qa",))):
                files = [tmp_path / "spec_bench" / f"{side}-T{t}.jsonl" for side in (name, PLAIN)]
                length, speed, over = spec_bench(*files, categories)
                (row,) = [r for r in made["rows"] if (r["name"], r["temperature"], r["category"]) == (name, t, group)]
                assert length == pytest.approx(row["accepted_length"]) and speed > 0 and over > 0
                numbers = [i for i, q in enumerate(ASKED) if group in (ALL, q.group)]
                each = [kept.lines[1, t, (i,)].made[name] for i in numbers]  # type: ignore[index]
                tokens = [sum(len(turn["tokens"]) for turn in one["talks"][0]) for one in each]
                assert speed == pytest.approx(mean(n / sum(one["seconds"]) for n, one in zip(tokens, each, strict=True)))
                assert row["tokens_per_second"] == pytest.approx(sum(tokens) / sum(sum(one["seconds"]) for one in each))
                assert (row["prompts"], row["answers"]) == (len(numbers), sum(len(ASKED[i].turns) for i in numbers))
    assert [row["category"] for row in made["rows"][::3]] == [ALL, "mt_bench", "qa"] * 2
    first = json.loads((tmp_path / "spec_bench" / "ngram-T0.jsonl").read_text().splitlines()[0])
    assert (first["question_id"], first["category"]) == (81, "writing") and len(first["choices"][0]["turns"]) == 2


def test_what_differs_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = evaluated(tmp_path, temperatures=(0.0,))
    key, line = next(iter(kept.lines.items()))
    talks = {name: [[dict(turn, prompt=[1]) for turn in talk] for talk in made["talks"]] for name, made in line.made.items()}
    prompts = [tokenizer()(ASKED[0].turns[0])["input_ids"], [5, 6, 7]]
    for each in talks.values():
        for turn, prompt in zip(each[0], prompts, strict=True):
            turn["prompt"] = prompt
    other = talks["ngram"][0][0]
    other["tokens"] = [*other["tokens"][:3], (other["tokens"][3] + 1) % 90, *other["tokens"][4:]]
    found = module._differences(TARGET(), {name: {"talks": each} for name, each in talks.items()}, how())
    assert [(x["turn"], x["token"], x["tie"]) for x in found["ngram"]] == [(0, 3, False)] and list(found) == ["ngram"]
    kept.lines[key] = line._replace(differences=found)
    assert lossless(kept.lines)["ngram"] == {"compared": 7, "differing": 1, "ties": 0}
    page = evaluation_page(write(kept, ASKED, tmp_path, 4, KNOWN))
    assert "ngram: NOT lossless, 1 of 7" in Page(page).root.text

    other["text"] = "another"  # now it is asked its second turn behind another answer than plain decoding gave
    kept.lines[key] = line._replace(made={name: made | {"talks": talks[name]} for name, made in line.made.items()}, differences=found)
    assert {name: each["compared"] for name, each in lossless(kept.lines).items()} == {"ngram": 6, "prompt_lookup": 7}


def test_the_page_and_the_terminal_show_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from headstart.inference.reports.evaluation import show

    made = write(evaluated(tmp_path), ASKED, tmp_path, 4, KNOWN | {"suite": "<script>five", "skipped": 3})
    page = Page((tmp_path / "evaluate.html").read_text())
    assert page.wrong == [] and page.root.all("h1")[0].text == "<script>five for tiny" and page.root.all("section")
    ids = [title.attributes["id"] for title in page.root.all("h2")]
    assert len(set(ids)) == len(ids) >= 4
    text = page.root.text
    assert all(word in text for word in ("Temperature 0, one prompt at a time", "Temperature 1", "prompt_lookup", "mt_bench", "qa"))
    (row,) = [r for r in made["rows"] if (r["name"], r["temperature"], r["category"]) == ("ngram", 0, ALL)]
    low, high = row["intervals"]["speedup"]
    assert f"{row['speedup']:.2f}×" in text and f"{low:.2f} to {high:.2f}" in text and "3 prompts skipped" in text
    show(made | {"rows": [r | {"category": r["category"].replace("qa", "[/qa]")} for r in made["rows"]]})
    said = capsys.readouterr().out
    assert f"{row['speedup']:.2f}x" in said and "[/qa]" in said


def test_a_side_that_says_nothing_has_no_figures(tmp_path: Path) -> None:
    kept = evaluated(tmp_path, temperatures=(0.0,))
    for line in kept.lines.values():
        for said in line.made["ngram"]["talks"][0]:
            said["tokens"], said["emitted"] = [], []
    with pytest.raises(UserError, match="ngram said nothing"):
        figures(kept.lines, 4)


# ---- transformers ----


def test_assisted_generation_says_the_same_and_its_rounds_are_counted(tmp_path: Path) -> None:
    """By a model that guesses what the target says: whole drafts are accepted, every pass of the target is one round."""
    target = TARGET()
    target.model.save_pretrained(tmp_path)
    prompt, passes = tokenizer()("the cat sat on the mat")["input_ids"], list[int]()
    plain = hf_generate(target, prompt, NEW, SamplingParams())
    for assisted in (LOOKUP, assistant_of(str(tmp_path), target)):
        hook = target.body.register_forward_pre_hook(lambda *_: passes.append(0))
        made = hf_generate(target, prompt, NEW, SamplingParams(), assisted)
        hook.remove()
        assert made.tokens == plain.tokens == generate(target, None, prompt, new_tokens=NEW).tokens
        assert len(made.emitted) == len(passes) and sum(made.emitted) == NEW
        passes.clear()
    assert min(made.emitted[:-1]) >= 2
    twice = [hf_generate(target, prompt, NEW, SamplingParams(temperature=1.0, seed=s), LOOKUP).tokens for s in (3, 3, 4)]
    assert twice[0] == twice[1] != twice[2]
    before = torch.get_rng_state()
    hf_generate(target, prompt, 2, SamplingParams(temperature=1.0, seed=5))
    assert torch.equal(torch.get_rng_state(), before), "the generator of whoever calls is left alone"
    with pytest.raises(UserError, match=r"assistant=.*nosuch"):
        assistant_of(str(tmp_path / "nosuch"), target)
    with pytest.raises(UserError, match="another vocabulary"):
        assistant_of(str(tmp_path), tiny_target(vocab_size=80))


# ---- repetition ----


def test_repetition_by_hand() -> None:
    loop = [1, 2, 3] * 5  # 15 tokens, 8 eight-grams, three of them different
    assert repetition([loop]) == pytest.approx(5 / 8)
    assert repetition([range(15)]) == repetition([[1] * 7]) == repetition([]) == 0
    assert repetition([[1] * 8, [1] * 8]) == 0, "another text is not the same text"
    assert repetition([loop, range(15)]) == pytest.approx(5 / 16) and repetition([loop], size=2) == pytest.approx(11 / 14)
    (line,) = too_much({0: {"repetition": 0.4}, 1: {"repetition": 0.01}, 2: {}})
    assert "temperature 0: 40% of the 8-grams" in line and "flatters" in line
