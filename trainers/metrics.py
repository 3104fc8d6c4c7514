"""The names of all numbers, in metrics.jsonl and in every tracker.

train/...       loss, expected_length, lr, gradient_norm, tokens, epoch; by depth the same as heldout/...; all over the rows of one step:
                loss over the rows of all processes, expected_length and the figures by depth over those of the first process;
                skipped (once a step was skipped, see trainers/guard.py): how many of the latest 100 steps were;
                target_kl (with trainer.lora): the adapted target's divergence from the original, per position;
                on_policy_rows, on_policy_rejected_rounds (a share), on_policy_accepted_length, on_policy_acceptance (with
                loss.on_policy): figures of the drafter's own text
heldout/...     loss, expected_length: over held-out text, teacher-forced; by depth depth/1/acceptance (share of a chain's rounds in which
                this guess and all before it are right), depth/1/accuracy (share of all guesses), loss_depth/1 (without decay and
                weighting)
decode/T0/...   at temperature 0, decoding with a tree: accepted_length and expected_length (tokens per target pass), standard_error (of
                their difference), depth/1/acceptance, tokens_per_second, plain_tokens_per_second, speedup; decode/T0/chain/... with
                chains; decode/T0/auto/... with what decode=auto chose (tree, chains or no guesses); decode/T1/... at temperature 1
decode/...      lossless, hf_generate_tokens_per_second, off_policy_expected_length; with several drafters c, v, predicted_speedup
speed/...       tokens_per_second; shares of time: data_share, target_share, step_share, waiting_share (for other processes); teraflops,
                10^12 operations per second of one process, without those of decoding for loss.on_policy; mfu, their share of the GPU's
                dense bf16 peak if that is known; gate_seconds, the time of a decoding during the training (trainers/gate.py), which does
                not count as training time
speed/T0/...    from a report that decodes several prompts at once: sequences/4/speedup, tokens_per_second, plain_tokens_per_second,
                accepted_length; speed/T1/...
system/...      memory_gib, gpu_memory_gib
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from headstart.heads.files import json_lines

FILE = "metrics.jsonl"
DECODED = ("accepted_length", "expected_length", "speedup", "tokens_per_second", "plain_tokens_per_second", "target_passes", "new_tokens")
WHOLE = {key: f"decode/{key}" for key in ("lossless", "hf_generate_tokens_per_second", "off_policy_expected_length", "c", "v")}
WHOLE |= {"predicted_speedup": "decode/T0/predicted_speedup", "drafter_parameters": "train/parameters", "train_seconds": "train/seconds"}
WHERE = {
    "temperature_0": "decode/T0", "temperature_1": "decode/T1", "chain_temperature_0": "decode/T0/chain",
    "chain_temperature_1": "decode/T1/chain", "auto_temperature_0": "decode/T0/auto", "auto_temperature_1": "decode/T1/auto",
}  # fmt: skip
# Which value of a number summarizes a run, for tables of runs.
BEST = {"train/loss": "min", "heldout/loss": "min", "train/expected_length": "max", "heldout/expected_length": "max",
        "heldout/depth/*": "max", "heldout/loss_depth/*": "min", "train/depth/*": "max", "train/loss_depth/*": "min",
        "train/target_kl": "min", "decode/c": "min", "decode/v": "min", "decode/*": "max", "speed/*": "mean",
        "system/*": "max"}  # fmt: skip


def best_of(name: str) -> str:
    """How a number is summarized over a run: "min" or "max", whichever is better, or "mean" if neither is."""
    return next((best for pattern, best in BEST.items() if fnmatch(name, pattern)), "max")


def named(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """The same numbers under present names: names without a prefix (train/, heldout/, ...), as in older files, get one."""
    return {_name(key): value for key, value in numbers.items()}


def _name(key: str) -> str:
    if "/" in key or key == "step":
        return key
    return f"heldout/{key.removeprefix('heldout_')}" if key.startswith("heldout_") else f"train/{key}"


def by_depth(shares: list[float], where: str, what: str = "acceptance") -> dict[str, float]:
    """The shares of depths 1, 2, ... under their names."""
    return {f"{where}/depth/{depth}/{what}": share for depth, share in enumerate(shares, start=1)}


def decoded(report: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a report, under their names."""
    made = {name: float(report[key]) for key, name in WHOLE.items() if report.get(key) is not None}
    for key, where in WHERE.items():
        figures = report.get(key, {})
        made |= {f"{where}/{name}": float(figures[name]) for name in DECODED if figures.get(name) is not None}
        made |= by_depth(figures.get("acceptance_by_depth", []), where)
    for row in report.get("batches", []):
        where = f"speed/T{row['temperature']}/sequences/{row['sequences']}"
        made |= {f"{where}/{name}": float(row[name]) for name in DECODED if name in row}
    return made | expected(report.get("truth", {}))  # last: for a tree the expected length of the tree, not of a chain


def expected(truth: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of ``inference.reports.truth``: each shape's expected length, and the standard error of its difference from the decoded
    one.
    """
    made: dict[str, float] = {}
    for temperature, shapes in truth.items():
        for shape, row in shapes.items():
            where = WHERE[temperature] + "/chain" * (shape == "chain")
            made[f"{where}/expected_length"] = float(row["expected"])
            if row["standard_error"] is not None:  # a single text has none
                made[f"{where}/standard_error"] = float(row["standard_error"])
    return made


def read_metrics(run: str | Path) -> list[dict[str, Any]]:
    """The lines of RUN/metrics.jsonl, under present names; [] if there is no file. Lines that a kill has cut in two are left out."""
    return [named(line) for line in json_lines(Path(run) / FILE)]
