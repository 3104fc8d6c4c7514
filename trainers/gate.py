"""The gate: during training, exports the drafter for a moment, decodes with the export, and compares with what training expects.

Every ``trainer.decode_every`` steps the drafter is written to a folder and loaded back. The loaded drafter decodes a few prompts with the
target, with a chain and with a tree, at temperature 0 and 1. The expected length of the drafter in training is computed over the very same
texts. Both numbers go to the curves (decode/T0/accepted_length, decode/T0/expected_length, .../chain/..., decode/T1/...). They are equal
at temperature 0 and differ by chance above it. If they differ by more, trainers/diagnosis looks for the known causes. Its findings are
printed with evidence and cure, and written to diagnosis.json in the run folder.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from headstart.heads import hub
from headstart.heads.base import Drafter
from headstart.heads.errors import UserError
from headstart.heads.files import UNFINISHED, put, put_text
from headstart.heads.stored import read_tensors
from headstart.inference.decoding.decode import Generation, generate, longest
from headstart.inference.decoding.policy import TreePolicy, fit_depth
from headstart.inference.decoding.propose import Drafting
from headstart.inference.decoding.sampling import heat_of
from headstart.inference.decoding.target import Target
from headstart.inference.reports.figures import acceptance
from headstart.inference.reports.truth import Truth
from headstart.inference.speculator import load_attached
from headstart.trainers import checkpoint
from headstart.trainers.arm import Arm
from headstart.trainers.checkpoint import BEST, best_of
from headstart.trainers.diagnosis import FILE, Case, Finding, diagnose, lines
from headstart.trainers.job import Job
from headstart.trainers.joint import Joint
from headstart.trainers.metrics import by_depth, expected
from headstart.trainers.patience import DECODED
from headstart.trainers.prepare import held_out_prompts

PROMPTS, NEW_TOKENS = 4, 24
GATE = ".gate-"  # prefix of the temporary folder of the export
Made = dict[tuple[str, bool], list[Generation]]


class Gate:
    """The gate of one run. ``why_not``: why the run cannot decode during training; "" if it can."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.prompts = (job.prompts or held_out_prompts(job))[:PROMPTS]
        self.why_not = ""
        for left in (folder for arm in job.arms for folder in arm.run.glob(f"{GATE}*")):  # left over from a killed process
            shutil.rmtree(left, ignore_errors=True)
        if not isinstance(job.target, Target):
            self.why_not = "the target's layers are not loaded while it trains"
        elif job.target.sharded:
            self.why_not = "no process holds all layers of the target (target.device=tp, fsdp)"
        elif any(isinstance(arm.learner, Joint) for arm in job.arms):
            self.why_not = "the target itself is trained (trainer.lora)"
        elif job.settings["parallel"]["name"] in ("fsdp", "deepspeed") and job.accelerator.num_processes > 1:
            self.why_not = "no process holds the whole drafter (parallel=ddp or zero1 does)"
        elif not self.prompts:
            self.why_not = "there is no held-out text to continue"

    def __call__(self, arm: Arm) -> Mapping[str, float]:
        """Decode with what this arm would export now. Returns the figures; {} after an error, which is printed and does not end the
        training.
        """
        try:
            with tempfile.TemporaryDirectory(prefix=GATE, dir=arm.run) as folder:
                return self._decoded(arm, Path(folder) / "speculator")
        except (UserError, OSError, torch.OutOfMemoryError) as e:
            print(f"{arm.label}not decoded at step {arm.fitted.steps}: {' '.join(str(e).split())}")
            return {}

    def _decoded(self, arm: Arm, folder: Path) -> dict[str, float]:
        job, target, start = self.job, self.job.target.opened(), time.perf_counter()
        hub.save(arm.drafter, folder, target.card, job.dtype, target.tokenizer, base=target.name)
        exported, live = load_attached(folder, target), copied(arm.drafter, target)
        truth, made = decode_beside(target, exported, live, self.prompts, job.decoding.policy, job.decoding.sampling, NEW_TOKENS)
        table = truth.table()
        numbers = figures(table, made, fit_depth(job.decoding.policy, exported).depth)
        arm.log(numbers | {"speed/gate_seconds": time.perf_counter() - start})
        if job.settings["trainer"]["keep"] == "best":
            keep_if_best(arm, numbers[DECODED])
        if apart := [f"{shape} at {name.replace('_', ' ')}" for name, of in table.items() for shape, row in of.items() if row["apart"]]:
            known = {"step": arm.fitted.steps, "dtype": str(target.dtype).removeprefix("torch."), "weights": target.fingerprint["weights"]}
            case = Case(target, exported, self.prompts, job.held_out, live.state_dict(), known)
            report_findings(arm, table, apart, diagnose(case))
        return numbers


def keep_if_best(arm: Arm, length: float) -> None:
    """Keep the arm's weights in best.safetensors if their accepted length (``length``) is greater than that of the weights kept there.
    Kept weights of the same or a later step come from an earlier run that was started over, and are replaced. Raises OSError.
    """
    place = arm.run / BEST
    step, best = best_of(place)
    if step >= arm.fitted.steps or length > best:
        weights = {k: checkpoint.copied(v) for k, v in arm.drafter.state_dict().items()}
        about = {"step": str(arm.fitted.steps), "decoded": repr(length)}
        for left in (path for path in place.parent.iterdir() if UNFINISHED.fullmatch(path.name)):
            left.unlink(missing_ok=True)
        put(place, lambda beside: save_file(weights, beside, metadata=about))


def take_best(arm: Arm) -> int:
    """Load the weights that ``keep_if_best`` has kept, for the export, unless the last ones are the best. Returns the step of what is to be
    exported. Raises UserError if the kept weights belong to another drafter.
    """
    place = arm.run / BEST
    step, length = best_of(place)
    if not 0 < step < arm.fitted.steps:
        return arm.fitted.steps
    try:
        arm.drafter.load_state_dict(read_tensors(place))
    except RuntimeError as e:
        raise UserError(f"{place} is of another drafter: remove it, and what is trained last is exported") from e
    print(f"{arm.label}exported is step {step}, which decoded best ({length:.2f} tokens a pass at temperature 0)")
    return step


def copied(drafter: Drafter, target: Target) -> Drafter:
    """A copy of the drafter in training, in eval mode, in the target's dtype and on its device."""
    settings = {key: value for key, value in drafter.config.items() if key != "head"}
    copy = hub.build(drafter.config["head"], drafter.shape, **settings)
    copy.attach(target.ends)
    copy.start_from(target.ends)
    copy.load_state_dict(drafter.state_dict())
    return copy.to(device=target.device, dtype=target.dtype).eval()


def decode_beside(
    target: Target, exported: Drafter, live: Drafter, prompts: Sequence[Sequence[int]], policy: TreePolicy, sampling: Any, new_tokens: int
) -> tuple[Truth, Made]:
    """Decode every prompt with ``exported``, with a tree and a chain, at temperature 0 and 1. (An auto policy always takes the tree of its
    settings here, whatever rounds cost.) Returns the comparison with what ``live`` expects over these texts, and the generations by
    (shape, sampled).
    """
    policy = fit_depth(policy, exported)
    shapes = {("tree", sampled): policy.own_shape(sampling.rule, heat_of(sampled)) for sampled in (False, True)}
    shapes |= {("chain", sampled): TreePolicy("chain", depth=policy.depth) for sampled in (False, True)}
    truth, made = Truth(target, live), Made()
    for i, prompt in enumerate(prompts):
        new = min(new_tokens, longest(target, len(prompt)) - len(prompt))
        for (kind, sampled), shape in shapes.items():
            how = replace(sampling, temperature=float(sampled), seed=sampling.seed + i)
            made.setdefault((kind, sampled), []).append(
                generate(target, Drafting(exported), prompt, new_tokens=new, policy=shape, sampling=how)
            )
            truth.add(kind, shape, prompt, made[kind, sampled][-1], how, new)
    return truth, made


def figures(table: Mapping[str, Any], made: Made, depth: int) -> dict[str, float]:
    """The figures of the generations and of the comparison, under the names of trainers/metrics.py."""
    found: dict[str, float] = {}
    for (kind, sampled), texts in made.items():
        where, made_of = f"decode/T{int(sampled)}" + "/chain" * (kind == "chain"), acceptance(texts, depth)
        found[f"{where}/accepted_length"] = made_of["accepted_length"]
        found |= by_depth(made_of["acceptance_by_depth"], where)
    return found | expected(table)


def report_findings(arm: Arm, table: Mapping[str, Any], apart: Sequence[str], findings: Sequence[Finding]) -> None:
    """Print the findings, and write them to diagnosis.json in the run folder."""
    print(
        f"{arm.label}step {arm.fitted.steps}: expected and decoded length differ by more than chance ({', '.join(apart)}):",
        *lines(findings),
        sep="\n  ",
    )
    told = {"step": arm.fitted.steps, "apart": list(apart), "truth": table, "findings": [each._asdict() for each in findings]}
    with suppress(OSError):
        put_text(arm.run / FILE, json.dumps(told, indent=2) + "\n")
