"""Compares one EAGLE-3 training step with those of other libraries, each in its own environment.

    python benchmarks/train_step.py --peer speculators=PYTHON --peer specforge=PYTHON --peer modelopt=PYTHON
        # writes benchmarks/results/train_step.json
    python benchmarks/train_step.py --device cuda --hidden 4096 --tokens 2049 --cases 32000:7 --dtypes bf16 --peer speculators=PYTHON
        # on a GPU: writes benchmarks/results/train_step_gpu.json, with a side "torch" (ours with loss.kernel=torch). speculators reads one
        # token less, and its attention there wants a multiple of 128

PYTHON: the Python of an environment with the library (`pip install --no-deps NAME==VERSION`, its dependencies, the torch used here, and the
transformers used here, except 5.8.1 for specforge 0.2.0, which also imports triton, and 5.14.1 for nvidia-modelopt 0.47.0).
All sides have the same weights, inputs and kind of head (trained, or frozen as in two of the libraries by default) and one thread. Each
side is a process (benchmarks/train_step_side.py); they are asked for a step in turn. The fastest step of each side counts, in CPU seconds
(user and system), which on a shared machine are more reliable than wall-clock time. On a GPU it is wall-clock time.
A step is the unroll, the loss and all gradients. Our step computes no metrics, like nine of ten steps of a training; a tenth of their cost
is added. The peers count correct guesses in every step, as their code does.

- ``seconds_over_best_peer_32k``, ``..._128k``: our time over the fastest peer's, the worst row of that vocabulary
- ``memory_over_best_peer``: growth of the resident size within a step, over that of the best peer, the worst row
- ``rows``: per case the figures of every side, with ``largest_difference``, the largest relative difference of its losses to ours
- ``not_measured``: peers that were not given
- ``accepted...``: from benchmarks/accepted.py, kept unchanged
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.frame import RESULTS, ROOT, keep, origin, parser
from benchmarks.loss_memory import shape
from benchmarks.train_step_side import SIDES, TAPS
from benchmarks.vllm_side import Client
from headstart.heads import hub

PEERS = [side for side in SIDES if side != "headstart"]


class Side(Client):
    """A process with a model that takes a training step on request."""

    def __init__(self, python: str, side: str, folder: Path, case: dict[str, Any]) -> None:
        command = [python, str(Path(__file__).with_name("train_step_side.py")), side, str(folder), json.dumps(case)]
        super().__init__(side, command, {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
        self.best: dict[str, Any] = {}

    def step(self) -> None:
        self.say({})
        made = self.hear()
        most = max(made["peak_bytes"], self.best.get("peak_bytes", 0))  # usually of the first step: later steps reuse memory
        if not self.best or made["seconds"] < self.best["seconds"]:
            self.best = made
        self.best["peak_bytes"] = most


def write(folder: Path, vocab: int, hidden: int, tokens: int, device: str) -> None:
    """Write random weights and inputs, made on ``device``. The final states are scaled as after a norm, so that a library that norms them
    again changes nothing.
    """
    torch.manual_seed(0)
    with torch.device(device):
        drafter = hub.build("eagle", shape(hidden, vocab), taps=list(TAPS), fc_norm=False, norm_output=False)
        final_BTD = torch.randn(1, tokens, hidden)
        given = {
            "tokens": torch.randint(vocab, (1, tokens)),
            "states": torch.randn(1, tokens, len(TAPS) * hidden),
            "final": final_BTD / final_BTD.square().mean(-1, keepdim=True).sqrt(),
            "head": torch.randn(vocab, hidden) / hidden**0.5,
        }
        save_file(given, folder / "given.safetensors")
        save_file(drafter.state_dict() | {"embed_tokens.weight": torch.randn(vocab, hidden)}, folder / "weights.safetensors")


def row(pythons: dict[str, str], folder: Path, case: dict[str, Any], turns: int) -> dict[str, Any]:
    """The row of one case: all sides measured on it."""
    sides = {"headstart": Side(sys.executable, "headstart", folder, case | {"figures": False})}
    sides["figures"] = Side(sys.executable, "headstart", folder, case | {"figures": True})
    if case["device"] == "cuda":
        sides["torch"] = Side(sys.executable, "headstart", folder, case | {"figures": False, "kernel": "torch"})
    sides |= {name: Side(python, name, folder, case) for name, python in pythons.items()}
    versions = {name: side.hear() for name, side in sides.items()}
    for turn in range(turns):
        for name in [*sides][turn % len(sides) :] + [*sides][: turn % len(sides)]:
            sides[name].step()
    for side in sides.values():
        side.close()
    ours, more = sides["headstart"].best, sides.pop("figures").best
    ours["seconds_without_figures"] = ours["seconds"]
    ours["seconds"] += max(0.0, more["seconds"] - ours["seconds"]) / 10
    found: dict[str, Any] = {**case, "sides": {name: versions[name] | side.best for name, side in sides.items()}}
    if pythons:
        for key in ("seconds", "peak_bytes"):
            best = min(pythons, key=lambda name: sides[name].best[key])
            found |= {f"{key}_best_peer": best, f"{key}_over_best_peer": ours[key] / sides[best].best[key]}
        gaps = [abs(a / b - 1) for name in pythons for a, b in zip(sides[name].best["losses"], ours["losses"], strict=True)]
        found["largest_difference"] = max(gaps)
    return found


def put(path: Path, found: dict[str, Any]) -> None:
    """Store the result. Other keys of the file (from accepted.py) stay."""
    before = json.loads(path.read_text()) if path.is_file() else {}
    keep(path, before | found)


def worst(rows: list[dict[str, Any]], key: str, vocab: int | None = None) -> float | None:
    return max((row[key] for row in rows if key in row and vocab in (None, row["vocab"])), default=None)


def main() -> None:
    conf: Any = OmegaConf.load(ROOT / "conf" / "config.yaml")
    cli = parser(__doc__)
    cli.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON", help=f"one of {', '.join(PEERS)}, and its Python")
    cli.add_argument("--cases", nargs="+", default=["32000:7", "128000:3"], metavar="VOCABULARY:DEPTH")
    cli.add_argument("--dtypes", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    cli.add_argument("--heads", nargs="+", choices=("trained", "frozen"), default=["trained", "frozen"])
    for name, value in dict(tokens=1024, hidden=512, chunk=conf.loss.chunk, turns=3).items():
        cli.add_argument(f"--{name}", type=int, default=value)
    cli.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    cli.add_argument("--out", type=Path, help="default: benchmarks/results/train_step.json, on a GPU train_step_gpu.json")
    args = cli.parse_args()
    out = args.out or RESULTS / ("train_step.json" if args.device == "cpu" else "train_step_gpu.json")
    pythons = dict(peer.split("=", 1) for peer in args.peer)
    if unknown := set(pythons) - set(PEERS):
        cli.error(f"--peer: {', '.join(unknown)} is none of {', '.join(PEERS)}")
    words = [word for i, word in enumerate(sys.argv[1:]) if "--out" not in (word, sys.argv[i])]  # the result does not depend on --out
    said = [word.partition("=")[0] + "=PYTHON" if "=" in word else word for word in words]
    results = origin(" ".join(["python", "benchmarks/train_step.py", *said]), args.device)
    rows: list[dict[str, Any]] = []
    ours = ["headstart"] if args.device == "cpu" else ["headstart", "torch"]
    table = Table("vocabulary", "depth", "dtype", "head", *(f"{name}, s" for name in ours + [*pythons]), "ratio", "memory", "difference")
    for vocab, depth in (map(int, case.split(":")) for case in args.cases):
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder), vocab, args.hidden, args.tokens, args.device)
            for dtype, head in ((dtype, head) for dtype in args.dtypes for head in args.heads):
                case = dict(vocab=vocab, depth=depth, dtype=dtype, trained=head == "trained", decay=conf.loss.decay)
                case |= {"kernel": "auto"} | {key: getattr(args, key) for key in ("device", "tokens", "hidden", "chunk")}
                rows.append(found := row(pythons, Path(folder), case, args.turns))
                shown = [f"{side['seconds']:.3f}" for side in found["sides"].values()]
                ratios = [f"{found.get(key, float('nan')):.2f}" for key in ("seconds_over_best_peer", "peak_bytes_over_best_peer")]
                table.add_row(f"{vocab:,}", str(depth), dtype, head, *shown, *ratios, f"{found.get('largest_difference', 0.0):.1e}")
                results |= {
                    "seconds_over_best_peer_32k": worst(rows, "seconds_over_best_peer", 32_000),
                    "seconds_over_best_peer_128k": worst(rows, "seconds_over_best_peer", 128_000),
                    "memory_over_best_peer": worst(rows, "peak_bytes_over_best_peer"),
                    "not_measured": [
                        peer for peer in PEERS if peer not in pythons and (args.device == "cuda" or peer != "speculators_torch")
                    ],
                    "rows": rows,
                }
                put(out, results)
    Console().print(table)


if __name__ == "__main__":
    main()
