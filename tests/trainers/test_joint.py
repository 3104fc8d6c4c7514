"""The target trained with its drafter (Medusa-2): when, by how much, and without a trace in the target that others share."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from headstart.data.live import look
from headstart.heads import hub
from headstart.heads.errors import UserError
from headstart.inference.decoding.target import Target
from headstart.trainers import checkpoint
from headstart.trainers.joint import Joint, divergence, how_changed
from headstart.trainers.learner import Seen, evaluate
from headstart.trainers.run import run
from tests.drafters import HEADS, MADE, make
from tests.tiny_targets import tiny_target
from tests.trainers.conftest import ROOT, TORCHRUN, check_trained_alike, save_target, small_run
from tests.trainers.small import LOOP, LOSS, quiet, repetitive, train
from tests.trainers.test_arms import alone, equal

LORA: dict[str, Any] = {"rank": 4, "alpha": 8, "names": ["q_proj", "down_proj"], "lr": 1e-2, "start": 0.5, "weight": 2.0}


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


def joint(target: Target, name: str = HEADS[0], lora: dict[str, Any] = LORA) -> Joint:
    torch.manual_seed(3)
    return Joint(quiet(name, target), lora, **LOSS)


def batch_of(target: Target, taps: tuple[int, ...]) -> Any:
    return look(repetitive(seed=7, documents=12).batch(slice(0, 4)), target, taps)


def disturb(learner: Joint, scale: float = 0.05) -> None:
    with torch.no_grad():
        for p in learner.lora.values():
            p += scale * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))


@pytest.mark.parametrize("name", MADE)
def test_the_adapter_has_a_gradient_after_the_warm_up_only(name: str, target: Target) -> None:
    """Every drafter hands one on; before, its loss and gradient are those of the frozen target, to the bit."""
    if not make(name, target).taps:
        with pytest.raises(UserError, match=f"head {name} reads no state of the target"):
            joint(target, name)
        return
    learner = joint(target, name)
    disturb(learner)
    batch = batch_of(target, learner.drafter.taps)
    learner.train()
    grads = []
    for done in (0.0, 0.49, 0.5, 0.9):
        learner.zero_grad()
        out = learner(batch, done=done)
        out.loss_sum.backward()
        grads.append(sum(float(p.grad.abs().sum()) for p in learner.lora.values()))
        assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in learner.drafter.parameters())
    assert grads[0] == grads[1] == 0 and grads[2] > 0 and grads[3] > 0
    assert learner.phase(0.0) == learner.phase(0.49) != learner.phase(0.5) == learner.phase(0.9), (
        "a pass of the target more is another phase"
    )
    assert not any(p.requires_grad or p.grad is not None for p in target.model.parameters())


def test_without_its_adapter_it_is_the_original(target: Target) -> None:
    """To the bit: switched off, and as it begins. The target itself has no adapter at any time, and no weight of it exists twice."""
    learner, before = joint(target), [p.clone() for p in target.model.parameters()]
    rows = repetitive(seed=7, documents=12).batch(slice(0, 4))

    def read(model: Target) -> torch.Tensor:
        return model.read(rows.tokens_BT, rows.positions_BT, ())[1]

    original = read(target)
    assert torch.equal(read(learner.target), original)
    disturb(learner)
    assert not torch.allclose(read(learner.target), original, atol=1e-2)
    with learner._models[1].disable_adapter():
        assert torch.equal(read(learner.target), original)
    assert torch.equal(read(target), original) and not hasattr(target.model, "peft_config")
    assert all(torch.equal(a, b) for a, b in zip(before, target.model.parameters(), strict=True))
    ours, shared = {p.data_ptr() for p in learner.target.model.parameters()}, {p.data_ptr() for p in target.model.parameters()}
    assert ours - shared == {p.data_ptr() for p in learner.lora.values()} and shared <= ours


def test_the_adapter_adds_alpha_over_rank_of_its_product_and_does_not_decay(target: Target) -> None:
    """W x + alpha / r B A x (2106.09685, section 4.1), in every module that is named."""
    learner, seen = joint(target), 0
    disturb(learner)
    for module in learner.target.model.modules():
        if hasattr(module, "get_delta_weight"):
            a, b, x = module.lora_A["default"].weight, module.lora_B["default"].weight, torch.randn(3, module.in_features)
            wanted = module.get_base_layer()(x) + LORA["alpha"] / LORA["rank"] * x @ a.T @ b.T
            torch.testing.assert_close(module(x), wanted)
            seen += 1
    assert seen == 2 * target.shape.layers
    (optimizer,) = learner.optimizers((0.9, 0.95))
    (group,) = optimizer.param_groups
    assert (group["lr"], group["weight_decay"], len(group["params"])) == (LORA["lr"], 0.0, 2 * seen)


def test_how_far_the_target_has_moved_is_over_all_rows_of_a_step(target: Target) -> None:
    """Not over its last micro-batch's."""
    learner = joint(target).train()
    disturb(learner)
    seen, apart, positions = Seen(), 0.0, 0
    for rows in (slice(0, 3), slice(3, 4)):
        batch = look(repetitive().batch(rows), target, learner.drafter.taps)
        wanted = learner.wanted(batch)
        out = learner(batch, done=0.5, wanted=wanted)
        figures = learner.figures(out, wanted, seen)
        last, count = out.also["target_kl"]
        apart, positions = apart + last, positions + count
    assert figures["target_kl"] == pytest.approx(apart / positions) != last / count


def test_the_loss_is_the_drafters_and_a_share_of_the_divergence(target: Target) -> None:
    """Against autograd through whole logits: the states are the adapted target's, the teacher is the original."""
    learner = joint(target)
    disturb(learner)
    batch = batch_of(target, learner.drafter.taps)
    learner.train()
    learner.settings = LORA | {"weight": 0.0}
    heads = learner(batch, done=0.5).loss_sum
    learner.settings = LORA
    made = learner(batch, done=0.5)
    out, (total, count) = made.loss_sum, made.also["target_kl"]
    learner_also = {"target_kl": total / count}
    learner.zero_grad()
    (out - heads).backward()
    found = [p.grad.clone() for p in learner.lora.values()]
    _, final_BTD = learner.target.read_with_grad(batch.tokens_BT, batch.positions_BT, ())
    rows = batch.supervised(0)
    log_p, log_q = (F.log_softmax(target.logits(x[rows]), -1) for x in (batch.final_BTD, final_BTD))
    wanted = (log_p.exp() * (log_p - log_q)).sum()
    size = float(wanted.detach())
    assert float((out - heads).detach()) == pytest.approx(LORA["weight"] * size, rel=1e-4)
    assert learner_also["target_kl"] == pytest.approx(size / int(rows.sum()), rel=1e-4)
    grads = torch.autograd.grad(LORA["weight"] * wanted, list(learner.lora.values()))
    for a, b in zip(found, grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_the_divergence_in_chunks() -> None:
    ends = tiny_target().ends
    p, q = torch.randn(2, 7, 32)
    log_p, log_q = (F.log_softmax(ends.logits(x), -1) for x in (p, q))
    wanted = float((log_p.exp() * (log_p - log_q)).sum())
    assert [float(divergence(p, q, ends, chunk)) for chunk in (1, 3, 100)] == [pytest.approx(wanted, rel=1e-4)] * 3
    assert float(divergence(p[:0], q[:0], ends, 3)) == 0


@torch.no_grad()
def test_how_far_two_targets_are_apart_over_prompts(target: Target) -> None:
    """Per position that a token follows: the divergence, and how often the likeliest token is another. Whatever fits into a chunk."""
    changed, prompts = Target(tiny_target().model, name="changed"), [[5, 6, 7, 8, 9], [3, 1, 4, 1, 5, 9, 2, 6]]
    for p in changed.layers.parameters():  # an adapter leaves embedding and output head as they are
        p += 0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
    each = [[F.log_softmax(m.model(torch.tensor([prompt])).logits[0, :-1], -1) for m in (target, changed)] for prompt in prompts]
    log_p, log_q = (torch.cat(side) for side in zip(*each, strict=True))
    wanted = {
        "kl": float((log_p.exp() * (log_p - log_q)).sum(-1).mean()),
        "other_token": float((log_p.argmax(-1) != log_q.argmax(-1)).float().mean()),
    }
    for chunk in (3, 100):
        assert how_changed(target, changed, [], prompts, chunk) == pytest.approx(wanted, rel=1e-3)
    assert 0 < wanted["other_token"] < 1 and wanted["kl"] > 0.01


def test_what_is_evaluated_is_judged_by_the_adapted_target(target: Target) -> None:
    learner = joint(target)
    disturb(learner, 0.5)
    (batch,) = batches = [batch_of(target, learner.drafter.taps)]
    changed = evaluate(learner, batches)
    same = learner.target.read(batch.tokens_BT, batch.positions_BT, learner.drafter.taps)
    frozen = evaluate(Joint.__bases__[0](learner.drafter, **LOSS), [type(batch)(**(vars(batch) | dict(states=same[0], final_BTD=same[1])))])
    assert changed == pytest.approx(frozen)


def test_resuming_changes_nothing(target: Target, tmp_path: Path) -> None:
    """The checkpoint of step 2 lies before the adapter moves, that of step 4 after."""
    torch.manual_seed(5)
    train(make(HEADS[0], target), target, tmp_path / "a", lora=LORA, save_every=2, keep=9)
    folders = checkpoint.folders(tmp_path / "a")
    first, second, last = (load_file(f / "drafter.safetensors") for f in folders)
    moved = {k for k in first if k.startswith("lora.")}
    assert moved and not any(first[k].any() for k in moved if "lora_B" in k) and any(second[k].any() for k in moved if "lora_B" in k)
    assert all(not torch.equal(second[k], last[k]) for k in moved if second[k].any() and "lora_B" in k)
    for stop in (2, 4):
        torch.manual_seed(5)
        with pytest.raises(ZeroDivisionError):
            train(make(HEADS[0], target), target, tmp_path / f"{stop}", lora=LORA, save_every=2, each=lambda i, at=stop: 1 // (i - at))
        assert checkpoint.folders(tmp_path / f"{stop}")[-1].name == f"step-0000000{stop}"
        torch.manual_seed(99)
        train(make(HEADS[0], target, noise=0.5), target, tmp_path / f"{stop}", lora=LORA, save_every=2)
        newest = checkpoint.folders(tmp_path / f"{stop}")[-1]
        assert equal(load_file(newest / "drafter.safetensors"), last)
        assert equal(load_file(newest / "optimizer.safetensors"), load_file(folders[-1] / "optimizer.safetensors"))


def test_arms_beside_it_learn_what_they_learn_alone(target: Target, tmp_path: Path) -> None:
    """The frozen one to the bit; and the joint one too."""
    from accelerate import Accelerator

    from headstart.trainers.trainer import fit
    from tests.trainers.small import COMMON, LOOP, open_arm

    packed, arms = repetitive(), []
    for name, loop in (("joint", LOOP | {"lora": LORA}), ("frozen", LOOP)):
        drafter = make(HEADS[1], target)
        torch.manual_seed(5)
        (tmp_path / name).mkdir()
        arms.append(open_arm(name, drafter, tmp_path / name, loop))
    stream = lambda start, rank, world: packed.stream(4, 0, start, rank, world)  # noqa: E731
    fit(arms, stream, lambda batch, taps: look(batch, target, taps), [], Accelerator(cpu=True), **{k: LOOP[k] for k in COMMON})
    assert equal(arms[1].drafter.state_dict(), alone(target, HEADS[1], tmp_path / "alone"))
    assert equal(arms[0].drafter.state_dict(), alone(target, HEADS[1], tmp_path / "alone2", lora=LORA))
    assert not equal(arms[0].drafter.state_dict(), arms[1].drafter.state_dict())
    lines = [json.loads(line) for line in (tmp_path / "joint" / "metrics.jsonl").read_text().splitlines()]
    assert "train/target_kl" not in lines[0] and lines[-1]["train/target_kl"] > 0


@pytest.mark.parametrize("architecture", ["gpt_oss", "llama4_text", "deepseek_v3", "mixtral"])
def test_the_saved_target_is_the_adapted_one(architecture: str, tmp_path: Path) -> None:
    """Experts, queries scaled by a hook, biases: merged and loaded by transformers, it says the same."""
    from transformers import AutoModelForCausalLM

    target = tiny_target(architecture)
    names = ["o_proj", "kv_b_proj" if architecture == "deepseek_v3" else "q_proj"]
    learner = joint(target, "medusa", LORA | {"names": names})
    disturb(learner)
    folder = learner.save(tmp_path, None)
    attention = target.model.config._attn_implementation
    saved = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention).eval()
    tokens = torch.randint(3, 90, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        made, wanted, original = (model(tokens).logits for model in (saved, learner.target.model, target.model))
    torch.testing.assert_close(made, wanted, rtol=0, atol=1e-4)
    assert (wanted - original).abs().max() > 0.1


@pytest.mark.parametrize("autocast", [False, True])
def test_a_target_in_half_precision(autocast: bool) -> None:
    """The adapter learns in fp32; while it is zero, the target says what it says without, to the bit."""
    target = Target(tiny_target().model.to(torch.bfloat16))
    learner = joint(target, "medusa")
    batch = batch_of(target, learner.drafter.taps)
    learner.train()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        a, b = (model.read(batch.tokens_BT, batch.positions_BT, ())[1] for model in (learner.target, target))
        out = learner(batch, done=0.9)
    out.loss_sum.backward()
    assert torch.equal(a, b) and out.also["target_kl"][0] == 0
    assert all(p.dtype == torch.float32 and p.grad.isfinite().all() and p.grad.any() == ("lora_B" in k) for k, p in learner.lora.items())


@pytest.mark.slow
def test_two_processes_are_one(target: Target, tmp_path: Path) -> None:
    """Distributed over gloo, accumulating and clipping, through the warm-up and beyond it; the adapter too."""
    lora = LORA | {"start": 0.3, "lr": 1e-3}
    torchrun = [*TORCHRUN, "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "tests.trainers.two_processes", str(tmp_path), json.dumps(lora)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    name = HEADS[0]
    first, second = (load_file(tmp_path / f"{name}-{rank}") for rank in (0, 1))
    assert equal(first, second)
    train(quiet(name, target), target, tmp_path / "alone", rows=4, accumulate=2, steps=3, clip=0.5, optimizer="adamw", lora=lora)
    two, one = (load_file(checkpoint.folders(tmp_path / run)[-1] / "drafter.safetensors") for run in (name, "alone"))
    assert any(one[k].any() for k in one if "lora_B" in k)
    check_trained_alike(two, one, lr=LOOP["lr"], steps=3)  # the adapter's own rate is lower


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_a_run_reports_against_the_changed_target(tied: bool, composed: Any, conversations: Path, tmp_path: Path) -> None:
    """Lossless against it; its folder, and the adapter on the original, are what was trained."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder, out = save_target(tmp_path / "original"), tmp_path / "run"
    if tied:
        weights, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
        del weights["lm_head.weight"]
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    settings = composed(*small_run(folder, conversations, out), "head=medusa")
    settings["trainer"] |= {"lora": LORA, "steps": 8}
    report = run(**settings)[""]
    made = report["target_changed"]
    assert report["lossless"] and made["rank"] == 4 and made["kl"] > 1e-4 and 0 <= made["other_token"] <= 1
    assert report == json.loads((out / "report.json").read_text()) and report["target"] == "original+lora"
    assert f"the target was CHANGED by the training (LoRA of rank 4)" in (out / "report.md").read_text()  # noqa: F541
    original, changed = (Target.load(str(f), device="cpu") for f in (folder, out / "target"))
    assert changed.tokenizer_sha == original.tokenizer_sha and changed.card == original.card
    assert json.loads((out / "speculator" / "config.json").read_text())["headstart"]["target"] == changed.card
    hub.load(out / "speculator", changed.shape, changed.card)
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), out / "adapter").eval()
    tokens = torch.randint(3, 90, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        a, b, c = (model(tokens).logits for model in (changed.model, adapted, original.model))
    torch.testing.assert_close(a, b, rtol=0, atol=2e-4)
    assert ("lm_head.weight" in load_file(out / "target" / "model.safetensors")) != tied
    assert (a - c).abs().max() > 1e-2
    apart = how_changed(original, changed, [], [[5, 6, 7, 8, 9]], 2)
    log_p, log_q = (F.log_softmax(m(torch.tensor([[5, 6, 7, 8, 9]])).logits[0, :-1], -1) for m in (original.model, changed.model))
    assert apart["kl"] == pytest.approx(float((log_p.exp() * (log_p - log_q)).sum(-1).mean().detach()), rel=1e-3)
    assert run(**settings)[""]["target_changed"] == made  # training was complete: again from the checkpoint
    assert {p.name for p in out.iterdir()} >= {"target", "adapter", "speculator"} and not list(out.glob(".*"))


@pytest.mark.slow
def test_beside_an_arm_with_a_frozen_target(composed: Any, target_folder: Path, conversations: Path, tmp_path: Path) -> None:
    """Each is measured with its own target, and the frozen one as if it had been alone."""
    base = composed(*small_run(target_folder, conversations, tmp_path / "run"), "head=medusa")
    arms = {"frozen": {k: base[k] for k in ("head", "loss", "trainer")}}
    arms["joint"] = arms["frozen"] | {"trainer": base["trainer"] | {"lora": LORA}}
    reports = run(**(base | {"arms": arms}))
    assert all(r["lossless"] for r in reports.values())
    assert "target_changed" in reports["joint"] and "target_changed" not in reports["frozen"]
    single = run(**(base | {"out": str(tmp_path / "single")}))[""]
    for key in ("accepted_length", "acceptance_by_depth", "expected_length"):
        assert single["temperature_0"][key] == reports["frozen"]["temperature_0"][key]
    assert "joint: its training changed the target" in (tmp_path / "run" / "comparison.md").read_text()
    assert json.loads((tmp_path / "run" / "comparison.json").read_text())["changed"] == ["joint"]


@pytest.mark.parametrize(("change", "words"), [
    ({"names": ["q_proj", "nope"]}, r"called 'nope'; there are down_proj, .*q_proj"),
    ({"names": ["lm_head"]}, r"called 'lm_head'"),
])  # fmt: skip
def test_what_is_wrong_in_the_settings_is_named(change: dict[str, Any], words: str, target: Target) -> None:
    with pytest.raises(UserError, match=words) as e:
        joint(target, lora=LORA | change)
    assert "\n" not in str(e.value)


def test_a_quantised_target_is_refused() -> None:
    target = tiny_target()
    target.model.config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(UserError, match=r"quantised, its weights cannot be changed"):
        joint(target)
