"""What the benchmarks share: the command line, where a result is stored with its origin, and measuring in a separate process."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def parser(about: str | None, out: str = "") -> argparse.ArgumentParser:
    """The command line of a benchmark. ``out``: its file in benchmarks/results, unless --out names another."""
    cli = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    if out:
        cli.add_argument("--out", type=Path, default=RESULTS / out)
    return cli


def origin(command: str, device: str = "cpu") -> dict[str, Any]:
    """The origin that a result states."""
    import torch  # imported here, because scripts that only start others do not need it

    from headstart.inference.provenance import machine, provenance

    return {"command": command, "machine": machine(torch.device(device)), **provenance()}


def keep(path: Path, found: Mapping[str, Any]) -> None:
    """Store a result as JSON. Its folder is made if it does not exist."""
    from headstart.heads.files import put_text

    path.parent.mkdir(parents=True, exist_ok=True)
    put_text(path, json.dumps(found, indent=1) + "\n")


def alone(script: str, what: str, **environment: str) -> Any:
    """Run ``script`` again in a new process, with the same arguments and --one ``what``. Returns the last line it prints."""
    command = [sys.executable, script, *sys.argv[1:], "--one", what]
    done = subprocess.run(command, env=os.environ | environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{what} failed ({done.returncode}; -9: out of memory)")
    return json.loads(done.stdout.splitlines()[-1])


def resident(field: str) -> int:
    """Resident bytes of this process (Linux). VmRSS: now; VmHWM: the peak."""
    return next(int(line.split()[1]) * 1024 for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
