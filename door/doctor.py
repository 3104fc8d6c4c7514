"""`python train.py doctor`: is everything here that a run needs? Each problem is printed with its remedy; nothing is changed."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Literal, NamedTuple

from headstart.data.lock import locked
from headstart.door.early import reader_may_leave
from headstart.heads.errors import UserError
from headstart.heads.files import put_text

GIB = 1 << 30
LOW_DISK, LOW_SHARED = 10 * GIB, 1 * GIB  # bytes: what a small run and its checkpoints need; what data loaders and NCCL share
FILES = 1024  # open files that a run with many shards may need


class Finding(NamedTuple):
    """The result of a check, printed as one line."""

    kind: Literal["ok", "note", "wrong"]
    what: str
    said: str


def examine() -> Iterator[Finding]:
    """Yield the findings of all checks, one after the other. A check that raises becomes a finding, and the others go on."""
    for check in (_python, _packages, _processor, _gpus, _folders, _shared_memory, _hub, _wandb, _slurm):
        try:
            yield from check()
        except Exception as e:  # whatever a driver or a broken installation raises
            yield Finding("wrong", check.__name__.strip("_"), f"{type(e).__name__}: {' '.join(str(e).split())[:300]}")


@reader_may_leave()
def doctor() -> int:
    """Print the findings. Returns the exit code: 1 where something is wrong."""
    found = []
    for finding in examine():
        found.append(finding)
        sign = {"ok": "  ok   ", "note": "  note ", "wrong": "  WRONG"}[finding.kind]
        print(f"{sign} {finding.what:16} {finding.said}", flush=True)
    wrong = sum(finding.kind == "wrong" for finding in found)
    print("all that a run needs is here" if not wrong else f"{wrong} of {len(found)} are wrong: see above what to do")
    return int(bool(wrong))


def _python() -> Iterator[Finding]:
    known = sys.version_info >= (3, 11)
    yield Finding("ok" if known else "wrong", "python", platform.python_version() + ("" if known else ": 3.11 or newer is needed"))


def _packages() -> Iterator[Finding]:
    """Whether the packages that pyproject.toml asks for are installed, in versions within its ranges."""
    from packaging.requirements import Requirement

    wrong = []
    asked = [Requirement(text) for text in requires("headstart") or []]
    for each in (each for each in asked if each.marker is None):
        try:
            have = version(each.name)
        except PackageNotFoundError:
            wrong.append(f"{each.name} is not installed")
            continue
        if not each.specifier.contains(have, prereleases=True):
            wrong.append(f"{each.name} {have} is not {each.specifier}")
    how = "; pip install -c constraints.txt -e . mends it"
    yield Finding("wrong", "packages", "; ".join(wrong) + how) if wrong else Finding("ok", "packages", f"{version('headstart')}, complete")


def _processor() -> Iterator[Finding]:
    import psutil
    import torch

    from headstart.heads import native, orders
    from headstart.inference.decoding.placement import multiplies_bf16
    from headstart.inference.provenance import machine

    memory = psutil.virtual_memory()
    said = f"{machine(torch.device('cpu'))}, {memory.available / GIB:.0f} of {memory.total / GIB:.0f} GiB free"
    fast = multiplies_bf16(torch.device("cpu"))
    slow = "; it does not multiply bf16 itself: training reads a target several times as fast with target.dtype=float32"
    yield Finding("ok", "processor", said + ("" if fast or torch.cuda.is_available() else slow))
    if isinstance(found := native.searched(), native.Unavailable):
        slower = "on the CPU decoding and training go on with torch's operations, which are slower"
        yield Finding("note", "decoding", f"our C++ cannot be used; {slower}: {found}")
        return
    over = {name: orders.panels_over_others(orders.measured(torch.randn(512, 512).to(d))) for d, name in native.DTYPES.items()}
    said = " and ".join(f"{share:.2f} in {name}" for name, share in over.items())
    said = f"on the CPU in C++, compiled for this processor; a product takes {said} of the time of torch's fastest"
    chosen = max(over.values()) < orders.WORTH
    yield Finding("ok", "decoding", said) if chosen else Finding("note", "decoding", f"{said}; torch's is taken where it is faster")


def _gpus() -> Iterator[Finding]:
    import torch

    from headstart.heads.kernels.launch import refused

    if not torch.cuda.is_available():
        if shutil.which("nvidia-smi"):
            built = "a build for the CPU" if torch.version.cuda is None else f"built for CUDA {torch.version.cuda}"
            yield Finding("wrong", "gpu", f"there is a driver, and torch {torch.__version__} ({built}) sees no GPU: nvidia-smi, and the "
                          "build of torch that fits it")  # fmt: skip
        else:
            yield Finding("note", "gpu", "none: the CPU trains small drafters, those of the shipped target in minutes")
        return
    for i in range(torch.cuda.device_count()):
        free, whole = torch.cuda.mem_get_info(i)
        half = torch.cuda.get_device_capability(i) >= (8, 0)
        said = f"{torch.cuda.get_device_name(i)}, {free / GIB:.0f} of {whole / GIB:.0f} GiB free"
        yield Finding("ok" if half else "note", f"gpu {i}", said + ("" if half else ": no bf16, take trainer.precision=fp32"))
        if (why := refused(torch.device("cuda", i))) is None:
            said = "our own (triton) can be launched: the target's layers, the loss and the attention of a training"
            yield Finding("ok", f"kernels on gpu {i}", said)
        else:
            said = f"our own (triton) cannot be launched, torch's operations are slower: {why}"
            yield Finding("note", f"kernels on gpu {i}", said)
    if torch.cuda.device_count() > 1 and not torch.distributed.is_nccl_available():
        yield Finding("wrong", "nccl", "torch was built without it: several GPUs cannot train together")


def _folders() -> Iterator[Finding]:
    """Where runs and downloads go: room, and whether files can be written, renamed and locked there."""
    for what, place, lower in (("runs", Path("runs"), "out=DIR on another disk"), ("hub's cache", _cache(), "HF_HOME=DIR on another disk")):
        there = next(folder for folder in (place.absolute(), *place.absolute().parents) if folder.exists())
        free = shutil.disk_usage(there).free
        try:
            with tempfile.TemporaryDirectory(dir=there, prefix=".doctor-") as folder, locked(Path(folder) / "lock"):
                put_text(Path(folder) / "file", "written, then renamed")
        except (OSError, UserError) as e:
            yield Finding("wrong", what, f"{place} cannot be written ({e}): {lower}")
            continue
        low = free < LOW_DISK
        yield Finding("note" if low else "ok", what, f"{place}, {free / GIB:.0f} GiB free" + (f": little; {lower}" if low else ""))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < FILES:
        yield Finding("note", "open files", f"{soft} at a time: ulimit -n {FILES} where there are many shards")


def _shared_memory() -> Iterator[Finding]:
    place = Path("/dev/shm")
    if place.is_dir() and (size := shutil.disk_usage(place).total) < LOW_SHARED:
        yield Finding("note", "shared memory", f"{size / GIB:.2f} GiB: several processes may need more (docker run --shm-size=8g)")


def _hub() -> Iterator[Finding]:
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        yield Finding("note", "hub", "offline (HF_HUB_OFFLINE): only what is in the cache, or in folders, can be opened")
        return
    token = "logged in" if get_token() else "not logged in: gated models need `hf auth login`"
    yield Finding("ok" if get_token() else "note", "hub", f"{constants.ENDPOINT.partition('://')[2]}, {token}")


def _wandb() -> Iterator[Finding]:
    from headstart.trainers.sinks.wandb import logged_in

    mode = os.environ.get("WANDB_MODE", "online")
    if mode != "online":
        yield Finding("note", "wandb", f"WANDB_MODE={mode}: tracker=wandb writes to disk, `wandb sync` sends it")
    elif logged_in():
        yield Finding("ok", "wandb", "logged in")
    else:
        yield Finding("note", "wandb", "not logged in: tracker=wandb writes to disk")


def _slurm() -> Iterator[Finding]:
    if shutil.which("sbatch"):
        yield Finding("ok", "slurm", "sbatch is here: launcher=slurm")


def _cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HOME)


if __name__ == "__main__":
    raise SystemExit(doctor())
