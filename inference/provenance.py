"""Where a measured figure comes from: the machine, the versions of packages, the commit."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from headstart.heads.errors import counted

PACKAGES = ("torch", "transformers", "accelerate", "datasets", "peft", "deepspeed", "safetensors", "numpy")


def versions() -> dict[str, str]:
    """Versions of Python, of the packages that affect numbers or speed, and of CUDA if torch has it."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name).partition("+")[0]  # after the +, the build
        except PackageNotFoundError:
            continue
    return found if torch.version.cuda is None else found | {"cuda": torch.version.cuda}


def commit() -> str:
    """The checkout's commit, with ``-dirty`` where files other than results of benchmarks differ from it. ``unknown`` where this package is
    not its own git checkout: an installed wheel may lie within another repository.
    """
    here = Path(__file__).resolve().parents[1]
    try:
        said = subprocess.run(["git", "rev-parse", "--show-toplevel", "HEAD"], cwd=here, capture_output=True, text=True, check=True).stdout
        top, _, sha = said.strip().rpartition("\n")
        if Path(top).resolve() != here:
            return "unknown"
        status = ["git", "status", "--porcelain", "--", ".", ":!benchmarks/results"]
        changed = subprocess.run(status, cwd=here, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return sha + ("-dirty" if changed else "")


def machine(device: torch.device) -> str:
    """The name of the GPU; or of the processor, with the instruction set and number of threads that torch uses. (Virtual machines hide
    which processor they run on, and the speeds with AVX2 and with AVX-512 differ severalfold.)
    """
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        models = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        name = models[0] if models else name
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}, {counted(torch.get_num_threads(), 'thread')}"


def ran_on(device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    """The device and dtype that figures depend on, in words."""
    return {"device": machine(device), "dtype": str(dtype).removeprefix("torch.")}


def provenance() -> dict[str, Any]:
    """Versions and commit: what a report must state so that its figures can be reproduced."""
    return {"versions": versions(), "commit": commit()}
