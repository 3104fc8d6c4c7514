"""Five drafters, each trained by itself on the same data for the same steps, and decoded; all kinds side by side: drafters.py.

    python benchmarks/figures.py            # about 20 minutes on two CPU cores; writes benchmarks/results/figures.json and .md
    python benchmarks/figures.py --quick    # a minute: does it run?

Each row is one `python train.py head=NAME`, in a process of its own; a run that is finished in --runs is not trained again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from headstart.heads.files import put_text

ROOT = Path(__file__).resolve().parents[1]
RESULTS, RUNS = ROOT / "benchmarks" / "results", ROOT / "runs" / "figures"
HEADS = ("eagle", "mtp", "eagle1", "draft_lm", "medusa")


def run(name: str, overrides: list[str], runs: Path, quick: bool) -> dict[str, Any]:
    """The report of one run, in a folder of this name; a finished one is not trained again."""
    out = runs.resolve() / f"{name}{'-quick' if quick else ''}"
    overrides = [*overrides, *(["experiment=smoke"] if quick else [])]
    print("$ python train.py", *overrides, f"out={out}", flush=True)
    subprocess.run([sys.executable, "train.py", *overrides, f"out={out}"], cwd=ROOT, check=True)
    report: dict[str, Any] = json.loads((out / "report.json").read_text())
    return report | {"command": " ".join(["python train.py", *overrides])}


def table(reports: list[dict[str, Any]]) -> str:
    lines = [
        "| drafter | parameters | accepted length, T = 0 | T = 1 | speed-up, T = 0 | T = 1 | over `generate` "
        "| chain: decoded | chain: expected | apart | over held-out text | lossless |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for r in sorted(reports, key=lambda r: -r["temperature_0"]["speedup"]):
        cold, warm, chain = r["temperature_0"], r["temperature_1"], r["chain_temperature_0"]
        cells = [
            f"`{r['head']}`",
            f"{r['drafter_parameters'] / 1e6:.2f}M",
            f"**{cold['accepted_length']:.2f}**",
            f"{warm['accepted_length']:.2f}",
            f"**{cold['speedup']:.2f}x**",
            f"{warm['speedup']:.2f}x",
            f"{cold['tokens_per_second'] / r['hf_generate_tokens_per_second']:.2f}x",
            f"{chain['accepted_length']:.3f}",
            f"{chain['expected_length']:.3f}",
            f"{abs(chain['accepted_length'] / chain['expected_length'] - 1):.2%}",
            f"{r['off_policy_expected_length']:.3f}",
            "yes" if r["lossless"] else f"NO ({r['differing_prompts']} prompts)",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    r = reports[0]
    tree = r["tree"]
    lines += [
        "",
        f"{r['prompts']} held-out prompts; tree: {tree['kind']}, at most {tree['nodes']} nodes, depth {tree['depth']}; "
        f"{r['train_steps']} steps, {r['train_tokens']:,} tokens each; {r['dtype']} on {r['device']}; commit {r['commit'][:12]}.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--quick", action="store_true", help="a few steps, to see that it runs; writes no results")
    cli.add_argument("--heads", nargs="*", default=HEADS, help="of conf/head")
    cli.add_argument("--runs", type=Path, default=RUNS, help="where the run folders are kept")
    args = cli.parse_args()
    reports = [run(head, [f"head={head}"], args.runs, args.quick) for head in args.heads]
    text = table(reports)
    if not args.quick:
        put_text(RESULTS / "figures.json", json.dumps(reports, indent=1) + "\n")
        put_text(RESULTS / "figures.md", text)
        best = max(reports, key=lambda r: r["temperature_0"]["speedup"])["head"]
        shutil.copy(args.runs / best / "report.png", RESULTS / "best.png")
        subprocess.run([sys.executable, "benchmarks/loss_memory.py"], cwd=ROOT, check=True)
    print(text)


if __name__ == "__main__":
    main()
