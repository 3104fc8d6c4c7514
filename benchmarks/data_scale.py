"""Data at scale: generated conversations, tokenised once by many processes, then read from disk by every run.

    python benchmarks/data_scale.py                           # a million conversations, about 1 GB: benchmarks/results/data_scale.json
    python benchmarks/data_scale.py --conversations 100000    # fewer

Each start is a new process, like a process of a training: it opens `data=chat` with the tokenizer and the template of `--target`, and
iterates over `--batches` batches of the packed rows. Its peak (VmHWM) includes the resident pages of mapped files. `workers`: the largest
peak of the processes that tokenised. The seconds of a start run from the start of the process, imports included, to the first batch.
Tokens/s per core: all tokens over the CPU seconds of the processes that tokenised (with --workers 1 those of the only process, packing
included). `in_memory`: the same in one process without the disk, as small files are read, for `--in-memory` conversations.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.frame import alone, keep, origin, parser, resident
from headstart.data import reader
from headstart.data.source import defaults, open_source
from headstart.inference.settings import read_target

LIMITS = {"peak_bytes": 1.5e9, "second_start_seconds": 10.0}


def conversations(path: Path, count: int, seed: int = 0) -> None:
    """Conversations of one to four questions and answers, about 1 KB each, of random words; always the same."""
    dice = random.Random(seed)
    words = ["".join(dice.choices("etaoinshrdlu", k=dice.randint(2, 9))) for _ in range(5000)]
    with path.open("w") as file:
        for _ in range(count):
            messages = []
            for _ in range(dice.randint(1, 4)):
                messages.append({"role": "user", "content": " ".join(dice.choices(words, k=dice.randint(4, 20)))})
                messages.append({"role": "assistant", "content": " ".join(dice.choices(words, k=dice.randint(10, 90)))})
            file.write(json.dumps({"messages": messages}) + "\n")


def age() -> float:
    """Seconds since this process was started (Linux)."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def start(path: Path, cache: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Start as a training does, in this process. ``seconds`` are counted from the start of the process."""
    target: Any = read_target({"name": "", "path": args.target, "dtype": "auto", "device": "cpu", "attention": "sdpa", "config": None})
    given = {"name": "chat"} | defaults({"name": "chat"}) | {"path": str(path), "cache": str(cache), "workers": args.workers}
    before = time.process_time()
    source = open_source(given, target, length=args.length, seed=0)
    own, rows = time.process_time() - before, source.packed
    assert rows is not None
    batches = source.stream((), args.rows, 0, 0, 0, 1)
    next(batches)
    seconds = age()
    tokens = sum(int(batch.tokens_BT.numel()) for batch in islice(batches, args.batches))
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "seconds": seconds, "cpu_seconds": own, "peak_bytes": resident("VmHWM"), "workers_peak_bytes": children.ru_maxrss * 1024,
        "workers_cpu_seconds": children.ru_utime + children.ru_stime, "rows": len(rows), "read_tokens": tokens, "digest": source.digest(),
        "tokens": len(rows) * rows.length - rows.padding + rows.dropped + rows.unsupervised,
    }  # fmt: skip


def inside(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Read the whole file into memory, as small files are read."""
    reader.LARGE = 1 << 60
    target: Any = read_target({"name": "", "path": args.target, "dtype": "auto", "device": "cpu", "attention": "sdpa", "config": None})
    given = {"name": "chat"} | defaults({"name": "chat"}) | {"path": str(path), "limit": args.in_memory}
    source = open_source(given, target, length=args.length, seed=0)
    assert source.packed is not None
    return {"conversations": args.in_memory, "peak_bytes": resident("VmHWM"), "rows": len(source.packed), "digest": source.digest()}


def process(what: str, path: Path, cache: Path) -> dict[str, Any]:
    """Run one measurement in a new process."""
    found: dict[str, Any] = alone(__file__, f"{what}:{path}:{cache}")
    print(f"{what}: " + ", ".join(f"{key} {value:,.1f}" if isinstance(value, float) else f"{key} {value}" for key, value in found.items()))
    return found


def main() -> None:
    cli = parser(__doc__, "data_scale.json")
    for name, value in dict(conversations=1_000_000, length=1024, rows=8, batches=2000, in_memory=20_000).items():
        cli.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    cli.add_argument("--workers", type=int, help="processes that tokenise (default: one for every core)")
    cli.add_argument("--target", default="assets/tiny")
    cli.add_argument("--folder", type=Path, help="for the conversations and the cache (default: a temporary one)")
    cli.add_argument("--one", help=argparse.SUPPRESS)  # WHAT:FILE:CACHE, in a process of its own
    args = cli.parse_args()
    if args.one:
        what, path, cache = args.one.split(":")
        print(json.dumps(inside(Path(path), args) if what == "in_memory" else start(Path(path), Path(cache), args)))
        return
    folder = args.folder or Path(tempfile.mkdtemp(prefix="data_scale"))
    folder.mkdir(parents=True, exist_ok=True)
    path, cache = folder / f"talks-{args.conversations}.jsonl", folder / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    conversations(path, args.conversations)
    first, second = (process(what, path, cache) for what in ("first_start", "second_start"))
    if first["digest"] != second["digest"]:
        raise SystemExit("the second start read other rows")
    cpu = first["workers_cpu_seconds"] or first["cpu_seconds"]
    found: dict[str, Any] = {
        **origin(" ".join(["python", "benchmarks/data_scale.py", *sys.argv[1:]])), "conversations": args.conversations,
        "source_bytes": path.stat().st_size, "cache_bytes": sum(file.stat().st_size for file in cache.rglob("*") if file.is_file()),
        "tokens": first["tokens"], "peak_bytes": max(each[key] for each in (first, second) for key in ("peak_bytes", "workers_peak_bytes")),
        "second_start_seconds": second["seconds"], "tokens_per_second_core": first["tokens"] / cpu,
        "limits": LIMITS, "first_start": first, "second_start": second,
    }  # fmt: skip
    if args.in_memory:
        found["in_memory"] = process("in_memory", path, cache)
    if args.folder is None:
        shutil.rmtree(folder)
    keep(args.out, found)
    for key, limit in LIMITS.items():
        print(f"{key} {found[key]:,.1f}, limit {limit:,.1f}: {'kept' if found[key] < limit else 'NOT KEPT'}")


if __name__ == "__main__":
    main()
