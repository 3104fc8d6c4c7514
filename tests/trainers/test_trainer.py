"""The loop: every drafter learns, resumes exactly, and its gradient does not depend on how the batch is cut up."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from headstart.data.live import look
from headstart.heads.errors import UserError
from headstart.trainers import checkpoint
from headstart.trainers.learner import Learner, evaluate
from headstart.trainers.metrics import read_metrics
from headstart.trainers.optimizer import learning_rate, open_optimizers
from tests.drafters import FEW, FEW_HEADS, HEADS, MADE, arguments, make
from tests.tiny_targets import tiny_target
from tests.trainers.conftest import ROOT, TORCHRUN, check_trained_alike, equal
from tests.trainers.small import LOOP, LOSS, quiet, repetitive, train


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def same(a, b) -> bool:
    x, y = a.state_dict(), b.state_dict()
    return x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x)


@pytest.mark.parametrize("name", FEW_HEADS)
def test_every_drafter_learns(name, target, tmp_path):
    drafter = make(name, target, noise=0.02)
    # of KL alone, the order of listed candidates learns nothing; matches are those with the target, which is not what wrote this text
    ordered = {"selector": 1.0} if drafter.unembedding(1).listed else {}
    loss = LOSS | {"terms": LOSS["terms"] | ordered}
    held = [look(repetitive(seed=7, documents=12).batch(slice(0, 4)), target, drafter.taps)]
    before = evaluate(Learner(drafter, **loss), held)
    fitted = train(drafter, target, tmp_path, steps=40, lr=3e-2, warmup=4, save_every=40, loss=loss)
    after = evaluate(Learner(drafter, **loss), held)
    assert after["heldout_loss"] < 0.7 * before["heldout_loss"]
    assert after["heldout_expected_length"] > before["heldout_expected_length"] + 0.3
    assert fitted.steps == 40 and fitted.tokens == 40 * 4 * 32 and not drafter.training


@pytest.mark.parametrize(
    ("name", "accumulate"),
    [*(pytest.param(name, 1, marks=() if name in FEW else pytest.mark.slow) for name in MADE), *((name, 2) for name in FEW)],
)
def test_resuming_changes_nothing(name, accumulate, target, tmp_path):
    """Noise included: the state of the random generators is part of a checkpoint."""
    at_once, in_two, batches, again = make(name, target), make(name, target), [], []
    torch.manual_seed(5)
    train(at_once, target, tmp_path / "a", seen=batches, accumulate=accumulate, rows=2)
    torch.manual_seed(5)
    stopped = tmp_path / "b"
    with pytest.raises(ZeroDivisionError):  # breaks in the fourth step; the checkpoint is of the third
        train(in_two, target, stopped, seen=again, accumulate=accumulate, rows=2, each=lambda i: 1 // (i - 3 * accumulate))
    assert [p.name for p in checkpoint.folders(stopped)] == ["step-00000003"]
    del again[3 * accumulate :]
    resumed = make(name, target, noise=0.5)
    torch.manual_seed(1234)
    fitted = train(resumed, target, stopped, seen=again, accumulate=accumulate, rows=2)
    assert fitted.steps == 6
    assert len(batches) == 6 * accumulate and all(torch.equal(a, b) for a, b in zip(batches, again, strict=True))
    assert same(at_once, resumed)


@pytest.mark.parametrize("name", FEW_HEADS)
def test_accumulation_does_not_change_the_gradient(name, target, tmp_path):
    moments = []
    for accumulate, rows in ((1, 4), (4, 1)):
        run = tmp_path / f"{accumulate}"
        train(quiet(name, target), target, run, accumulate=accumulate, rows=rows, steps=1, clip=0.0, optimizer="adamw")
        flat = load_file(run / "checkpoints" / "step-00000001" / "optimizer.safetensors")
        moments.append({k: v for k, v in flat.items() if k.endswith("exp_avg")})
    assert moments[0] and max(float(v.abs().max()) for v in moments[0].values()) > 1e-4
    for other in moments[1:]:
        for key, wanted in moments[0].items():  # exp_avg after one step is a tenth of the gradient
            torch.testing.assert_close(other[key] * 10, wanted * 10, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_two_processes_are_one(target, tmp_path):
    """Distributed over gloo, accumulating, clipping, with heads deeper than the loss asks."""
    torchrun = [*TORCHRUN, "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "tests.trainers.two_processes", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    for name in HEADS:
        first, second = (load_file(tmp_path / f"{name}-{rank}") for rank in (0, 1))
        alone = quiet(name, target)
        train(alone, target, tmp_path / f"{name}-alone", rows=4, accumulate=2, steps=3, clip=0.5, optimizer="adamw")
        assert equal(first, second), f"{name} differs between processes"
        check_trained_alike(first, alone.state_dict(), lr=LOOP["lr"], steps=3)


def test_a_loss_that_is_not_finite_names_the_learning_rate(target, tmp_path):
    drafter = quiet(HEADS[0], target)

    def break_it(i: int) -> None:
        if i == 4:
            next(drafter.parameters()).data.fill_(math.nan)

    with pytest.raises(UserError, match=r"step 5: the loss is nan.*trainer\.lr.*step-00000003\) is whole"):
        train(drafter, target, tmp_path, each=break_it)
    (folder,) = checkpoint.folders(tmp_path)
    assert all(v.isfinite().all() for v in load_file(folder / "drafter.safetensors").values())


def test_nothing_supervised_is_an_error(target, tmp_path):
    packed = repetitive()
    packed.loss_mask_RT[:] = False
    with pytest.raises(UserError, match="no token of the first batch is supervised"):
        train(quiet(HEADS[0], target), target, tmp_path, packed=packed)


@pytest.mark.parametrize("name", [HEADS[0], *(name for name in HEADS if "draft_vocab" in arguments(name))])
def test_one_batch_without_supervision_is_passed_over(name, target, tmp_path):
    """With a trimmed vocabulary, where there can be one."""
    trimmed = {"draft_vocab": list(range(0, 96, 3))} if "draft_vocab" in arguments(name) else {}
    packed, drafter = repetitive(), make(name, target, **trimmed)
    second = packed.order(0, 0)[4:8]
    packed.loss_mask_RT[second] = False
    assert train(drafter, target, tmp_path, packed=packed, steps=3).steps == 3
    assert all(p.isfinite().all() for p in drafter.parameters())


def test_a_line_of_metrics_per_log_and_none_twice(target, tmp_path):
    train(quiet(HEADS[0], target), target, tmp_path, steps=20, save_every=10)
    (tmp_path / "metrics.jsonl").open("a").write('{"step": 23, "loss": 1.0}\n{"step": 2')  # a killed run's, after its checkpoint
    train(quiet(HEADS[0], target), target, tmp_path, steps=20, save_every=10)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 10, 20]
    learnt = {f"train/{name}" for name in ("loss", "expected_length", "lr", "gradient_norm", "tokens")}
    assert all(set(line) >= learnt | {"speed/tokens_per_second", "system/memory_gib"} for line in lines)
    assert all(sum(line[f"speed/{part}_share"] for part in ("data", "target", "step")) == pytest.approx(1) for line in lines)
    assert lines[-1]["train/tokens"] == 20 * 4 * 32 and lines[-1]["train/loss"] < lines[0]["train/loss"]


def test_how_often_it_logs_changes_nothing_else(target, tmp_path):
    weights = []
    for every, logged in ((1, [1, 2, 3, 4, 5, 6, 7]), (3, [1, 3, 6, 7]), (10, [1, 7])):
        drafter = quiet("eagle", target)
        train(drafter, target, tmp_path / str(every), steps=7, log_every=every)
        assert [line["step"] for line in read_metrics(tmp_path / str(every)) if "train/loss" in line] == logged
        weights.append(drafter.state_dict())
    assert all(torch.equal(weights[0][key], other[key]) for other in weights[1:] for key in other)


def test_numbers_that_cannot_be_written_do_not_stop_training(target, tmp_path, capsys):
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    assert train(quiet(HEADS[0], target), target, tmp_path).steps == 6
    assert "metrics.jsonl" in capsys.readouterr().out


def test_schedules():
    cosine = [learning_rate(s, 100, 10, "cosine") for s in range(100)]
    assert cosine[0] == pytest.approx(0.1) and max(cosine) == cosine[10] == 1.0
    assert cosine == [*sorted(cosine[:10]), *sorted(cosine[10:], reverse=True)] and 0.1 <= cosine[-1] < 0.11
    weight = torch.nn.Parameter(torch.zeros(1))
    reference = torch.optim.lr_scheduler.CosineAnnealingLR(torch.optim.SGD([weight], lr=1.0), T_max=90, eta_min=0.25)
    for step in range(10, 100):
        assert learning_rate(step, 100, 10, "cosine", 0.25) == pytest.approx(reference.get_last_lr()[0])
        reference.optimizer.step()
        reference.step()
    assert learning_rate(100, 100, 10, "cosine", 0.0) == 0.0
    wsd = [learning_rate(s, 100, 10, "wsd") for s in range(100)]
    assert wsd[10:81] == [1.0] * 71 and wsd[90] == pytest.approx(0.5) and wsd[-1] == pytest.approx(0.05)


@pytest.mark.parametrize("name", HEADS)
def test_muon_moves_the_matrices_inside_and_adamw_all_the_rest(name, target):
    drafter = quiet(name, target)
    trained = {id(p): p for p in drafter.parameters() if p.requires_grad}
    # a base kernel: scales of channels, side by side, which decay would pull away from 1; fusion weights: what weighs a state, each; what
    # is added for a slot or a rank: one vector or number for each
    scales = ("base_kernel", "layer_fusion_weights", "slot_embedding", "rank_embedding", "relative_slot_bias")
    vectors = {id(p) for key, p in drafter.named_parameters() if p.ndim <= 1 or key.endswith(scales)}
    tables = {id(m.weight) for m in drafter.modules() if isinstance(m, torch.nn.Embedding)}
    heads = {id(b) for d in range(1, (drafter.max_depth or 1) + 1) for b in drafter.unembedding(d).blocks} - tables
    for kind in ("adamw", "muon"):
        optimizers = open_optimizers(drafter, kind, 1e-3, (0.8, 0.97), 0.01)
        groups = [g for x in optimizers for g in x.param_groups]
        assert sorted(id(p) for g in groups for p in g["params"]) == sorted(trained)  # each once
        assert all((g["weight_decay"] == 0) == (id(p) in vectors) for g in groups for p in g["params"])
        slow = heads | vectors if kind == "muon" else set()
        assert all(g["lr"] == pytest.approx(3e-4 if id(p) in slow else 1e-3) for g in groups for p in g["params"])
        assert {g["betas"] for g in optimizers[0].param_groups} == {(0.8, 0.97)}
    outer = [p for g in optimizers[0].param_groups for p in g["params"]]
    vocabulary = target.shape.vocab_size
    assert len(optimizers) == 2 and all(p.ndim != 2 or p.shape[0] == vocabulary or id(p) in vectors for p in outer)
    assert not any(p is b for p in optimizers[1].param_groups[0]["params"] for b in drafter.unembedding(1).blocks)
