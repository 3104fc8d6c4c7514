"""A capture by several processes, killed at any moment, gone on with by any number; what verify says; folders elsewhere."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from itertools import islice
from pathlib import Path

import pytest
import torch

from headstart.data import folder as folders
from headstart.data import index as indexes
from headstart.data import shards
from headstart.data import verify as verification
from headstart.data.capture import capture
from headstart.data.folder import open_folder
from headstart.data.lock import locked
from headstart.data.shards import Shards, ahead
from headstart.data.shards import open as open_shards
from headstart.data.verify import damage, verify
from headstart.heads import files
from headstart.heads.errors import UserError
from tests.data.captures import FakeTarget, decoded, equal, rows

HELD = dict(seed=3, documents=60)


def captured(folder, rank=0, world=1, target=None, **changes):
    how = {"batch_size": 3, "rows_per_shard": 5, "storage": "int8", "held_out": rows(**HELD)} | changes
    return capture(rows(), target or FakeTarget(), (0, 2), folder, rank=rank, world=world, **how)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Of one process that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    captured(folder)
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# ---- several processes ----


@pytest.mark.parametrize("ranks", [[0, 1], [1, 0], [2, 0, 1]])
def test_many_processes_write_what_one_does(ranks, whole, tmp_path, capsys):
    """In whatever order they come: the same files and the same index, to the byte."""
    for rank in ranks:
        made = captured(tmp_path, rank, len(ranks))
        last = rank == ranks[-1]
        assert (made is not None) == last and last == (tmp_path / "index.json").exists()
        if not last:
            assert f"process {rank} of {len(ranks)} has written its files; the others have" in capsys.readouterr().out
            with pytest.raises(UserError, match="rows are captured: run the same capture again"):
                Shards(tmp_path)
    assert content(tmp_path) == content(whole)


@pytest.mark.parametrize("then", [1, 2, 3, 5])
def test_any_number_goes_on(then, whole, tmp_path):
    """Nothing is read twice."""
    targets = [FakeTarget() for _ in range(2 + then)]
    for target, rank in zip(targets, (0, 3), strict=False):
        captured(tmp_path, rank, 4, target)
    made = [captured(tmp_path, rank, then, target) for rank, target in enumerate(targets[2:])]
    assert made[-1] is not None and content(tmp_path) == content(whole)
    once = FakeTarget()
    captured(tmp_path / "once", target=once)
    assert sum(target.passes for target in targets) == once.passes


def test_processes_of_different_settings_are_told(tmp_path):
    captured(tmp_path, 0, 2)
    for change in ({"storage": "fp8"}, {"held_out": None}, {"rows_per_shard": 4}):
        with pytest.raises(UserError, match=f"{next(iter(change)).replace('storage', 'dtype')} differs: the shards have"):
            captured(tmp_path, 1, 2, **change)


@pytest.mark.parametrize("name, rank", [(".lock", 0), (".lock-1", 1)])
def test_one_of_each_rank(name, rank, tmp_path):
    class Greedy(FakeTarget):
        def read(self, *arguments):
            assert (tmp_path / name).exists()
            with pytest.raises(UserError, match=rf"out={tmp_path} is being written by process \d+ on .*: wait for it, end it, or choose"):
                captured(tmp_path, rank, 3)
            return super().read(*arguments)

    captured(tmp_path, rank, 3, Greedy())
    assert captured(tmp_path, 2, 3) is None and not [*tmp_path.glob(".lock*")]


@pytest.mark.parametrize("at_once", [1, 3])  # its index is read before the right one, or after
def test_two_that_wrote_the_same_file_do_not_contradict_each_other(at_once, whole, tmp_path):
    """Started as two and as three at once, with rows that were read in other batches: the file says which index is right."""
    captured(tmp_path, 0, 2)
    other = json.loads((tmp_path / "index-00000-of-00002.json").read_text())
    for file in other["files"]:
        file["sha256"] = "0" * 64
    (tmp_path / f"index-00000-of-{at_once:05d}.json").write_text(json.dumps(files.sealed(other)))
    captured(tmp_path, 1, 2)
    assert content(tmp_path) == content(whole)


def test_indexes_that_are_merged_while_they_are_read_are_read_again(whole, tmp_path, monkeypatch):
    captured(tmp_path, 0, 2)
    read, asked = indexes.read_index, []

    def merged_just_now(folder, name=indexes.NAME):
        asked.append(name)
        if len(asked) == 1:
            with monkeypatch.context() as patch:
                patch.setattr(indexes, "read_index", read)
                captured(tmp_path, 1, 2)
        return read(folder, name)

    monkeypatch.setattr(indexes, "read_index", merged_just_now)
    assert indexes.read_all(open_folder(tmp_path)) == json.loads((whole / "index.json").read_text())
    assert asked == ["index-00000-of-00002.json", "index.json"]
    (tmp_path / "index.json").write_text("{")  # nobody writes here: it is damaged
    with pytest.raises(UserError, match="no target outputs can be read here"):
        indexes.read_all(open_folder(tmp_path))
    assert asked == ["index-00000-of-00002.json", "index.json", "index.json"]


# ---- kills ----


def killed_after(count: int, folder: Path, rank: int, world: int) -> bool:
    """A process of the capture, killed (-9) before the count-th thing that it asks of its disk. Returns whether it was."""
    if not (child := os.fork()):
        code = 1
        try:
            asked = 0

            def counted(call):
                def wrapped(*arguments, **named):
                    nonlocal asked
                    asked += 1
                    if asked > count:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return call(*arguments, **named)

                return wrapped

            os.fsync, Path.replace, Path.unlink = map(counted, (os.fsync, Path.replace, Path.unlink))  # type: ignore[assignment]
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            captured(folder, rank, world, rows_per_shard=14)
            code = 0
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL)
    return code != 0


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_a_kill_at_any_moment_leaves_nothing_trusted_that_is_broken(world, tmp_path):
    captured(tmp_path / "whole", rows_per_shard=14)
    wanted, count = content(tmp_path / "whole"), 0
    while count < 300:  # things asked of the disk
        folder = tmp_path / str(count)
        dead = [killed_after(count, folder, rank, world) for rank in range(world)]
        index = indexes.read_all(open_folder(folder)) if folder.exists() else None
        if index is not None:
            assert set(damage(open_folder(folder), index).values()) <= {"not captured yet"}
        for rank in range(3 - world):  # by another number
            captured(folder, rank, 3 - world, rows_per_shard=14)
        found = {name: text for name, text in content(folder).items() if not name.startswith(".lock")}  # locks that nobody holds any more
        assert found == wanted
        if not any(dead):
            break
        count += 1
    assert 20 < count < 300, "it was killed at every moment, and then not"


def test_a_half_file_of_a_killed_process_goes(whole, tmp_path):
    """Under our name, and under the one of safetensors (tests/heads/test_files.py)."""
    captured(tmp_path, 0, 2)
    for name in (".shard-00001.safetensors.part", ".tmpQ7xZ0a"):
        (tmp_path / name).write_bytes(b"half")
    captured(tmp_path, 1, 2)
    assert content(tmp_path) == content(whole)


def test_another_may_finish_before_the_last_file_is_seen_to_be_there(whole, tmp_path, monkeypatch):
    """It takes the index of this process away, in the moment in which that is complete."""
    captured(tmp_path, 0, 2)

    def put(path, write, put=folders.put):
        put(path, write)
        if path.name.startswith("index-00001"):
            captured(tmp_path, 0, 2)

    monkeypatch.setattr(folders, "put", put)
    assert captured(tmp_path, 1, 2) is not None and content(tmp_path) == content(whole)


# ---- verify ----


def test_a_whole_capture_is_said_to_be(whole, capsys):
    verify(whole)
    said = capsys.readouterr().out
    assert re.search(r"(\d+) of \1 files are whole, (\d+) of \2 rows are usable \(100\.0%\)", said)


def test_what_is_damaged_is_named_and_written_anew(whole, tmp_path, capsys):
    captured(tmp_path)
    names = sorted(path.name for path in tmp_path.glob("shard-*"))
    flipped = bytearray((tmp_path / names[0]).read_bytes())
    flipped[-1] ^= 1
    (tmp_path / names[0]).write_bytes(flipped)
    (tmp_path / names[1]).write_bytes(flipped[:50])
    (tmp_path / names[2]).unlink()
    (tmp_path / "held-out.safetensors").write_bytes(bytes((tmp_path / "held-out.safetensors").stat().st_size))
    count = len(names) + 1
    with pytest.raises(UserError, match=f"4 of {count} files are damaged or missing: verify with drop=true and run the capture again"):
        verify(tmp_path)
    said = capsys.readouterr().out
    for name, why in zip(names, ("the checksum differs", "the shard has 50 bytes", "the shard is missing"), strict=False):
        assert f"{name}: {why}" in said
    assert "held-out.safetensors: the checksum differs" in said
    rows_left = len(rows()) - 15
    assert f"{count - 4} of {count} files are whole, {rows_left} of {len(rows())} rows are usable ({rows_left / len(rows()):.1%})" in said

    with pytest.raises(UserError, match="run the same capture again, which writes them"):
        verify(tmp_path, drop=True)
    with pytest.raises(UserError, match=f"only {rows_left} of {len(rows())} rows are captured"):
        Shards(tmp_path)
    target = FakeTarget()
    for rank in range(2):
        captured(tmp_path, rank, 2, target)
    assert content(tmp_path) == content(whole)
    assert target.passes == 3 * 2 + 6, "two passes for each shard, six of three rows for what is held out"


@pytest.mark.parametrize("lock", [".lock", ".lock-1", ".lock-12"])
def test_nothing_is_taken_out_while_any_process_writes(lock, tmp_path):
    for rank in range(2):
        captured(tmp_path, rank, 3)  # not the third: each process still has its own index
    (tmp_path / "shard-00000.safetensors").write_bytes(b"damaged")
    (tmp_path / ".lock-7").touch()  # left by a process that was killed: nobody holds it
    before = content(tmp_path)
    with locked(tmp_path, name=lock), pytest.raises(UserError, match=rf"^path={tmp_path} is being written by process {os.getpid()} on"):
        verify(tmp_path, drop=True)
    assert before.items() - content(tmp_path).items() <= {(".lock-7", b"")} and content(tmp_path).keys() <= before.keys()
    with pytest.raises(UserError, match="run the same capture again, which writes them"):
        verify(tmp_path, drop=True)
    assert not [*tmp_path.glob(".lock*")] and not (tmp_path / "shard-00000.safetensors").exists()


def test_what_is_written_while_files_are_checked_is_kept(whole, tmp_path, monkeypatch):
    captured(tmp_path, 0, 2)
    shard = tmp_path / "shard-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")  # of the size that it had, so that a capture goes on
    check = verification.damage

    def meanwhile(*about):
        monkeypatch.undo()  # what is damaged is looked at once more, under the lock
        found = check(*about)
        captured(tmp_path, 1, 2)
        return found

    monkeypatch.setattr(verification, "damage", meanwhile)
    with pytest.raises(UserError, match="run the same capture again"):
        verify(tmp_path, drop=True)
    target = FakeTarget()
    captured(tmp_path, target=target)
    assert content(tmp_path) == content(whole) and target.passes == 2, "only the damaged shard is read again"


def test_what_is_found_whole_under_the_lock_is_kept(whole, tmp_path, monkeypatch):
    """A disk that is busy may refuse a file once."""
    captured(tmp_path)
    before, check = content(tmp_path), verification.damage

    def refused_once(*about):
        monkeypatch.undo()
        return check(*about) | {"shard-00000.safetensors": "not a safetensors file"}

    monkeypatch.setattr(verification, "damage", refused_once)
    with pytest.raises(UserError):
        verify(tmp_path, drop=True)
    assert before.items() <= content(tmp_path).items()


def test_a_file_that_goes_while_a_folder_is_listed_takes_no_other_with_it(tmp_path, monkeypatch):
    """Its name is gone between two questions; the folder is not."""
    captured(tmp_path)
    before, is_file = open_folder(tmp_path).sizes(), Path.is_file
    (tmp_path / "row-0.safetensors").write_bytes(b"written, and merged")

    def then_gone(path):
        found = is_file(path)
        if path.name == "row-0.safetensors":
            path.unlink(missing_ok=True)
        return found

    monkeypatch.setattr(Path, "is_file", then_gone)
    assert open_folder(tmp_path).sizes() == before
    assert open_folder(tmp_path / "nowhere").sizes() == {} and open_folder(tmp_path / "index.json").sizes() == {}


def test_what_says_that_a_file_is_missing_says_how_it_is_written_again(whole, tmp_path):
    captured(tmp_path)
    (tmp_path / "shard-00001.safetensors").unlink()
    for _ in range(2):
        with pytest.raises(UserError, match=rf"the shard is missing: `python -m data verify {tmp_path} drop=true` takes it out, the same"):
            captured(tmp_path)
    with pytest.raises(UserError):
        verify(tmp_path, drop=True)
    captured(tmp_path)
    assert content(tmp_path) == content(whole)
    index = tmp_path / "index.json"
    index.write_text(index.read_text().replace('"layers": ', '"layers":  1', 1))
    with pytest.raises(UserError, match=r"index\.json is damaged: .*: remove it, and capture again"):
        captured(tmp_path)
    index.unlink()
    captured(tmp_path)
    assert content(tmp_path) == content(whole)


def test_what_is_not_captured_yet_is_said(tmp_path, capsys):
    captured(tmp_path, 1, 2)
    with pytest.raises(UserError, match="files are damaged or missing: run the same capture again, which writes them"):
        verify(tmp_path)
    assert "shard-00000.safetensors: not captured yet" in capsys.readouterr().out
    with pytest.raises(UserError, match="no target outputs can be read here"):
        verify(tmp_path / "nowhere")


# ---- reading ahead ----


def test_items_come_in_order_and_errors_in_their_place():
    made, threads = [], set()

    def items():
        for i in range(6):
            threads.add(threading.get_ident())
            made.append(i)
            yield i
        raise UserError("the seventh")

    stream = ahead(items())
    assert next(stream) == 0 and list(islice(stream, 5)) == [1, 2, 3, 4, 5]
    with pytest.raises(UserError, match="the seventh"):
        next(stream)
    assert threading.get_ident() not in threads and len(threads) == 1
    made.clear()
    left = ahead(items())
    next(left)
    left.close()
    assert len(made) <= 3 and not [thread for thread in threading.enumerate() if thread.name.startswith("ahead")]


def test_files_are_hashed_and_read_beside_the_training(whole, monkeypatch):
    threads, sha256, slices = set(), indexes.sha256, set()
    monkeypatch.setattr(indexes, "sha256", lambda *paths: threads.add(threading.current_thread().name) or sha256(*paths))
    stored = Shards.stored
    monkeypatch.setattr(Shards, "stored", lambda self, *a, **k: slices.add(threading.current_thread().name) or stored(self, *a, **k))
    batches = list(islice(Shards(whole).stored_stream(2, seed=1), 30))
    main = threading.main_thread().name
    assert len(batches) == 30 and threads and slices and main not in threads | slices
    assert all(batch.stored["tap_2"].dtype.is_signed and batch.stored["tap_2"].element_size() == 1 for batch in batches), "as stored"


@pytest.mark.parametrize("name", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_states_are_made_where_they_are_wanted(name, whole):
    """The final state of the tokens that have one, zeros elsewhere; from pinned memory, on a GPU."""
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    device, read = torch.device(name), Shards(whole)
    for stored, wanted in islice(zip(read.stored_stream(3, pin=name == "cuda"), decoded(read, 3), strict=False), 8):
        made = stored.states_on(device, torch.bfloat16)
        assert made.final_BTD.device.type == name and equal(made.to(torch.device("cpu")), wanted)
        assert bool((wanted.final_BTD.norm(dim=-1) > 0).eq(wanted.supervised(0)).all()) and stored.stored["tap_0"].is_pinned() == (
            name == "cuda"
        )


def test_what_is_damaged_ends_the_training_where_it_is_read(whole, tmp_path):
    captured(tmp_path)
    path = tmp_path / "shard-00003.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(UserError, match=r"shard-00003\.safetensors: the checksum differs"):
        list(islice(decoded(Shards(tmp_path), 4), 100))


# ---- elsewhere ----


@pytest.fixture
def memory():
    """A folder of fsspec's own file system that lies in memory."""
    import fsspec

    yield "memory://bucket/captured"
    fsspec.filesystem("memory").rm("/bucket", recursive=True)


def test_a_folder_behind_a_url_is_made(tmp_path):
    """Not of object stores, but of others: file://, sftp://, hdfs://."""
    folder = open_folder(f"file://{tmp_path}/a/b")
    folder.make()
    folder.put("x", lambda path: path.write_bytes(b"1"))
    assert (tmp_path / "a" / "b" / "x").read_bytes() == b"1"


def check_elsewhere(url, whole, monkeypatch):
    """Written by two processes, the first of which is cut off; verified, damaged, written anew, read."""
    from headstart.data.folder import Elsewhere

    put, done = Elsewhere.put, []

    def cut(self, name, write):
        done.append(name)
        if len(done) == 4:
            raise ConnectionError("the store does not answer")
        return put(self, name, write)

    with monkeypatch.context() as patch:
        patch.setattr(Elsewhere, "put", cut)
        with pytest.raises(UserError, match=rf"^{url}/.*: not written \(the store does not answer\); earlier shards are kept"):
            captured(url, 0, 2)
    assert [captured(url, rank, 2) is not None for rank in (1, 0)] == [False, True]
    folder = open_folder(url)
    assert folder.sizes() == {name: len(text) for name, text in content(whole).items()}
    for name, text in content(whole).items():
        with folder.file(name) as path:
            assert path.read_bytes() == text
    verify(url)
    read = Shards(url)
    assert all(equal(a, b) for a, b in zip(islice(decoded(read, 3), 30), decoded(Shards(whole), 3), strict=False))
    folder.put("shard-00001.safetensors", lambda path: path.write_bytes(bytes(folder.sizes()["shard-00001.safetensors"])))
    with pytest.raises(UserError, match=rf"^{url}/shard-00001\.safetensors: the checksum differs"):
        Shards(url).batch([5])
    with pytest.raises(UserError, match="1 of"):
        verify(url, drop=True)
    captured(url)
    verify(url)


def test_a_folder_elsewhere(memory, whole, monkeypatch):
    check_elsewhere(memory, whole, monkeypatch)


def test_a_bucket(s3, whole, monkeypatch):
    check_elsewhere(s3, whole, monkeypatch)


def test_a_file_elsewhere_is_checked_each_time_it_is_fetched(memory, monkeypatch):
    captured(memory)
    read = Shards(memory)
    monkeypatch.setattr(shards, "OPEN", 1)
    read.batch([0])
    read.batch([5])  # closes the first file
    read.folder.put("shard-00000.safetensors", lambda path: path.write_bytes(bytes(read.files[0]["bytes"])))
    with pytest.raises(UserError, match=r"shard-00000\.safetensors: the checksum differs"):
        read.batch([0])


@pytest.mark.parametrize(
    "url, says", [("nothing://x/y", "cannot be opened: Protocol not known"), ("gs://x/y", "cannot be opened: .*gcsfs")]
)
def test_a_url_that_nothing_opens(url, says):
    if url.startswith("gs"):
        pytest.importorskip("fsspec")
        try:
            import gcsfs  # noqa: F401

            pytest.skip("gcsfs is installed")
        except ImportError:
            pass
    with pytest.raises(UserError, match=f"^{url} {says}"):
        captured(url)


def test_training_asks_for_what_was_held_out(whole):
    """As a source: the same object that training rows come from has those of evaluation."""
    target = FakeTarget()
    target.dtype = torch.float32
    source = open_shards(target, length=32, seed=0, path=str(whole), prompts_file=None)
    assert source.held_out is not None and len(source.held_out) == 16
    batch = source.observe(source.held_out.batch(slice(4, 9)), (2,))
    held = rows(**HELD).batch(slice(4, 9))
    assert batch.tokens_BT.tolist() == held.tokens_BT.tolist() and list(batch.states) == [2]
    assert {row.tobytes() for row in rows().tokens_RT}.isdisjoint(row.tobytes() for row in held.tokens_BT.int().numpy())
