"""What a product with a prepacked matrix (heads/prepack.py) takes, against torch's own linear layer over the dense one.

    python benchmarks/prepack.py        # one minute; writes benchmarks/results/prepack.json

Matrices of the tiny target, of the planted pair of decode.py and of a Llama of 1B, as many copies of each as exceed the caches, so
that they come from memory as in a decoding step. In turn, of several rounds the fastest. ``ratio``: dense over prepacked.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.alternatives import ROOT, console
from heads.files import put_text
from heads.prepack import prepack_beside, prepackable, product
from inference.provenance import machine, provenance

MATRICES = {  # [V, H]
    "tiny: mlp": (448, 160), "tiny: head": (4096, 160), "128M: attention": (768, 768), "128M: mlp": (1792, 768),
    "128M: head": (16000, 768), "1B: attention": (2048, 2048), "1B: mlp": (8192, 2048),
}  # fmt: skip
ROWS = (1, 4, 16, 512)
BYTES = 128 << 20  # of all copies of a matrix


def fastest(calls: dict[str, Callable[[], None]], rounds: int = 5) -> dict[str, float]:
    """Seconds."""
    found = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds + 1):  # the first calls are slow
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            found[name] = min(found[name], time.perf_counter() - start)
    return found


@torch.no_grad()
def measure(size: tuple[int, int], rows: int, dtype: torch.dtype) -> dict[str, float]:
    """Microseconds of one product."""
    copies = max(1, BYTES // (size[0] * size[1] * dtype.itemsize))
    copies = min(copies, 200) if rows < 100 else min(copies, 4)
    dense = [torch.randn(size, dtype=dtype) for _ in range(copies)]
    twins = [matrix.clone() for matrix in dense]
    for twin in twins:
        prepack_beside(twin)
    x = torch.randn(rows, size[1], dtype=dtype)

    def call(multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], matrices: list[torch.Tensor]) -> Callable[[], None]:
        def run() -> None:
            for matrix in matrices:
                multiply(x, matrix)

        return run

    took = fastest({"dense": call(F.linear, dense), "prepacked": call(product, twins)})
    return {name: seconds / copies * 1e6 for name, seconds in took.items()} | {"ratio": took["dense"] / took["prepacked"]}


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "prepack.json")
    cli.add_argument("--threads", type=int, default=2)
    args = cli.parse_args()
    torch.set_num_threads(args.threads)
    result: dict[str, Any] = {"command": "python benchmarks/prepack.py", "machine": machine(torch.device("cpu"))} | provenance()
    shown = Table("matrix", *(f"{dtype}, {rows} rows" for dtype in ("fp32", "bf16") for rows in ROWS), title="dense over prepacked")
    for name, size in MATRICES.items():
        cells = []
        for dtype in (torch.float32, torch.bfloat16):
            if not prepackable(torch.empty(size, dtype=dtype)):
                cells += ["not prepacked here"] * len(ROWS)
                continue
            for rows in ROWS:
                made = result.setdefault("microseconds", {})[f"{name}, {str(dtype)[6:]}, {rows} rows"] = measure(size, rows, dtype)
                cells.append(f"{made['ratio']:.2f}")
        shown.add_row(name, *cells)
        put_text(args.out, json.dumps(result, indent=1) + "\n")
    console.print(shown)


if __name__ == "__main__":
    main()
