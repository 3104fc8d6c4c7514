"""What each setting of the default run gains: EAGLE on the tiny target, one setting changed at a time, with equal data and steps.

    python benchmarks/ablations.py            # about 20 minutes on two CPU cores; writes benchmarks/results/ablations.json and .md
    python benchmarks/ablations.py --quick    # a minute: does it run?

All are decoded with the same tree, so that accepted lengths do not depend on costs on this machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.frame import RESULTS, ROOT, keep, parser
from headstart.heads.files import put_text

CHANGES = {
    "as shipped": ["head=eagle"],
    "AdamW at 5e-3 instead of Muon": ["trainer.optimizer=adamw", "trainer.lr=5e-3"],
    "cosine to a tenth instead of linear to zero": ["trainer.schedule=cosine"],
    "half the learning rate": ["trainer.lr=4e-3"],
    "the target's 4 and 2 heads instead of 8 and 8": ["head.heads=4", "head.kv_heads=2"],
    "trained at depth 1 only": ["loss.depth=1"],
    "trained to depth 5": ["loss.depth=5"],
}
DECODED = ("temperature_0", "temperature_1", "chain_temperature_0")  # accepted lengths
KEPT = ("commit", "device", "prompts", "tree", "train_steps", "train_tokens", "train_seconds", "off_policy_expected_length")


def run(name: str, overrides: list[str], runs: Path, quick: bool) -> dict[str, Any]:
    """Train one run in a folder of this name, unless it is finished. Returns the figures of its report that are kept."""
    out = runs.resolve() / f"{name}{'-quick' if quick else ''}"
    overrides = [*overrides, *(["experiment=smoke"] if quick else [])]
    print("$ python train.py", *overrides, f"out={out}", flush=True)
    subprocess.run([sys.executable, "train.py", *overrides, f"out={out}"], cwd=ROOT, check=True)
    report: dict[str, Any] = json.loads((out / "report.json").read_text())
    return {"command": " ".join(["python train.py", *overrides]), **kept(report)}


def kept(report: dict[str, Any]) -> dict[str, Any]:
    return {key: report[key]["accepted_length"] for key in DECODED} | {key: report[key] for key in KEPT}


def table(reports: dict[str, dict[str, Any]]) -> str:
    lines = [
        "| | accepted length, T = 0 | T = 1 | chain, T = 0 | expected over held-out text |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name, r in reports.items():
        cells = " | ".join(f"{r[key]:.2f}" for key in (*DECODED, "off_policy_expected_length"))
        lines.append(f"| {name} | {cells} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    cli = parser(__doc__)
    cli.add_argument("--quick", action="store_true", help="a few steps, to see that it runs; writes no results")
    cli.add_argument("--runs", type=Path, default=ROOT / "runs" / "ablations", help="where the run folders are kept")
    args = cli.parse_args()
    reports = {
        name: run(f"ablation-{i}", [*changes, "decode=dynamic"], args.runs, args.quick) for i, (name, changes) in enumerate(CHANGES.items())
    }
    text = table(reports)
    if not args.quick:
        keep(RESULTS / "ablations.json", reports)
        put_text(RESULTS / "ablations.md", text)
    print(text)


if __name__ == "__main__":
    main()
