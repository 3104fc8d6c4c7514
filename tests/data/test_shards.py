"""What was captured is what the target said, bit by bit; damage and mix-ups are named."""

from __future__ import annotations

import errno
import json
from itertools import islice

import numpy as np
import pytest
import torch

from headstart.data import capture as capturing
from headstart.data import index as indexes
from headstart.data import shards
from headstart.data.capture import capture
from headstart.data.folder import open_folder
from headstart.data.index import read_index
from headstart.data.live import look
from headstart.data.shards import Shards
from headstart.heads.errors import UserError
from headstart.heads.files import sealed, sha256
from tests.data.captures import LAYERS, TAPS, FakeTarget, decoded, equal, in_bf16, rows


@pytest.fixture
def packed():
    return rows()


def captured(packed, folder, target=None, taps=TAPS):
    return capture(packed, target or FakeTarget(), taps, folder, batch_size=3, rows_per_shard=5)


def test_round_trip_is_bit_equal(packed, tmp_path):
    target = FakeTarget()
    read = captured(packed, tmp_path, target)
    assert len(read) == len(packed)
    mixed = np.random.default_rng(1).permutation(len(packed))
    assert equal(read.batch(mixed), in_bf16(look(packed.batch(mixed), target, TAPS)))
    some = Shards(tmp_path, taps=(2,)).batch(mixed[:3])
    assert list(some.states) == [2]
    assert torch.equal(some.states[2], read.batch(mixed[:3]).states[2])


def test_the_final_state_is_stored_once(packed, tmp_path):
    from safetensors import safe_open

    captured(packed, tmp_path)
    with safe_open(tmp_path / "shard-00000.safetensors", "pt") as shard:
        assert set(shard.keys()) == {"tokens", "loss_mask", "positions", "documents", "final", "tap_0", "tap_2"}
    batch = Shards(tmp_path).batch([4])
    assert torch.equal(batch.states[LAYERS], batch.final_BTD)


def test_a_look_gives_what_the_target_says_of_a_batch(packed):
    target = FakeTarget()
    for wanted in islice(packed.stream(4, seed=2), 3):
        batch = look(wanted, target, (1,))
        assert torch.equal(batch.tokens_BT, wanted.tokens_BT) and torch.equal(batch.loss_mask_BT, wanted.loss_mask_BT)
        assert torch.equal(batch.states[1], target.read(wanted.tokens_BT, wanted.positions_BT, (1,))[0][1])
        assert not batch.final_BTD.requires_grad


def test_the_stream_resumes_and_ranks_share_it(packed, tmp_path):
    read = captured(packed, tmp_path)
    whole = list(islice(decoded(read, 2, seed=5), 40))
    assert all(equal(a, b) for a, b in zip(islice(decoded(Shards(tmp_path), 2, seed=5, start_step=25), 15), whole[25:], strict=True))
    halves = [list(islice(decoded(read, 1, seed=5, rank=r, world=2), 40)) for r in range(2)]
    for step, batch in enumerate(whole):
        assert torch.equal(torch.cat([halves[0][step].tokens_BT, halves[1][step].tokens_BT]), batch.tokens_BT)
    orders = [read.order(epoch, 5) for epoch in range(3)]
    assert all(sorted(order) == list(range(len(read))) for order in orders)
    assert not np.array_equal(orders[0], orders[1])
    near = orders[0][: shards.BUFFER * 4] // 5  # disk-friendly: an epoch's beginning is in few shards
    assert len(set(near.tolist())) <= shards.BUFFER
    assert np.count_nonzero(np.diff(near)) > shards.BUFFER, "its rows are mixed"
    assert len({tuple(sorted({*(order[: shards.BUFFER * 5] // 5).tolist()})) for order in orders}) > 1, "and begin in other shards"


def test_an_interrupted_capture_goes_on(packed, tmp_path, monkeypatch):
    whole = captured(packed, tmp_path / "whole")
    save, written = capturing.save_file, []

    def full(tensors, path):
        if len(written) == 3:
            path.write_bytes(b"half of it")
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(path)
        save(tensors, path)

    monkeypatch.setattr(capturing, "save_file", full)
    folder = tmp_path / "cut"
    with pytest.raises(UserError, match=r"shard-00003\.safetensors: not written .*No space left.*run again"):
        captured(packed, folder)
    assert sorted(p.name for p in folder.iterdir()) == ["index.json", *(f"shard-0000{i}.safetensors" for i in range(3))]
    with pytest.raises(UserError, match=f"only 15 of {len(packed)} rows are captured"):
        Shards(folder)
    index = read_index(open_folder(folder))
    assert all(sha256(folder / f["name"]) == f["sha256"] for f in index["files"])  # earlier shards are whole

    monkeypatch.setattr(capturing, "save_file", save)
    target = FakeTarget()
    resumed = captured(packed, folder, target)
    assert resumed.index == whole.index
    assert target.passes == sum(-(-f["rows"] // 3) for f in whole.files[3:])  # nothing is read twice
    again = FakeTarget()
    captured(packed, folder, again)
    assert again.passes == 0


def test_other_settings_are_refused(packed, tmp_path):
    captured(packed, tmp_path)
    with pytest.raises(UserError, match="taps differs"):
        captured(packed, tmp_path, taps=(1,))
    with pytest.raises(UserError, match=r"target\.model_type differs: the shards have 'fake', here it is 'other'"):
        captured(packed, tmp_path, FakeTarget("other"))
    with pytest.raises(UserError, match="rows_per_shard differs"):
        capture(packed, FakeTarget(), TAPS, tmp_path, rows_per_shard=6)
    packed.loss_mask_RT[0, 0] ^= True
    with pytest.raises(UserError, match="data differs"):
        captured(packed, tmp_path)


def test_another_target_is_refused(packed, tmp_path):
    captured(packed, tmp_path)
    Shards(tmp_path, FakeTarget().fingerprint, taps=TAPS)
    with pytest.raises(UserError, match=r"target\.weights differs"):
        Shards(tmp_path, FakeTarget(scale=1.5).fingerprint)
    with pytest.raises(UserError, match=r"target\.vocab_size differs"):
        Shards(tmp_path, {"vocab_size": 5})
    with pytest.raises(UserError, match="tap 1 was not captured"):
        Shards(tmp_path, taps=(1, 2))
    with pytest.raises(UserError, match=r"target\.weights differs"):  # before anything is read of them
        shards.open(FakeTarget(scale=1.5), length=32, seed=0, path=str(tmp_path), prompts_file=None)


def test_what_is_missing_of_a_capture_is_said_without_what_is_held_out(packed, tmp_path):
    whole = capture(packed, FakeTarget(), TAPS, tmp_path, rows_per_shard=5, held_out=rows(seed=3)).index
    path = tmp_path / "index.json"
    path.write_text(json.dumps(sealed(whole | {"files": whole["files"][1:]})))
    with pytest.raises(UserError, match=f"only {len(packed) - 5} of {len(packed)} rows are captured"):
        Shards(tmp_path)
    path.write_text(json.dumps(sealed(whole | {"files": whole["files"][:-1]})))
    with pytest.raises(UserError, match="no held-out rows are captured"):
        Shards(tmp_path)


def test_a_capture_of_an_earlier_version_goes_on(packed, tmp_path):
    """It said neither which tokens have a final state nor what is held out: all of them, and nothing."""
    whole = captured(packed, tmp_path).index
    (tmp_path / "index.json").write_text(json.dumps({k: x for k, x in whole.items() if k not in ("final", "held_out", "sha256")}))
    again = FakeTarget()
    assert len(captured(packed, tmp_path, again)) == len(packed) and again.passes == 0


def test_few_files_are_open_at_a_time(packed, tmp_path, monkeypatch):
    """The one whose last use is the longest ago is closed. Only what is opened for the first time is hashed."""
    read, hashed = captured(packed, tmp_path), []
    monkeypatch.setattr(shards, "OPEN", 2)
    monkeypatch.setattr(indexes, "sha256", lambda path: hashed.append(path.name) or sha256(path))
    for row in (0, 5, 0, 10):
        read.batch([row])
    assert list(read._open) == [0, 2]
    read.batch([5])
    assert hashed == [f"shard-0000{number}.safetensors" for number in range(3)]


def test_the_next_files_open_before_they_are_needed(packed, tmp_path, monkeypatch):
    """Before the first batch is read, those of a whole buffer of shards and of one batch more."""
    read, prepared, seen = captured(packed, tmp_path), [], []
    prepare, stored = Shards.prepare, Shards.stored

    def watched(self, number):
        prepared.append(number)
        return prepare(self, number)

    monkeypatch.setattr(Shards, "prepare", watched)
    monkeypatch.setattr(Shards, "stored", lambda self, rows: seen.append({*prepared}) or stored(self, rows))
    next(iter(read.stored_stream(2, seed=5)))
    assert seen[0] == {*(read.order(0, 5)[: shards.BUFFER * 5 + 2] // 5).tolist()} and len(seen[0]) > shards.BUFFER


def test_damage_names_the_file(packed, tmp_path):
    captured(packed, tmp_path)
    path = tmp_path / "shard-00001.safetensors"
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[-1] ^= 1
    path.write_bytes(flipped)
    read = Shards(tmp_path)
    read.batch([0])
    with pytest.raises(UserError, match=r"shard-00001\.safetensors: the checksum differs"):
        read.batch([5])
    path.write_bytes(whole[:-100])
    with pytest.raises(UserError, match=r"shard-00001\.safetensors: the shard has \d+ bytes"):
        Shards(tmp_path)
    with pytest.raises(UserError, match=r"shard-00001\.safetensors: the shard has"):
        captured(packed, tmp_path)
    path.unlink()
    with pytest.raises(UserError, match=r"shard-00001\.safetensors: the shard is missing"):
        Shards(tmp_path)


def test_a_shard_that_is_not_what_the_index_says(packed, tmp_path):
    from safetensors.torch import load_file, save_file

    captured(packed, tmp_path)
    path, index_path = tmp_path / "shard-00000.safetensors", tmp_path / "index.json"
    tensors = load_file(path)
    save_file(tensors | {"tap_2": tensors["tap_2"].float()}, path)
    index = json.loads(index_path.read_text())
    index["files"][0] |= {"bytes": path.stat().st_size, "sha256": sha256(path)}
    index_path.write_text(json.dumps(sealed(index)))
    with pytest.raises(UserError, match=r"shard-00000\.safetensors: tensor tap_2 is \('F32'"):
        Shards(tmp_path).batch([0])


def test_final_states_of_other_tokens_are_refused(packed, tmp_path):
    """Of a file whose mask was changed, with a checksum of what it holds now: each would be taken for another token's."""
    from safetensors.torch import load_file, save_file

    captured(packed, tmp_path, taps=(0, 2))
    path, index_path = tmp_path / "shard-00000.safetensors", tmp_path / "index.json"
    tensors = load_file(path)
    tensors["loss_mask"][0] = False
    save_file(tensors, path)
    index = json.loads(index_path.read_text())
    index["files"][0] |= {"sha256": sha256(path)}
    index_path.write_text(json.dumps(sealed(index)))
    states = len(tensors["final"])
    with pytest.raises(UserError, match=rf"shard-00000\.safetensors: it has {states} final states for \d+ tokens: capture again"):
        Shards(tmp_path).batch([3])


@pytest.mark.parametrize(
    "change, says",
    [
        ({"version": 2}, "version 2 is not 1"),
        ({"rows": "many"}, "rows is missing or of the wrong type"),
        ({"rows": -1}, "less than 1"),
        ({"rows": 10**12}, "do not add up|rows are captured"),
        ({"taps": [9]}, "not layers"),
        ({"files": [{"name": "../shard-00000.safetensors", "rows": 5, "bytes": 1, "sha256": ""}]}, "malformed"),
        ({"files": 3}, "malformed"),
    ],
)
def test_a_wrong_index_is_refused(change, says, packed, tmp_path):
    captured(packed, tmp_path)
    path = tmp_path / "index.json"
    changed = json.loads(path.read_text()) | change
    path.write_text(json.dumps(sealed(changed)))  # by somebody who knows of the checksum
    with pytest.raises(UserError, match=says):
        Shards(tmp_path)
    path.write_text(json.dumps(changed))
    with pytest.raises(UserError, match=r"index\.json is damaged: its content does not have the checksum"):
        Shards(tmp_path)
    for text in ("{", "[" * 100_000, '{"a":' * 100 + "1" + "}" * 100):
        path.write_text(text)
        with pytest.raises(UserError, match=r"index\.json .*: no target outputs can be read here"):
            Shards(tmp_path)
    path.unlink()
    with pytest.raises(UserError, match="no target outputs"):
        Shards(tmp_path)


def test_an_index_that_names_its_shards_in_another_order_is_refused(packed, tmp_path):
    """Their checksums are right, and so is every size: only the index's own checksum tells."""
    before = captured(packed, tmp_path).batch(range(10))
    path = tmp_path / "index.json"
    index = json.loads(path.read_text())
    index["files"][:2] = index["files"][1::-1]
    path.write_text(json.dumps(index))
    with pytest.raises(UserError, match="does not have the checksum that it names"):
        Shards(tmp_path)
    del index["sha256"]  # as an earlier version wrote it
    in_order, files = index["files"][1::-1] + index["files"][2:], index["files"]
    for wrong in (files, [*in_order, files[0] | {"name": f"shard-{len(files):05d}.safetensors"}]):
        path.write_text(json.dumps(index | {"files": wrong}))
        with pytest.raises(UserError, match="files are named twice, in another order, or are more than"):
            Shards(tmp_path)
    path.write_text(json.dumps(index | {"files": in_order}))
    assert equal(Shards(tmp_path).batch(range(10)), before)


def test_a_refused_capture_poisons_nothing(packed, tmp_path):
    """Whatever ends it before the first shard: another capture, with other settings, finds a folder that holds nothing."""

    class Broken(FakeTarget):
        def read(self, *_):
            raise UserError("the target is not what it should be")

    with pytest.raises(UserError, match="not what it should be"):
        captured(packed, tmp_path / "new", Broken())
    assert not (tmp_path / "new").exists()
    (tmp_path / "there").mkdir()
    with pytest.raises(UserError, match="not what it should be"):
        captured(packed, tmp_path / "there", Broken())
    assert not list((tmp_path / "there").iterdir())
    assert len(captured(packed, tmp_path / "there", taps=(1,))) == len(packed)


def test_an_index_without_shards_holds_nothing(packed, tmp_path):
    """As earlier versions left it."""
    whole = captured(packed, tmp_path)
    (tmp_path / "index.json").write_text(json.dumps(sealed(whole.index | {"files": [], "length": 99, "rows_per_shard": 7})))
    assert len(captured(packed, tmp_path, taps=(1,))) == len(packed)


def test_the_digest_names_what_is_there(packed, tmp_path):
    one, same = captured(packed, tmp_path / "a"), captured(packed, tmp_path / "b")
    assert one.digest() == same.digest() == Shards(tmp_path / "a", taps=(2,)).digest()
    packed.tokens_RT[0, 0] += 1
    assert captured(packed, tmp_path / "c").digest() != one.digest()
