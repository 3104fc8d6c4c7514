"""``data.held_out``: another file is held out whole, and everything of ``path`` is trained on, however it is read."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from headstart.data import reader, streamed, text, text_files
from headstart.data.source import Source, check_source, open_source
from headstart.heads.errors import UserError
from tests.data.conftest import TALKS, write

SIZE = 16
HOW: dict[str, dict[str, Any]] = {"in memory": {}, "on disk": {"cache": "cache"}, "streamed": {"stream": True, "cache": "cache"}}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed, "BLOCK", 12)
    monkeypatch.setattr(streamed, "HELD", 8)


def opened(given: dict[str, Any], how: str, target: Any, folder: Path, length: int = SIZE) -> Source:
    given = {"split": "train", "subset": "", "on_bad": "error"} | given | HOW[how]
    if "cache" in given:
        given["cache"] = str(folder / given["cache"])
    check_source(given)
    return open_source(given, target, length=length, seed=0)


def trained_on(source: Source, steps: int) -> set[int]:
    return {token for batch in islice(source.stream((), 4, 0, 0, 0, 1), steps) for token in batch.tokens_BT.reshape(-1).tolist()}


@pytest.mark.parametrize("how", HOW)
def test_rows_of_tokens(how: str, target: Any, tmp_path: Path) -> None:
    train, held = range(1, 41), range(101, 106)
    paths = [write(tmp_path / f"{part[0]}.jsonl", [{"input_ids": [i] * SIZE} for i in part]) for part in (train, held)]
    given: dict[str, Any] = {"name": "tokenized", "path": str(paths[0])}
    drawn = opened(given, how, target, tmp_path)  # what it is without, in the same cache, before and after
    source = opened(given | {"held_out": str(paths[1])}, how, target, tmp_path)
    assert trained_on(source, 10) == set(train)
    assert source.held_out is not None and set(source.held_out.batch(slice(None)).tokens_BT.reshape(-1).tolist()) == set(held)
    again = opened(given, how, target, tmp_path)
    assert again.digest() == drawn.digest() != source.digest() and len(trained_on(again, 10)) < len(train)


@pytest.mark.parametrize("how", HOW)
def test_texts(how: str, target: Any, tmp_path: Path) -> None:
    """Their prompts are of the held-out text too; a folder holds texts of its own."""
    said = {part: [{"text": "\n\n".join(f"{part} {i} {k}" for k in range(12))} for i in range(30)] for part in ("7", "3")}
    paths = {part: write(tmp_path / f"{part}.jsonl", rows) for part, rows in said.items()}
    given = {"name": "text", "field": "text", "suffixes": [".txt"], "path": str(paths["7"]), "held_out": str(paths["3"])}
    source = opened(given, how, target, tmp_path, length=32)
    assert source.held_out is not None
    words = [target.tokenizer.decode(row) for row in source.held_out.batch(slice(None)).tokens_BT.tolist()]
    assert sum("3" in word for word in words) == len(words)
    prompts = [target.tokenizer.decode(prompt) for prompt in source.prompts(4, 8)]
    assert prompts and all(prompt.lstrip().removeprefix("<begin>").lstrip().startswith("3") for prompt in prompts)


def test_conversations_and_what_the_target_said_of_them(door: Any, target: Any, tmp_path: Path) -> None:
    other = write(tmp_path / "other.jsonl", [{"messages": [*TALKS[0][:1], {"role": "user", "content": "99"}, TALKS[0][2]]}])
    held = write(tmp_path / "held.jsonl", [{"messages": said} for said in TALKS if said[-1]["role"] == "assistant"])
    given = {"name": "chat", "path": str(other), "held_out": str(held)}
    source = opened(given, "in memory", target, tmp_path, length=64)  # of one conversation, none of which is held out
    assert source.packed is not None and len(source.packed) == 1 and source.held_out is not None and len(source.held_out) > 1
    answered = door("temperature=0")
    few = write(tmp_path / "few.jsonl", [json.loads(line) for line in answered.read_text().splitlines()[:1]])
    said = {"name": "regenerated", "path": str(few), "held_out": str(answered)}
    check_source(said)
    source = open_source(said, target, length=64, seed=0)
    assert source.packed is not None and source.held_out is not None and len(source.prompts(9, 8)) > 1


@pytest.mark.parametrize("name", ["chat", "text", "tokenized"])
def test_what_cannot_be_held_out_is_refused(name: str, questions: Path, target: Any, tmp_path: Path) -> None:
    more = {"field": "text", "suffixes": [".txt"]} if name == "text" else {}
    more |= {"columns": None, "turns": None, "template": None} if name == "chat" else {}
    given = {"name": name, "path": str(questions), **more}
    with pytest.raises(UserError, match=r"data\.held_out=.*talks\.jsonl is what is trained on"):
        opened(given | {"held_out": str(questions.parent / "." / questions.name)}, "in memory", target, tmp_path)
    (link := tmp_path / "link.jsonl").symlink_to(questions)
    with pytest.raises(UserError, match=r"data\.held_out=.*link\.jsonl is what is trained on"):
        opened(given | {"held_out": str(link)}, "in memory", target, tmp_path)
    with pytest.raises(UserError, match=r"data\.held_out=test: no such file, and path is no dataset"):
        opened(given | {"held_out": "test"}, "in memory", target, tmp_path)
    with pytest.raises(UserError, match=r"data\.held_out=train is the split that is trained on"):
        opened(given | {"path": "nobody/nothing", "held_out": "train"}, "in memory", target, tmp_path)
    empty = write(tmp_path / "empty.jsonl", [])
    with pytest.raises(UserError, match=r"empty\.jsonl"):
        opened(given | {"held_out": str(empty)}, "in memory", target, tmp_path)


def test_of_a_large_file_the_beginning_is_held_out(
    target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reader, "APART", 3)
    monkeypatch.setattr(text, "MOST_HELD", 40)
    paths = [write(tmp_path / f"{i}.jsonl", [{"input_ids": [i + k] * SIZE, "text": f"{i} {k}" * 9} for k in range(9)]) for i in (1, 50)]
    given = {"path": str(paths[0]), "held_out": str(paths[1])}
    source = opened({"name": "tokenized"} | given, "in memory", target, tmp_path)
    assert source.held_out is not None and len(source.held_out) == 3 and "the first 3 documents are held out" in capsys.readouterr().out
    assert (
        len(text_files.documents_of({"path": str(paths[1]), "split": "", "subset": "", "field": "text", "suffixes": [], "on_bad": "error"}))
        == 9
    )
    opened({"name": "text", "field": "text", "suffixes": []} | given, "in memory", target, tmp_path)
    assert "the first 2 of 9 documents are held out" in capsys.readouterr().out
