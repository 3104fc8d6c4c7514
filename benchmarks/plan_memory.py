"""Compares the memory that a plan predicts with what a step takes: `python train.py plan=true` against the peak of torch's allocator.

    python benchmarks/plan_memory.py            # writes benchmarks/results/plan_memory.json

Each case trains on the CPU: a random target (unless states are captured), a drafter, and real steps of the training loop (the target's
pass, unroll, fused loss, backward, clipping, optimiser). ``measured`` is the most bytes that torch held at any time, as its profiler
counts them, minus those before the first step, when the weights of both exist: gradients, moments, states and activations remain.
``planned_over_measured`` is the plan for these over it. Memory that libraries map is not included (50 to 150 MB, depending on the CPU).
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.frame import keep, origin, parser
from headstart.data.batch import TokenBatch
from headstart.data.live import look
from headstart.heads import hub
from headstart.heads.base import Drafter
from headstart.inference.decoding.target import Target
from headstart.trainers.learner import Learner
from headstart.trainers.optimizer import open_optimizers
from headstart.trainers.plan import plan

VOCABULARY = 16000
PARTS = ("gradients", "moments", "states of the target", "activations")
CONFIG = dict(
    model_type="llama", hidden_size=512, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=4,
    vocab_size=VOCABULARY, max_position_embeddings=4096,
)  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "eagle": {"head": {"name": "eagle"}},
    "eagle, depth 7": {"head": {"name": "eagle"}, "depth": 7},
    "eagle, 4,000 tokens": {"head": {"name": "eagle", "draft_vocab": 4000}},
    "eagle, AdamW": {"head": {"name": "eagle"}, "optimizer": "adamw"},
    "eagle1": {"head": {"name": "eagle1"}},
    "mtp": {"head": {"name": "mtp"}},
    "medusa": {"head": {"name": "medusa", "guesses": 3}},
    "dflash": {"head": {"name": "dflash", "layers": 2, "block": 8, "anchors": 32}},
    "eagle, bf16": {"head": {"name": "eagle"}, "precision": "bf16"},
    "eagle, two micro-batches": {"head": {"name": "eagle"}, "accumulate": 2},
    "medusa, two micro-batches": {"head": {"name": "medusa", "guesses": 3}, "accumulate": 2},
}


def settings_of(case: dict[str, Any]) -> dict[str, Any]:
    trainer = dict(batch_size=2, length=512, accumulate=case.get("accumulate", 1), steps=3, epochs=None, gradient_checkpointing=False,
                   start=None, optimizer=case.get("optimizer", "muon"), lr=1e-3, betas=[0.9, 0.95],
                   weight_decay=0.0, precision=case.get("precision", "fp32"))  # fmt: skip
    loss = dict(depth=case.get("depth", 3), chunk=256, terms={"kl": 1.0}, base_until=0.0, decay=0.8, weighting="decay", kernel="auto")
    where = dict(name="random", config=CONFIG, path="", dtype="float32", device="cpu")
    return dict(
        target=where, head=case["head"], loss=loss, trainer=trainer, data={"name": "stdlib"}, arms=None, nodes=1, gpus=1, gpu="h100"
    )


class Arm(NamedTuple):
    """One drafter in training."""

    drafter: Drafter
    learner: Learner
    optimizers: list[torch.optim.Optimizer]


def arm_of(target: Target, head: dict[str, Any], loss: dict[str, Any], trainer: dict[str, Any]) -> Arm:
    arguments = {k: v for k, v in head.items() if k != "name"}
    if "draft_vocab" in arguments:
        arguments["draft_vocab"] = list(range(arguments["draft_vocab"]))
    drafter = hub.build(head["name"], target.shape, **arguments)
    drafter.attach(target.ends)
    drafter.start_from(target.ends)
    optimizers = open_optimizers(drafter, trainer["optimizer"], trainer["lr"], trainer["betas"], 0.0)
    return Arm(drafter, Learner(drafter, **loss).train(), optimizers)


def random_target(config: dict[str, Any]) -> Target:
    return Target(AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)))


def measure(case: dict[str, Any]) -> int:
    """Train a drafter of a random target for a few steps. Returns the peak in bytes, without the weights of both."""
    torch.manual_seed(0)
    settings, target = settings_of(case), random_target(CONFIG)
    trainer = settings["trainer"]
    arm = arm_of(target, settings["head"], settings["loss"], trainer)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen_by:
        for _ in range(trainer["steps"]):
            shape = [trainer[key] for key in ("accumulate", "batch_size", "length")]
            step(target, [arm], torch.randint(VOCABULARY, shape), trainer["precision"] == "bf16")
    with tempfile.TemporaryDirectory() as folder:
        seen_by.export_chrome_trace(str(Path(folder) / "trace.json"))
        events = json.loads((Path(folder) / "trace.json").read_text())["traceEvents"]
    changes = sorted((e["ts"], e["args"]["Bytes"]) for e in events if e["name"] == "[memory]")
    return max(accumulate(change for _, change in changes))


def step(target: Target, arms: Sequence[Arm], tokens_ABT: torch.Tensor, half: bool = False) -> None:
    """One training step of all arms. They share the target's pass of each of the A micro-batches."""
    places_BT = torch.arange(tokens_ABT.shape[2]).expand_as(tokens_ABT[0])
    for tokens_BT in tokens_ABT:
        batch = TokenBatch(tokens_BT, torch.ones_like(tokens_BT, dtype=torch.bool), places_BT, torch.zeros_like(tokens_BT))
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            seen = look(batch, target, sorted({tap for arm in arms for tap in arm.drafter.taps}))
        for _, learner, _ in arms:
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                out = learner(seen, figures=False, wanted=learner.wanted(seen))
            (out.loss_sum / out.weight_sum / len(tokens_ABT)).backward()
    for drafter, _, optimizers in arms:
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def main() -> None:
    cli = parser(__doc__, "plan_memory.json")
    args = cli.parse_args()
    rows = list[dict[str, Any]]()
    for name, case in CASES.items():
        planned = plan(settings_of(case)).memory
        said = {part: planned[part] for part in PARTS}
        measured, total = measure(case), sum(said.values())
        rows.append({"case": name, "planned": said, "measured": measured, "planned_over_measured": total / measured})
        print(f"{name:22s} planned {total / 1e6:6.0f} MB, measured {measured / 1e6:6.0f} MB: {total / measured:.2f}", flush=True)
    worst = max(abs(row["planned_over_measured"] - 1) for row in rows)
    keep(args.out, {"worst": worst, "rows": rows, **origin("python benchmarks/plan_memory.py")})
    print(f"{args.out}: at most {worst:.0%} apart")


if __name__ == "__main__":
    main()
