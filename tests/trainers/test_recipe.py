"""How a training is set: what is kept of a depth, epochs, schedules, Muon's own settings."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from headstart.data.live import look
from headstart.data.packed import Packed
from headstart.heads.base import TargetShape
from headstart.heads.errors import UserError
from headstart.heads.memory import Memory
from headstart.heads.unroll import unroll
from headstart.inference.decoding.target import Target
from headstart.trainers import checkpoint, plan
from headstart.trainers.learner import Learner
from headstart.trainers.optimizer import before_the_fall, learning_rate, open_optimizers
from headstart.trainers.resume import Batch, lasting, resumable
from headstart.trainers.run import fit, prepare, run
from headstart.trainers.shapes import without_numbers, without_weights
from tests.drafters import MADE, make, random_tokens, roots_of
from tests.tiny_targets import tiny_target
from tests.trainers.conftest import Composed
from tests.trainers.small import LOSS, quiet, repetitive, train
from tests.trainers.test_plan import small


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


def gradients(name: str, target: Target, again: bool, kept: list[int] | None = None) -> list[Tensor]:
    drafter = make(name, target).train()
    learner = Learner(drafter, **LOSS)
    learner.checkpointing = again
    batch = look(repetitive().batch(slice(0, 4)), target, drafter.taps)
    torch.manual_seed(3)  # noise, and anchors
    wanted = learner.wanted(batch)
    sizes: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = learner(batch, wanted=wanted)
    if kept is not None:
        kept.append(sum(sizes.values()))
    out.loss_sum.backward()
    return [torch.zeros(0) if p.grad is None else p.grad for p in drafter.parameters()] + [out.loss_sum.detach(), torch.rand(3)]


@pytest.mark.parametrize("name", MADE)
def test_what_is_computed_again_has_the_same_gradients(name: str, target: Target) -> None:
    """To the bit, its noise included; and random numbers go on as they would."""
    kept: list[int] = []
    plain, again = (gradients(name, target, again, kept) for again in (False, True))
    assert len(plain) == len(again) and all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    assert any(bool(x.any()) for x in plain[:-2])
    assert name != "eagle" or kept[1] < 0.75 * kept[0]  # a drafter that is one matrix a depth has nothing to gain


def test_training_with_and_without_ends_with_the_same_weights(target: Target, tmp_path: Path) -> None:
    drafters = [quiet("eagle", target) for _ in range(2)]
    for again, drafter in enumerate(drafters):
        train(drafter, target, tmp_path / str(again), gradient_checkpointing=bool(again), accumulate=2)
    a, b = (d.state_dict() for d in drafters)
    assert all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("head", ["eagle", "dflash", "medusa"])
def test_the_plan_knows_what_is_not_kept(head: str) -> None:
    counts = []
    for again in (False, True):
        asked = small(head)
        asked["trainer"] |= {"gradient_checkpointing": again, "length": 64}
        hf = plan.config_of(asked["target"])[1]
        built, shape = without_weights(hf), TargetShape.of(hf)
        with FakeTensorMode():
            without_numbers(built)
            arm = {k: asked[k] for k in ("head", "loss", "trainer")}
            counts.append(plan._count(arm, built, shape, asked["trainer"], False, torch.device("cpu"), torch.float32))
    assert counts[1].flops > counts[0].flops
    if head == "eagle":  # a depth of three; the others have all in one
        assert counts[1].kept < 0.75 * counts[0].kept


def test_linear_and_constant_schedules() -> None:
    short = [learning_rate(s, 20, 20, "wsd") for s in range(20)]  # the warm-up is as long as the run: it ends low all the same
    assert short[15] == 0.8 and short[16:] == [0.85, 0.75, 0.5, 0.25] and before_the_fall(20, 20, "wsd") == 17
    linear = [learning_rate(s, 110, 10, "linear") for s in range(110)]
    assert linear[:10] == pytest.approx([(s + 1) / 10 for s in range(10)]) and linear[10:] == pytest.approx(
        [1 - s / 100 for s in range(100)]
    )
    constant = [learning_rate(s, 50, 10, "constant") for s in range(50)]
    assert constant[10:] == [1.0] * 40 and constant[:10] == linear[:10]
    assert before_the_fall(50, 10, "constant") == 50 and before_the_fall(50, 10, "linear") is None
    assert before_the_fall.cache_info().maxsize is None, "every arm asks after every step"


@pytest.mark.parametrize("schedule", ["wsd", "cosine", "linear", "constant"])
def test_a_warm_up_below_one_is_a_share_of_the_steps(schedule: str) -> None:
    for steps, share, count in ((100, 0.05, 5), (10, 0.001, 1), (8, 0.5, 4), (30, 0.101, 4)):
        assert learning_rate(0, steps, 1, schedule) == 1  # one is a step
        assert [learning_rate(s, steps, share, schedule) for s in range(steps)] == [
            learning_rate(s, steps, count, schedule) for s in range(steps)
        ]


def test_a_constant_rate_can_always_be_prolonged(target: Target, tmp_path: Path) -> None:
    def steps(run: Path, count: int) -> dict[str, Tensor]:
        drafter = quiet("medusa", target)
        settings = {"trainer": {"steps": count, "lora": None, "warmup": 2, "schedule": "constant"}, "loss": {"base_until": 0.0}}
        train(drafter, target, run, steps=count, schedule="constant", settings=settings)
        return drafter.state_dict()

    steps(tmp_path / "a", 6)
    longer, at_once = steps(tmp_path / "a", 12), steps(tmp_path / "b", 12)
    assert all(torch.equal(longer[k], at_once[k]) for k in longer)


@pytest.mark.parametrize("half", [True, False], ids=["in bf16", "where bf16 is slow, in fp32"])
def test_muon_is_told_its_own_settings(half: bool, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step of a matrix by hand: Newton-Schulz over the momentum, scaled to the size of AdamW's."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: half)
    for lr, momentum, ns_steps in ((None, 0.5, 5), (2e-2, 0.95, 3)):
        drafter = quiet("eagle", target)
        own = {"muon_lr": lr, "momentum": momentum, "ns_steps": ns_steps}
        adamw, muon = open_optimizers(drafter, "muon", 1e-2, (0.9, 0.95), 0.0, **own)
        assert {g["peak_lr"] for g in muon.param_groups} == {lr or 1e-2} and max(g["peak_lr"] for g in adamw.param_groups) == 1e-2
        matrix = muon.param_groups[0]["params"][0]
        mean = torch.zeros_like(matrix)
        for _ in range(2):
            before, grad = matrix.detach().clone(), torch.randn_like(matrix)
            matrix.grad = grad.clone()
            muon.step()
            mean = mean.lerp(grad, 1 - momentum)
        x = grad.lerp(mean, momentum).to(torch.bfloat16 if half else torch.float64)  # Nesterov's
        turned = x.size(0) > x.size(1)
        x = x.T if turned else x
        x = x / x.norm().clamp(min=1e-7)
        for _ in range(ns_steps):
            a = x @ x.T
            x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
        step = (x.T if turned else x).float() * (lr or 1e-2) * 0.2 * math.sqrt(max(matrix.shape))
        wrong = (before - matrix.detach() - step).norm() / step.norm()
        assert wrong < (0.04 if half else 1e-4)  # another momentum or number of steps: a quarter
        assert half or muon.state[matrix]["momentum_buffer"].allclose(mean, atol=1e-6)  # which is not what was divided in place
        muon.param_groups[0]["params"] = []  # as in a process that owns none
        muon.step()


def test_epochs_are_counted_in_rows(composed: Composed, overrides: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = composed(*overrides, "trainer.epochs=0.5", "trainer.accumulate=2")
    with prepare(**settings) as job:
        assert job.source.packed is not None
        steps = math.ceil(0.5 * len(job.source.packed) / (2 * 2))
        assert job.settings["trainer"]["steps"] == job.own[""]["trainer"]["steps"] == steps > 1
        assert f"trainer.epochs=0.5: {steps} steps of 4 rows, of {len(job.source.packed)} in an epoch" in capsys.readouterr().out
        assert not fit(job)
    assert json.loads((tmp_path / "run" / "config.json").read_text())["trainer"]["steps"] == steps
    with prepare(**composed(*overrides, f"trainer.steps={steps}", "trainer.accumulate=2")) as same:  # the same run
        assert not fit(same) and same.arms[0].began == steps
    with prepare(**composed(*overrides, "trainer.epochs=1", "trainer.accumulate=2", "trainer.schedule=wsd")) as longer:
        assert longer.settings["trainer"]["steps"] > steps
    with pytest.raises(UserError, match=r"trainer\.epochs: a plan does not read the data"):
        plan.plan(settings | {"nodes": 1, "gpus": 1, "gpu": "h100"})


def test_an_epoch_of_a_stream_has_no_length(composed: Composed, overrides: list[str]) -> None:
    settings = composed(*overrides, "trainer.epochs=1")
    with pytest.raises(UserError, match=r"trainer\.epochs: the length of an epoch of streamed data is not known"):
        prepare(**settings | {"data": settings["data"] | {"stream": True}})


def test_a_counted_vocabulary_belongs_to_a_run(composed: Composed, overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of other counts the rows of its output head would be other tokens'."""
    settings = composed(*overrides, "head=eagle", "head.draft_vocab=50", "report=none")
    run(**settings)
    run(**settings)
    monkeypatch.setattr(Packed, "counts", lambda rows, size: torch.arange(size))
    with pytest.raises(UserError, match="holds a run with draft_vocab="):
        run(**settings)


def test_a_run_of_before_these_settings_goes_on(composed: Composed, overrides: list[str], tmp_path: Path) -> None:
    """Its checkpoint has no key for them; what does not change the result may be changed, Muon's momentum not."""
    run(**composed(*overrides, "report=none"))
    out = tmp_path / "run"
    settings = composed(*overrides, "trainer.profile=3", "trainer.gradient_checkpointing=true")
    own = {k: settings[k] for k in ("head", "loss", "trainer")}
    now = lasting(own, settings["data"], Batch(2, 1, 1))
    (newest,) = checkpoint.folders(out)[-1:]
    state: dict[str, Any] = json.loads((newest / "state.json").read_text())
    for key in ("muon_lr", "momentum", "ns_steps", "profile", "gradient_checkpointing", "epochs", "floor"):
        state["settings"]["trainer"].pop(key, None)
    del state["settings"]["loss"]["detach"]
    (newest / "state.json").write_text(json.dumps(checkpoint.sealed(state)))
    found = resumable([out], now)
    assert found is not None and found[0] == newest
    other = json.loads(json.dumps(now))
    other["trainer"]["momentum"] = 0.9
    with pytest.raises(UserError, match=r"trainer\.momentum=0\.95, now it is 0\.9"):
        resumable([out], other)


def test_unroll_leaves_what_it_remembers_to_be_seen(target: Target) -> None:
    drafter, memories = make("eagle", target), [Memory(), Memory()]
    roots = roots_of(target, drafter, torch.tensor([random_tokens(12, 1)]))
    for again, memory in enumerate(memories):
        unroll(drafter, roots, None, 3, checkpointing=bool(again), memory=memory)
    a, b = (memory.layers for memory in memories)
    assert a.keys() == b.keys() and [len(a[0]), len(b[0])] == [3, 3]
    assert all(torch.equal(x, y) for first, second in zip(a[0], b[0], strict=True) for x, y in zip(first, second, strict=True))
