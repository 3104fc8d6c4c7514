"""Tokenised once, by several processes, and read from disk: the same rows, bit by bit, as in memory, and nothing trusted that is broken."""

from __future__ import annotations

import copy
import errno
import fcntl
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
from functools import partial
from itertools import count, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from headstart.data import arrow, chat, reader
from headstart.data.source import Source, defaults, open_source
from headstart.heads.errors import UserError
from headstart.heads.seal import tokenizer_file_sha, tokenizer_sha
from headstart.trainers import resume
from tests.data.conftest import write
from tests.trainers.conftest import TEMPLATE

pytest.importorskip("datasets")

BATCH = resume.Batch(1, 1, 1)


def talks(count: int) -> list[dict[str, Any]]:
    """Of many lengths; a few are none."""
    return [
        {"messages": [{"role": "user", "content": f"{i} {i % 7}"}, {"role": "assistant", "content": " ".join(map(str, range(i % 40)))}]}
        if i % 40
        else {"nothing": i}
        for i in range(count)
    ]


@pytest.fixture
def given(tmp_path: Path) -> dict[str, Any]:
    path = write(tmp_path / "talks.jsonl", talks(700))
    return {"name": "chat", "path": str(path), "split": "train", "on_bad": "skip"}


def opened(given: dict[str, Any], target: Any, **more: Any) -> Source:
    return open_source({**given, **more}, target, length=64, seed=3)


def same(a: Source, b: Source) -> None:
    assert a.packed is not None and b.packed is not None and a.held_out is not None and b.held_out is not None
    assert a.digest() == b.digest() and a.held_out.digest() == b.held_out.digest() and len(a.packed) == len(b.packed)
    assert (a.packed.left_out, a.packed.padding) == (b.packed.left_out, b.packed.padding)
    assert a.counts().equal(b.counts()) and a.prompts(9, 8) == b.prompts(9, 8)
    batches = zip(a.stream((), 4, 0, 5, 1, 2), b.stream((), 4, 0, 5, 1, 2), strict=False)
    for one, other in islice(batches, 5):
        for name in ("tokens_BT", "loss_mask_BT", "positions_BT", "documents_BT"):
            assert getattr(one, name).equal(getattr(other, name))


@pytest.mark.parametrize("form", ["lines", *(pytest.param(form, marks=pytest.mark.slow) for form in ("array", "gz"))])
@pytest.mark.parametrize("workers", [1, 3])
def test_rows_are_those_of_memory(given: Any, form: str, workers: int, target: Any, tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setattr(arrow, "SHARE", 100)
    path = Path(given["path"])
    if form == "array":
        path = write(tmp_path / "talks.json", [json.dumps(talks(700))])
    elif form == "gz":
        import gzip

        path = tmp_path / "talks.jsonl.gz"
        path.write_bytes(gzip.compress(Path(given["path"]).read_bytes()))
    inside = opened(given, target)
    said = caplog.text
    caplog.clear()
    on_disk = opened({**given, "path": str(path), "cache": str(tmp_path / "cache"), "workers": workers}, target)
    assert "dropped 18 of 700 rows" in said and "dropped 18 of 700 rows" in caplog.text
    same(inside, on_disk)
    (folder,) = (tmp_path / "cache").iterdir()
    assert len(list(folder.glob("tokens*.arrow"))) == workers
    assert {p.suffix for p in folder.iterdir()} == {".arrow", ".json", ".npy"}  # and no lock, nothing half made


@pytest.mark.slow
def test_what_is_there_is_not_made_again(given: Any, target: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """Nor packed; and whatever the tokens follow from has a place of its own."""
    given["cache"] = str(tmp_path / "cache")
    first = opened(given, target)
    with monkeypatch.context() as patched:
        patched.setattr(reader.Reader, "__call__", lambda *_: pytest.fail("tokenised again"))
        patched.setattr(arrow, "plan", lambda *_: pytest.fail("packed again"))
        same(first, opened({**given, "workers": 2}, target))
    other = tmp_path / "other.jinja"
    other.write_text(TEMPLATE.replace("<end>", "<end> "))
    count = 1
    for change in ({"limit": 600}, {"turns": "last"}, {"template": str(other)}, {"path": str(write(tmp_path / "more.jsonl", talks(701)))}):
        changed, count = opened({**given, **change}, target), count + 1
        assert (changed.digest() == first.digest()) == ("turns" in change) and len(list((tmp_path / "cache").iterdir())) == count
    one_bit = Path(given["path"])
    one_bit.write_text(one_bit.read_text().replace("1 2 3", "1 2 4", 1))
    assert opened(given, target).digest() != first.digest()
    with pytest.raises(UserError, match=r"line 1: not a conversation.*data\.on_bad=skip"):
        opened({**given, "on_bad": "error"}, target)


def test_a_cache_of_another_template_is_not_taken_for_this_ones(given: Any, target: Any, tmp_path: Path) -> None:
    """Though it has its name: somebody has copied or renamed folders. (They are whole, and named by what they were made of.)"""
    given["cache"] = str(tmp_path / "cache")
    first = opened(given, target)
    (folder,) = (tmp_path / "cache").iterdir()
    other = tmp_path / "other.jinja"
    other.write_text(TEMPLATE.replace("<end>", "<end> "))
    given["template"] = str(other)
    wanted = opened(given, target)
    (others,) = (place for place in (tmp_path / "cache").iterdir() if place != folder)
    shutil.rmtree(others)
    shutil.copytree(folder, others)
    assert wanted.digest() != first.digest() and opened(given, target).digest() == wanted.digest()


@pytest.mark.parametrize("what", ["tokens.arrow", "index.json", "rows-64-3.npy"])
def test_what_was_damaged_is_not_trusted(given: Any, target: Any, what: str, tmp_path: Path) -> None:
    given["cache"] = str(tmp_path / "cache")
    opened(given, target)
    first = opened({**given, "cache": str(tmp_path / "another")}, target)  # which maps no file that is damaged here
    (folder,) = (tmp_path / "cache").iterdir()
    data = bytearray((folder / what).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / what).write_bytes(bytes(data[:-8] if what.endswith("arrow") else data))
    if what.endswith("npy"):
        with pytest.raises(UserError, match=r"rows-64-3\.npy is damaged: run the same command again"):
            opened(given, target)
    same(first, opened(given, target))


def test_a_row_that_is_none_is_named_by_the_process_that_met_it(given: Any, target: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(arrow, "SHARE", 100)
    with pytest.raises(UserError, match=r"talks\.jsonl line \d+: not a conversation"):
        opened({**given, "on_bad": "error", "cache": str(tmp_path / "cache"), "workers": 2}, target)
    assert not list((tmp_path / "cache").iterdir())


def test_a_data_set_is_kept_too(given: Any, target: Any, tmp_path: Path, monkeypatch: Any) -> None:
    import datasets

    rows = datasets.Dataset.from_list([row for row in talks(300) if "messages" in row])
    monkeypatch.setattr(datasets, "load_dataset", lambda *name, split: rows)
    (path := tmp_path / "same.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    same(opened({**given, "path": "someone/talks", "cache": str(tmp_path / "cache")}, target), opened({**given, "path": str(path)}, target))


def build(given: dict[str, Any], folder: Path, made: Any) -> None:
    from headstart.inference.settings import open_target

    target = open_target({"name": "x", "path": str(folder), "dtype": "float32", "device": "cpu", "attention": "sdpa", "config": None})
    call = reader.Reader.__call__

    def slow(self: Any, rows: Any) -> Any:
        made.value += 1
        return call(self, rows)

    reader.Reader.__call__ = slow  # type: ignore[method-assign]
    opened({**given, "workers": 1}, target)


def test_one_makes_it_and_the_others_wait(given: Any, folder: Path, tmp_path: Path) -> None:
    given["cache"] = str(tmp_path / "cache")
    context = multiprocessing.get_context("fork")
    made = context.Value("i", 0)
    several = [context.Process(target=build, args=(given, folder, made)) for _ in range(3)]
    for process in several:
        process.start()
    for process in several:
        process.join(200)
    assert [process.exitcode for process in several] == [0, 0, 0]
    assert made.value == -(-700 // arrow.BATCH)


PROGRAM = """
import re, sys
from pathlib import Path
from headstart.data import arrow
from headstart.data.pack import plan
peak = lambda: int(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1])
for mapped in (1 << 24, 1 << 40):
    arrow.MAPPED = mapped
    documents = arrow.Mapped(sorted(Path(sys.argv[1]).glob("*.arrow")))
    rows = plan(documents, 2048)
    before = peak()
    rows.digest()
    print((peak() - before) >> 10)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_what_was_read(tmp_path: Path) -> None:
    """A file of 96 MB is read three times over, with 16 MB mapped at most; then with all of it mapped."""
    import pyarrow as pa

    ids = pa.ListArray.from_arrays(np.arange(0, 2_000_001, 2000, dtype=np.int32), np.arange(2_000_000, dtype=np.int32))
    mask = pa.ListArray.from_arrays(ids.offsets, pa.array(np.ones(2_000_000, dtype=np.bool_)))
    columns = [ids, mask, pa.array(np.arange(1000)), pa.nulls(1000, pa.string())]
    batch = pa.RecordBatch.from_arrays(columns, names=list(arrow.COLUMNS))
    with pa.OSFile(str(tmp_path / "tokens.arrow"), "wb") as file, pa.ipc.new_stream(file, batch.schema) as out:
        for _ in range(12):
            out.write_batch(batch)
    assert (tmp_path / "tokens.arrow").stat().st_size > 90 << 20
    said = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, env=os.environ)
    assert not said.stderr
    little, all_of_it = map(int, said.stdout.split())
    assert little < 40 and little < all_of_it / 2


def test_a_key_names_all_that_a_tokenizer_does(target: Any) -> None:
    """Two of one vocabulary may make other tokens of a text."""
    from tokenizers import normalizers

    other = copy.deepcopy(target.tokenizer)
    assert tokenizer_file_sha(other) == tokenizer_file_sha(target.tokenizer)
    other.backend_tokenizer.normalizer = normalizers.Lowercase()
    assert tokenizer_sha(other) == tokenizer_sha(target.tokenizer) and tokenizer_file_sha(other) != tokenizer_file_sha(target.tokenizer)


def test_a_key_names_all_settings_that_documents_depend_on(target: Any, tmp_path: Path) -> None:
    (other := tmp_path / "other.jinja").write_text(TEMPLATE + " ")
    ways: list[dict[str, Any]] = [{}, {"columns": ("a",)}, {"turns": "last"}, {"template": str(other)}, {"on_bad": "skip"}]
    longer = copy.deepcopy(target.tokenizer)
    longer.add_tokens(["<more>"])
    keys = [chat.Reader(target.tokenizer, **way).about() for way in ways] + [chat.Reader(longer).about()]
    assert len({*map(json.dumps, keys)}) == len(keys)


def test_where_tokens_are_kept_makes_no_other_run() -> None:
    """Nor does a setting that was not there yet when it began."""
    own: dict[str, Any] = {"head": {}, "loss": {}, "trainer": {"start": None, "steps": 1}}
    before = {"name": "chat", "path": "a", "on_bad": "error"}
    began, now = resume.lasting(own, before, BATCH), defaults(before) | before
    for more in ({}, {"cache": "elsewhere", "workers": 3}):
        resume._same_settings(
            began, resume.lasting(own, {**now, **more, "subset": None, "split": None}, BATCH), Path("run/checkpoints/step")
        )
    mixes = [{"name": "mix", "sources": [{**before, "weight": 1, "cache": cache}]} for cache in ("a", "b")]
    assert resume.lasting(own, mixes[0], BATCH) == resume.lasting(own, mixes[1], BATCH) != resume.lasting(own, before, BATCH)
    with pytest.raises(UserError, match=r"data\.limit=None, now it is 5"):
        resume._same_settings(began, resume.lasting(own, {**before, "limit": 5}, BATCH), Path("run/checkpoints/step"))


def test_without_locks_the_first_process_of_a_run_makes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait until it is there: several would remove each other's unfinished folder."""

    def without(*_: object) -> None:
        raise OSError(errno.ENOSYS, "no such thing here")

    monkeypatch.setattr(fcntl, "flock", without)
    for rank, wanted, looks in (("1", False, [False, False, True, True]), ("0", True, [False, False])):
        monkeypatch.setenv("RANK", rank)
        with arrow.only_one(tmp_path / "made", partial(looks.pop, 0)) as first:
            assert first is wanted


def test_without_locks_one_that_reads_other_data_does_not_wait_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first process shows at once what it makes. While it does that, and where the folder is there but not whole, there is no limit."""

    def without(*_: object) -> None:
        raise OSError(errno.ENOSYS, "no such thing here")

    now = count(step=400.0)
    monkeypatch.setattr(fcntl, "flock", without)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(arrow, "time", SimpleNamespace(monotonic=now.__next__, sleep=lambda _: None))
    for name, made in (("made", ".made.part"), ("there", "there")):
        (tmp_path / made).mkdir()
        looks = [*[False] * 9, True, True]
        with arrow.only_one(tmp_path / name, partial(looks.pop, 0)) as first:
            assert not first and not looks
    looks = [*[False] * 9, True, True]
    with (
        pytest.raises(
            UserError, match=r"the first process makes other tokens: give all processes the same data \(rows\) and the same settings"
        ),
        arrow.only_one(tmp_path / "another", partial(looks.pop, 0)),
    ):
        pass
