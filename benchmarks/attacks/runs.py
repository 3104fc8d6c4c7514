"""Attacks on runs by kills at any moment and by full disks: in the end they must have the weights of an undisturbed run."""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from functools import partial
from pathlib import Path

from benchmarks.attacks.killing import SIGNALS, Thing, killed, started, steps_of, thing
from benchmarks.attacks.outcome import TRACE, Outcome
from benchmarks.attacks.world import World, equal, weights
from tests.doors import ROOT

BY_SIGNAL = {-s for s in SIGNALS} | {130, 143, 137}  # exit codes of commands that a signal has ended


def kills(world: World, count: int, seed: int) -> Generator[Outcome, None, None]:
    dice, known = random.Random(seed), dict[str, Thing]()
    made = {
        "train": ("train", world.run, world.folder / "run"),
        "capture": ("data", world.shards, world.folder / "shards"),
        "regenerate": ("data regenerate", world.answers, world.folder / "answers.jsonl"),
    }
    for i in range(count):
        name = "train" if i % 3 != 2 else ("capture", "regenerate")[i // 3 % 2]
        known[name] = known.get(name) or thing(world, name, *made[name])
        place = world.folder / f"killed-{i}"
        place.mkdir()
        try:
            yield killed(known[name], place, dice)[1]
        finally:
            shutil.rmtree(place)


def commands(world: World, count: int, seed: int) -> Iterator[Outcome]:
    """Start and kill runs as a user does: first one process, then a run of two processes."""
    dice, out = random.Random(seed), world.folder / "command"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    whole: dict[str, Path] = {"launcher=local": world.folder / "run"}
    seconds: dict[str, float] = {}
    for i in range(count):
        launcher = ("launcher=local", "launcher=processes")[i // 2 % 2]
        command = [sys.executable, str(ROOT / "train.py"), launcher]

        def start(place: Path, command: list[str] = command) -> subprocess.Popen[str]:
            how = dict(cwd=world.folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            how["preexec_fn"] = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # shells start background jobs with SIGINT ignored
            return subprocess.Popen([*command, *world.run(place)], **how)  # type: ignore[call-overload]

        if launcher not in seconds:  # the first one is not killed
            began, place = time.monotonic(), world.folder / launcher
            with start(place) as process:
                said = process.communicate()[0]
            seconds[launcher] = time.monotonic() - began
            if process.returncode or TRACE in said:
                yield Outcome(f"{launcher}, left alone", "traceback", said)
                return
            whole.setdefault(launcher, place)
        number, after = dice.choice(SIGNALS), dice.uniform(0.15, 1) * seconds[launcher]
        name = f"python train.py {launcher}: {signal.Signals(number).name} after {after:.2f} s"
        with start(out) as process:
            try:
                said = process.communicate(timeout=after)[0]
            except subprocess.TimeoutExpired:
                process.send_signal(number)
                said = process.communicate()[0]
        code, newest = process.returncode, steps_of(out)
        with start(out) as process:
            again = process.communicate()[0]
        said = f"{code}\n{said}\n--- again: {process.returncode}\n{again}"
        if TRACE in said or code not in {0, *BY_SIGNAL}:
            yield Outcome(name, "traceback", said)
        else:
            went_on = not newest or f"resuming after step {newest} " in " ".join(again.split())
            yield Outcome(
                name, "same" if process.returncode == 0 and went_on and equal(weights(out), weights(whole[launcher])) else "lost", said
            )
        shutil.rmtree(out)


# ---- disks ----


def full(world: World, count: int, seed: int) -> Iterator[Outcome]:
    """A disk that limits the bytes of a file, or refuses from some moment on, with and without a second disk (out_fallback). The run must
    end with error lines, and the trained weights must be on the second disk, or come with the same command later.
    """
    dice, whole = random.Random(seed), world.folder / "run"
    largest = max(path.stat().st_size for path in whole.rglob("*") if path.is_file())
    for i in range(count):
        place = world.folder / f"full-{i}"
        out, spare = place / "out", place / "spare"
        spare.mkdir(parents=True)
        beside = [f"out_fallback={spare}"] if i % 3 == 2 else []
        if i % 3 == 0:
            size = dice.randrange(2 * largest)
            name, before = f"files of up to {size} bytes", partial(resource.setrlimit, resource.RLIMIT_FSIZE, (size, -1))
        else:
            after = dice.randrange(1, 60)
            name, before = f"full after {after} writes{', another disk' * bool(beside)}", partial(refuse, after, out)
        ended = started("train", [*world.run(out), *beside], place, before={0: before})
        code, said = ended.codes[0], f"{ended.codes[0]}\n{ended.said}"
        if TRACE in said or code not in (0, 2):
            yield Outcome(name, "traceback", said)
            continue
        if beside:
            trained = [path for path in (out, spare / "out") if (path / "speculator" / "model.safetensors").is_file()]
            safe = code == 0 and trained and weights_or_speculator(trained, whole)
            if not safe:
                yield Outcome(name, "lost", said)
                continue
        again = started("train", [*world.run(out), *beside], place)
        said += f"\n--- again: {again.codes[0]}\n{again.said}"
        came = (
            "traceback"
            if TRACE in again.said
            else "same"
            if again.codes == [0] and weights_or_speculator([out, spare / "out"], whole)
            else "lost"
        )
        yield Outcome(name, came, said)
        shutil.rmtree(place)


def weights_or_speculator(places: list[Path], whole: Path) -> bool:
    """Whether one of the places holds the expected export."""
    wanted = (whole / "speculator" / "model.safetensors").read_bytes()
    found = [path for place in places if (path := place / "speculator" / "model.safetensors").is_file()]
    return bool(found) and all(path.read_bytes() == wanted for path in found)


def refuse(after: int, out: Path) -> None:
    """Runs in a fork: the disk of ``out`` refuses every write after a number of them."""
    sync, asked = os.fsync, 0

    def refusing(handle: int) -> None:
        nonlocal asked
        if str(out) in str(Path(f"/proc/self/fd/{handle}").readlink()):
            asked += 1
            if asked > after:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(handle)

    os.fsync = refusing  # type: ignore[assignment]
