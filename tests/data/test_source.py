"""A source is a file and a YAML of one name, and nothing else knows which there are. Prompts that do not fit are all named, or skipped."""

from __future__ import annotations

import inspect
import json
import sys
from itertools import islice
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from headstart.data import plain, regenerate, regenerated, source
from headstart.data.packed import Document
from headstart.data.prompts import Size, check_prompts, check_sizes, fitting
from headstart.data.source import find, open_source
from headstart.door import infer
from headstart.heads.errors import UserError
from headstart.inference.decoding.decode import longest
from headstart.inference.decoding.stored import StoredTarget
from headstart.inference.decoding.target import Target
from headstart.inference.settings import read_target
from tests.composed import composed
from tests.data.conftest import lines, settings, write
from tests.trainers.conftest import save_target

KEYS = ("prompts", "decode.new_tokens", "on_long")


@pytest.mark.parametrize("name", source.names())
def test_a_source_takes_what_its_yaml_gives(name: str) -> None:
    given = OmegaConf.load(source.CONF / f"{name}.yaml")
    given = OmegaConf.to_container(given.data if "data" in given else given)
    module, settings = find({**given, "path": "some"} if "path" in given else given)
    assert module.__name__ == f"headstart.data.{name}" and settings.keys() == given.keys() - {"name"}
    for function in ("open", "check", "texts"):
        taken = inspect.signature(getattr(module, function, module.open)).parameters
        assert taken.keys() - {"target", "length", "seed", "_"} <= settings.keys()


@pytest.mark.parametrize("name", ["chat", "tokenized", "text"])
def test_a_split_of_a_file_is_refused(name: str, tmp_path: Path) -> None:
    """It would be read whole, in the place of its first rows."""
    path = write(tmp_path / "some.jsonl", [{"text": "one", "messages": [], "input_ids": []}])
    given = source.defaults({"name": name}) | {"name": name, "path": str(path)}
    source.check_source(given)
    for stream in (None, True):
        for key, value in (("split", "train[:10]"), ("subset", "en")):
            with pytest.raises(UserError) as error:
                source.check_source(given | {"stream": stream, key: value})
            whole = f"data.{key}={value}: path={path} is no dataset with {key}s, and is read whole: leave it out"
            assert str(error.value) == whole + ("" if name == "text" else ", or take data.limit=N for the first rows")


def test_settings_of_a_source_are_of_the_types_that_its_open_names(monkeypatch: pytest.MonkeyPatch) -> None:
    def open_it(target: Any, *, length: int, seed: int, path: str, times: int = 2, loud: bool = False, few: int | None = None) -> None: ...

    monkeypatch.setattr(source, "_module", lambda _: SimpleNamespace(open=open_it))
    assert find({"name": "mine", "path": 7})[1] == {"path": "7", "times": 2, "loud": False, "few": None}
    wrong = {"times": (0, True, "2", None), "loud": (1, "true", None), "few": (0, 1.0), "path": (None, True, ["a"])}
    for key, value in ((key, value) for key, values in wrong.items() for value in values):
        with pytest.raises(UserError, match=rf"^data\.{key} must "):
            find({"name": "mine", "path": "here", key: value})


def test_another_source_is_one_file_and_one_yaml(target: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trained on, captured and continued without another line of code."""
    made = ModuleType("headstart.data.counting")

    def texts(seed: int, *, upto: str) -> tuple[list[plain.Text], list[plain.Text]]:
        said = [plain.Text(f"from {i}", " ".join(str(n % 40) for n in range(i, i + int(upto)))) for i in range(20)]
        return said[1:], said[:1]

    def opened(target: Any, *, length: int, seed: int, upto: str) -> source.Source:
        train, held = texts(seed, upto=upto)
        return plain.source(target, train, held, length, seed, (plain.PARAGRAPHS,), {"0": [held[0][:2]]})

    made.open, made.texts = opened, texts  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "headstart.data.counting", made)
    (tmp_path / "counting.yaml").write_text("name: counting\nupto: 80\n")
    monkeypatch.setattr(source, "CONF", tmp_path)
    given = {"name": "counting", "upto": 80}
    assert open_source(given, target, length=32, seed=0).prompts(1, 8)
    config = settings(folder, "data=stdlib", f"out={tmp_path / 'made.jsonl'}", "prefix=9", "limit=6") | {"data": given}
    regenerate.main(config)
    assert len(lines(tmp_path / "made.jsonl")) == 6
    assert regenerated.read(config["out"], target.tokenizer, 320).source == "counting"


# ---- prompts that do not fit ----


@pytest.fixture
def asked(tmp_path: Path) -> str:
    """Of five prompts the first, the third and the last are short enough for 12 new tokens in 512."""
    rows = [{"id": f"q{i}", "text": "x" * (600 * (i % 2) + 10 + i)} for i in range(5)]
    (tmp_path / "some.json").write_text(json.dumps(rows))
    return str(tmp_path / "some.json")


def test_all_prompts_that_do_not_fit_are_named(asked: str, target: Any) -> None:
    with pytest.raises(UserError) as error:
        fitting(asked, 4, target, 12, "error", keys=KEYS)
    said = str(error.value)
    assert said == (
        "2 of 4 prompts do not fit the target's context of 512 with 12 new tokens: q1 (611 tokens), q3 (613 tokens): "
        "shorten or take out what is too long, or on_long=skip"
    )
    assert [len(p) for p in fitting(asked, 1, target, 12, "error", keys=KEYS)] == [10]  # others are not asked for
    with pytest.raises(UserError, match="5 of 5 prompts do not fit"):
        fitting(asked, None, target, 510, "error", keys=KEYS)


def test_the_largest_new_tokens_that_would_do_is_said(tmp_path: Path, target: Any) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text('{"text": "1 2 3"}\n' + json.dumps({"id": "x", "text": "1" * 80}))
    with pytest.raises(
        UserError, match=r"prompt x \(80 tokens\) does not fit .* with 500 new tokens: set decode\.new_tokens to 432 or less"
    ):
        fitting(str(path), None, target, 500, "error", keys=KEYS)
    assert len(fitting(str(path), None, target, 432, "error", keys=KEYS)) == 2


def test_skipped_prompts_are_counted_and_others_take_their_place(asked: str, target: Any, capsys: Any) -> None:
    assert [len(p) for p in fitting(asked, 3, target, 12, "skip", keys=KEYS)] == [10, 12, 14]  # q0, q2, q4
    assert "skipped 2 of 5 prompts, too long for the target's context of 512 with 12 new tokens: q1, q3" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"some\.json: no prompts in it that fit"):
        fitting(asked, 3, target, 511, "skip", keys=KEYS)


def test_no_prompt_may_cross_the_turn_of_a_longrope_target(asked: str, target: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Decoding refuses it, where before the training nothing did. Beyond the turn the whole context is free."""
    monkeypatch.setattr(Target, "rope_switch", 24)
    assert [len(p) for p in fitting(asked, 2, target, 12, "skip", keys=KEYS)] == [10, 12]
    capsys.readouterr()
    assert [len(p) for p in fitting(asked, None, target, 11, "skip", keys=KEYS)] == [10, 12]
    assert "skipped 3 of 5 prompts, too long for the target's context of 24 with 11 new tokens: q1, q3, q4" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"prompt q4 .14 tokens. does not fit the target's context of 24 with 11 new .* to 10 or less, "):
        check_sizes([Size(f"q{n - 10}", n, longest(target, n)) for n in (10, 12, 14, 400)], 11, "decode.new_tokens")
    check_prompts([[1] * 12, [1] * 30], 12, target)
    with pytest.raises(UserError, match=r"prompt number 1 .13 tokens. does not fit the target's context of 24 with 12 new tokens"):
        check_prompts([[1] * 13, [1] * 30], 12, target)


def test_a_target_that_is_not_loaded_says_where_it_turns(tmp_path: Path) -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    rope: Any = {"rope_scaling": {"type": "longrope", **factors}, "original_max_position_embeddings": 64}
    for architecture, how, most in (("phi3", rope, 64), ("llama", {}, 512)):
        folder = save_target(tmp_path / architecture, architecture=architecture, **how)
        given = {"name": "a", "path": str(folder), "dtype": "float32", "device": "cpu", "attention": "sdpa", "config": None}
        stored = read_target(given)
        assert isinstance(stored, StoredTarget)
        for tokens in (20, 64, 65):
            assert longest(stored, tokens) == longest(stored.opened(), tokens) == (most if tokens <= 64 else 512)


def test_a_report_and_tuning_take_on_long(asked: str, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    where = ["target=folder", f"target.path={folder}", "target.dtype=float32", "target.device=cpu", f"prompts={asked}", f"out={tmp_path}"]
    for door, run, more in (
        ("inference", infer.report, ["decode.new_tokens=12", "decode=ngram", "decode.prompts=4"]),
        ("tune", infer.tune, ["new_tokens=12", f"speculator={tmp_path}"]),
    ):
        monkeypatch.setattr("headstart.inference.speculator.open_speculator", lambda *_: None)
        monkeypatch.setattr(infer, "overrides", list)
        with pytest.raises(UserError, match=r"2 of [45] prompts do not fit .*q3 \(613 tokens\).*or on_long=skip"):
            run(composed(*where, *more, door=door))


def test_shards_take_on_long(asked: str, target: Any, tmp_path: Path) -> None:
    from headstart.data.capture import capture
    from headstart.data.source import Source

    made: Source = open_source({"name": "text", "path": asked, "split": "", "field": "text", "suffixes": [], "on_bad": "error"},
                               target, length=32, seed=0)  # fmt: skip
    assert made.packed is not None
    capture(made.packed, target, (2,), tmp_path / "shards")
    given = {"name": "shards", "path": str(tmp_path / "shards"), "prompts_file": asked}
    with pytest.raises(UserError, match=r"2 of 5 prompts do not fit .*, or data\.on_long=skip"):
        open_source(given, target, length=32, seed=0).prompts(5, 12)
    assert len(open_source({**given, "on_long": "skip"}, target, length=32, seed=0).prompts(5, 12)) == 3
    with pytest.raises(UserError, match=r"rows of 32 tokens, trainer\.length is 64: set trainer\.length=32"):
        open_source(given, target, length=64, seed=0)


@pytest.mark.parametrize(("count", "share"), [(2, 1), (39, 1), (40, 2), (1279, 63), (5000, 64)])
def test_a_twentieth_is_held_out_and_never_trained_on(count: int, share: int) -> None:
    few, rest = source.drawn(count, 3)
    assert len(few) == share and sorted([*few, *rest]) == list(range(count))
    assert count < 1000 or set(few) != set(source.drawn(count, 4)[0])


def test_a_prompt_may_fill_the_context_to_the_last_token(target: Any, capsys: Any) -> None:
    mask = np.arange(505) >= 500
    held, most = [Document(np.full(505, 7, dtype=np.int32), mask)], target.shape.max_positions - 500
    assert [len(prompt) for prompt in source.beginnings(target, held, 1, most)] == [500] and source.beginnings(
        target, held, 1, most + 1
    ) == []


def test_what_is_left_out_is_said_once(target: Any, tmp_path: Path, capsys: Any) -> None:
    """Long questions with short answers: most windows of them teach nothing, and no row without a guess is trained on."""
    talks = [[{"role": "user", "content": "x" * 300}, {"role": "assistant", "content": "1 2 3"}] for _ in range(20)]
    path = write(tmp_path / "long.jsonl", [{"messages": talk} for talk in talks])
    given = {"name": "chat", "path": str(path), "split": "", "on_bad": "error"}
    made = open_source(given, target, length=64, seed=0)
    assert made.packed is not None
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("data: 19 documents, ") and out[0].endswith(" tokens") and "; held out: 1 document, " in out[0]
    assert out[1] == "data: left out: 38 tokens in pieces shorter than 8, 4,864 tokens where nothing is supervised"
    assert out[2:] == ["data: of what is held out, left out: 2 tokens in pieces shorter than 8, 256 tokens where nothing is supervised"]
    assert made.packed.unsupervised == 19 * 4 * 64
    assert len(made.prompts(4, 8)) == 1 and made.prompts(4, 400) == []
    said = "data: 1 of 1 held-out prompts passed over: too long for the target's context with 400 new tokens\n"
    assert capsys.readouterr().out == said
    for batch in islice(made.stream((2,), 1, 0, 0, 0, 1), len(made.packed)):
        assert batch.supervised(1).any()
