"""The endpoint's log: whole replies, in the form that training reads, and nothing else."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from headstart.data.forms import talk_of
from headstart.heads.errors import UserError
from headstart.inference.serving import record
from headstart.inference.serving.endpoint import CHAT, COMPLETIONS
from headstart.inference.serving.record import Record
from tests.inference.serving.served import NEW, client, greedy, running

ASKED = [{"role": "user", "content": "one two"}]


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@running
async def test_whole_and_streamed_replies_are_conversations(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("log") / "log.jsonl"
    async with client(record=Record(str(path))) as it:
        chat = {"messages": ASKED, "max_tokens": NEW, "temperature": 0}
        whole = await (await it.post(CHAT, json=chat | {"logprobs": True})).json()
        await (await it.post(CHAT, json=chat | {"stream": True})).read()
        assert (await it.post(CHAT, json=chat | {"tools": [1]})).status == 400
        two = await (await it.post(COMPLETIONS, json=greedy(0, NEW, n=2, best_of=2))).json()
    first, streamed, completion = rows(path)
    (said,) = whole["choices"]
    for row in (first, streamed):
        (choice,) = row["response"]["choices"]
        assert choice == {"index": 0, "message": said["message"], "finish_reason": said["finish_reason"], "stop_reason": None}
        cut = {"cut": True} if said["finish_reason"] == "length" else {}
        assert talk_of(row) == ([*ASKED, {"role": "assistant", "content": said["message"]["content"]} | cut], None)
        assert row["response"]["usage"] == whole["usage"] and row["response"]["model"] == "toy"
    assert first["request"] == chat | {"logprobs": True} and streamed["request"] == chat | {"stream": True}
    assert [c["text"] for c in completion["response"]["choices"]] == [c["text"] for c in two["choices"]]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@running
async def test_a_stream_is_logged_though_its_client_leaves_with_the_end(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("log") / "log.jsonl"
    async with client(record=Record(str(path))) as it:
        for _ in range(6):
            async with it.post(CHAT, json={"messages": ASKED, "max_tokens": NEW, "temperature": 0, "stream": True}) as answer:
                while b'finish_reason": "' not in await answer.content.readline():
                    pass
    assert len(rows(path)) == 6


@running
async def test_a_stop_string_is_told(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The target has not ended its turn there, so its end is not learnt."""
    path = tmp_path_factory.mktemp("log") / "log.jsonl"
    async with client(record=Record(str(path))) as it:
        chat = {"messages": ASKED, "max_tokens": NEW, "temperature": 0}
        said = (await (await it.post(CHAT, json=chat)).json())["choices"][0]["message"]["content"]
        await it.post(CHAT, json=chat | {"stop": [said[3:5], "nowhere"]})
    stopped = rows(path)[1]
    assert stopped["response"]["choices"][0]["stop_reason"] == said[3:5] and talk_of(stopped)[0][-1]["cut"]


def test_a_file_that_cannot_be_written_is_told_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, why in (
        (tmp_path, "cannot be written"), (tmp_path / "nowhere" / "log.jsonl", "cannot be written"), (tmp_path / "pipe", "is no ordinary"),
        ("a\0b", "cannot be written"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=f"log={path} {why}"):
            Record(str(path))


def test_a_line_that_a_kill_has_cut_is_not_continued(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"a": 1}\n{"b"')
    for number in (2, 3):
        kept = Record(str(path))
        kept.add(b"%d" % number, {})
        kept.close()
    assert [line[:4] for line in path.read_text().splitlines()] == ['{"a"', '{"b"', '{"ti', '{"ti']


def test_a_full_disk_costs_a_line_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    write = os.write

    def full(file: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    ways = iter([write, lambda file, data: write(file, data[:5]), full, write])
    monkeypatch.setattr(record.os, "write", lambda file, data: next(ways)(file, data))
    kept = Record(str(tmp_path / "log.jsonl"))
    for number in range(4):
        kept.add(b"%d" % number, {})
    kept.close()
    monkeypatch.setattr(record.os, "write", write)
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["request"] for line in (lines[0], *lines[2:])] == [0, 3] and len(lines) == 3 and len(lines[1]) == 5
    assert [r.message.rpartition(": ")[2] for r in caplog.records] == ["the disk is full", "No space left on device"]
