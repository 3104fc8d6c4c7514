"""``headstart train ...``, ``headstart infer ...``, ``headstart data ...``: the doors from anywhere, once the package is installed."""

from __future__ import annotations

import runpy
import sys
from importlib.metadata import version

DOORS = {
    "train": ("train", "train a drafter, export and measure it"),
    "infer": ("infer", "decode with an exported folder and report; infer tune, diagnose, expect, evaluate, advise, chat, serve"),
    "doctor": ("doctor", "is everything here that a run needs?"),
    "compare": ("compare", "finished runs side by side, from their folders alone"),
    "board": ("board", "a workspace of W&B with the charts that drafters are compared by"),
    "sweep": ("sweep_file", "a file for `wandb sweep`, made of the command line of a --multirun"),
    "data": ("data", "capture what a target says; data regenerate: its own answers"),
}


def main() -> None:
    """The console command: the first word says which door."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name == "--version":
        return print(f"headstart {version('headstart')}")
    if name not in DOORS:
        lines = [f"  headstart {door:<8} ...   {what}" for door, (_, what) in DOORS.items()]
        asked = name in ("", "-h", "--help")
        print(*(["the doors (each has --help):"] if asked else [f"there is no command {name!r}; there are"]), *lines, sep="\n",
              file=sys.stdout if asked else sys.stderr)  # fmt: skip
        raise SystemExit(0 if asked else 2)
    sys.argv[:2] = [f"headstart {name}"]
    runpy.run_module(f"headstart.door.{DOORS[name][0]}", run_name="__main__", alter_sys=False)
