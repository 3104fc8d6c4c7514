"""However a training is spread over processes: the same losses, gradients, weights and checkpoints as in one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import nn

from headstart.heads.errors import UserError
from headstart.inference.decoding.target import Target
from headstart.trainers import checkpoint
from headstart.trainers.parallel import check_parallel, owners, to_first
from headstart.trainers.zero import Zero
from tests.starting import LONGEST
from tests.tiny_targets import tiny_target
from tests.trainers import shared_target, spread
from tests.trainers.conftest import ROOT, TORCHRUN, save_target, small_run

WAYS: list[dict[str, Any]] = [{"name": "ddp"}, {"name": "zero1"}, {"name": "fsdp"}]
DEEPSPEED: list[dict[str, Any]] = [{"name": "deepspeed", "stage": stage, "offload": stage == 1} for stage in (1, 2)]


def named(way: dict[str, Any]) -> str:
    return "-".join(map(str, way.values()))


NAMES = [named(way) for way in WAYS]


def spread_out(out: Path, ways: list[dict[str, Any]]) -> Path:
    """By one process here, and by two in every way; these also go on from the second step of the one."""
    target = tiny_target()
    for head, optimizer in spread.CASES:
        folder = out / "one" / f"{head}-{optimizer}"
        said = spread.run(folder, head, 4, target, **spread.settings(optimizer), keep=3)
        (out / "one" / f"{head}-{optimizer}-0.json").write_text(json.dumps(said))
        for way in ways:
            there = out / f"resumed-{named(way)}" / f"{head}-{optimizer}" / "checkpoints"
            shutil.copytree(checkpoint.folders(folder)[0], there / "step-00000002")
    torchrun = [*TORCHRUN, "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "tests.trainers.spread", str(out), *map(json.dumps, ways)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return out


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return spread_out(tmp_path_factory.mktemp("spread"), WAYS)


@pytest.fixture(scope="module")
def ran_by_deepspeed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("deepspeed")
    return spread_out(tmp_path_factory.mktemp("deepspeed"), DEEPSPEED)


def newest(folder: Path) -> dict[str, torch.Tensor]:
    place = checkpoint.folders(folder)[-1]
    parts = {part: load_file(place / f"{part}.safetensors") for part in ("drafter", "optimizer")}
    return {f"{part} {key}": x for part, tensors in parts.items() for key, x in tensors.items()}


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for key, x in wanted.items():
        torch.testing.assert_close(found[key], x, rtol=1e-5, atol=1e-5, msg=lambda m, key=key: f"{key}: {m}")


def is_one(out: Path, name: str, case: str) -> None:
    wanted = json.loads((out / "one" / f"{case}-0.json").read_text())
    for rank in (0, 1):
        assert json.loads((out / name / f"{case}-{rank}.json").read_text()) == {k: pytest.approx(v, rel=1e-6) for k, v in wanted.items()}
    same(newest(out / name / case), newest(out / "one" / case))


def goes_on(out: Path, name: str, case: str) -> None:
    folder = out / f"resumed-{name}" / case
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [5], "it began anew"
    same(newest(folder), newest(out / "one" / case))
    exported = load_file(out / name / f"{case}.safetensors")  # the drafter itself, when the group is left
    assert all(torch.equal(x, newest(folder)[f"drafter {key}"]) for key, x in exported.items())


@pytest.mark.slow
@pytest.mark.parametrize("case", ["-".join(case) for case in spread.CASES])
@pytest.mark.parametrize("name", NAMES)
def test_two_processes_are_one(name: str, case: str, ran: Path) -> None:
    is_one(ran, name, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["-".join(case) for case in spread.CASES])
@pytest.mark.parametrize("name", NAMES)
def test_a_run_of_one_process_goes_on_in_two(name: str, case: str, ran: Path) -> None:
    goes_on(ran, name, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["-".join(case) for case in spread.CASES[:-1]])
@pytest.mark.parametrize("name", [named(way) for way in DEEPSPEED])
def test_deepspeed_is_one_process_too(name: str, case: str, ran_by_deepspeed: Path) -> None:
    is_one(ran_by_deepspeed, name, case)
    goes_on(ran_by_deepspeed, name, case)


@pytest.mark.slow
def test_deepspeed_takes_one_process_alone(tmp_path: Path) -> None:
    """As `python train.py parallel=deepspeed` starts it, without a launcher's variables: the weights of ddp."""
    pytest.importorskip("deepspeed")
    folder, rows = save_target(tmp_path / "target"), tmp_path / "chat.jsonl"
    talk = [{"role": "user", "content": "count"}, {"role": "assistant", "content": " ".join(map(str, range(40)))}]
    rows.write_text(f"{json.dumps({'messages': talk})}\n" * 20)
    alone = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    for way in ("deepspeed", "ddp"):
        words = [*small_run(folder, rows, tmp_path / way), f"parallel={way}", "trainer.optimizer=adamw", "report=none"]
        done = subprocess.run([sys.executable, "train.py", *words], cwd=ROOT, capture_output=True, text=True, timeout=400, env=alone)
        assert done.returncode == 0, done.stderr[-3000:]
    same(newest(tmp_path / "deepspeed"), newest(tmp_path / "ddp"))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_arms_side_by_side_are_as_if_alone(name: str, ran: Path) -> None:
    for head in spread.HEADS[:2]:
        same(newest(ran / name / "two" / head), newest(ran / "one" / f"{head}-adamw"))


@pytest.mark.slow
def test_a_target_that_processes_share_says_what_a_whole_one_says(tmp_path: Path) -> None:
    """Two by two: pairs compute its layers together, each process reads rows of its own. And gathered layer by layer, by all four."""
    folder = save_target(tmp_path / "target", num_attention_heads=4, num_key_value_heads=2)
    torchrun = [*TORCHRUN, "--nproc-per-node", "4"]
    command = [*torchrun, "-m", "tests.trainers.shared_target", str(tmp_path), str(folder), "tp:2", "fsdp"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LONGEST, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    whole = Target.load(str(folder), device="cpu")
    for head in shared_target.HEADS:
        spread.run(tmp_path / "one" / head, head, 4, whole, **spread.settings("adamw"))
        for device in ("tp:2", "fsdp"):
            same(newest(tmp_path / device / head), newest(tmp_path / "one" / head))


@pytest.mark.slow
def test_deepspeed_adds_up_gradients_in_fp32_under_bf16(tmp_path: Path) -> None:
    """As the other ways do. By default it would add up those of nn.Linear in bf16."""
    pytest.importorskip("deepspeed")
    (tmp_path / "zero.py").write_text(
        "import os, torch\nfrom accelerate import Accelerator\nfrom headstart.trainers.zero import Zero\n"
        "class Learner(torch.nn.Linear):\n    trained = property(lambda self: self)\n"
        "learner, one = Learner(8, 8), Accelerator(cpu=True, mixed_precision='bf16')\n"
        "inner = torch.nn.Sequential(torch.nn.Linear(8, 8))\nlearner.inner = inner\n"
        "zero = Zero(one, learner, [torch.optim.AdamW(learner.parameters(), fused=True)], 2, False)\n"
        "print('kinds', list(zero.engine.optimizer.ipg_buckets), flush=True)\nos._exit(0)\n"
    )
    alone = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    command = [sys.executable, str(tmp_path / "zero.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LONGEST, env=alone)
    assert "kinds [torch.float32]" in done.stdout, done.stdout + done.stderr[-3000:]


@pytest.mark.slow
def test_gradients_are_held_once(tmp_path: Path) -> None:
    """In the buckets in which the processes add them up, not also beside them."""
    command = [*TORCHRUN, "--nproc-per-node", "2", "-m", "tests.trainers.two_gradients", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LONGEST, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in (0, 1):  # the first step begins without gradients, and they are in the bucket when the processes have added them up
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == [2, 1, 1, 1, 1, 1]


def test_moments_before_the_first_step_are_those_that_an_optimiser_begins_with() -> None:
    """A checkpoint may be made then: where the first steps were skipped."""
    sent = to_first(Accelerator(cpu=True), 0, None, torch.ones(2, 3, device="meta"))  # as Parallel.wanted has them
    assert sent is not None and torch.equal(sent, torch.zeros(2, 3))


def test_how_many_numbers_the_processes_hold_is_counted_exactly() -> None:
    """Also beyond 2^24, where fp32 no longer has every whole number: here three processes hold as many each."""
    piece = (1 << 24) + 1
    trained = nn.ParameterList([nn.Parameter(torch.empty(3 * piece, device="meta"))])
    trained[0]._hp_mapping = SimpleNamespace(lp_fragment_address=SimpleNamespace(numel=piece))  # type: ignore[attr-defined]
    zero: Any = Zero.__new__(Zero)
    zero.learner, zero.engine = SimpleNamespace(trained=trained), SimpleNamespace(world_size=3)
    zero.accelerator = SimpleNamespace(num_processes=3, device=torch.device("cpu"), reduce=lambda held, how: 3 * held)
    zero.check()
    trained[0]._hp_mapping.lp_fragment_address.numel -= 1  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="parallel=deepspeed is not what runs"):
        zero.check()


def test_what_is_owned_is_shared_out_evenly() -> None:
    sizes = [100, 3, 50, 49, 1]
    found = owners(sizes, 2)
    held = [sum(size for size, owner in zip(sizes, found, strict=True) if owner == rank) for rank in (0, 1)]
    assert held == [101, 102] or held == [102, 101]


@pytest.mark.parametrize(("name", "trainer", "loss", "words"), [
    ("fsdp", {"lora": {"rank": 2}}, {}, "parallel=fsdp .*trainer.lora.*parallel=zero1"),
    ("deepspeed", {}, {"on_policy": {"rows": 2}}, "parallel=deepspeed: loss.on_policy.*parallel=zero1"),
    ("deepspeed", {"optimizer": "muon"}, {}, "parallel=deepspeed .*trainer.optimizer=adamw, or parallel=zero1"),
])  # fmt: skip
def test_what_does_not_go_together_is_refused(name, trainer, loss, words) -> None:
    arm = {"trainer": {"lora": None, "optimizer": "adamw"} | trainer, "loss": {"on_policy": None} | loss}
    with pytest.raises(UserError, match=words):
        check_parallel({"name": name}, {"": arm})


def test_deepspeed_trains_one_drafter() -> None:
    arm = {"trainer": {"lora": None, "optimizer": "adamw"}, "loss": {"on_policy": None}}
    with pytest.raises(UserError, match=r"parallel=deepspeed trains one drafter"):
        check_parallel({"name": "deepspeed"}, {"a": arm, "b": arm})
