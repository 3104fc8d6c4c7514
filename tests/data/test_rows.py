"""Every form of a file gives the same rows, of any size, and whatever is wrong with one is a line that names it and the place."""

from __future__ import annotations

import gzip
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headstart.data import rows as rows_module
from headstart.data.prompts import fitting
from headstart.data.prompts import read as read_prompts
from headstart.data.rows import each, file_rows, kept, lines, parsed, read_text, rows, tell
from headstart.data.source import open_source
from headstart.data.text import texts
from headstart.heads.errors import UserError
from headstart.inference.serving.text import BadRow
from tests.data.chats import documents

ROWS = [{"id": i, "text": "x" * (i * 7 % 50) + '[]{},"\\ é😀'[i % 12 :]} for i in range(40)]


def found(path: Path) -> list[dict[str, Any]]:
    return [parsed(row.value) for row in rows(str(path), "train")]


FORMS: dict[str, Callable[[], bytes]] = {
    "lines.jsonl": lambda: "\n\n".join(map(json.dumps, ROWS)).encode(),
    "lines.jsonl.gz": lambda: gzip.compress("\n".join(map(json.dumps, ROWS)).encode()),
    "array.json": lambda: json.dumps(ROWS).encode(),
    "pretty.json": lambda: json.dumps(ROWS, indent=2, ensure_ascii=False).encode(),
    "array.json.gz": lambda: gzip.compress(json.dumps(ROWS).encode()),
    "marked.json": lambda: b"\xef\xbb\xbf \r\n" + json.dumps(ROWS).encode() + b"\r\n ",
    "marked.jsonl": lambda: b"\xef\xbb\xbf" + "\r\n".join(map(json.dumps, ROWS)).encode(),
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("block", [1, 7, 1 << 20])
def test_every_form_gives_the_same_rows(name: str, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "BLOCK", block)
    path = tmp_path / name
    path.write_bytes(FORMS[name]())
    assert found(path) == ROWS
    last = list(rows(str(path), "train"))[-1]
    line = {"lines.jsonl": 79}.get(name, 40)
    assert last.number == line and last.where == f"{path} {'item' if '.json' in path.suffixes else 'line'} {line}"


def test_an_array_is_read_as_it_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is that of a row: the first ones come although the file is broken further on, and blocks are no larger than they must be."""
    monkeypatch.setattr(rows_module, "BLOCK", 64)
    path = tmp_path / "long.json"
    path.write_text(json.dumps([{"n": i, "text": "word " * 10} for i in range(1000)])[:-1] + ", nonsense]")
    it = rows(str(path), "train")
    assert [next(it).value["n"] for _ in range(900)] == list(range(900))
    with pytest.raises(UserError, match=r"long\.json item 1001: not JSON \(Expecting value\)$"):
        list(it)


@pytest.mark.parametrize("block", [9, 10, 1000])  # 9: what follows lies in another block
def test_what_follows_an_array_is_refused(block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "BLOCK", block)
    path = tmp_path / "some.json"
    path.write_text('[{"a": 1}]'.replace(" ", "") + "x")
    with pytest.raises(UserError, match="something follows its array"):
        found(path)


def test_the_place_of_a_line_is_where_it_begins_in_the_file(tmp_path: Path) -> None:
    content = b'{"a": 1}  \r\n\n   \n {"b": 2}\n{"c": 3}'
    path = tmp_path / "some.jsonl"
    path.write_bytes(content)
    with path.open("rb") as file:
        seen = list(lines(path, file))
    assert [number for _, number, _ in seen] == [1, 4, 5] and all(content[at : at + len(line)] == line for at, _, line in seen)


@pytest.mark.parametrize(
    ("most", "limit", "good", "told"),
    [
        (None, None, [0, 2, 3, 5], "dropped 2 of 6 rows"),
        (2, None, [0, 2], "dropped 1 of 3 rows"),
        (None, 3, [0, 2], "dropped 1 of 3 rows"),
        (1, 5, [0], None),
    ],
)
def test_as_many_rows_are_read_as_are_asked_for(
    most: int | None, limit: int | None, good: list[int], told: str | None, tmp_path: Path
) -> None:
    """``most`` of those that are good, or ``limit`` of any kind; what lies behind them is not looked at."""
    path, looked, notes = tmp_path / "some.jsonl", list[int](), list[str]()
    path.write_text("\n".join(json.dumps({"i": i}) for i in range(6)))

    def read(row: dict[str, Any]) -> int:
        looked.append(row["i"])
        if row["i"] in (1, 4):
            raise BadRow("no")
        return int(row["i"])

    made = [i for _, i in each(str(path), "train", "", "skip", read, "rows", notes, most=most, limit=limit)]
    assert made == good and looked == [*range(6 if told and "of 6" in told else 3 if told else 1)]
    assert [note.partition(": ")[2].partition(",")[0] for note in notes] == ([told] if told else [])


def test_no_array_passes_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut anywhere, or with any one character changed, it gives the rows of Python's own reader or an error."""
    dice, path = random.Random(0), tmp_path / "some.json"
    whole = json.dumps(ROWS[:4], indent=1)
    for _ in range(400):
        monkeypatch.setattr(rows_module, "BLOCK", dice.choice([1, 5, 1000]))
        at = dice.randrange(1, len(whole))
        text = whole[:at] if dice.random() < 0.3 else whole[:at] + dice.choice('[]{},:"\\ x7') + whole[at + 1 :]
        path.write_text(text)
        try:
            wanted = json.loads(text)
        except ValueError:
            with pytest.raises(UserError, match=r"some\.json( item \d+)?: "):
                list(rows(str(path), "train"))
        else:
            assert [row.value for row in rows(str(path), "train")] == wanted


HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "no conversations|no prompts|no texts|0 characters"),
    "blank": (b" \n\n \n", "no conversations|no prompts|no texts|0 characters"),
    "brackets": (b"[" * 100_000, "too many"),
    "braces": (b'{"a":' * 100_000, "line 1: not JSON .brackets in brackets"),
    "nul": (b"\0" * 5000, "line 1: not JSON"),
    "rubbish": (bytes(random.Random(1).randbytes(5000)), "line 1: not JSON"),
    "utf-16": ('{"text": "hello"}\n'.encode("utf-16"), "is UTF-16: save it as UTF-8"),
    "latin-1": ('{"text": "caf\xe9"}'.encode("latin-1"), "line 1: not JSON .'utf-8' codec"),
    "latin-1 array": ('[{"text": "caf\xe9"}]'.encode("latin-1"), "item 1: not UTF-8"),
    "half": (b'{"text": "a\\ud800"}', "line 1: .* half of a surrogate pair|line 1: not a conversation"),
    "half said": (b'{"messages": [{"role": "user", "content": "a\\udfff"}]}', "line 1: .*half of a surrogate pair|line 1: no text"),
    "string": (b'"text"', "line 1: not an object but str"),
    "array of arrays": (b"[[1], 2]", "item 1: not an object but list"),
    "two arrays": (b'[{"text": "a"}]\n[{"text": "b"}]', "something follows its array|item 1"),
    "huge number": (b'{"text": ' + b"9" * 5000 + b"}", "line 1: not JSON"),
    "role": (json.dumps({"messages": [{"role": "x" * 5000, "content": ""}]}).encode(), "line 1: (a message.s role|no text)"),
}
READERS: dict[str, Callable[[str, Any], object]] = {
    "chat": lambda path, target: documents(path, target.tokenizer),
    "prompts": lambda path, target: fitting(path, None, target, 1, "error", keys=("prompts", "new_tokens", "on_long")),
    "text": lambda path, target: texts(0, path=path, split="", subset="", field="text", suffixes=[], on_bad="error"),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("reader", READERS)
def test_hostile_files_are_one_line(reader: str, name: str, target: Any, tmp_path: Path) -> None:
    content, says = HOSTILE[name]
    path = tmp_path / "some.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match=says) as error:
        READERS[reader](str(path), target)
    said = str(error.value)
    assert "some.jsonl" in said and "\n" not in said and len(said) < 700


def places(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "broken.gz").write_bytes(gzip.compress(b"{}" * 1000)[:-20])
    (tmp_path / "lie.gz").write_text("plain")
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "loop.jsonl").symlink_to(tmp_path / "loop.jsonl")
    names = {n: str(tmp_path / n) for n in ("folder.jsonl", "broken.gz", "lie.gz", "pipe.jsonl", "loop.jsonl", "gone.jsonl")}
    return names | {"long": "/tmp/" + "n" * 300, "nul": "a\0b.jsonl", "half": "a\ud800.jsonl", "nobody": "~nobody-at-all/x.jsonl", "": ""}


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("folder.jsonl", "is a folder"), ("broken.gz", "cannot be read: "), ("lie.gz", "cannot be read: Not a gzipped"),
        ("pipe.jsonl", "is no file"), ("loop.jsonl", "cannot be read: Too many levels"), ("gone.jsonl", "no such file"),
        ("long", "cannot be read: File name too long"), ("nul", "cannot be read: "), ("half", "cannot be read: "),
        ("nobody", "home directory"), ("", "is a folder"),
    ],
)  # fmt: skip
def test_names_that_cannot_be_read_are_one_line(name: str, says: str, tmp_path: Path) -> None:
    path = places(tmp_path)[name]
    for read in (lambda: list(file_rows(path, "prompts")), lambda: kept(path, "train", "", "skip", dict, "rows")):
        with pytest.raises(UserError, match=says) as error:
            read()
        assert "\n" not in str(error.value)
    with pytest.raises(UserError, match=r"^prompts="):
        list(file_rows(path, "prompts"))
    if name not in ("folder.jsonl", ""):  # folders are read
        with pytest.raises(UserError, match=says):
            READERS["text"](path, None)


def test_a_file_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "closed.jsonl"
    path.write_text("{}")

    def refuse(*_: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refuse)  # those who may do everything run tests too
    with pytest.raises(UserError, match=r"path=.*closed\.jsonl cannot be read: Permission denied$"):
        found(path)


def test_a_line_without_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "LONGEST", 1000)
    path = tmp_path / "long.jsonl"
    for text, says in (("{}\n" + "x" * 2000, "line 2 is longer than"), ('[{}, "' + "x" * 5000, "item 2: not JSON")):
        path.write_text(text)
        with pytest.raises(UserError, match=says):
            list(rows(str(path), "train"))


def test_text_files(tmp_path: Path) -> None:
    path = tmp_path / "some.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\n\r\ntwo\n")
    assert read_text(path) == "one\n\ntwo\n"
    for content, says in ((b"caf\xe9", "not UTF-8 .byte 3"), (b"a\0b", "NUL bytes")):
        path.write_bytes(content)
        with pytest.raises(BadRow, match=says):
            read_text(path)


def test_sharegpt_as_it_is_found(target: Any, tmp_path: Path) -> None:
    """One array, the names of several services, conversations that are empty or begin with the assistant."""
    said = [
        {"from": "human", "value": "hi"},
        {"from": "chatgpt", "value": "yes"},
        {"from": "human", "value": "?"},
        {"from": "bing", "value": "no"},
    ]
    talks = [{"id": "a_0", "conversations": said}, {"id": "b", "conversations": []}, {"id": "c", "conversations": said[1:]}]
    path = tmp_path / "ShareGPT_V3.json"
    path.write_text(json.dumps(talks, indent=2))
    with pytest.raises(UserError, match=r"V3\.json item 2: not a conversation.*data\.on_bad=skip"):
        documents(str(path), target.tokenizer)
    one, two = documents(str(path), target.tokenizer, on_bad="skip")
    assert target.tokenizer.decode(one.tokens[one.loss_mask].tolist()) == "yes<end>no<end>" and len(two.tokens) < len(one.tokens)
    given = {"name": "chat", "path": str(path), "split": "train", "on_bad": "skip"}
    source = open_source(given, target, length=16, seed=0)
    assert source.packed is not None and source.prompts(1, 4)
    assert next(read_prompts(str(path), target.tokenizer, "prompts"))["id"] == "a_0"


def test_one_of_several_processes_tells_of_dropped_rows(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        tell(["a.jsonl: dropped 1 of 2 rows"])
        assert caplog.messages == ["a.jsonl: dropped 1 of 2 rows"]
