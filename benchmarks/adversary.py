"""Attacks the commands: wrong input, kills at any moment, full disks, and files that were changed on disk.

    python benchmarks/adversary.py            # some 15 minutes on two CPU cores; writes benchmarks/results/adversary.json
    python benchmarks/adversary.py --quick    # a few of each kind, a minute; writes only to --out

traceback: the command did not end with lines that say what is wrong. silent: wrong input was accepted and changed the result. lost:
existing files or trained weights are gone. All three must be 0 (exit status 1 otherwise). The attacked files are made by the commands
themselves: a small target, a run, shards, answers. Attacks are drawn with a fixed seed. Only the moments of kills vary: they are shares
of a run's duration on this machine.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = os.environ["OMP_NUM_THREADS"] = "1"  # read at import
os.environ["WANDB_MODE"] = "offline"

import torch
from rich.progress import Progress, TextColumn, TimeElapsedColumn

from benchmarks.attacks import doors, folders, runs
from benchmarks.attacks.outcome import BAD, Outcome, as_a_user
from benchmarks.attacks.world import World, build
from benchmarks.frame import RESULTS, ROOT, keep, parser
from headstart.inference.provenance import machine, provenance

RESULT = RESULTS / "adversary.json"
SEED = 0
Section = Callable[[World], Iterator[Outcome]]


def sections(quick: bool) -> dict[str, Section]:
    """The sections of attacks, the longest first."""
    every = partial(_every, quick)
    return {
        "doors: files of folders": partial(doors.inside, every=every(90)),
        "doors: files": partial(doors.files, every=every(45)),
        "doors: command lines": partial(doors.lines, every=every(60)),
        "doors: names": partial(doors.names, every=every(90)),
        "commands killed": partial(runs.commands, count=0 if quick else 8, seed=SEED),
        "kills": partial(runs.kills, count=3 if quick else 36, seed=SEED),
        "full disks": partial(runs.full, count=3 if quick else 24, seed=SEED),
        "checkpoints": partial(folders.checkpoints, every=every(16), seed=SEED),
        "speculators": partial(folders.speculators, every=every(4), seed=SEED),
        "shards": partial(folders.shards, every=every(12), seed=SEED),
        "doors: requests": partial(doors.sent, every=every(10)),
        "doors: typed": partial(doors.typed, every=every(4)),
    }


def _every(quick: bool, count: int) -> int:
    return count if quick else 1


def tried(names: Sequence[str], quick: bool, scratch: Path) -> Iterator[tuple[str, Outcome | None]]:
    """Yield the outcome of each attack of these sections, and None at the end of a section. Works on files of its own."""
    torch.set_num_threads(1)
    world = build(scratch)
    for name in names:
        try:
            with as_a_user():
                for outcome in sections(quick)[name](world):
                    yield name, outcome
        except Exception:  # an error of the adversary itself must not pass as an attack that found nothing
            yield name, Outcome(f"the section {name} itself", "traceback", traceback.format_exc())
        yield name, None


def _work(names: Any, quick: bool, scratch: Path, told: Any) -> None:
    """The work of one process: attack sections until none is left."""
    with scratch.with_suffix(".log").open("w") as log:
        os.dup2(log.fileno(), 2)  # commands called in this process are judged by their own streams alone
        for found in tried(iter(names.get, None), quick, scratch):  # type: ignore[arg-type]
            told.put(found)
    told.put(None)


def side_by_side(only: Sequence[str], quick: bool, scratch: Path, jobs: int) -> Iterator[tuple[str, Outcome | None]]:
    """Attack these sections, ``jobs`` at a time. Even a single job has its own process: forks need a process without threads."""
    forks = multiprocessing.get_context("fork")
    names, told = forks.SimpleQueue(), forks.SimpleQueue()
    jobs = min(jobs, len(only))
    workers = [forks.Process(target=_work, args=(names, quick, scratch / str(job), told)) for job in range(jobs)]
    for name in [*only, *[None] * jobs]:
        names.put(name)
    for worker in workers:
        worker.start()
    try:
        left = jobs
        while left:
            found = told.get()
            if found is None:
                left -= 1
            else:
                yield found
    finally:
        for worker in workers:
            worker.terminate()
            worker.join()


def counted(found: Sequence[tuple[str, Outcome]]) -> dict[str, Any]:
    """The table of outcomes."""
    by_section: dict[str, Counter[str]] = {}
    for name, outcome in found:
        by_section.setdefault(name, Counter())[outcome.came] += 1
    every = Counter(outcome.came for _, outcome in found)
    failures = [{"section": name, **outcome._asdict(), "said": outcome.shown} for name, outcome in found if outcome.came in BAD]
    return {
        "tried": len(found), "tracebacks": every["traceback"], "silent": every["silent"], "lost": every["lost"],
        "sections": {name: {"tried": came.total(), **dict(sorted(came.items()))} for name, came in sorted(by_section.items())},
        "failures": failures,
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    cli = parser(__doc__)
    cli.add_argument("--quick", action="store_true", help="a few of each kind")
    cli.add_argument("--only", nargs="*", choices=list(sections(True)), help="these sections alone; writes nothing but where --out says")
    cli.add_argument("--jobs", type=int, default=2, help="processes")
    cli.add_argument("--out", type=Path, help=f"default: {RESULT.relative_to(ROOT)}")
    args = cli.parse_args(arguments)
    began, found = time.monotonic(), list[tuple[str, Outcome]]()
    columns = (TextColumn("{task.description}"), TextColumn("{task.completed} tried"), TimeElapsedColumn())
    with tempfile.TemporaryDirectory(prefix="adversary-") as scratch, Progress(*columns, transient=True) as progress:
        whole = progress.add_task("all")
        tasks: dict[str, Any] = {}
        for name, outcome in side_by_side(args.only or list(sections(args.quick)), args.quick, Path(scratch), args.jobs):
            if outcome is None:
                own = Counter(o.came for n, o in found if n == name)
                progress.console.print(f"{name}: {own.total()} tried, {', '.join(f'{n} {came}' for came, n in sorted(own.items()))}")
                progress.remove_task(tasks.pop(name, progress.add_task(name)))
                continue
            if name not in tasks:
                tasks[name] = progress.add_task(name)
            found.append((name, outcome))
            progress.advance(whole)
            progress.advance(tasks[name])
            if outcome.came in BAD:
                progress.console.print(f"{outcome.came}: {outcome.name}\n{outcome.shown}", style="red", markup=False, soft_wrap=True)
    made = counted(found) | {
        "seed": SEED, "seconds": round(time.monotonic() - began), "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["python benchmarks/adversary.py", *(["--quick"] if args.quick else [])]),
        "device": f"{machine(torch.device('cpu')).rpartition(',')[0]}, {args.jobs} processes", **provenance(),
    }  # fmt: skip
    if out := args.out or (None if args.quick or args.only else RESULT):
        keep(out, made)
    print(json.dumps({key: made[key] for key in ("tried", "tracebacks", "silent", "lost", "seconds")}))
    return int(bool(made["failures"]))


if __name__ == "__main__":
    sys.exit(main())
