"""What the scripts share: their command line, where a result goes and what it says of its origin, measuring in a process of its own."""

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
    """``out``: the file among the results that --out may replace."""
    cli = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    if out:
        cli.add_argument("--out", type=Path, default=RESULTS / out)
    return cli


def origin(command: str) -> dict[str, Any]:
    """What a result says of where it is from; measured on the CPU."""
    import torch  # not by scripts that only start others

    from headstart.inference.provenance import machine, provenance

    return {"command": command, "machine": machine(torch.device("cpu")), **provenance()}


def keep(path: Path, found: Mapping[str, Any]) -> None:
    """As JSON, in a folder that is made if need be."""
    from headstart.heads.files import put_text

    path.parent.mkdir(parents=True, exist_ok=True)
    put_text(path, json.dumps(found, indent=1) + "\n")


def alone(script: str, what: str, **environment: str) -> Any:
    """What ``script`` prints last, called once more as it was called, with --one ``what``: in a process of its own."""
    command = [sys.executable, script, *sys.argv[1:], "--one", what]
    done = subprocess.run(command, env=os.environ | environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{what} failed ({done.returncode}; -9: out of memory)")
    return json.loads(done.stdout.splitlines()[-1])


def resident(field: str) -> int:
    """Bytes of this process (Linux): VmRSS, resident now; VmHWM, at most."""
    return next(int(line.split()[1]) * 1024 for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
