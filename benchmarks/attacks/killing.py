"""Runs commands in forks of this process, which has already imported everything: kills are real, and a run takes a second."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import NamedTuple

from benchmarks.attacks.outcome import TRACE, Outcome
from benchmarks.attacks.world import World, equal, weights
from headstart.door.launch import free_port
from headstart.heads.files import UNFINISHED
from headstart.trainers import checkpoint
from tests.doors import DOORS

SIGNALS = (signal.SIGKILL, signal.SIGINT, signal.SIGTERM)
PATIENCE = 300  # seconds allowed for a run that takes one or two
GRACE = 30.0  # seconds that the other processes get after one has failed
ENDS = (0, 2, 130, -signal.SIGTERM, -signal.SIGKILL)  # exit codes of killed forks; 2 only of the processes that run beside a killed one


class Ended(NamedTuple):
    codes: list[int]
    said: str
    seconds: float
    kills: int  # kills that came before it had ended


def started(
    door: str, words: Sequence[str], folder: Path, processes: int = 1, kills: Sequence[tuple[float, int, int]] = (),
    before: Mapping[int, Callable[[], None]] | None = None,
) -> Ended:  # fmt: skip
    """Run a command in several forks. ``kills``: seconds after which one of them gets a signal. ``before``: called first in one of them.

    They write to a pipe, because ``before`` may make disks full, and a log file would not be written either.
    """
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(processes)}
    start, children, (read, write) = time.monotonic(), list[int](), os.pipe()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # before and after `play`, SIGINT would make a fork continue as this process
    for rank in range(processes):
        child = os.fork()
        if not child:
            os.close(read)
            os.environ |= {**world, "RANK": str(rank), "LOCAL_RANK": str(rank)} if processes > 1 else {}
            play(door, words, folder, write, (before or {}).get(rank))
        children.append(child)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    os.close(write)
    os.set_blocking(read, False)
    codes, due, came, told, said = dict[int, int](), sorted(kills), 0, 0.0, b""
    with open(read, "rb", buffering=0) as pipe:  # noqa: PTH123 - a handle
        while len(codes) < processes:
            said += pipe.read() or b""
            for child in children:
                if child not in codes and (found := os.waitpid(child, os.WNOHANG))[0]:
                    codes[child] = os.waitstatus_to_exitcode(found[1])
            now, left = time.monotonic() - start, [child for child in children if child not in codes]
            while due and now > due[0][0]:
                _, rank, number = due.pop(0)
                if children[rank] in left:
                    os.kill(children[rank], number)
                    came += 1
            if any(codes.values()) and left and not told:  # end the others, as launchers do (door/launch.py)
                told = now
                for child in left:
                    os.kill(child, signal.SIGTERM)
            if now > PATIENCE or (told and now > told + GRACE):
                for child in left:
                    os.kill(child, signal.SIGKILL)
            time.sleep(0.002)
        said += pipe.read() or b""
    return Ended([codes[child] for child in children], said.decode(errors="replace"), time.monotonic() - start, came)


def play(name: str, words: Sequence[str], folder: Path, write: int, before: Callable[[], None] | None) -> None:
    """Runs in the fork: what Python does around a command."""
    code = 1
    try:
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # until the command runs
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        for stream in (1, 2):
            os.dup2(write, stream)
        sys.stdout, sys.stderr = (open(fd, "w", buffering=1, closefd=False) for fd in (1, 2))  # noqa: SIM115
        os.chdir(folder)
        os.environ["HYDRA_FULL_ERROR"] = "1"
        first, *command = name.split()
        sys.argv = [first, *command, *words]
        if before is not None:
            before()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        DOORS[first]()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def steps_of(out: Path) -> int:
    """The step of the newest checkpoint. No later run may fall behind it."""
    return max((checkpoint.step_of(folder) for folder in checkpoint.folders(out)), default=0)


def left_over(out: Path) -> list[str]:
    """Files that a finished run left behind and nobody uses."""
    return [path.name for path in out.rglob(".*") if path.name.endswith((".part", ".old")) or UNFINISHED.fullmatch(path.name)]


class Thing(NamedTuple):
    """Something that a command makes, piece by piece."""

    name: str
    door: str
    words: Callable[[Path], list[str]]
    processes: int
    whole: Path  # the result of an undisturbed run
    seconds: float

    def same(self, out: Path) -> bool:
        if self.whole.is_file():
            return out.read_bytes() == self.whole.read_bytes()
        if self.door == "data":
            files = [{path.name: path.read_bytes() for path in place.iterdir()} for place in (out, self.whole)]
            return files[0] == files[1]
        speculator = [(place / "speculator" / "model.safetensors").read_bytes() for place in (out, self.whole)]
        return equal(weights(out), weights(self.whole)) and speculator[0] == speculator[1]


def thing(world: World, name: str, door: str, words: Callable[[Path], list[str]], whole: Path | None, processes: int = 1) -> Thing:
    """Make it once, undisturbed, to measure how long it takes. ``whole``: the result, if it exists already."""
    out = Path(mkdtemp(prefix="whole-", dir=world.folder)) / "out"
    ended = started(door, words(out), world.folder, processes)
    assert not any(ended.codes), f"{name} does not work at all: {ended.codes}\n{ended.said}"
    return Thing(name, door, words, processes, whole or out, ended.seconds)


def killed(it: Thing, place: Path, dice: random.Random, signals: Sequence[signal.Signals] = SIGNALS) -> tuple[int, Outcome]:
    """Kill it one to three times, then let it finish: the result must be that of an undisturbed run. Also returns the kills in time."""
    out, said, how, newest, kills = place / "out", "", list[str](), 0, 0
    ends = {*ENDS} - {2} if it.processes == 1 else {*ENDS}

    def came(what: str, why: str = "") -> tuple[int, Outcome]:
        return kills, Outcome(f"{it.name}: {', '.join(how)}", what, f"{said}\n{why}" if why else "")

    for _ in range(dice.choice((1, 1, 2, 3))):
        number, rank, after = dice.choice(signals), dice.randrange(it.processes), dice.uniform(0.02, 1.05) * it.seconds
        again = [(after + dice.uniform(0, 0.1), rank, number)] if number == signal.SIGINT and dice.random() < 0.3 else []
        how.append(f"{number.name}{' twice' * bool(again)} after {after:.2f} s")
        ended = started(it.door, it.words(out), place, it.processes, [(after, rank, number), *again])
        kills, said = kills + ended.kills, f"{said}\n--- {how[-1]}: {ended.codes}\n{ended.said}"
        if TRACE in ended.said or not {*ended.codes} <= ends:
            return came("traceback", "it did not end as it should")
        if it.door == "train":
            newest, before = steps_of(out), newest
            if newest < before:
                return came("lost", f"from step {before} back to {newest}")
    ended = started(it.door, it.words(out), place, it.processes)
    said += f"\n--- again: {ended.codes}\n{ended.said}"
    if TRACE in ended.said:
        return came("traceback", "it did not go on")
    if any(ended.codes) or (newest and f"resuming after step {newest} " not in " ".join(ended.said.split())):
        return came("lost", f"it did not go on from step {newest}")
    if left_over(place):
        return came("lost", f"left behind: {left_over(place)}")
    return came("same") if it.same(out) else came("lost", "it is another")
