"""While a drafter is trained its export is decoded with: both numbers go to the curves, are equal, and what decoded best is exported."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headstart.heads.base import Drafter
from headstart.heads.errors import UserError
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.sampling import SamplingParams
from headstart.inference.decoding.target import Target
from headstart.trainers import gate
from headstart.trainers.diagnosis import FILE, Case
from headstart.trainers.metrics import read_metrics
from headstart.trainers.optimizer import before_the_fall
from headstart.trainers.patience import DECODED, Patience
from headstart.trainers.run import run
from tests.drafters import learn_by_heart, make, random_tokens
from tests.tiny_targets import tiny_target

Composed = Callable[..., dict[str, Any]]
KEYS = [f"decode/T{t}/{chain}{key}" for t in (0, 1) for chain in ("", "chain/") for key in ("accepted_length", "expected_length")]
TREE = TreePolicy(depth=3, nodes=6, branch=2)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "PROMPTS", 2)
    monkeypatch.setattr(gate, "NEW_TOKENS", 12)


def decoded(out: Path) -> dict[int, dict[str, float]]:
    return {line["step"]: line for line in read_metrics(out) if KEYS[0] in line and "decode/lossless" not in line}


def test_a_target_of_which_every_process_has_a_part_decodes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first process alone would wait for the layers of the others."""
    target = tiny_target()
    decoding = SimpleNamespace(policy=TREE, sampling=SamplingParams())
    job: Any = SimpleNamespace(target=target, prompts=[[5, 6]], decoding=decoding, arms=[], accelerator=SimpleNamespace(num_processes=2))
    job.settings = {"parallel": {"name": "ddp"}}
    assert gate.Gate(job).why_not == ""
    monkeypatch.setattr(Target, "sharded", True)
    assert gate.Gate(job).why_not == "no process holds all layers of the target (target.device=tp, fsdp)"


def test_a_run_is_decoded_with_as_it_goes_and_the_best_is_exported(
    composed: Composed, overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths, figures = iter([1.5, 1.2]), gate.figures
    monkeypatch.setattr(gate, "figures", lambda *a: figures(*a) | {"decode/T0/accepted_length": next(lengths)})
    (tmp_path / "run" / ".gate-1").mkdir(parents=True)  # of a process that was killed
    run(**composed(*overrides, "trainer.decode_every=3", "trainer.keep=best"))
    found = decoded(tmp_path / "run")
    assert sorted(found) == [3, 4] and all(key in line for line in found.values() for key in KEYS)
    for line in found.values():
        assert line["decode/T0/chain/expected_length"] == line["decode/T0/chain/accepted_length"]
    saved = load_file(tmp_path / "run" / "speculator" / "model.safetensors")
    best = load_file(tmp_path / "run" / gate.BEST)
    assert all(any(torch.equal(saved[k], x) for x in best.values()) for k in saved if saved[k].is_floating_point())
    assert "exported is step 3, which decoded best (1.50" in capsys.readouterr().out
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert [report[key] for key in ("train_steps", "train_tokens", "exported_step", "exported_tokens")] == [4, 512, 3, 384]
    assert not list((tmp_path / "run").glob(".gate-*")), "its folders are taken away"
    seconds = [line["speed/gate_seconds"] for line in read_metrics(tmp_path / "run") if "speed/gate_seconds" in line]
    assert len(seconds) == 2 and min(seconds) > 0 and report["train_seconds"] > 0


@pytest.mark.slow
def test_a_training_is_the_same_with_it_and_without(composed: Composed, overrides: list[str], tmp_path: Path) -> None:
    for every in (0, 1):
        run(**composed(*overrides, f"trainer.decode_every={every}", f"out={tmp_path / str(every)}"))
    weights = [load_file(tmp_path / str(every) / "speculator" / "model.safetensors") for every in (0, 1)]
    assert all(torch.equal(weights[0][k], weights[1][k]) for k in weights[0]) and sorted(decoded(tmp_path / "1")) == [1, 2, 3, 4]


def test_a_text_ends_where_a_longrope_target_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """To decode on would raise an error."""
    target = tiny_target()
    drafter = make("medusa", target)
    monkeypatch.setattr(Target, "rope_switch", 24)
    truth, made = gate.decode_beside(target, drafter, drafter, [random_tokens(20, 1)], TREE, SamplingParams(), 12)
    assert {len(g.tokens) for texts in made.values() for g in texts} == {4} and truth.table()
    assert Case(target, drafter, [random_tokens(20, 1)]).room(random_tokens(20, 1)) == 4


def test_each_prompt_has_random_numbers_of_its_own() -> None:
    """Else the texts that are judged would be too much alike."""
    target = tiny_target()
    drafter = make("medusa", target).train()
    assert not gate.copied(drafter, target).training
    _, made = gate.decode_beside(target, drafter.eval(), drafter, [random_tokens(9, 1)] * 2, TREE, SamplingParams(seed=5), 12)
    assert {shape: texts[0].tokens == texts[1].tokens for shape, texts in made.items()} == {shape: not shape[1] for shape in made}


def test_weights_that_were_no_better_before_are_the_last(tmp_path: Path) -> None:
    """And the step of what is exported is said either way."""
    drafter = torch.nn.Linear(1, 1)
    arm: Any = SimpleNamespace(run=tmp_path, label="", fitted=SimpleNamespace(steps=3), drafter=drafter)
    assert gate.take_best(arm) == 3, "nothing was kept"
    gate.keep_if_best(arm, 1.5)
    assert gate.take_best(arm) == 3
    arm.fitted.steps, kept = 5, {key: x.clone() for key, x in drafter.state_dict().items()}
    torch.nn.init.zeros_(drafter.weight)
    assert gate.take_best(arm) == 3 and torch.equal(drafter.weight, kept["weight"])


def test_what_is_no_reason_to_end_a_training_ends_none(
    composed: Composed, overrides: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*a: Any, **k: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(gate, "load_attached", full)
    run(**composed(*overrides, "trainer.decode_every=2", "report=none"))
    assert "not decoded at step 2: no space left" in capsys.readouterr().out


def test_of_equal_ones_the_first_is_the_best_to_keep_and_to_wait_for(tmp_path: Path) -> None:
    arm: Any = SimpleNamespace(run=tmp_path, fitted=SimpleNamespace(steps=0), drafter=torch.nn.Linear(1, 1))
    patience, left = Patience(9), tmp_path / ".tmpQ7xZ0a"
    left.touch()  # by a process that was killed while it wrote (tests/heads/test_files.py)
    for arm.fitted.steps, length in enumerate((1.5, 1.25, 1.5, 1.75, 1.75), 1):
        patience.judge(DECODED, length, arm.fitted.steps)
        gate.keep_if_best(arm, length)
        assert gate.best_of(tmp_path / gate.BEST) == (patience.step, patience.best)
    assert patience.step == 4 and not left.exists()


@pytest.mark.slow
def test_what_an_earlier_run_kept_is_not_exported_by_one_that_starts_over(composed: Composed, overrides: list[str], tmp_path: Path) -> None:
    out, overrides = tmp_path / "run", [*overrides, "trainer.keep=best", "trainer.decode_every=2", "report=none"]
    run(**composed(*overrides))
    earlier = load_file(out / gate.BEST)
    save_file(earlier, out / gate.BEST, metadata={"step": "1", "decoded": "99.0"})  # better than whatever comes
    run(**composed(*overrides, "trainer.resume=false", "trainer.seed=1"))
    assert gate.best_of(out / gate.BEST)[1] < 99
    now = load_file(out / gate.BEST)
    assert any(not torch.equal(now[name], earlier[name]) for name in earlier)


@pytest.mark.slow
def test_the_best_of_a_branch_that_is_left_is_not_exported(
    composed: Composed, overrides: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that is prolonged goes on from the step before the learning rate fell: what was best behind it is of another run."""
    out, overrides = tmp_path / "run", [*overrides, "trainer.keep=best", "trainer.decode_every=5", "report=none"]
    run(**composed(*overrides, "trainer.steps=10"))
    shutil.copytree(out, tmp_path / "as it was")
    began, weights = before_the_fall(10, 2, "wsd"), load_file(out / gate.BEST)
    for beyond in (0, 1):
        shutil.rmtree(out)
        shutil.copytree(tmp_path / "as it was", out)
        step = began + beyond
        save_file(weights, out / gate.BEST, metadata={"step": str(step), "decoded": "99.0"})
        run(**composed(*overrides, "trainer.steps=12"))
        said = capsys.readouterr().out
        assert f"resuming after step {began} " in said, said
        assert (gate.best_of(out / gate.BEST) == (step, 99.0)) == (beyond == 0)


def test_damaged_weights_of_the_best_are_named(tmp_path: Path) -> None:
    (tmp_path / gate.BEST).write_bytes(b"{}" * 20)
    with pytest.raises(UserError, match=gate.BEST):
        gate.best_of(tmp_path / gate.BEST)


# ---- where they part ----


def learnt(target: Target) -> Drafter:
    prompts = [random_tokens(9, i) for i in range(4)]
    from headstart.inference.decoding.decode import generate

    texts = [p + generate(target, None, p, new_tokens=24).tokens for p in prompts]
    return learn_by_heart(make("eagle", target), target, texts, depth=3, steps=40)


def test_they_are_equal_and_part_where_the_export_is_another_drafter() -> None:
    target = tiny_target()
    live, prompts = learnt(target), [random_tokens(9, i) for i in range(4)]
    for exported, apart in ((gate.copied(live, target), False), (make("eagle", target), True)):
        truth, made = gate.decode_beside(target, exported, live, prompts, TREE, SamplingParams(), 24)
        table = truth.table()
        assert {(t, kind) for t in table for kind in table[t]} == {(f"temperature_{t}", k) for t in (0, 1) for k in ("tree", "chain")}
        for kind, row in table["temperature_0"].items():
            rounds = [n for each in made[kind, False] for n in each.emitted]
            assert row["decoded"] == pytest.approx(sum(rounds) / len(rounds)) and row["apart"] == apart, row
            assert apart or row["expected"] == row["decoded"] > 1.5
        warm = table["temperature_1"]["tree"]
        assert apart or abs(warm["expected"] - warm["decoded"]) <= 4 * warm["standard_error"]


def test_a_gate_that_finds_them_apart_says_why(
    composed: Composed, overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load_attached = gate.load_attached

    def older(folder: Path, target: Target) -> Drafter:
        drafter = load_attached(folder, target)
        with torch.no_grad():
            for p in drafter.parameters():
                p.mul_(1.5) if p.ndim == 1 else p.add_(0.3 * torch.randn_like(p))
        return drafter

    monkeypatch.setattr(gate, "load_attached", older)
    monkeypatch.setattr("headstart.inference.reports.lengths.APART", -1.0)  # two drafters that know nothing are equally bad
    monkeypatch.setattr("headstart.inference.reports.lengths.SIGMAS", -1.0)
    run(**composed(*overrides, "trainer.decode_every=4", "report=none"))
    told = json.loads((tmp_path / "run" / FILE).read_text())
    assert told["step"] == 4 and "a stale export" in [each["cause"] for each in told["findings"]]
    assert "a stale export: " in capsys.readouterr().out and told["apart"] and told["truth"]["temperature_0"]["chain"]["decoded"] >= 1
