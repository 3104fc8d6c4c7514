"""Does parallel training give the same result? Compares every parallel mode and placement of the target with one process.

    python benchmarks/parallel.py [--processes 2 4] [--ways ddp zero1 fsdp deepspeed]

The shipped target trains on EXPERIMENTS.md: five steps of 4 rows of 128 tokens, fp32, AdamW at the rate of trainer=full, gloo on the CPU.
The processes of a case share its rows. Writes benchmarks/results/parallel.json (--out) with a row per case: largest_difference of a
weight after the five steps (absolute), of a loss and of a gradient norm (relative). Exit status 1 if one exceeds its bound.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.alternatives import for_run
from benchmarks.frame import ROOT, keep, origin, parser

HEADS = {"eagle": [], "dflash": ["head.layers=2", "head.block=8"], "draft_lm": []}
WAYS = ("ddp", "zero1", "fsdp", "deepspeed")
TARGETS = {"copy": "cpu", "tp": "tp", "tp:2": "tp:2", "fsdp": "fsdp"}
BOUNDS = {"largest_difference": 1e-5, "loss": 1e-6, "gradient_norm": 1e-6}
ROWS, STEPS = 4, 5


def settings(folder: Path, head: str, way: str, device: str, processes: int) -> dict[str, Any]:
    """The settings that `python train.py` would pass on."""
    sizes = [
        f"trainer.steps={STEPS}",
        f"trainer.batch_size={ROWS // processes}",
        "trainer.length=128",
        "trainer.warmup=2",
        "trainer.lr=1e-4",
    ]
    what = ["data=text", f"data.path={ROOT / 'EXPERIMENTS.md'}"]
    how = ["trainer.optimizer=adamw", "trainer.precision=fp32", f"trainer.save_every={STEPS}", "report=none", f"target.device={device}"]
    return for_run(f"head={head}", *HEADS[head], *sizes, *what, *how, f"out={folder}", f"parallel={way}")


def work(folder: Path, cases: list[list[Any]]) -> None:
    """The work of every process: train each case, and keep the loss and gradient norm of each step."""
    import torch

    from headstart.trainers.arm import Arm
    from headstart.trainers.prepare import prepare
    from headstart.trainers.trainer import fit

    torch.set_num_threads(1)
    step, said = Arm.step, list[tuple[float, float]]()

    def recorded(self: Arm, *given: Any) -> None:
        step(self, *given)
        said.append((self.shown["loss"], self.shown["gradient_norm"]))

    Arm.step = recorded  # type: ignore[assignment, method-assign]
    for name, asked in cases:
        said.clear()
        with prepare(**asked) as job:
            trainer = job.settings["trainer"]

            def stream(start: int, rank: int, world: int, job: Any = job, trainer: Any = trainer) -> Iterator[Any]:
                return job.source.stream(job.taps, trainer["batch_size"], trainer["seed"], start, rank, world)

            loop = {k: trainer[k] for k in ("steps", "accumulate", "save_every", "keep", "eval_every", "resume")}
            fit(job.arms, stream, job.source.observe, [], job.accelerator, **loop)
            if job.accelerator.is_main_process:
                (folder / f"{name}.json").write_text(json.dumps(said))
    sys.stdout.flush()
    os._exit(0)


def run(folder: Path, cases: list[tuple[str, str, str, int]]) -> None:
    """Run the cases (head, way, target, processes), all of the same number of processes."""
    processes = cases[0][3]
    asked = [[named(c), settings(folder / named(c), c[0], c[1], TARGETS[c[2]], processes)] for c in cases]
    (folder / "cases.json").write_text(json.dumps(asked))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)] if processes > 1 else []
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([*sys.path])}
    command = [sys.executable, *launcher, __file__, "--work", str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    if done.returncode:
        raise SystemExit(f"{cases}: {done.stdout[-1000:]}{done.stderr[-4000:]}")


def named(case: tuple[str, str, str, int]) -> str:
    return "-".join(map(str, case)).replace(":", "")


def compare(folder: Path, case: tuple[str, str, str, int]) -> dict[str, Any]:
    """A row: the case against one process."""
    from safetensors.torch import load_file

    one = (case[0], "ddp", "copy", 1)
    place = f"checkpoints/step-{STEPS:08d}/drafter.safetensors"
    found, wanted = (load_file(folder / named(c) / place) for c in (case, one))
    assert found.keys() == wanted.keys()
    apart = max(float((found[k].double() - x.double()).abs().max()) for k, x in wanted.items())
    a, b = (json.loads((folder / f"{named(c)}.json").read_text()) for c in (case, one))
    assert len(a) == len(b) == STEPS
    loss, norm = (max(abs(x[i] - y[i]) / abs(y[i]) for x, y in zip(a, b, strict=True)) for i in (0, 1))
    row = {"strategy": case[1], "target": case[2], "processes": case[3], "head": case[0]}
    return row | {"largest_difference": apart, "loss": loss, "gradient_norm": norm}


def main() -> None:
    cli = parser(__doc__, "parallel.json")
    cli.add_argument("--processes", type=int, nargs="+", default=[2, 4], help="of the cases")
    cli.add_argument("--ways", choices=WAYS, nargs="+", default=WAYS, help="values of parallel=")
    cli.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    args = cli.parse_args()
    if args.work:
        return work(args.work, json.loads((args.work / "cases.json").read_text()))
    every = [(head, way, "copy", n) for n in args.processes for way in args.ways for head in HEADS]
    if 4 in args.processes:
        every += [(head, "ddp", target, 4) for target in ("tp:2", "fsdp") for head in HEADS]
    if 2 in args.processes:
        every += [(head, way, target, 2) for way, target in (("ddp", "tp"), ("fsdp", "fsdp")) for head in HEADS]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        run(folder, [(head, "ddp", "copy", 1) for head in HEADS])
        for n in args.processes:
            for group in ({"ddp", "zero1", "fsdp"}, {"deepspeed"}):
                for target in TARGETS:
                    if cases := [c for c in every if c[3] == n and c[1] in group and c[2] == target]:
                        run(folder, cases)
        rows = [compare(folder, case) for case in every]
    keep(args.out, origin("python benchmarks/parallel.py") | {"bounds": BOUNDS, "rows": rows})
    for row in rows:
        print({k: f"{v:.1e}" if isinstance(v, float) else v for k, v in row.items()})
    raise SystemExit(any(row[k] > bound for row in rows for k, bound in BOUNDS.items()))


if __name__ == "__main__":
    main()
