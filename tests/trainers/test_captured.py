"""Captured states as training meets them: what a bf16 target says is trained on bit by bit, held-out rows too; the doors of a capture."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from headstart.data.capture import capture
from headstart.data.shards import Shards
from headstart.data.source import open_source
from headstart.door.data import capture_states
from headstart.trainers.learner import evaluate
from headstart.trainers.prepare import prepare
from tests.doors import call
from tests.trainers.conftest import Composed


@pytest.fixture
def half(overrides: list[str]) -> list[str]:
    """The settings of a run with a target in bf16."""
    return [*overrides, "target.dtype=bfloat16"]


def from_shards(half: list[str], folder: Path) -> list[str]:
    return [*(o for o in half if not o.startswith(("data=", "path="))), "data=shards", f"path={folder}", f"out={folder.parent / 'other'}"]


def test_held_out_rows_are_those_of_a_live_run(composed: Composed, half: list[str], tmp_path: Path) -> None:
    """However many rows a step has."""
    folder = tmp_path / "shards"
    capture_states(composed(*half[:6], "target.dtype=bfloat16", f"out={folder}", "length=64", door="capture"))
    figures = []
    with prepare(**composed(*half, "report=none")) as live:
        learner = live.arms[0].learner
        for rows in (2, 3):
            with prepare(
                **composed(*from_shards(half, folder), f"trainer.batch_size={rows}", "trainer.resume=false", "report=none")
            ) as job:
                assert sum(len(batch.tokens_BT) for batch in job.held_out) == sum(len(batch.tokens_BT) for batch in live.held_out) > 1
                figures.append(evaluate(learner, job.held_out))
        seen = torch.cat([batch.states[1] for batch in live.held_out])
        assert torch.equal(seen, torch.cat([batch.states[1] for batch in job.held_out])) and seen.dtype == torch.bfloat16
        wanted = evaluate(learner, live.held_out)
    assert figures[0] == wanted and figures[0]["heldout_loss"] > 0
    assert figures[1]["heldout_loss"] == pytest.approx(wanted["heldout_loss"], rel=1e-5)  # summed in other batches


@pytest.mark.parametrize("storage", ["bf16", "fp8", "int8"])
def test_losses_and_gradients(storage: str, composed: Composed, half: list[str], tmp_path: Path) -> None:
    """Of the same rows, read live and from disk: the same to the last bit from bf16, nearly the same from 8 bits."""
    with prepare(**composed(*half, "report=none")) as job:
        packed, target = job.source.packed, job.target
        assert packed is not None
        capture(packed, target, job.taps, tmp_path / "shards", storage=storage)  # type: ignore[arg-type]
        settings = {"name": "shards", "path": str(tmp_path / "shards"), "prompts_file": None}
        source = open_source(settings, target, length=64, seed=0)
        assert torch.equal(job.source.counts(), source.counts())
        learner, found = job.arms[0].learner, []
        kept = Shards(tmp_path / "shards").stored(range(4))
        for batch in (job.source.observe(packed.batch(slice(0, 4)), job.taps), source.observe(kept, job.taps)):
            learner.zero_grad()
            out = learner(batch)
            out.loss_sum.backward()
            found.append((out.loss_sum.detach(), torch.cat([p.grad.flatten() for p in learner.parameters() if p.grad is not None])))
    (loss, grads), (other_loss, others) = found
    if storage == "bf16":
        assert torch.equal(loss, other_loss) and torch.equal(grads, others)
    else:
        assert other_loss != loss and float(other_loss) == pytest.approx(float(loss), rel=0.01)
        assert float((grads - others).norm() / grads.norm()) < 0.1


# ---- doors ----


def test_two_processes_capture_what_one_does(
    overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As torchrun starts them, or anybody: one after the other. Then verify, with a file damaged and whole."""
    asked = [*overrides[:6], "length=32", "rows=2", "storage=fp8"]
    assert call("data", [*asked, "out=one"], tmp_path, monkeypatch) == 0
    said = capsys.readouterr().out
    amount = re.search(r"as float8_e4m3fn: (\d+) bytes a token, .* MB in (\d+) files", said)
    assert amount and "the mean token differs from what the target said" in said and "train with: python train.py" in said
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in "1", "0":
        monkeypatch.setenv("RANK", rank)
        assert call("data", [*asked, "out=two"], tmp_path, monkeypatch) == 0
        said = capsys.readouterr().out
        assert ("train with: python train.py" in said) == (rank == "0")
        assert (f" in {amount[2]} files" in said and ", by 2 processes" in said) == (rank == "0")
    one, two = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("one", "two"))
    assert one == two and len(one) == int(amount[2]) + 1

    assert call("data verify", ["two"], tmp_path, monkeypatch) == 0
    assert "files are whole" in capsys.readouterr().out
    path = tmp_path / "two" / "shard-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert call("data verify", ["two"], tmp_path, monkeypatch) == 2
    said_all: Any = capsys.readouterr()
    assert "shard-00000.safetensors: the shard has" in said_all.out and said_all.err.count("\n") == 1
    assert call("data verify", ["path=two", "drop=true"], tmp_path, monkeypatch) == 2
    for rank in "0", "1":
        monkeypatch.setenv("RANK", rank)
        assert call("data", [*asked, "out=two"], tmp_path, monkeypatch) == 0
    assert {path.name: path.read_bytes() for path in (tmp_path / "two").iterdir()} == one


@pytest.mark.slow
def test_a_training_from_elsewhere(composed: Composed, half: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that only fsspec reaches, by the doors; the same weights as from a folder of this machine."""
    import fsspec

    from headstart.trainers.run import run
    from tests.trainers.conftest import equal, weights

    url = "memory://bucket/states"
    try:
        for place in (url, str(tmp_path / "shards")):
            capture_states(composed(*half[:6], f"out={place}", "length=64", "storage=int8", door="capture"))
        for place, out in ((url, "elsewhere"), (str(tmp_path / "shards"), "here")):
            run(**composed(*from_shards(half, tmp_path / "shards"), f"path={place}", "report=none", f"out={tmp_path / out}"))
        assert equal(weights(tmp_path / "elsewhere"), weights(tmp_path / "here"))
        assert call("data verify", [url], tmp_path, monkeypatch) == 0
    finally:
        fsspec.filesystem("memory").rm("/bucket", recursive=True)
