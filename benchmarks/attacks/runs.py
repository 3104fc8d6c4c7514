"""Runs that are killed at any moment, and runs whose disk is full: in the end they have the weights of one that nothing disturbed.

Doors are called in forks of this process, which has everything imported: a kill is a real one, and a run takes a second.
"""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks.attacks.outcome import TRACE, Outcome
from benchmarks.attacks.world import World, equal, weights
from headstart.trainers import checkpoint
from tests.doors import DOORS, ROOT

SIGNALS = (signal.SIGKILL, signal.SIGINT, signal.SIGTERM)
PATIENCE = 300  # seconds for a run of one or two
BY_SIGNAL = {-s for s in SIGNALS} | {130, 143, 137}  # exit codes of what was ended so


class Ended(NamedTuple):
    code: int
    said: str
    seconds: float


def forked(
    name: str, words: Sequence[str], folder: Path, kills: Sequence[tuple[float, int]] = (), before: Callable[[], None] | None = None
) -> Ended:
    """A door in a fork. ``kills``: after so many seconds that signal. ``before``: what is done in the fork first."""
    read, write = os.pipe()
    start, child = time.monotonic(), os.fork()
    if not child:
        os.close(read)
        play(name, words, folder, write, before)
    os.close(write)
    parts: list[bytes] = []

    def listen() -> None:
        with open(read, "rb") as pipe:  # noqa: PTH123 - a handle
            parts.extend(iter(lambda: pipe.read1(1 << 16), b""))

    listener = threading.Thread(target=listen)
    listener.start()
    for after, number in (*kills, (PATIENCE, signal.SIGKILL)):
        while time.monotonic() < start + after and not _over(child):
            time.sleep(0.002)
        if _over(child):
            break
        os.kill(child, number)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    listener.join()
    return Ended(code, b"".join(parts).decode(errors="replace"), time.monotonic() - start)


def _over(child: int) -> bool:
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def play(name: str, words: Sequence[str], folder: Path, write: int, before: Callable[[], None] | None) -> None:
    """In the fork: what Python does around a door."""
    code = 1
    try:
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # while this is no door yet
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
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


# ---- kills ----


def steps_of(out: Path) -> int:
    """The newest checkpoint's, which no later run may fall behind."""
    return max((checkpoint.step_of(folder) for folder in checkpoint.folders(out)), default=0)


def left_over(out: Path) -> list[str]:
    """What a run that has ended leaves to nobody's use."""
    return [path.name for path in out.rglob(".*") if path.name.endswith((".part", ".old", ".tmp"))]


class Thing(NamedTuple):
    """Something that a door makes, piece by piece."""

    name: str
    door: str
    words: Callable[[Path], list[str]]
    whole: Path  # as it is where nothing disturbs
    seconds: float

    def same(self, out: Path) -> bool:
        if out.is_file():
            return out.read_bytes() == self.whole.read_bytes()
        if self.door == "data":
            return all((out / path.name).read_bytes() == path.read_bytes() for path in self.whole.iterdir())
        speculator = [(place / "speculator" / "model.safetensors").read_bytes() for place in (out, self.whole)]
        return equal(weights(out), weights(self.whole)) and speculator[0] == speculator[1]


def thing(world: World, name: str) -> Thing:
    """The run, the capture or the answers of the world, made once more to see how long it takes."""
    door, words, whole = {
        "train": ("train", world.run, world.folder / "run"),
        "capture": ("data", world.shards, world.folder / "shards"),
        "regenerate": ("data regenerate", world.answers, world.folder / "answers.jsonl"),
    }[name]
    out = world.folder / "timed"
    ended = forked(door, words(out), world.folder)
    assert ended.code == 0, ended.said
    shutil.rmtree(out) if out.is_dir() else out.unlink()
    return Thing(name, door, words, whole, ended.seconds)


def killed(it: Thing, out: Path, dice: random.Random) -> Outcome:
    """Once to three times, then left alone: what is there in the end is what would have been."""
    said, how, newest = "", [], 0
    for _ in range(dice.choice((1, 1, 2, 3))):
        number = dice.choice(SIGNALS)
        after = dice.uniform(0.02, 1.05) * it.seconds
        again = [(after + dice.uniform(0, 0.1), signal.SIGINT)] if number == signal.SIGINT and dice.random() < 0.3 else []
        how.append(f"{signal.Signals(number).name}{' twice' * bool(again)} after {after:.2f} s")
        ended = forked(it.door, it.words(out), out.parent, [(after, number), *again])
        said += f"\n--- {how[-1]}: {ended.code}\n{ended.said}"
        name = f"{it.name}: {', '.join(how)}"
        if TRACE in ended.said or ended.code not in {0, *BY_SIGNAL}:
            return Outcome(name, "traceback", said)
        if it.name == "train":
            newest, before = steps_of(out), newest
            if newest < before:
                return Outcome(name, "lost", f"{said}\nfrom step {before} back to {newest}")
    ended = forked(it.door, it.words(out), out.parent)
    said += f"\n--- again: {ended.code}\n{ended.said}"
    if TRACE in ended.said:
        return Outcome(name, "traceback", said)
    if newest and f"resuming after step {newest} " not in " ".join(ended.said.split()):
        return Outcome(name, "lost", f"{said}\nit did not go on from step {newest}")
    if ended.code or not it.same(out) or (out.is_dir() and left_over(out)):
        return Outcome(name, "lost", f"{said}\n{left_over(out) if out.is_dir() else ''}")
    return Outcome(name, "same")


def kills(world: World, count: int, seed: int) -> Generator[Outcome, None, None]:
    dice, known = random.Random(seed), dict[str, Thing]()
    for i in range(count):
        name = "train" if i % 3 != 2 else ("capture", "regenerate")[i // 3 % 2]
        known[name] = known.get(name) or thing(world, name)
        place = world.folder / f"killed-{i}"
        place.mkdir()
        try:
            yield killed(known[name], place / "out", dice)
        finally:
            shutil.rmtree(place)


def commands(world: World, count: int, seed: int) -> Iterator[Outcome]:
    """As a user starts and kills it: a process of its own, then two processes of a run."""
    dice, out = random.Random(seed), world.folder / "command"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    whole: dict[str, Path] = {"launcher=local": world.folder / "run"}
    seconds: dict[str, float] = {}
    for i in range(count):
        launcher = ("launcher=local", "launcher=processes")[i // 2 % 2]
        command = [sys.executable, str(ROOT / "train.py"), launcher]

        def start(place: Path, command: list[str] = command) -> subprocess.Popen[str]:
            how = dict(cwd=world.folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            how["preexec_fn"] = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # shells start what is in the background deaf
            return subprocess.Popen([*command, *world.run(place)], **how)  # type: ignore[call-overload]

        if launcher not in seconds:  # the first is left alone
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
    """A disk that takes so many bytes of a file, or refuses from some moment on, with another disk beside it and without: it ends in
    lines, and what was trained is on the other disk, or follows with the same command.
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
        ended = forked("train", [*world.run(out), *beside], place, before=before)
        said = f"{ended.code}\n{ended.said}"
        if TRACE in said or ended.code not in (0, 2):
            yield Outcome(name, "traceback", said)
            continue
        if beside:
            trained = [path for path in (out, spare / "out") if (path / "speculator" / "model.safetensors").is_file()]
            safe = ended.code == 0 and trained and weights_or_speculator(trained, whole)
            if not safe:
                yield Outcome(name, "lost", said)
                continue
        again = forked("train", [*world.run(out), *beside], place)
        said += f"\n--- again: {again.code}\n{again.said}"
        came = (
            "traceback"
            if TRACE in again.said
            else "same"
            if again.code == 0 and weights_or_speculator([out, spare / "out"], whole)
            else "lost"
        )
        yield Outcome(name, came, said)
        shutil.rmtree(place)


def weights_or_speculator(places: list[Path], whole: Path) -> bool:
    """Whether what was exported into one of the places is what it should be."""
    wanted = (whole / "speculator" / "model.safetensors").read_bytes()
    found = [path for place in places if (path := place / "speculator" / "model.safetensors").is_file()]
    return bool(found) and all(path.read_bytes() == wanted for path in found)


def refuse(after: int, out: Path) -> None:
    """In a fork: the disk of ``out`` keeps nothing any more once it was asked so often."""
    sync, asked = os.fsync, 0

    def refusing(handle: int) -> None:
        nonlocal asked
        if str(out) in str(Path(f"/proc/self/fd/{handle}").readlink()):
            asked += 1
            if asked > after:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(handle)

    os.fsync = refusing  # type: ignore[assignment]
