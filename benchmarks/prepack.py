"""Compares the forms in which a model may decode on a CPU: as transformers loads it, and as loading for decoding changes it.

    python benchmarks/prepack.py        # some minutes; writes benchmarks/results/prepack.json
    python benchmarks/prepack.py --quick --out FILE

``passes``: milliseconds of a pass with its arg-max, by the number of rows: transformers' modules, the same prepacked, the layers of
heads/lean.py without heads/native.cpp (``operations``; in older results ``scripts``, as TorchScript), and with it (``lean``), which
decoding uses. The forms take turns; the fastest of several rounds counts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import planted
from benchmarks.alternatives import console, fastest
from benchmarks.frame import keep, origin, parser
from benchmarks.tiny import open_tiny
from headstart.heads import native, orders
from headstart.inference.decoding.context import Context
from headstart.inference.decoding.target import Target
from headstart.inference.decoding.tree import Tree

ROWS = (1, 2, 4, 8, 16)


@torch.inference_mode()
def passes(targets: dict[str, Target], rows: Sequence[int], rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds of a pass after 64 kept rows, by the number of rows."""
    contexts = {name: Context(target, (), 64 + max(rows)) for name, target in targets.items()}
    for name, context in contexts.items():
        context.read_prompt(torch.arange(64) % targets[name].shape.vocab_size)
        context.keep(64)

    def once(name: str, n: int) -> None:
        context = contexts[name]
        _, final = context.read(torch.arange(n), Tree.of(range(1, n), range(-1, n - 2)))
        targets[name].logits(final).argmax(-1)
        context.keep(0)

    found = {}
    for n in rows:
        took = fastest({name: lambda name=name, n=n: once(name, n) for name in targets}, 4 * rounds)  # type: ignore[misc]
        found[str(n)] = {name: 1e3 * seconds for name, seconds in took.items()}
    return found


def forms(opened: Callable[[], Target]) -> dict[str, Target]:
    """A target as transformers loads it, prepacked, and lean: without and with the native library."""
    packed = opened().prepack()
    packed.reader.lean = None
    with mock.patch.object(native, "library", return_value=None), mock.patch.object(orders, "TIMES", {}):
        operations = opened().prepack()
    return {"modules": opened(), "prepacked": packed, "operations": operations, "lean": opened().prepack()}


def main() -> None:
    cli = parser(__doc__, "prepack.json")
    cli.add_argument("--quick", action="store_true", help="tiny alone, to see that it runs")
    cli.add_argument("--threads", type=int, default=2)
    args = cli.parse_args()
    torch.set_num_threads(args.threads)
    made = origin("python benchmarks/prepack.py" + (" --quick" if args.quick else ""))
    models = {"tiny, float32": lambda: open_tiny(False)}
    models |= {} if args.quick else {"128M, bfloat16": lambda: planted.open_pair()[0][0]}
    rows, rounds = (ROWS[:1], 1) if args.quick else (ROWS, 5)
    found = {name: passes(forms(opened), rows, rounds) for name, opened in models.items()}
    console.print(found)
    keep(args.out, made | {"passes": found})


if __name__ == "__main__":
    main()
