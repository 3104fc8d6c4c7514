"""What the gate costs: seconds of the decodings during training, compared with the training itself, with default settings.

    python benchmarks/gate.py                      # `python train.py` without its report: some minutes; writes benchmarks/results/gate.json
    python benchmarks/gate.py head=dflash          # another run

- ``train_seconds``, ``gate_seconds``: of the whole run; ``decodings``: how many
- ``share``: gate_seconds over train_seconds; both are of the same run, so the speed of the machine cancels out
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.frame import ROOT, keep, origin, parser
from headstart.trainers import checkpoint
from headstart.trainers.metrics import read_metrics


def costs(run: Path) -> dict[str, Any]:
    """The costs in a finished run."""
    newest = checkpoint.folders(run)[-1]
    seconds = [row["speed/gate_seconds"] for row in read_metrics(run) if "speed/gate_seconds" in row]
    trained = json.loads((newest / "state.json").read_text())["seconds"]
    return {
        "steps": checkpoint.step_of(newest), "train_seconds": trained, "decodings": len(seconds), "gate_seconds": sum(seconds),
        "share": sum(seconds) / trained,
    }  # fmt: skip


def main() -> None:
    cli = parser(__doc__, "gate.json")
    cli.add_argument("words", nargs="*", help="words of `python train.py`")
    args = cli.parse_args()
    with tempfile.TemporaryDirectory(prefix="gate-") as folder:
        run = Path(folder) / "run"
        command = [sys.executable, str(ROOT / "train.py"), *args.words, "report=none", "tracker=none", f"out={run}"]
        subprocess.run(command, check=True)
        made = costs(run)
    keep(args.out, made | origin(" ".join(["python", "benchmarks/gate.py", *args.words])))
    print(
        f"{made['decodings']} decodings in {made['gate_seconds']:.1f} s, {made['share']:.1%} of {made['train_seconds']:.0f} s of training"
    )


if __name__ == "__main__":
    main()
