"""What is streamed is trained on once an epoch, by one process each; a run goes on where it was, and tokenises nothing again for it."""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from headstart.data import streamed
from headstart.data.rows import passing
from headstart.data.source import Source, check_source, open_source
from headstart.data.tokenized import Reader
from headstart.heads.errors import UserError
from tests.data.conftest import write

COUNT, SIZE = 200, 16


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Each document its own token, a row each; two rows are none."""
    monkeypatch.setattr(streamed, "BLOCK", 12)
    monkeypatch.setattr(streamed, "HELD", 8)
    rows: list[Any] = [{"input_ids": [i + 1] * SIZE} for i in range(COUNT)]
    rows[20] = rows[50] = {"none": 0}
    path = write(tmp_path / "tokens.jsonl", rows)
    return {"name": "tokenized", "path": str(path), "split": "", "subset": "", "on_bad": "skip", "limit": None, "workers": None,
            "cache": str(tmp_path / "cache"), "stream": True}  # fmt: skip


def opened(given: dict[str, Any], target: Any) -> Source:
    check_source(given)
    return open_source(given, target, length=SIZE, seed=0)


def tokens(source: Source, steps: int, *place: int, rows: int = 3) -> list[torch.Tensor]:
    return [batch.tokens_BT for batch in islice(source.stream((), rows, *place), steps)]


@pytest.mark.parametrize("world", [1, 3])
def test_every_row_once_an_epoch_and_held_out_never(given: Any, world: int, target: Any) -> None:
    source = opened(given, target)
    assert source.held_out is not None and set(source.held_out.tokens_RT.reshape(-1).tolist()) == set(range(1, 9))
    ranks = [torch.cat(tokens(source, 190, 5, 0, rank, world))[:, 0].tolist() for rank in range(world)]
    wanted = set(range(9, COUNT + 1)) - {21, 51}
    assert set().union(*ranks) == wanted and sum(map(len, map(set, ranks))) == len(wanted)
    for line in ranks:
        own = len(set(line))
        assert all(sorted(line[e * own : (e + 1) * own]) == sorted(set(line)) for e in range(len(line) // own))
        assert line[:own] != line[own : 2 * own] and max(Counter(line).values()) - min(Counter(line).values()) <= 1


def test_each_block_has_an_order_of_its_own(given: Any, target: Any) -> None:
    line = torch.cat(tokens(opened(given, target), 12, 5))[:, 0].tolist()
    first, third = line[:12], line[23:35]  # the second one lacks a row
    assert sorted(first) == [*range(9, 21)] and sorted(third) == [*range(33, 45)] and first != [token - 24 for token in third]


def test_a_bad_row_is_told_of_and_drops_no_block(given: Any, target: Any) -> None:
    given["on_bad"] = "error"
    with pytest.raises(UserError, match=r"tokens\.jsonl line 21: not tokenised"):
        tokens(opened(given, target), 20)


@pytest.mark.parametrize("held_out", [False, True])
def test_rows_that_are_dropped_are_told_of(given: Any, held_out: bool, target: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Of the rows that are held out and the first block at once, then of each epoch; and within one where they are ten times as many."""
    path = Path(given["path"])
    rows = path.read_text().splitlines(keepends=True)
    if held_out:
        own = path.with_name("own.jsonl")
        own.write_text("".join(rows[:8]))
        given["held_out"] = str(own)
    for bad in (3, 10, *range(120, 140)):
        rows[bad] = "{}\n"
    path.write_text("".join(rows))
    source = opened(given, target)
    assert f"{path}: dropped 2 of {12 if held_out else 20} rows, first {path} line 4: not tokenised" in caplog.messages[0]
    tokens(source, COUNT // 3, 5)
    said = [re.findall(r"dropped (\d+) of (\d+) rows", message) for message in caplog.messages[1:]]
    assert said == ([[("16", "132")], [("24", "200")]] if held_out else [[("11", "120")], [("23", "192")]])


def test_rows_that_were_told_of_are_not_told_of_again(caplog: pytest.LogCaptureFixture) -> None:
    """At the end of an epoch, where nothing was dropped since."""
    dropped = streamed.Dropped("corpus")
    for of, count, messages in ((40, 12, 1), (60, 12, 1), (80, 13, 2)):
        dropped.of, dropped.count = of, count
        dropped.tell(often=10)
        dropped.tell()
        assert len(caplog.messages) == messages


def test_masks_of_what_is_streamed_are_looked_at(target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    talk = {"messages": [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "An answer of some length."}]}
    path = write(tmp_path / "talks.jsonl", [talk] * 80)
    given = {"name": "chat", "path": str(path), "split": "", "on_bad": "error", "cache": str(tmp_path / "cache"), "stream": True}
    monkeypatch.setattr(
        target.tokenizer, "chat_template", "{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}{% endfor %}"
    )
    with pytest.raises(UserError, match="the loss mask is full"):
        open_source(given, target, length=64, seed=0)


def test_the_next_batch_is_announced_to_the_target(given: Any, target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A target on a server then begins with it while this one is trained on."""
    told = list[torch.Tensor]()
    monkeypatch.setattr(target, "begin", lambda tokens_BT, positions_BT: told.append(tokens_BT))
    batches = opened(given, target).stream((), 3, 7, 0, 0, 1)
    read = [next(batches).tokens_BT for _ in range(4)]
    assert len(told) == 5 and all(map(torch.equal, told, read))


@pytest.mark.parametrize("world", [1, 2])
def test_it_goes_on_where_it_was(given: Any, world: int, target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    place = (7, 0, world - 1, world)
    whole = tokens(opened(given, target), 150, *place)
    again, made = opened(given, target), Counter[str]()
    assert again.digest() == opened(given, target).digest()
    monkeypatch.setattr(Reader, "read", lambda self, row, read=Reader.read: made.update(["rows"]) or read(self, row))
    for start in (0, 1, 13, 40, 120, 140):
        made.clear()
        went_on = tokens(again, 3, 7, start, *place[2:])  # and a fourth batch, which is announced
        assert all(torch.equal(a, b) for a, b in zip(whole[start : start + 3], went_on, strict=True))
        assert made["rows"] <= 24  # a block, or two where one ends
    Path(given["cache"]).rename(Path(given["cache"]).with_name("gone"))  # without what was written down: from the beginning
    assert torch.equal(tokens(again, 1, 7, 60, *place[2:])[0], whole[60])


def test_another_corpus_of_the_same_path_goes_on_where_it_was_itself(given: Any, target: Any) -> None:
    """What was written down of blocks was of the file that had this path before."""
    path = Path(given["path"])
    rows = path.read_text().splitlines(keepends=True)
    tokens(opened(given, target), 150, 7)
    # in the second block the rows are in another order, in a file of the same size, or others, and then fewer
    for changed in (rows[:30] + rows[:29:-1], rows[:30] + rows[90:], rows[:60]):
        path.write_text("".join(changed))
        whole = tokens(opened(given, target), 60, 7)
        for start in (1, 13, 40):
            went_on = tokens(opened(given, target), 2, 7, start)
            assert all(torch.equal(a, b) for a, b in zip(whole[start : start + 2], went_on, strict=True))


def test_of_a_data_set_nothing_is_downloaded_first(given: Any, target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    rows = [json.loads(line) for line in Path(given["path"]).read_text().splitlines()]
    asked = []

    def load(name: str, subset: Any, split: str, streaming: bool = False) -> Any:
        asked.append(streaming)
        return datasets.IterableDataset.from_generator(lambda: iter([row for row in rows if "input_ids" in row]))

    monkeypatch.setattr(datasets, "load_dataset", load)
    source = opened({**given, "path": "someone/tokens", "split": "train"}, target)
    seen = [{*torch.cat(tokens(each, 66, 3, 0, 0, 1))[:, 0].tolist()} for each in (source, opened(given, target))]
    assert seen[0] == seen[1] and all(asked)
    asked.clear()
    assert list(passing("someone/tokens", "train", "", 0, 0)) == [] and not asked, "for no rows, not even the data set is opened"
    assert [(row.number, row.where) for row in passing("someone/tokens", "train", "", 3, 5)] == [
        (4, "someone/tokens row 4"),
        (5, "someone/tokens row 5"),
    ]
    with pytest.raises(UserError, match="nothing to learn in its blocks of 12 rows: train without"):
        tokens(opened({**given, "limit": 40}, target), 1, 3, 0, 7, 9)
    with pytest.raises(UserError, match="no documents beside the 8 that are held out in it"):
        opened({**given, "limit": 8}, target)
    with pytest.raises(UserError, match=r"data\.stream must be true or false, found 'yes'"):
        check_source({**given, "stream": "yes"})


def test_plain_text(target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of texts, one of them empty; prompts are taken from those that are held out."""
    monkeypatch.setattr(streamed, "BLOCK", 12)
    monkeypatch.setattr(streamed, "HELD", 8)
    texts = ["" if i == 30 else " ".join(str(n % 40) for n in range(i, i + 60)) for i in range(60)]
    path = write(tmp_path / "texts.jsonl", [{"text": text} for text in texts])
    given = {"name": "text", "path": str(path), "split": "", "subset": "", "field": "text", "suffixes": [], "on_bad": "error"}
    given |= {"stream": True, "cache": str(tmp_path / "cache")}
    check_source(given)
    source = open_source(given, target, length=64, seed=0)
    prompts = source.prompts(4, 8)
    assert len(prompts) == 4 and all(any(target.tokenizer.decode(prompt) in text for text in texts[:8]) for prompt in prompts)
    seen = target.tokenizer.decode(torch.cat(tokens(source, 60, 0, 0, 0, 1)).reshape(-1).tolist())
    assert all(text[:40] in seen for text in texts[8:] if text)
    for wrong, says in (({"path": str(tmp_path)}, "what is streamed has rows"), ({"field": "body"}, "line 1: no text in 'body'")):
        with pytest.raises(UserError, match=says):
            check_source({**given, **wrong})
            open_source({**given, **wrong}, target, length=64, seed=0)


@pytest.mark.parametrize("name", ["file", "someone/tokens"])
def test_a_limit_counts_from_the_beginning(name: str, given: Any, target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are held out are among the first ones; beyond the limit nothing is read. A bad row is told of by its number."""
    import datasets

    rows = [json.loads(line) for line in Path(given["path"]).read_text().splitlines()]
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.IterableDataset.from_generator(lambda: iter(rows)))
    if name != "file":
        given |= {"path": name, "split": "train"}
    source = opened({**given, "limit": 40}, target)
    assert source.held_out is not None and set(source.held_out.tokens_RT.reshape(-1).tolist()) == set(range(1, 9))
    assert set(torch.cat(tokens(source, 40, 3, 0, 0, 1))[:, 0].tolist()) == set(range(9, 41)) - {21}
    with pytest.raises(UserError, match=r"tokens\.jsonl line 21: not tok" if name == "file" else r"^someone/tokens row 21: not tok"):
        tokens(opened({**given, "on_bad": "error"}, target), 20)
