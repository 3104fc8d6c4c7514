"""CPU seconds of the fused loss and its gradients, beside those of an earlier commit.

    python benchmarks/loss_step.py --against 39b1e13        # some minutes; writes benchmarks/results/loss_step.json

Both commits in turn, each time in a process of its own that takes some steps of it: losses and gradients of ``--tokens`` roots at
every depth, from random vectors, the head trained or frozen, without figures (nine of ten steps of a training have none). Of each the
fastest, in seconds of the processor, user's and system's: on a machine that others use, too, they say more than a clock.

- ``seconds``, ``seconds_before``, ``seconds_ratio``: this commit, that of ``--against``, this one over that one
- ``faults``, ``faults_before``: pages that a step had mapped (4 KiB each): buffers that are mapped anew cost as much as arithmetic
- ``peak_bytes``, ``peak_bytes_before``: the largest resident size of the process, less that before its first step
- ``loss_difference``: relative, between the two
"""

from __future__ import annotations

import argparse
import io
import json
import os
import resource
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.loss_memory import rss
from headstart.heads.base import TargetEnds
from headstart.heads.files import put_text
from headstart.heads.unembedding import Unembedding
from headstart.inference.provenance import machine, provenance
from headstart.trainers.losses import fused_loss

ROOT = Path(__file__).resolve().parents[1]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def inputs(rows: int, width: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Random, without a larger tensor on the way: what was largest before the first step would hide what steps take."""
    made = torch.empty(rows, width, dtype=dtype)
    for block in made.split(1024):
        block.normal_(std=scale)
    return made


def one(case: dict[str, Any], steps: int) -> dict[str, float]:
    """Measure in this process."""
    torch.manual_seed(0)
    tokens, depth, vocab, width, dtype = (*(case[k] for k in ("tokens", "depth", "vocab", "hidden")), DTYPES[case["dtype"]])
    head = inputs(vocab, width, dtype, width**-0.5).requires_grad_(case["trained"])
    ends = TargetEnds(nn.Identity(), inputs(vocab, width, dtype, width**-0.5))
    final, x = inputs(tokens, width, dtype)[None], torch.randint(vocab, (1, tokens))
    hidden = [inputs(tokens, width, dtype)[None].requires_grad_() for _ in range(depth)]
    supervised = [torch.arange(tokens)[None] < tokens - d - 1 for d in range(1, depth + 1)]
    made: dict[str, float] = {"seconds": float("inf")}
    before = rss()
    for _ in range(steps):
        a = resource.getrusage(resource.RUSAGE_SELF)
        about = (final, ends, x, supervised, {"kl": 1.0}, 0.8, case["chunk"])
        loss = fused_loss(hidden, [Unembedding(head)] * depth, *about, figures=False).loss_sum
        loss.backward()
        b = resource.getrusage(resource.RUSAGE_SELF)
        seconds = b.ru_utime + b.ru_stime - a.ru_utime - a.ru_stime
        if seconds < made["seconds"]:
            made = {"seconds": seconds, "faults": b.ru_minflt - a.ru_minflt, "loss": loss.item()}
        head.grad = None
        for h in hidden:
            h.grad = None
    return made | {"peak_bytes": b.ru_maxrss * 1024 - before}


def package(checkout: Path, folder: Path) -> Path:
    """A folder from which that checkout is imported as ``headstart``."""
    (folder / "headstart").mkdir(parents=True)
    for part in ("heads", "inference", "data", "trainers", "door", "conf"):
        (folder / "headstart" / part).symlink_to((checkout / part).resolve())
    return folder


def earlier(commit: str, folder: Path) -> Path:
    packed = subprocess.run(["git", "archive", commit, "heads", "inference", "data", "trainers", "door", "conf"], cwd=ROOT, check=True,
                            capture_output=True).stdout  # fmt: skip
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        tar.extractall(folder / "files", filter="data")
    return package(folder / "files", folder / "before")


def run(place: Path, case: dict[str, Any], args: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, __file__, "--one", json.dumps(case), "--steps", str(args.steps)]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(place)}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{case} failed ({done.returncode}):\n{done.stderr}")
    return dict(json.loads(done.stdout))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", default="39b1e13", help="the commit that is compared with")
    parser.add_argument("--vocabs", type=int, nargs="+", default=[32_000, 128_000])
    parser.add_argument("--depths", type=int, nargs="+", default=[3, 7])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--heads", nargs="+", choices=("trained", "frozen"), default=["trained"])
    for name, value in dict(tokens=1024, hidden=512, chunk=512, steps=1, turns=3).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "loss_step.json")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # a case, in a process of its own
    args = parser.parse_args()
    if args.one:
        print(json.dumps(one(json.loads(args.one), args.steps)))
        return
    about = {"machine": machine(torch.device("cpu")), "provenance": provenance()}
    command = " ".join(["python", "benchmarks/loss_step.py", *sys.argv[1:]])
    rows: list[dict[str, Any]] = []
    table = Table("vocabulary", "depth", "dtype", "head", "seconds", "before", "ratio", "faults", "before", "MB", "before")
    with tempfile.TemporaryDirectory() as folder:
        places = {"": package(ROOT, Path(folder) / "now"), "_before": earlier(args.against, Path(folder))}
        cases = [(v, d, t, h) for v in args.vocabs for d in args.depths for t in args.dtypes for h in args.heads]
        for vocab, depth, dtype, head in cases:
            case = dict(vocab=vocab, depth=depth, dtype=dtype, trained=head == "trained")
            case |= {key: getattr(args, key) for key in ("tokens", "hidden", "chunk")}
            found: dict[str, dict[str, float]] = {}
            for _ in range(args.turns):
                for label, place in places.items():
                    made = run(place, case, args)
                    found[label] = min(made, found.get(label, made), key=lambda each: each["seconds"])
            row: dict[str, Any] = dict(case)
            for label, made in found.items():
                row |= {f"{key}{label}": value for key, value in made.items() if key != "loss"}
            row["seconds_ratio"] = row["seconds"] / row["seconds_before"]
            row["loss_difference"] = abs(found[""]["loss"] / found["_before"]["loss"] - 1)
            rows.append(row)
            shown = [f"{row[key]:.2f}" for key in ("seconds", "seconds_before", "seconds_ratio")]
            shown += [f"{row[key]:,}" for key in ("faults", "faults_before")]
            shown += [f"{row[key] / 1e6:.0f}" for key in ("peak_bytes", "peak_bytes_before")]
            table.add_row(f"{vocab:,}", str(depth), dtype, head, *shown)
            whole = {"command": command, "against": args.against, "rows": rows} | about
            put_text(args.out, json.dumps(whole, indent=2) + "\n")
    Console().print(table)


if __name__ == "__main__":
    main()
