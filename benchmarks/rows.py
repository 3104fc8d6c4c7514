"""Runs GPU measurements: each part in its own process, one JSON line per measurement as soon as it is made."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.frame import RESULTS, parser
from benchmarks.gpu import Bench
from headstart.inference.provenance import machine, provenance

Row = tuple[str, Callable[[], dict[str, Any]]]
Part = tuple[int, Callable[[Bench], Iterator[Row]]]  # time limit in seconds, and the part's rows


def write(out: Path | None, row: str, found: dict[str, Any]) -> None:
    text = json.dumps({"row": row, **found})
    print(text, flush=True)
    if out is not None:
        with out.open("a") as file:
            file.write(text + "\n")


def run_part(name: str, rows: Callable[[Bench], Iterator[Row]], smoke: bool, out: Path | None) -> None:
    start = time.perf_counter()
    bench = Bench(smoke)
    bench.wait()
    about = {"seconds": time.perf_counter() - start, "machine": machine(bench.device), **provenance()}
    write(out, f"{name}: target made", about)
    for row, measure in rows(bench):
        start = time.perf_counter()
        try:
            found = measure()
        except Exception as e:
            traceback.print_exc()  # the traceback goes to standard error
            why = e.__cause__ or e
            found = {"error": f"{type(why).__name__}: {why}"[:2000]}
        write(out, row, found | {"seconds": time.perf_counter() - start})
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()


def measure(script: str, about: str | None, parts: Mapping[str, Part], total: int) -> None:
    """The command line of ``script``. ``total``: seconds that all parts may take together."""
    kept = RESULTS / f"{Path(script).stem}.jsonl"
    cli = parser(about)
    cli.add_argument("--smoke", action="store_true", help="toy shapes on the CPU; writes no file unless --out is given")
    cli.add_argument("--out", type=Path, help=f"default: benchmarks/results/{kept.name}")
    cli.add_argument("--part", choices=parts, help="this one only, in this process")
    args = cli.parse_args()
    out = args.out or (None if args.smoke else kept)
    if not args.smoke and not torch.cuda.is_available():
        sys.exit("there is no GPU here: --smoke runs toy shapes on the CPU")
    if args.part:
        run_part(args.part, parts[args.part][1], args.smoke, out)
        return
    start = time.perf_counter()
    for name, (most, _) in parts.items():
        most = min(most, total - int(time.perf_counter() - start))
        command = [sys.executable, script, "--part", name, *(["--smoke"] if args.smoke else []), *(["--out", str(out)] if out else [])]
        try:
            done = subprocess.run(command, timeout=max(most, 1), check=False)
            if done.returncode:
                write(out, f"{name}: ended", {"error": f"exit code {done.returncode}"})
        except subprocess.TimeoutExpired:
            write(out, f"{name}: out of time", {"error": f"stopped after {most} seconds"})
