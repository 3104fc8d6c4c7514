"""What do processes that are killed (SIGKILL) at any moment cost? They are started again, and end with what nothing had disturbed.

    python benchmarks/faults.py                                     # 50 kills, some 10 minutes; writes benchmarks/results/faults.json
    python benchmarks/faults.py --kills 10 --out FILE.json
    python benchmarks/faults.py --with "" trainer.background=false   # trainings with each of these words in turn

Trainings, in each of three ways to be parallel, and captures, in one process and in two (of which one is killed). lost: a run that fell
behind a checkpoint that it had, did not go on from the newest, ended otherwise than well, or with other weights or other files, or left
something unfinished behind. bit_equal: all weights are those of the undisturbed run of as many processes, to the last bit, and all captured
files those of one process. The dice are seeded; the moments of the kills are shares of how long a run takes here. Runs are forks of this
process, which has everything imported: the kills are real.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = os.environ["OMP_NUM_THREADS"] = "1"  # read at import
os.environ["WANDB_MODE"] = "offline"
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch

from benchmarks.attacks.outcome import TRACE
from benchmarks.attacks.runs import PATIENCE, left_over, play, steps_of
from benchmarks.attacks.world import World, build, equal, weights
from headstart.door.launch import free_port
from headstart.heads.files import put_text
from headstart.inference.provenance import machine, provenance
from tests.doors import ROOT

RESULT = ROOT / "benchmarks" / "results" / "faults.json"
SEED = 0
GRACE = 30.0  # seconds that are left to the others when one was killed
ENDS = (0, 2, 130, -signal.SIGTERM, -signal.SIGKILL)  # exit codes of what is killed, and of what is with it


class Ended(NamedTuple):
    codes: list[int]
    said: str
    seconds: float
    killed: bool  # before it had ended


def started(
    door: str, words: Sequence[str], folder: Path, processes: int, kill: tuple[int, float] | None = None,
    before: Mapping[int, Callable[[], None]] | None = None,
) -> Ended:  # fmt: skip
    """A door in so many forks. ``kill``: which one gets SIGKILL, after how many seconds. ``before``: what is done in one of them first."""
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(processes)}
    log, start, children = folder / "log", time.monotonic(), list[int]()
    for rank in range(processes):
        said = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | (0 if rank else os.O_TRUNC))  # or one writes over the other
        child = os.fork()
        if not child:
            os.environ |= {**world, "RANK": str(rank), "LOCAL_RANK": str(rank)} if processes > 1 else {}
            play(door, words, folder, said, (before or {}).get(rank))
        os.close(said)
        children.append(child)
    codes, killed, told = dict[int, int](), False, 0.0
    while len(codes) < processes:
        for child in children:
            if child not in codes and (found := os.waitpid(child, os.WNOHANG))[0]:
                codes[child] = os.waitstatus_to_exitcode(found[1])
        now = time.monotonic() - start
        if kill is not None and now > kill[1] and not killed and children[kill[0]] not in codes:
            os.kill(children[kill[0]], signal.SIGKILL)
            killed = True
        left = [child for child in children if child not in codes]
        if any(codes.values()) and left and not told:  # as launchers do (door/launch.py)
            told = now
            for child in left:
                os.kill(child, signal.SIGTERM)
        if now > PATIENCE or (told and now > told + GRACE):
            for child in left:
                os.kill(child, signal.SIGKILL)
        time.sleep(0.002)
    return Ended([codes[child] for child in children], log.read_text(errors="replace"), time.monotonic() - start, killed)


class Kind(NamedTuple):
    """What is started and killed."""

    name: str
    door: str
    words: Any  # of a folder
    processes: int
    whole: Path  # as it is where nothing disturbs
    seconds: float

    def same(self, out: Path) -> bool:
        if self.door == "data":
            return {path.name for path in out.iterdir()} == {path.name for path in self.whole.iterdir()} and all(
                (out / path.name).read_bytes() == path.read_bytes() for path in self.whole.iterdir()
            )
        return equal(weights(out), weights(self.whole))


def kinds(world: World, several: Sequence[str]) -> list[Kind]:
    """Each run once, undisturbed."""
    what: list[tuple[str, str, Any]] = [("capture", "data", world.shards)]
    what += [(f"train {more}".strip(), "train", partial(_trained, world, more)) for more in several]
    found = [(f"{name}, {n} process{'es' * (n > 1)}", door, words, n) for name, door, words in what for n in (1, 2)]
    made: list[Kind] = []
    for i, (name, door, words, processes) in enumerate(found):
        out = world.folder / f"whole-{i}"
        ended = started(door, words(out), world.folder, processes)
        if any(ended.codes):
            raise SystemExit(f"{name} does not work at all: {ended.codes}\n{ended.said}")
        whole = made[0].whole if door == "data" and made else out  # captures do not hang on the number of processes
        made.append(Kind(name, door, words, processes, whole, ended.seconds))
    return made


def _trained(world: World, more: str, out: Path) -> list[str]:
    return world.run(out, "report=none", *more.split())


def killed(it: Kind, place: Path, dice: random.Random) -> tuple[int, str]:
    """Once to three times, then left alone. Returns how often, and what is wrong with what came of it."""
    out, newest, kills, said = place / "out", 0, 0, ""
    for _ in range(dice.choice((1, 1, 2, 3))):
        ended = started(it.door, it.words(out), place, it.processes, (dice.randrange(it.processes), dice.uniform(0.02, 1.05) * it.seconds))
        kills, said = kills + ended.killed, f"{said}\n--- {ended.codes}\n{ended.said}"
        if TRACE in ended.said or not set(ended.codes) <= {*ENDS}:
            return kills, f"{said}\nit did not end as it should"
        if it.door == "train":
            newest, before = steps_of(out), newest
            if newest < before:
                return kills, f"{said}\nfrom step {before} back to {newest}"
    ended = started(it.door, it.words(out), place, it.processes)
    said = f"{said}\n--- again: {ended.codes}\n{ended.said}"
    if any(ended.codes) or (newest and f"resuming after step {newest} " not in " ".join(ended.said.split())):
        return kills, f"{said}\nit did not go on from step {newest}"
    if left_over(out):
        return kills, f"{said}\nleft behind: {left_over(out)}"
    return kills, "" if it.same(out) else f"{said}\nit is another"


def counted(rows: list[dict[str, Any]], failures: list[dict[str, str]]) -> dict[str, Any]:
    """The table."""
    every = {key: sum(row[key] for row in rows) for key in ("kills", "runs", "lost")}
    return every | {"bit_equal": not failures, "rows": rows, "failures": failures}


def main(arguments: Sequence[str] | None = None) -> int:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--kills", type=int, default=50)
    cli.add_argument(
        "--with", dest="several", nargs="+", default=["", "parallel=zero1", "parallel=fsdp"], help="words of a training's command line"
    )
    cli.add_argument("--seed", type=int, default=SEED)
    cli.add_argument("--out", type=Path, default=RESULT)
    args = cli.parse_args(arguments)
    began, dice = time.monotonic(), random.Random(args.seed)
    rows, made = dict[str, dict[str, Any]](), dict[str, Any]()
    failures: list[dict[str, str]] = []
    about = {"seed": args.seed, "date": time.strftime("%Y-%m-%d"), "device": machine(torch.device("cpu")), **provenance()}
    about["command"] = " ".join(["python benchmarks/faults.py", *(sys.argv[1:] if arguments is None else arguments)])
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="faults-") as scratch:
        world = build(Path(scratch))
        for i, it in enumerate(cycle(kinds(world, args.several))):
            if sum(row["kills"] for row in rows.values()) >= args.kills:
                break
            place = world.folder / f"killed-{i}"
            place.mkdir()
            kills, wrong = killed(it, place, dice)
            row = rows.setdefault(it.name, {"what": it.name, "runs": 0, "kills": 0, "lost": 0})
            row |= {"runs": row["runs"] + 1, "kills": row["kills"] + kills, "lost": row["lost"] + bool(wrong)}
            failures += [{"what": it.name, "said": wrong[-4000:]}] if wrong else []
            shutil.rmtree(place)
            print(f"{it.name}: {kills} kills, {'LOST' + wrong[-2000:] if wrong else 'the same'}", flush=True)
            made = counted(list(rows.values()), failures) | about | {"seconds": round(time.monotonic() - began)}
            put_text(args.out, json.dumps(made, indent=1) + "\n")  # each time: what was tried until it is ended itself counts
    print(json.dumps({key: made[key] for key in ("kills", "runs", "lost", "bit_equal", "seconds")}))
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
