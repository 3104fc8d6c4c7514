"""What does it cost if processes are killed (SIGKILL) at any moment? After a restart they must end with the result of an undisturbed run.

    python benchmarks/faults.py                                     # 50 kills, some 10 minutes; writes benchmarks/results/faults.json
    python benchmarks/faults.py --kills 10 --out FILE.json
    python benchmarks/faults.py --with "" trainer.background=false   # trainings with each of these words in turn

Killed are trainings, in three parallel modes, and captures, with one process and with two (of which one is killed). lost: a run lost a
checkpoint that it had, did not resume from the newest one, failed, ended with other weights or files, or left unfinished files behind.
bit_equal: all weights equal those of the undisturbed run with as many processes, bit by bit, and all captured files equal those of one
process. Kills are drawn with a fixed seed; their moments are shares of a run's duration on this machine. Runs are forks of this process,
which has already imported everything.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = os.environ["OMP_NUM_THREADS"] = "1"  # read at import
os.environ["WANDB_MODE"] = "offline"
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch

from benchmarks.attacks.killing import Thing, killed, thing
from benchmarks.attacks.outcome import BAD
from benchmarks.attacks.world import World, build
from benchmarks.frame import keep, origin, parser

SEED = 0


def kinds(world: World, several: Sequence[str]) -> list[Thing]:
    """Run each kind once, undisturbed. A capture's files do not depend on the number of processes."""
    what: list[tuple[Any, ...]] = [("capture", "data", world.shards, world.folder / "shards")]
    what += [(f"train {more}".strip(), "train", partial(_trained, world, more), None) for more in several]
    both = [(*each, n) for each in what for n in (1, 2)]
    return [thing(world, f"{name}, {n} process{'es' * (n > 1)}", door, words, whole, n) for name, door, words, whole, n in both]


def _trained(world: World, more: str, out: Path) -> list[str]:
    return world.run(out, "report=none", *more.split())


def counted(rows: list[dict[str, Any]], failures: list[dict[str, str]]) -> dict[str, Any]:
    """The table of results."""
    every = {key: sum(row[key] for row in rows) for key in ("kills", "runs", "lost")}
    return every | {"bit_equal": not failures, "rows": rows, "failures": failures}


def main(arguments: Sequence[str] | None = None) -> int:
    cli = parser(__doc__, "faults.json")
    cli.add_argument("--kills", type=int, default=50)
    cli.add_argument(
        "--with", dest="several", nargs="+", default=["", "parallel=zero1", "parallel=fsdp"], help="words of a training's command line"
    )
    cli.add_argument("--seed", type=int, default=SEED)
    args = cli.parse_args(arguments)
    began, dice = time.monotonic(), random.Random(args.seed)
    rows, made = dict[str, dict[str, Any]](), dict[str, Any]()
    failures: list[dict[str, str]] = []
    command = " ".join(["python benchmarks/faults.py", *(sys.argv[1:] if arguments is None else arguments)])
    about = {"seed": args.seed, "date": time.strftime("%Y-%m-%d"), **origin(command)}
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="faults-") as scratch:
        world = build(Path(scratch))
        for i, it in enumerate(cycle(kinds(world, args.several))):
            if sum(row["kills"] for row in rows.values()) >= args.kills:
                break
            place = world.folder / f"killed-{i}"
            place.mkdir()
            kills, outcome = killed(it, place, dice, [signal.SIGKILL])
            wrong = outcome.said if outcome.came in BAD else ""
            row = rows.setdefault(it.name, {"what": it.name, "runs": 0, "kills": 0, "lost": 0})
            row |= {"runs": row["runs"] + 1, "kills": row["kills"] + kills, "lost": row["lost"] + bool(wrong)}
            failures += [{"what": it.name, "said": wrong[-4000:]}] if wrong else []
            shutil.rmtree(place)
            print(f"{it.name}: {kills} kills, {'LOST' + wrong[-2000:] if wrong else 'the same'}", flush=True)
            made = counted(list(rows.values()), failures) | about | {"seconds": round(time.monotonic() - began)}
            keep(args.out, made)  # after each kill, so that the results so far survive an interrupt
    print(json.dumps({key: made[key] for key in ("kills", "runs", "lost", "bit_equal", "seconds")}))
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
