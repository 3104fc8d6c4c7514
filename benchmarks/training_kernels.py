"""Compares the C++ attention and loss of CPU training with torch's.

    python benchmarks/training_kernels.py            # two minutes; writes benchmarks/results/training_kernels.json

Causal attention over packed rows, forward and backward, is compared with torch's flash attention for CPUs. The loss of draft logits (KL,
its gradient and the acceptance, including the matrix products) is compared with the same in torch's operations. Both sides take turns;
the fastest of ``--repeats`` counts. Ratios are our time over torch's.

- ``attention``: per shape, ``forward`` and ``backward``: milliseconds of ours and torch's, and the ratio
- ``loss``: the same per vocabulary size
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from rich.table import Table
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.alternatives import console, fastest
from benchmarks.frame import keep, origin, parser
from headstart.heads import native_flash
from headstart.heads.base import TargetEnds
from headstart.heads.flash import flash, flash_backward
from headstart.heads.unembedding import Unembedding
from headstart.trainers.losses import fused_loss

# rows of the batch, heads, key-value heads, tokens, head size
SHAPES = [(4, 4, 2, 512, 32), (4, 8, 8, 512, 32), (4, 9, 3, 512, 64), (1, 9, 3, 2048, 64), (1, 8, 8, 2048, 128)]
VOCABULARIES, TOKENS, DEPTH, HIDDEN = (4096, 32000, 128256), 512, 3, 256
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def beside(ours: Callable[[], Any], theirs: Callable[[], Any], repeats: int) -> dict[str, float]:
    """Milliseconds of both, and the ratio of our time to the other's."""
    found = {name: 1000 * seconds for name, seconds in fastest({"ours": ours, "torch": theirs}, repeats).items()}
    return found | {"ratio": found["ours"] / found["torch"]}


def by_torch(run: Callable[[], Any]) -> Callable[[], Any]:
    def without() -> Any:
        with patch.object(native_flash, "takes", lambda q: False):
            return run()

    return without


def attention(shape: tuple[int, ...], dtype: torch.dtype, repeats: int) -> dict[str, Any]:
    B, h, g, N, d = shape
    q, k, v, grad = (torch.randn(B, N, n, d).to(dtype).transpose(1, 2) for n in (h, g, g, h))
    out, lse = flash(q, k, v)
    return {
        "ours": native_flash.takes(q),
        "forward": beside(lambda: flash(q, k, v), by_torch(lambda: flash(q, k, v)), repeats),
        "backward": beside(run := lambda: flash_backward(grad, q, k, v, out, lse), by_torch(run), repeats),
    }


def loss(vocab: int, dtype: torch.dtype, repeats: int) -> dict[str, float]:
    head_VH = (torch.randn(vocab, HIDDEN) * HIDDEN**-0.5).to(dtype)
    hidden = [torch.randn(1, TOKENS, HIDDEN).to(dtype).requires_grad_() for _ in range(DEPTH)]
    final_BTD, tokens_BT = torch.randn(1, TOKENS, HIDDEN).to(dtype), torch.randint(vocab, (1, TOKENS))
    supervised = [torch.arange(TOKENS)[None] < TOKENS - d for d in range(1, DEPTH + 1)]

    def by(kernel: str) -> Callable[[], Tensor]:
        given = hidden, [Unembedding(head_VH)] * DEPTH, final_BTD, TargetEnds(nn.Identity(), head_VH), tokens_BT, supervised
        return lambda: fused_loss(*given, {"kl": 1.0}, 0.8, 512, kernel=kernel).loss_sum

    return beside(by("native"), by("torch"), repeats)


def main() -> None:
    cli = parser(__doc__, "training_kernels.json")
    cli.add_argument("--repeats", type=int, default=10)
    args = cli.parse_args()
    torch.manual_seed(0)
    made = origin("python benchmarks/training_kernels.py")
    table = Table("", "ours, ms", "torch, ms", "ratio")
    for name, dtype in DTYPES.items():
        for shape in SHAPES:
            found = made.setdefault("attention", {})[f"{name} {' x '.join(map(str, shape))}"] = attention(shape, dtype, args.repeats)
            for part in ("forward", "backward"):
                table.add_row(f"attention {name} {shape}, {part}", *(f"{found[part][x]:.2f}" for x in ("ours", "torch", "ratio")))
        for vocab in VOCABULARIES:
            judged = made.setdefault("loss", {})[f"{name} {vocab}"] = loss(vocab, dtype, args.repeats)
            table.add_row(f"loss {name}, {vocab:,} tokens", *(f"{judged[x]:.2f}" for x in ("ours", "torch", "ratio")))
    console.print(table)
    keep(args.out, made)


if __name__ == "__main__":
    main()
