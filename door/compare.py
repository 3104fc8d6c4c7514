"""The door ``python -m trainers compare``: finished runs side by side, from their folders alone.

python -m trainers compare runs/a runs/b            comparison.html, .md, .png and .json in runs/compare-a+b
python -m trainers compare runs/sweep-* out=DIR     in DIR; of a run with several arms, every arm

A RUN is the folder of a training or of a report. Nothing is loaded or decoded: only the finished reports are read. Conditions that
differ between them (the machine, the prompts) are named.
For Weights & Biases see also: python -m trainers board --help, python -m trainers sweep --help.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headstart.door.arguments import door_of_words
from headstart.door.sweep import joined, part
from headstart.heads.errors import UserError


def main(words: Sequence[str]) -> None:
    """Compare the runs in ``words``: folders, and at most one ``out=DIR``. Raises UserError for a folder without a report."""
    outs = [word.removeprefix("out=") for word in words if word.startswith("out=")]
    runs = list(dict.fromkeys(Path(word) for word in words if not word.startswith("out=")))
    if wrong := [word for word in words if word.startswith("-")]:
        raise UserError(f"there is no option {wrong[0]}: give RUN... and, if wanted, out=DIR")
    if not runs or len(outs) > 1 or "" in outs:
        raise UserError("give folders of runs, and out=DIR at most once: python -m trainers compare RUN... out=DIR")
    from headstart.trainers.finished import compare_folders, reported  # here: it loads torch

    found: dict[str, Path] = {}
    alone = len({run.name for run in runs}) == len(runs)
    for run in runs:
        if not (folders := reported(run)):
            what = "there is no such folder" if not run.is_dir() else "it has no report.json, and no arm in it has one"
            raise UserError(f"{run}: {what}; give the folder of a finished run")
        name = run.resolve().name if alone else str(run)
        for arm, folder in folders.items():
            found[f"{name}/{arm}" if arm and len(runs) > 1 else arm or name] = folder
    out = Path(outs[0]) if outs else runs[0].parent / joined(["compare", "+".join(part(run.resolve().name) for run in runs)])
    compare_folders(found, {}, out)


def start() -> None:
    """Run the command line of this door, with the word ``compare`` (of ``python -m trainers``) or without (``headstart compare``)."""
    door_of_words("compare", __doc__, main)


if __name__ == "__main__":
    start()
