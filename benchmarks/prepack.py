"""Compares what loading a model for CPU decoding chooses with all alternatives: matrix orders, dtypes of keys, forms of layers.

    python benchmarks/prepack.py        # some minutes; writes benchmarks/results/prepack.json
    python benchmarks/prepack.py --quick --out FILE

At loading, heads/orders.py times the product with a matrix in all orders for some milliseconds and keeps the fastest. Here the same
products are measured for longer, on so many copies of each matrix that they exceed the caches, as in a decoding step. The ways take
turns; the fastest of several rounds counts.

- ``products``: microseconds of one product, by the number of rows: ``linear`` and ``mm`` (torch, dense), ``onednn`` and ``panels`` (of
  heads/native.cpp; absent without a compiler), and ``chosen``, which decoding calls. ``choice`` names that order, ``ratio`` is the
  speed-up of the chosen order over torch's dense one, and ``over_best`` its time divided by the fastest time of all.
- ``attention``: attention over 512 kept rows, with keys and values in the model's dtype and in fp32, and which of the two is chosen.
- ``passes``: milliseconds of a pass with its arg-max, by the number of rows: transformers' modules, the same prepacked, the layers of
  heads/lean.py without heads/native.cpp (``operations``; in older results ``scripts``, as TorchScript), and with it (``lean``), which
  decoding uses.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import planted
from benchmarks.alternatives import console, fastest
from benchmarks.frame import keep, origin, parser
from benchmarks.tiny import open_tiny
from headstart.heads import native, orders, prepack
from headstart.heads.frozen import Product
from headstart.inference.decoding.context import Context
from headstart.inference.decoding.target import Target
from headstart.inference.decoding.tree import Tree

MATRICES = {  # [V, H]
    "tiny: mlp": (448, 160), "tiny: head": (4096, 160), "128M: attention": (768, 768), "128M: mlp": (1792, 768),
    "128M: head": (16000, 768), "1B: attention": (2048, 2048), "1B: mlp": (8192, 2048),
}  # fmt: skip
HEADS = {"128M": (12, 12, 64), "1B": (32, 8, 64)}  # heads of queries, heads of keys, head size
ROWS = (1, 2, 4, 8, 16, 512)
KEPT = 512  # rows that attention reads
BYTES = 128 << 20  # of all copies of a matrix
Calls = dict[str, Callable[[], object]]


def ways(x_NH: Tensor, dense: list[Tensor], packed: dict[str, list[Tensor]], chosen: Sequence[Callable[[Tensor], Tensor]]) -> Calls:
    """The ways to multiply x by all these matrices, which are copies of one matrix."""
    turned, x_1NH = [matrix.t() for matrix in dense], x_NH[None]
    packs = {order: lambda some=some: [orders.packed_product(x_NH, each, None) for each in some] for order, some in packed.items()}
    return {
        "linear": lambda: [F.linear(x_NH, matrix) for matrix in dense],
        "mm": lambda: [torch.mm(x_NH, matrix) for matrix in turned],
        **packs,
        "chosen": lambda: [multiply(x_1NH) for multiply in chosen],
    }


@torch.inference_mode()
def products(size: tuple[int, int], dtype: torch.dtype, rows: Sequence[int], rounds: int) -> dict[int, dict[str, Any]]:
    """Microseconds of one product, by the number of rows."""
    copies = min(max(1, BYTES // (size[0] * size[1] * dtype.itemsize)), 200)
    layers = [nn.Linear(size[1], size[0], bias=False, dtype=dtype) for _ in range(copies)]
    dense = [layer.weight.detach().clone() for layer in layers]
    packed = {order: [pack(matrix) for matrix in dense] for order, pack in orders.packers(dense[0]).items()}
    for layer in layers:
        prepack.prepack(nn.Sequential(layer))
    chosen = [Product(layer) for layer in layers]
    found: dict[int, dict[str, Any]] = {}
    for n in rows:
        few = copies if n < 100 else max(1, copies // 50)
        calls = ways(torch.randn(n, size[1], dtype=dtype), dense[:few], {order: some[:few] for order, some in packed.items()}, chosen[:few])
        took = {name: seconds / few * 1e6 for name, seconds in fastest(calls, rounds).items()}
        first = layers[0]
        by_twin = getattr(first, "twin", None) is not None and n >= first.since  # type: ignore[operator]
        multiplied: Any = first.twin if by_twin else first.weight
        found[n] = took | {
            "choice": "onednn" if multiplied.is_mkldnn else "panels" if multiplied.dim() == 3 else "dense",
            "ratio": min(took["linear"], took["mm"]) / took["chosen"],
            "over_best": took["chosen"] / min(seconds for name, seconds in took.items() if name != "chosen"),
        }
    return found


@torch.inference_mode()
def attention(sizes: tuple[int, int, int], dtype: torch.dtype, rows: Sequence[int], rounds: int) -> dict[str, Any]:
    """Microseconds of attention over one layer's keys, read from memory and not from caches."""
    heads, kv_heads, head_dim = sizes
    found: dict[str, Any] = {"choice": str(orders.memory_dtype(dtype, *sizes) or dtype)[6:]}
    copies = BYTES // (2 * KEPT * kv_heads * head_dim * 4)
    kept = {each: torch.randn(copies, 2, 1, kv_heads, KEPT, head_dim).to(each) for each in (dtype, torch.float32)}
    for n in rows:
        q = torch.randn(1, kv_heads, n * heads // kv_heads, head_dim, dtype=dtype)

        def attend(each: torch.dtype, q: Tensor = q) -> None:
            for k, v in kept[each]:
                F.scaled_dot_product_attention(q.to(each), k, v).to(dtype)

        took = fastest({str(each)[6:]: lambda each=each: attend(each) for each in kept}, rounds)  # type: ignore[misc]
        found[str(n)] = {name: seconds / copies * 1e6 for name, seconds in took.items()}
    return found


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
    cli.add_argument("--quick", action="store_true", help="the smallest matrices alone, to see that it runs")
    cli.add_argument("--threads", type=int, default=2)
    args = cli.parse_args()
    torch.set_num_threads(args.threads)
    command = "python benchmarks/prepack.py" + (" --quick" if args.quick else "")
    result = origin(command)
    rounds, rows = (1, ROWS[:2]) if args.quick else (5, ROWS)
    some = dict(list(MATRICES.items())[:2]) if args.quick else MATRICES

    def done(part: dict[str, Any]) -> None:
        result.update(part)
        keep(args.out, result)

    shown = Table("matrix", "dtype", *(f"{n} rows" for n in rows), title="torch's over the chosen, what is chosen, chosen over the best")
    measured: dict[str, Any] = {}
    for name, size in some.items():
        for dtype in (torch.float32, torch.bfloat16):
            if not orders.prepackable(torch.empty(size, dtype=dtype)):
                shown.add_row(name, str(dtype)[6:], *["never prepacked here"] * len(rows))
                continue
            made = products(size, dtype, rows, rounds)
            measured |= {f"{name}, {str(dtype)[6:]}, {n} rows": found for n, found in made.items()}
            shown.add_row(name, str(dtype)[6:], *(f"{m['ratio']:.2f} {m['choice']} {m['over_best']:.2f}" for m in made.values()))
            done({"products": measured, "worst_over_best": max(m["over_best"] for m in measured.values())})
    console.print(shown)
    done({"attention": {name: attention(sizes, torch.bfloat16, rows[:-1], rounds) for name, sizes in HEADS.items()}})
    console.print(result["attention"])
    models = {"tiny, float32": lambda: open_tiny(False)}
    models |= {} if args.quick else {"128M, bfloat16": lambda: planted.open_pair()[0][0]}
    done({"passes": {name: passes(forms(opened), rows[:-1], rounds) for name, opened in models.items()}})
    console.print(result["passes"])


if __name__ == "__main__":
    main()
