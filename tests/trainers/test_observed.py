"""What a training says of itself: by depth, in time and operations, as a trace, and as lines of a log; and what it does only once."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor

from headstart.data.batch import TargetBatch, TokenBatch
from headstart.data.live import look
from headstart.heads import products
from headstart.heads.unroll import unroll
from headstart.inference.decoding.target import Target
from headstart.inference.reports.walk import Walk, walk_rows
from headstart.trainers import clock as clock_module
from headstart.trainers import operations, progress, trainer
from headstart.trainers.clock import Clock
from headstart.trainers.gpus import GPUS, peak_of
from headstart.trainers.learner import Learner, Seen, Wanted, evaluate
from headstart.trainers.metrics import read_metrics
from headstart.trainers.operations import Operations
from headstart.trainers.trace import Trace
from headstart.trainers.watch import Watch
from tests.drafters import make
from tests.tiny_targets import tiny_target
from tests.trainers.small import COMMON, LOOP, LOSS, open_arm, quiet, repetitive, train

RANGES = {"data", "target", "draft", "loss", "backward", "optimiser"}


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


@pytest.mark.parametrize("name", ["eagle", "dflash"])
def test_which_guesses_count_is_found_out_once_a_step(name: str, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the divisor and by the loss; figures may look at it again."""
    calls, own = Counter[int](), TokenBatch.supervised
    monkeypatch.setattr(TokenBatch, "supervised", lambda self, depth: (calls.update([depth]), own(self, depth))[1])
    drafter, at = quiet(name, target), dict[int, Counter[int]]()
    drafter.anchors = drafter.anchors and 5
    train(drafter, target, tmp_path, steps=4, accumulate=3, save_every=99, each=lambda i: at.update({i: Counter(calls)}))
    depths = range(1, Learner(drafter, **LOSS).depth + 1)
    once = {d: 6 if d == 1 and drafter.anchors else 3 for d in depths}  # anchors are drawn among the roots that count at depth 1
    assert {d: at[6][d] - at[3][d] for d in depths} == once  # the forward passes of the second step, and the beginning of the third


def by_hand(learner: Learner, batch: TargetBatch) -> tuple[list[float], list[float]]:
    """KL and share of right guesses of each depth, over full logits in float64."""
    losses, rights = [], []
    teacher = learner.drafter.ends.logits(batch.final_BTD).double()
    for d, draft in enumerate(unroll(learner.drafter, batch.roots(), batch.documents_BT, learner.depth), start=1):
        mask_BT = batch.supervised(d)
        q = learner.drafter.unembedding(d).logits(draft.hidden_BNH).double()[mask_BT].log_softmax(-1)
        p = teacher[F.pad(mask_BT, (d, 0))[:, : mask_BT.shape[1]]].log_softmax(-1)
        losses.append(float((p.exp() * (p - q)).sum(-1).mean()))
        rights.append(float((p.argmax(-1) == q.argmax(-1)).double().mean()))
    return losses, rights


@torch.no_grad()
def test_loss_and_accuracy_of_each_depth(target: Target) -> None:
    learner = Learner(make("eagle", target), **LOSS)
    batches = [look(repetitive(seed=s, documents=12).batch(slice(0, 4)), target, learner.drafter.taps) for s in (7, 8)]
    losses, rights = by_hand(learner, batches[0])
    out = learner(batches[0])
    found = learner.figures(out, learner.wanted(batches[0]))
    assert [found[f"train/loss_depth/{d}"] for d in (1, 2, 3)] == pytest.approx(losses, rel=1e-4) and len(set(losses)) == 3
    assert [found[f"train/depth/{d}/accuracy"] for d in (1, 2, 3)] == pytest.approx(rights)
    weights = [LOSS["decay"] ** k * int(out.count_K[k]) for k in range(3)]
    assert float(out.loss_sum) == pytest.approx(sum(w * x for w, x in zip(weights, losses, strict=True)), rel=1e-4)
    held = evaluate(learner, batches)
    counts = [[int(b.supervised(d).sum()) for d in (1, 2, 3)] for b in batches]
    both = [(a * m + b * n) / (m + n) for a, b, m, n in zip(losses, by_hand(learner, batches[1])[0], *counts, strict=True)]
    assert [held[f"heldout/loss_depth/{d}"] for d in (1, 2, 3)] == pytest.approx(both, rel=1e-4)
    assert found["train/depth/2/acceptance"] <= found["train/depth/1/acceptance"] <= 1

    seen, walks = Seen(), Walk()  # the micro-batches of a step, together
    for batch in batches:
        out = learner(batch)
        together = learner.figures(out, learner.wanted(batch), seen)
        walks.add(walk_rows(out.match_KBT, batch.supervised(1)))
    assert [together[f"train/loss_depth/{d}"] for d in (1, 2, 3)] == pytest.approx(both, rel=1e-4)
    assert together["expected_length"] == pytest.approx(walks.tokens / walks.rounds) != found["expected_length"]
    assert held["heldout_expected_length"] == pytest.approx(walks.tokens / walks.rounds)

    single = Learner(make("draft_lm", target), **LOSS)  # depth 1 alone is trained, and all are looked at
    batch = look(repetitive(seed=7, documents=12).batch(slice(0, 4)), target, single.drafter.taps)
    out = single(batch)
    out.match_KBT[0], out.match_KBT[1:] = batch.supervised(1), False
    assert len(out.match_KBT) == 3 and single.figures(out, single.wanted(batch))["train/depth/1/accuracy"] == 1


@pytest.mark.parametrize(("name", "weighting", "terms", "kernel"), [
    ("eagle", "dpace", {"kl": 1.0}, "torch"), ("eagle", "chain", {"tv": 1.0}, "auto"),
    ("dflash2", "dpace", {"ce": 1.0, "selector": 0.6}, "auto"),
])  # fmt: skip
def test_loss_of_a_depth_is_without_weights(name: str, weighting: str, terms: dict[str, float], kernel: str, target: Target) -> None:
    """So that a training's figures can be compared with those over held-out text, which have none."""
    drafter = quiet(name, target).train()
    drafter.anchors = 0
    learner = Learner(drafter, **LOSS | {"weighting": weighting, "terms": terms, "kernel": kernel})
    batch = look(repetitive().batch(slice(0, 4)), target, drafter.taps)
    figures = learner.figures(learner(batch), learner.wanted(batch))
    held = evaluate(learner, [batch])
    own = {key: value for key, value in figures.items() if "loss_depth" in key}
    assert own == pytest.approx({key: held[key.replace("train", "heldout")] for key in own}, rel=1e-5) and len(own) > 1


@torch.no_grad()
def test_of_anchors_the_figures_are_means_over_them(target: Target) -> None:
    learner = Learner(make("dflash", target), **LOSS)
    batch = look(repetitive().batch(slice(0, 2)), target, learner.drafter.taps)
    ask_BA = torch.tensor([[3, 9], [4, 20]])
    wanted = Wanted(ask_BA, learner.supervised(batch, ask_BA))
    out = learner(batch, wanted=wanted)
    found = learner.figures(out, wanted)
    K = len(out.match_KBT)
    chains = [[bool(out.match_KBT[k, b, t]) for k in range(K)] for b in (0, 1) for t in ask_BA[b].tolist() if batch.supervised(1)[b, t]]
    lengths = [1 + next((k for k, right in enumerate(chain) if not right), K) for chain in chains]
    assert found["expected_length"] == pytest.approx(sum(lengths) / len(lengths))
    assert found["train/depth/1/acceptance"] == pytest.approx(sum(chain[0] for chain in chains) / len(chains))


def test_operations_of_what_is_known_by_hand() -> None:
    x, w = torch.randn(5, 7), torch.randn(7, 11, requires_grad=True)
    with Operations() as found:
        y = x @ w
        y.sum().backward()
    assert found.count == 2 * 2 * 5 * 7 * 11  # no gradient of x
    q, k = torch.randn(2, 4, 6, 8, requires_grad=True), torch.randn(2, 4, 6, 8, requires_grad=True)
    with Operations() as found:
        F.scaled_dot_product_attention(q, k, k, is_causal=True).sum().backward()
    assert found.count == (2 + 5) * 2 * 2 * 4 * 6 * 6 * 8
    with Operations() as found:
        torch.zeros(5, 11).addmm_(x, w.detach())
        torch.mm(x, w.detach(), out=torch.empty(5, 11))
    assert found.count == 2 * 2 * 5 * 7 * 11


def test_heads_that_share_keys_count_as_with_keys_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward, in rows and in documents of variable length; by torch's formulas of today and of 2.11, which have none."""

    def of_then(formula: Any, heads: Callable[..., set[int]]) -> Any:
        def count(*args: Any, **kwargs: Any) -> int:
            assert len(heads(*args)) == 1, "query/key/value shapes are incompatible"
            return formula(*args, **kwargs)

        return count

    q, k = torch.randn(2, 8, 6, 16, requires_grad=True), torch.randn(2, 2, 6, 16, requires_grad=True)
    own, wide = operations._OWN, k.detach().repeat_interleave(4, 1).requires_grad_()
    with Operations() as found:
        F.scaled_dot_product_attention(q, wide, wide, is_causal=True).sum().backward()
    aten = torch.ops.aten
    flash, back = aten._scaled_dot_product_flash_attention_for_cpu, aten._scaled_dot_product_flash_attention_for_cpu_backward
    old = {
        flash: of_then(own[flash], lambda q, k, v, *_: {x.shape[1] for x in (q, k, v)}),
        back: of_then(own[back], lambda grad, q, k, v, *_: {x.shape[1] for x in (grad, q, k, v)}),
    }
    for formulas in (own, own | old):
        monkeypatch.setattr(operations, "_OWN", formulas)
        with Operations() as shared:
            F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True).sum().backward()
        assert shared.count == found.count == (2 + 5) * 2 * 2 * 8 * 6 * 6 * 16
    rows, few = torch.randn(12, 8, 16), torch.randn(12, 2, 16)
    for name, first in (("_flash_attention_forward", 0), ("_flash_attention_backward", 1)):
        args = (rows, few, few) if not first else (rows, rows, few, few)
        kept = operations._keys_of_their_own(getattr(aten, name).default, (*args, "rest"))
        assert [x.shape for x in kept[:-1]] == [rows.shape] * len(args) and kept[-1] == "rest"


def test_a_step_counts_what_its_parts_take(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once; as a rate of every step, and as a share where the peak of the device is known."""
    steps: list[float] = []
    own = Clock.count
    monkeypatch.setattr(Clock, "count", lambda self, arm, tokens: (own(self, arm, tokens), steps.append(self.per_token[arm] * tokens))[0])
    plain, known = quiet("eagle", target), quiet("eagle", target)
    train(plain, target, tmp_path / "a", steps=11, accumulate=2)
    lines = read_metrics(tmp_path / "a")
    assert all(line["speed/teraflops"] > 0 and "speed/mfu" not in line for line in lines) and len(lines) == 3
    packed = repetitive()
    with Operations() as found:
        for rows in (slice(0, 4), slice(4, 8)):
            batch = look(packed.batch(packed.order(0, 0)[rows]), target, plain.taps)
            learner = Learner(quiet("eagle", target), **LOSS).train()
            learner(batch).loss_sum.backward()
    assert steps[0] == pytest.approx(found.count, rel=0.02) and len(set(steps)) == 1
    monkeypatch.setattr(clock_module, "peak", lambda device: 2e12)
    train(known, target, tmp_path / "b", steps=1)
    (line,) = read_metrics(tmp_path / "b")
    assert line["speed/mfu"] == pytest.approx(line["speed/teraflops"] / 2)


def test_operations_are_counted_anew_where_steps_do_something_else(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guesses without their correction are judged in the first half alone; and figures since the last ones are of what was done."""
    monkeypatch.setattr(products, "by_onednn", lambda *_: False)  # for its products torch has no formula
    own, done = Clock.count, list[float]()
    monkeypatch.setattr(Clock, "count", lambda self, kind, tokens: (own(self, kind, tokens), done.append(self.done[kind[0]]))[0])
    train(quiet("domino", target), target, tmp_path, steps=6, log_every=3, loss=LOSS | {"base_until": 0.5})
    first, second, third, *rest = [a - b for a, b in zip(done, [0, 0, *done[1:2], 0, *done[3:5]], strict=True)]
    assert first == second == third > 1.02 * rest[0] > 0 and rest[0] == rest[1] == rest[2]


@pytest.mark.parametrize("processes", [1, 2])
def test_the_drafters_own_text_counts_but_not_its_decoding(processes: int) -> None:
    """Every process does as much as this one; a rate is that of one of them, and since the last figures."""
    clock, kind = Clock(torch.device("cpu"), processes), ("a", ())
    with clock.counting([kind]):
        torch.ones(2, 3) @ torch.ones(3, 5)
        with operations.uncounted():
            torch.ones(20, 30) @ torch.ones(30, 50)
        torch.ones(2, 3) @ torch.ones(3, 5)
    clock.count(kind, 12)
    assert clock.per_token == {kind: processes * 2 * (2 * 2 * 3 * 5) / 12}
    clock.whole["a"] = 2
    found, later = clock.figures("a"), clock.figures("a")
    assert found["speed/teraflops"] == pytest.approx(2 * (2 * 2 * 3 * 5) / 2 / 1e12) and found["speed/tokens_per_second"] == 12 / 2
    assert "speed/teraflops" not in later and later["speed/tokens_per_second"] == 0


def test_the_peak_is_that_of_the_very_gpu_or_not_said() -> None:
    known = {
        "NVIDIA H100 80GB HBM3": "h100", "NVIDIA H200": "h200", "NVIDIA B200": "b200", "NVIDIA A100-SXM4-80GB": "a100",
        "NVIDIA A100-PCIE-40GB": "a100", "NVIDIA L40S": "l40s", "NVIDIA A10": "a10", "NVIDIA GeForce RTX 4090": "rtx4090",
        "NVIDIA GeForce RTX 3090": "rtx3090", "AMD Instinct MI300X": "mi300x",
    }  # fmt: skip
    assert {name: peak_of(name) for name in known} == {name: GPUS[kind].flops for name, kind in known.items()}
    for name in ("NVIDIA A10G", "NVIDIA H100 PCIe", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GH200 480GB", "Tesla T4"):
        assert peak_of(name) is None, name


def test_waiting_for_other_processes_is_a_part_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[int] = []
    accelerator: Any = SimpleNamespace(num_processes=2, wait_for_everyone=lambda: waited.append(1))
    clock, arms = Clock(torch.device("cpu"), 2), [SimpleNamespace(name="a")]
    loop = trainer._Loop(arms, None, accelerator, None, clock, None)  # type: ignore[arg-type]
    loop._wait(arms, False)  # type: ignore[arg-type]
    assert not waited
    loop._wait(arms, True)  # type: ignore[arg-type]
    assert waited and clock.parts["waiting"]["a"] > 0
    assert clock.figures("a")["speed/waiting_share"] == pytest.approx(1)
    accelerator.num_processes = 1
    loop._wait(arms, True)  # type: ignore[arg-type]
    assert len(waited) == 1


def test_a_trainings_seconds_are_those_of_all_its_parts(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part takes so long every time: data, the target's two passes; the beginning, two passes and the end of the drafter's step."""
    seconds = {"data": 1000.0, "target": 100.0, "step": 1.0}
    monkeypatch.setattr(Clock, "since", lambda self, start, part, arms: seconds[part])
    assert train(quiet("medusa", target), target, tmp_path, steps=3, accumulate=2, log_every=1).seconds == 3 * (1000 + 2 * 100 + 4 * 1)
    accelerator: Any = SimpleNamespace(num_processes=2, wait_for_everyone=lambda: None)
    loop = trainer._Loop([], None, accelerator, None, Clock(torch.device("cpu"), 2), None)  # type: ignore[arg-type]
    seconds["waiting"] = 7.0
    assert loop._wait([], True) == 7.0


def test_processes_that_wait_for_a_decoding_are_as_far_as_the_first() -> None:
    """Else the watch would take them for those that the first one waits for, after ``trainer.timeout`` seconds."""
    arm: Any = SimpleNamespace(name="a", label="", failed=False, fitted=SimpleNamespace(steps=7), drafter=make("medusa", tiny_target()))
    waits = list[tuple[int, bool]]()

    def watch_of(decoded: Any) -> Watch:
        accelerator: Any = SimpleNamespace(process_index=int(decoded is None), num_processes=2, is_main_process=decoded is not None)
        watch = Watch(accelerator, 100.0)
        accelerator.wait_for_everyone = lambda: waits.append((watch.count, watch.alone))
        clock = Clock(torch.device("cpu"), 2)
        assert trainer._Loop([arm], None, accelerator, None, clock, watch, decoded).decode([arm, arm]) == [arm, arm]  # type: ignore[arg-type]
        return watch

    first, second = watch_of(lambda arm: {}), watch_of(None)
    assert first.count == second.count == 2 and waits == [(1, True), (2, True)] * 2


def traced(target: Target, folder: Path, steps: int, trace: Trace | None) -> dict[str, Tensor]:
    folder.mkdir()
    arm, packed = open_arm("", quiet("eagle", target), folder, LOOP), repetitive()
    settings = {k: LOOP[k] for k in COMMON} | {"steps": steps}
    observe = lambda batch, taps: look(batch, target, taps)  # noqa: E731
    trainer.fit([arm], lambda *place: packed.stream(4, 0, *place), observe, [], Accelerator(cpu=True), trace=trace, **settings)
    return arm.drafter.state_dict()


@pytest.mark.slow
def test_a_trace_names_the_parts_of_the_steps_that_it_holds(target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = traced(target, tmp_path / "plain", 5, None)
    same = traced(target, tmp_path / "a", 5, Trace(tmp_path / "a", 2))
    assert all(torch.equal(plain[k], same[k]) for k in plain)
    (path,) = (tmp_path / "a" / "profile").iterdir()
    assert path.name == "rank-0.json.gz" and f"profile: {path} " in capsys.readouterr().out
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    found = Counter(event["name"] for event in events if event.get("cat") == "user_annotation")
    assert {name: found[name] for name in RANGES} == dict.fromkeys(RANGES, 2), found
    traced(target, tmp_path / "b", 1, Trace(tmp_path / "b", 2))
    assert "no step was recorded" in capsys.readouterr().out and not (tmp_path / "b" / "profile").exists()


def test_a_log_file_gets_lines(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """No control characters; one of the first step, one of the last, and between them one in so many seconds."""
    for every, wanted in ((1e9, [1, 40]), (0.0, [1, 10, 20, 30, 40])):
        monkeypatch.setattr(progress, "EVERY", every)
        train(quiet("medusa", target), target, tmp_path / f"{every}", steps=40, save_every=40)
        said = capsys.readouterr().out
        assert not set("\r\x1b\b") & set(said)
        lines = [line for line in said.splitlines() if line.startswith("step ")]
        assert [int(line.split()[1]) for line in lines] == wanted and all("of 40  loss " in line and "tokens/s" in line for line in lines)
        assert all(("left" in line) == (0 < i < len(lines) - 1) for i, line in enumerate(lines))
