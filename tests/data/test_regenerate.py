"""The target's own answers: what it says is what is written and trained on, however many are under way and wherever a run stopped."""

from __future__ import annotations

import copy
import errno
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headstart.data import regenerate, regenerated
from headstart.data.answers import ByEngine, Line
from headstart.data.source import open_source
from headstart.heads import hub
from headstart.heads.errors import UserError
from headstart.inference.decoding.decode import generate
from headstart.inference.decoding.engine import Engine
from headstart.inference.decoding.sampling import SamplingParams
from headstart.inference.decoding.target import Target
from headstart.inference.serving.text import asking
from tests.data.chats import documents
from tests.data.conftest import NEW, TALKS, lines, text, write
from tests.drafters import make
from tests.trainers.conftest import ROOT, save_target

# ---- what is said ----


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_turn_is_the_targets_own_with_its_own_answers_as_history(temperature: float, door: Any, target: Any) -> None:
    made = {m["line"]: m for m in lines(door(f"temperature={temperature}", "top_p=0.9"))}
    assert list(made) == sorted(made) and made[4]["id"] == "talk-3"
    ends = set()
    for i, asked in enumerate(TALKS):
        history, answers, cut = [], [], 0
        for message in asked if asked[-1]["role"] == "assistant" else [*asked, {"role": "assistant"}]:
            if message["role"] != "assistant":
                history.append(message)
                continue
            prompt = asking(target.tokenizer, history)
            if temperature:
                how = SamplingParams(temperature=temperature, top_p=0.9, seed=regenerate.seed_of(0, i + 1))
                said = generate(target, None, prompt, new_tokens=NEW, sampling=how).tokens
            else:
                said = target.model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)[0, len(prompt) :].tolist()
            stopped = said[-1] in target.stop_ids
            cut += not stopped
            ends.add(stopped)
            history.append({"role": "assistant", "content": text(target, said[:-1] if stopped else said)})
            answers.append((prompt, said))
        if not any(m["content"].strip() for m in history if m["role"] == "assistant"):
            assert i + 1 not in made  # nothing to learn from, and no conversation for data=chat
            continue
        record = made[i + 1]
        assert record["messages"] == history and record["regenerated"]["truncated"] == cut
        found = [(d["tokens"][:a], d["tokens"][a:b]) for d in record["documents"] for a, b in d["answers"]]
        assert found == answers
    assert len(made) > 10
    assert ends == {True, False}


def test_an_answer_ends_at_the_tokenizers_own_end(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fine-tunes that kept the generation_config.json of their base end so; what they would say after it is nobody's answer."""
    prompt = asking(target.tokenizer, TALKS[0][:2])
    said = generate(target, None, prompt, new_tokens=NEW, stop_ids=()).tokens
    speech = copy.deepcopy(target.tokenizer)
    speech.eos_token = speech.convert_ids_to_tokens(said[4])
    monkeypatch.setattr(target, "tokenizer", speech)
    monkeypatch.setattr(target.model.generation_config, "eos_token_id", 0)
    answers = ByEngine(target, Engine(target, None, sequences=1, max_length=256), SamplingParams(), NEW)
    answers.ask(Line(1, 0, iter(()), prompt))
    ((_, answer),) = answers.wait()
    assert answer.tokens == said[: said.index(said[4]) + 1] and answer.ended == "stop"


def test_turns_last_keeps_the_history_that_others_wrote(door: Any, target: Any) -> None:
    made = lines(door("turns=last", "temperature=0"))
    assert len(made) > 10
    for record, asked in ((m, TALKS[m["line"] - 1]) for m in made):
        history = asked[:-1] if asked[-1]["role"] == "assistant" else asked
        prompt = asking(target.tokenizer, history)
        said = generate(target, None, prompt, new_tokens=NEW).tokens
        assert record["messages"][:-1] == history
        assert record["documents"] == [{"tokens": prompt + said, "answers": [[len(prompt), len(prompt) + len(said)]]}]


def test_it_does_not_matter_how_many_are_under_way(door: Any, tmp_path: Path) -> None:
    files = [door(f"sequences={rows}", f"out={tmp_path / f'{rows}.jsonl'}").read_bytes() for rows in (1, 3, 20)]
    assert files[0] == files[1] == files[2]
    other = door("seed=1", f"out={tmp_path / 'other.jsonl'}")
    assert lines(other)[0]["messages"] != lines(tmp_path / "1.jsonl")[0]["messages"]


def test_a_drafter_changes_nothing_at_temperature_0(door: Any, target: Any, tmp_path: Path) -> None:
    hub.save(make("eagle", target), tmp_path / "speculator", target.card, torch.float32)
    plain = door("temperature=0")
    drafted = door("temperature=0", f"speculator={tmp_path / 'speculator'}", f"out={tmp_path / 'drafted.jsonl'}")
    assert plain.read_bytes() == drafted.read_bytes()


@pytest.mark.usefixtures("few_files")
def test_prefixes_of_plain_text_are_continued(door: Any, target: Any) -> None:
    made = lines(door("data=stdlib", "limit=5", "prefix=10", "temperature=0"))
    assert len(made) == 5 and len({m["document"] for m in made}) > 1
    for record in made:
        (document,) = record["documents"]
        prompt = document["tokens"][:10]
        said = generate(target, None, prompt, new_tokens=NEW).tokens
        assert document == {"tokens": prompt + said, "answers": [[10, 10 + len(said)]]}
        assert record["prompt"] == text(target, prompt) and record["regenerated"]["truncated"] == (said[-1] not in target.stop_ids)


# ---- it trains ----


def test_only_answers_are_supervised_token_by_token(door: Any, target: Any) -> None:
    path = door("temperature=0")
    documents = [d for m in lines(path) for d in m["documents"]]
    groups, source, _ = regenerated.read(str(path), target.tokenizer, target.shape.vocab_size)
    read = [d for group in groups for d in group]
    assert source == "chat" and [d.tokens.tolist() for d in read] == [d["tokens"] for d in documents]
    for ours, stored in zip(read, documents, strict=True):
        assert ours.tokens[ours.loss_mask].tolist() == [t for a in stored["answers"] for t in answer(stored, a)]
    source = open_source({"name": "regenerated", "path": str(path)}, target, length=64, seed=0)
    assert source.packed is not None and source.held_out is not None
    both, said = (source.packed, source.held_out), sum(len(answer(d, a)) for d in documents for a in d["answers"])
    assert said - sum(p.dropped for p in both) <= sum(int(p.loss_mask_RT.sum()) for p in both) <= said
    batch = next(source.stream((2,), 8, 0, 0, 0, 1))
    assert batch.loss_mask_BT.any() and source.observe(batch, (2,)).states[2].shape == (8, 64, target.shape.hidden_size)
    prompts = source.prompts(3, 8)
    assert prompts and all(text(target, p).endswith("<assistant>") for p in prompts)


def test_answers_of_a_target_that_was_trained_further_since_are_told(door: Any, target: Any, monkeypatch: Any, capsys: Any) -> None:
    """They are trained on: in reinforcement learning they are a few steps old. But nobody should do so unawares."""
    path, weights = door("temperature=0"), target.fingerprint["weights"]
    given = {"name": "regenerated", "path": str(path), "held_out": None}
    capsys.readouterr()
    open_source(given, target, length=64, seed=0)
    assert "another target" not in capsys.readouterr().out
    monkeypatch.setitem(target.fingerprint, "weights", "f" * 64)
    open_source(given, target, length=64, seed=0)
    said = [line for line in capsys.readouterr().out.splitlines() if "another target gave these answers" in line]
    assert len(said) == 1 and said[0].startswith(f"{path}: ") and f"(weights {weights[:16]}, here {'f' * 16})" in said[0]
    assert "python -m data regenerate" in said[0]
    rows = lines(path)
    for row in rows:
        del row["regenerated"]["weights"]  # as of an endpoint
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    open_source(given, target, length=64, seed=0)
    assert "another target" not in capsys.readouterr().out


def test_data_chat_reads_it_too(door: Any, target: Any) -> None:
    path = door("temperature=0")
    words = [m["content"] for r in lines(path) for m in r["messages"] if m["role"] == "assistant"]
    read = documents(str(path), target.tokenizer)
    assert len(read) == len(lines(path))
    supervised = "".join(text(target, d.tokens[d.loss_mask].tolist()) for d in read)
    assert supervised == "".join(words)
    assert open_source({"name": "chat", "path": str(path), "split": "", "on_bad": "error"}, target, length=64, seed=0).packed


def answer(document: dict[str, Any], place: list[int]) -> list[int]:
    tokens: list[int] = document["tokens"][place[0] : place[1]]
    return tokens


@pytest.mark.usefixtures("few_files")
def test_plain_text_trains_and_reports_on_held_out_modules(door: Any, target: Any) -> None:
    path = door("data=stdlib", "limit=8", "prefix=10")
    source = open_source({"name": "regenerated", "path": str(path)}, target, length=32, seed=0)
    assert source.packed is not None and source.held_out is not None
    count = sum(int(p.loss_mask_RT.sum()) for p in (source.packed, source.held_out))
    assert count == sum(len(answer(d, a)) for m in lines(path) for d in m["documents"] for a in d["answers"])
    plain = open_source({"name": "stdlib"}, target, length=32, seed=0)
    assert source.prompts(2, 8) == plain.prompts(2, 8)


def test_a_conversation_is_one_document_where_the_tokens_repeat(target: Any) -> None:
    from headstart.data.answers import Answer
    from headstart.data.talks import Item, converse

    class Letters:
        chat_template = "any"
        added_tokens_decoder: dict[int, Any] = {}

        def get_chat_template(self) -> str:
            return self.chat_template

        def apply_chat_template(self, messages: Any, tokenize: bool, add_generation_prompt: bool) -> str:
            return "".join(f"{m['role'][0]}{m['content']}." for m in messages) + "a" * add_generation_prompt

        def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
            return {"input_ids": [ord(c) for c in text]}

    def spoken(first: str) -> Any:
        messages = [{"role": role, "content": "q"} for role in ("user", "assistant") * 2]
        it = converse(Item(1, "here", "1", messages, [], ""), Letters(), "all", lambda prompt: None)
        next(it)
        it.send(Answer([ord(c) for c in first], "xy", "stop", 3))
        try:
            it.send(Answer([ord("z")], "z", "length", 1))
        except StopIteration as end:
            return end.value
        raise AssertionError

    assert spoken("xy.").record["documents"] == [{"tokens": [ord(c) for c in "uq.axy.uq.az"], "answers": [[4, 7], [11, 12]]}]
    apart = spoken("x!y").record["documents"]  # its text comes back as other tokens
    assert [(len(d["tokens"]), d["answers"]) for d in apart] == [(7, [[4, 7]]), (12, [[11, 12]])]


# ---- it goes on where it stopped ----


@pytest.mark.slow
def test_killed_and_begun_again_it_is_the_same_file(door: Any, folder: Path, questions: Path, tmp_path: Path, capsys: Any) -> None:
    whole = door("sequences=2").read_bytes()
    out = tmp_path / "killed.jsonl"
    command = [sys.executable, "-m", "data", "regenerate", "target=folder", f"target.path={folder}", "target.dtype=float32"]
    command += ["target.device=cpu", "data=chat", f"path={questions}", f"new_tokens={NEW}", "max_length=256", "sequences=2", f"out={out}"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})
    began = time.monotonic()
    while not (out.exists() and out.read_bytes().count(b"\n") >= 2) and process.poll() is None and time.monotonic() - began < 200:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    left = out.read_bytes()
    assert left.count(b"\n") >= 2
    for cut in (left, left[:-40], whole[:5], whole[: len(whole) // 2], b""):
        out.write_bytes(cut)
        assert door("sequences=2", f"out={out}").read_bytes() == whole
    capsys.readouterr()
    door("sequences=2", f"out={out}")
    assert f"{out}: done already, 14 lines" in capsys.readouterr().out and out.read_bytes() == whole


def test_a_larger_limit_goes_on(door: Any, tmp_path: Path) -> None:
    assert len(lines(door("limit=4", f"out={tmp_path / 'grows.jsonl'}"))) == 4
    assert door(f"out={tmp_path / 'grows.jsonl'}").read_bytes() == door().read_bytes()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("temperature=0.5", r"made\.jsonl line 1: temperature differs: it was made with 1\.0, here it is 0\.5: choose another out="),
        ("seed=3", "seed differs"),
        ("top_p=0.9", "top_p differs"),
        ("top_k=3", "top_k differs"),
        ("new_tokens=5", "new_tokens differs"),
        ("turns=last", "turns differs"),
        ("data=stdlib", "data differs: it was made with 'chat'"),
        ("path=OTHER", "line 2: it was not made of line 2 of this source"),
    ],
)
@pytest.mark.usefixtures("few_files")
def test_other_settings_do_not_go_into_the_same_file(change: str, says: str, door: Any, tmp_path: Path) -> None:
    other = write(tmp_path / "other.jsonl", [{"messages": TALKS[0]}, {"messages": TALKS[2]}])
    before = door().read_bytes()
    with pytest.raises(UserError, match=says):
        door(change.replace("OTHER", str(other)))
    assert (tmp_path / "made.jsonl").read_bytes() == before


def test_the_template_of_the_data_asks(door: Any, target: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text("{% for m in messages %}{{ 'say ' + m['content'] + ' ' }}{% endfor %}")
    asked = f"data.template={tmp_path / 'mine.jinja'}"
    for record in lines(door(asked, "limit=2")):
        first = record["documents"][0]
        prompt = target.tokenizer.decode(first["tokens"][: first["answers"][0][0]])
        asking = next(i for i, m in enumerate(record["messages"]) if m["role"] == "assistant")
        assert prompt.split() == [word for m in record["messages"][:asking] for word in ("say", *m["content"].split())]
    for more in (["limit=2"], ["limit=2", f"data.template={write(tmp_path / 'other.jinja', ['{{ messages[0].content }}'])}"]):
        with pytest.raises(UserError, match="template differs"):
            door(*more)


def test_another_targets_answers_are_told_apart(door: Any, tmp_path: Path) -> None:
    door("limit=2")
    other = save_target(tmp_path / "other", num_hidden_layers=3)
    with pytest.raises(UserError, match="weights differs"):
        door("limit=2", f"target.path={other}")


def test_another_precision_is_told_apart_and_above_temperature_0_a_drafter(door: Any, target: Any, tmp_path: Path) -> None:
    hub.save(make("eagle", target), tmp_path / "speculator", target.card, torch.float32)
    drafted = f"speculator={tmp_path / 'speculator'}"
    door("limit=2")
    with pytest.raises(UserError, match="dtype differs: it was made with 'float32', here it is 'bfloat16'"):
        door("limit=2", "target.dtype=bfloat16")
    with pytest.raises(UserError, match="drafted differs: it was made with False, here it is True"):
        door("limit=2", drafted)
    greedy, whole = ["temperature=0", f"out={tmp_path / 'greedy.jsonl'}"], ["temperature=0", f"out={tmp_path / 'whole.jsonl'}"]
    door(*greedy, "limit=9")
    assert door(*greedy, drafted).read_bytes() == door(*whole).read_bytes()


def test_files_that_are_not_ours_stay_as_they_are(door: Any, questions: Path, tmp_path: Path) -> None:
    for content in ('{"messages": []}\n', "a note without an end"):
        (tmp_path / "note").write_text(content)
        with pytest.raises(UserError, match="note line 1 was not written by"):
            door(f"out={tmp_path / 'note'}")
        assert (tmp_path / "note").read_text() == content
    with pytest.raises(UserError, match="is not a file"):
        door(f"out={tmp_path}")
    book = regenerated.JsonlWriter(tmp_path / "busy", {}, {})
    with pytest.raises(UserError, match="busy is being written by another process"):
        door(f"out={tmp_path / 'busy'}")
    book.close()


def test_a_smaller_limit_than_before_is_named(tmp_path: Path) -> None:
    """Whoever follows the advice loses no answers."""
    settings, of = {"target": "any"}, {line: f"{line}" for line in (1, 3, 4)}
    book = regenerated.JsonlWriter(tmp_path / "made.jsonl", settings, of)
    for line in of:
        book.add(line, {})
    book.close()
    with pytest.raises(UserError, match=r"line 3: it is of line 4, and .* ends at line 3: raise limit, or choose another out=$"):
        regenerated.JsonlWriter(tmp_path / "made.jsonl", settings, {line: of[line] for line in (1, 3)})


def test_where_nothing_can_be_locked_answers_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def without(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks here")

    monkeypatch.setattr(regenerated.fcntl, "flock", without)
    regenerated.JsonlWriter(tmp_path / "made.jsonl", {}, {}).close()
    assert f"out={tmp_path / 'made.jsonl'} cannot be locked (no locks here)" in capsys.readouterr().out


@pytest.mark.parametrize(
    "content",
    [
        b"\0" * 3000 + b"\n", b'{"line": 1, "regenerated": []}\n', b'{"line": ' + b"9" * 5000 + b"}\n",
        *(pytest.param(line + b"\n", marks=pytest.mark.slow) for line in (
            b"[" * 100_000, b'{"line":' + b"[" * 100_000, b"\xff\xfe\x00", b'{"line": 1e999}', b'{"line": true, "regenerated": {}}',
            b'{"line": "\\ud800", "regenerated": {}}', b"null", b"", b"x" * 1_000_000,
        )),
    ],
)  # fmt: skip
def test_a_broken_book_is_one_line_and_stays_as_it_is(content: bytes, door: Any, tmp_path: Path) -> None:
    path, whole = tmp_path / "broken.jsonl", door("limit=2").read_bytes()
    for before, line in ((b"", 1), (whole, 3)):
        path.write_bytes(before + content)
        with pytest.raises(UserError, match=rf"broken\.jsonl line {line} was not written by .*: choose another out=") as error:
            door(f"out={path}")
        assert "\n" not in str(error.value) and len(str(error.value)) < 500 and path.read_bytes() == before + content


def test_names_that_cannot_be_written(door: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for out, says in (
        (tmp_path / ("n" * 300), "cannot be written: File name too long"),
        (tmp_path / "file" / "made.jsonl", "cannot be written: Not a directory|cannot be written: File exists"),
        (tmp_path, "is not a file: give out=FILE"),
        ("~nobody-at-all/x", "home directory"),
        ("/proc/made.jsonl", "cannot be written: "),
    ):
        with pytest.raises(UserError, match=says) as error:
            door(f"out='{out}'")
        assert "\n" not in str(error.value) and str(error.value).startswith("out=")


def test_a_full_disk_leaves_whole_lines(tmp_path: Path) -> None:
    book = regenerated.JsonlWriter(tmp_path / "made.jsonl", {"target": "any"}, dict.fromkeys(range(1, 9), "x"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(UserError, match=r"made\.jsonl: not written .*; its 2 lines are kept: run again to go on"):
            for line in range(1, 9):
                book.add(line, {"id": "n" * 300})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    book.close()
    assert [m["line"] for m in lines(tmp_path / "made.jsonl")] == [1, 2]


# ---- what does not fit, what is no conversation ----


def test_what_does_not_fit_is_counted_and_named(door: Any, tmp_path: Path, capsys: Any, caplog: Any) -> None:
    long = {"role": "user", "content": "no end " * 60}
    rows = [{"messages": TALKS[1]}, {"messages": [long]}, {"messages": [*TALKS[4], long]}, {"messages": TALKS[2]}]
    path = write(tmp_path / "long.jsonl", rows)
    made = lines(door(f"path={path}"))
    assert [m["line"] for m in made] == [1, 3, 4] and made[1]["messages"][-1]["role"] == "assistant"
    assert [m["content"] for m in made[1]["messages"] if m["role"] == "user"] == [m["content"] for m in TALKS[4] if m["role"] == "user"]
    assert "1 shortened, 1 left out" in capsys.readouterr().out
    assert f"{path} line 2: the prompt's" in caplog.text and f"{path} line 3: the prompt's" in caplog.text


@pytest.mark.usefixtures("few_files")
def test_a_prompt_that_would_cross_the_turn_of_a_longrope_target_is_left_out(
    door: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """The engine reads up to the turn only: it would end the run at such a prompt."""
    monkeypatch.setattr(Target, "rope_switch", 40)
    made = lines(door("temperature=0"))
    assert 0 < len(made) < len(TALKS) and " left out" in capsys.readouterr().out
    assert all(len(document["tokens"]) <= 40 for record in made for document in record["documents"])


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["data=stdlib", "prefix=300"], r"no prefix fits: prefix=300 and new_tokens=12 need max_length=312 or more, found 256$"),
        (
            ["data=stdlib", "prefix=505", "max_length=4096"],
            r"none of the \d+ prompts fits, .* the 512 that fit: set new_tokens to 7 or less or prefix to 500 or less$",
        ),
        (
            ["new_tokens=250"],
            r"none of the 14 prompts fits, .* exceed the 256 that fit: set max_length to \d+ or more or new_tokens to \d+ or less$",
        ),
        (["new_tokens=510", "max_length=4096"], r"none of the 14 prompts fits, .* exceed the 512 that fit: set new_tokens to 490 or less$"),
    ],
)
@pytest.mark.usefixtures("few_files")
def test_that_nothing_fits_is_said_before_anything_is_asked(more: list[str], says: str, door: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regenerate, "run", None)
    with pytest.raises(UserError, match=says):
        door(*more)


def test_half_of_a_surrogate_pair(door: Any, tmp_path: Path) -> None:
    rows = [
        '{"id": "\\ud800", "messages": [{"role": "user", "content": "1 2"}]}\n',
        '{"messages": [{"role": "user", "content": "a\\ud800"}]}\n',
    ]
    path = write(tmp_path / "half.jsonl", rows)
    with pytest.raises(UserError, match=r"half\.jsonl line 2: content is not Unicode: it holds half of a surrogate pair"):
        door(f"path={path}")
    assert [m["id"] for m in lines(door(f"path={path}", "data.on_bad=skip"))] == ["\ud800"]


def test_an_array_of_conversations_is_answered_as_lines_are(door: Any, tmp_path: Path) -> None:
    path = tmp_path / "talks.json"
    path.write_text(json.dumps([{"messages": m, "id": f"talk-{i}"} for i, m in enumerate(TALKS)], indent=1))
    array = door(f"path={path}", f"out={tmp_path / 'array.jsonl'}")
    assert array.read_bytes() == door().read_bytes()


def test_lines_that_are_no_conversations(door: Any, tmp_path: Path, caplog: Any) -> None:
    leading = [{"role": "assistant", "content": "Welcome"}, *TALKS[1]]
    path = write(tmp_path / "bad.jsonl", [{"messages": leading}, "{\n", {"messages": TALKS[0][-1:]}, {"messages": TALKS[2]}])
    with pytest.raises(UserError, match=r"bad\.jsonl line 2: not JSON .*on_bad=skip"):
        door(f"path={path}")
    made = lines(door(f"path={path}", "data.on_bad=skip"))
    assert [m["line"] for m in made] == [1, 4] and made[0]["messages"][0]["role"] == "user"
    assert "dropped 2 of 4 rows" in caplog.text and "line 3: it has no message of a user" in caplog.text


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["path=/nowhere.jsonl"], r"/nowhere\.jsonl: no such file"),
        (["path=EMPTY"], "no conversations in it"),
        (["data.path=null"], r"data\.path must have a value, found null"),
        (["temperature=-1"], "temperature must be at least 0"),
        (["url=http://127.0.0.1:9/v1"], r"url=http://127\.0\.0\.1:9/v1 does not answer: "),
        (["url=http://127.0.0.1:9/v1", "key=NOT_THERE"], "key=NOT_THERE: there is no such environment variable"),
        (["max_length=20"], r"none of the 14 prompts fits, .*12 new ones exceed the 20 that fit: set max_length to \d+ or more"),
        (["data=regenerated"], "data=regenerated has no prompts"),
        (["data.turns=last"], r"data\.turns is for training: here take turns="),
        (["data.stream=true"], r"data\.stream is for training: here take limit="),
    ],
)
def test_what_a_user_gets_wrong_is_one_line(more: list[str], says: str, door: Any, tmp_path: Path) -> None:
    empty = write(tmp_path / "empty.jsonl", [])
    with pytest.raises(UserError, match=says) as error:
        door(*(m.replace("EMPTY", str(empty)) for m in more))
    assert "\n" not in str(error.value)


@pytest.mark.usefixtures("few_files")
def test_a_prefix_longer_than_every_file(door: Any) -> None:
    with pytest.raises(UserError, match=r"prefix=99999 is too long: the longest text has \d+ tokens: set prefix to \d+ or less"):
        door("data=stdlib", "prefix=99999", "max_length=200000")


def test_a_target_without_a_template(door: Any, tmp_path: Path) -> None:
    made = save_target(tmp_path / "plain")
    (made / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match="no chat template"):
        door(f"target.path={made}")


def test_files_that_cannot_be_trained_on(door: Any, target: Any, tmp_path: Path) -> None:
    made = lines(door("limit=3"))
    path = tmp_path / "damaged.jsonl"

    def says(match: str, change: Callable[[dict[str, Any]], object], end: str = "\n") -> None:
        record = json.loads(json.dumps(made[1]))
        change(record)
        path.write_text(json.dumps(made[0]) + "\n" + json.dumps(record) + end)
        with pytest.raises(UserError, match=match):
            regenerated.read(str(path), target.tokenizer, target.shape.vocab_size)

    says("line 2 is cut in two", lambda r: None, end="")
    says("line 2: it was made with another tokenizer", lambda r: r["regenerated"].update(tokenizer="x"))
    says("line 2: it has no tokens.*data=chat", lambda r: r.pop("documents"))
    for tokens in ([1, 2, 320], [-1], ["a"], None, [True, 5]):
        says("line 2: its documents are damaged", lambda r, tokens=tokens: r["documents"][0].update(tokens=tokens))
    for answers in ([[0, 99999]], [[5, 3]], [[0, 2], [1, 3]], [[1]], 7):
        says("line 2: its documents are damaged", lambda r, answers=answers: r["documents"][0].update(answers=answers))
    with pytest.raises(UserError, match="no such file"):
        regenerated.read(str(tmp_path / "nowhere"), target.tokenizer, 320)
