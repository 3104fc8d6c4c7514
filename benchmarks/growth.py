"""How the time of a training step grows with the length of a row and with the number of drafters trained side by side.

    python benchmarks/growth.py            # some minutes; writes benchmarks/results/growth.json and growth.png

EAGLE drafters of a small random target run on one CPU thread, with the steps of the training loop (the target's pass, unroll, fused loss,
backward, clipping, AdamW). The measurements take turns, in both directions, ``--turns`` times; the fastest step of each counts, in CPU
seconds. A step has one row. Several arms train on the same row, which the target reads once.

- ``lengths``: ``tokens`` of the row, ``seconds`` of a step, ``seconds_per_token``; ``less_attention``: seconds per token without the
  attention of target and drafter, which is the term c T^2 of a fit a + b T + c T^2
- ``attention_share``: share of that term in the longest step
- ``arms``: number of arms, ``seconds`` of a step, ``seconds_per_token``
- ``off_line``: the largest relative distance of a step time from the straight line through the first and the last number of arms
"""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.alternatives import fastest
from benchmarks.frame import keep, origin, parser
from benchmarks.plan_memory import Arm, arm_of, random_target, step
from headstart.inference.decoding.target import Target
from headstart.inference.reports.pictures import COLD, INK, PLAIN, WARM, bare, figure_of

CONFIG = dict(
    model_type="llama", hidden_size=512, intermediate_size=1536, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
    vocab_size=4000, max_position_embeddings=16384,
)  # fmt: skip
LOSS, TRAINER = dict(depth=3, chunk=512, terms={"kl": 1.0}, decay=0.8), dict(optimizer="adamw", lr=1e-3, betas=(0.9, 0.95))


def steps(target: Target, cases: dict[int, tuple[list[Arm], int]], turns: int) -> dict[int, float]:
    """Name -> CPU seconds of a step. Each case: its arms, and the tokens of the row."""

    def one(arms: list[Arm], tokens: int) -> None:
        step(target, arms, torch.randint(target.shape.vocab_size, (1, 1, tokens)))

    return fastest({name: partial(one, *case) for name, case in cases.items()}, turns, time.process_time)


def by_length(seconds: dict[int, float]) -> dict[str, Any]:
    """The figures of ``lengths``. ``seconds``: tokens of the row -> seconds of a step."""
    x, y = np.array(list(seconds), dtype=float), np.array(list(seconds.values()))
    # fit relative errors, so that short steps count as much as long ones
    *_, square = np.linalg.lstsq(np.stack([x**0, x, x**2], 1) / y[:, None], np.ones(len(x)), rcond=None)[0]
    rows = [{"tokens": tokens, "seconds": s, "seconds_per_token": s / tokens, "less_attention": s / tokens - float(square) * tokens}
            for tokens, s in seconds.items()]  # fmt: skip
    return {"lengths": rows, "attention_share": float(square * x[-1] ** 2 / y[-1])}


def by_arms(seconds: dict[int, float], tokens: int) -> dict[str, Any]:
    """The figures of ``arms``. ``seconds``: number of arms -> seconds of a step."""
    rows = [{"arms": count, "seconds": s, "seconds_per_token": s / tokens} for count, s in seconds.items()]
    (first, start), *_, (last, end) = seconds.items()
    line = {count: start + (end - start) * (count - first) / (last - first) for count in seconds}
    return {"arms": rows, "off_line": max(abs(s / line[count] - 1) for count, s in seconds.items())}


def picture(made: dict[str, Any]) -> Any:
    figure = figure_of(3.2)
    left, right = figure.subplots(1, 2)
    for axes, rows, key, colour, mark in ((left, made["lengths"], "tokens", COLD, "o"), (right, made["arms"], "arms", WARM, "D")):
        x, y = [row[key] for row in rows], [1e3 * row["seconds_per_token"] for row in rows]
        axes.plot(x, y, mark + "-", color=colour, markersize=5, linewidth=1.6)
        for place, value in zip(x, y, strict=True):
            axes.annotate(f"{value:.2f}", (place, value), (0, 7), textcoords="offset points", ha="center", fontsize=8.5, color=INK)
        axes.set_ylim(0, 1.25 * max(y))
        bare(axes)
    left.set_xscale("log", base=2)
    left.set_xticks([row["tokens"] for row in made["lengths"]], [f"{row['tokens']:,}" for row in made["lengths"]])
    left.minorticks_off()
    left.set(xlabel="tokens of the row", ylabel="CPU ms a token")
    x, y = [row["tokens"] for row in made["lengths"]], [1e3 * row["less_attention"] for row in made["lengths"]]
    left.plot(x, y, "--", color=PLAIN, linewidth=1)
    left.annotate("without attention's square", (x[-1], y[-1]), (0, -12), textcoords="offset points", ha="right", fontsize=8.5, color=INK)
    right.set_xticks([row["arms"] for row in made["arms"]])
    right.set(xlabel="drafters trained side by side", ylabel="CPU ms a token, all of them")
    figure.suptitle("A step of training: of one drafter, and of several from one pass of the target", fontsize=10, color=INK)
    return figure


def main() -> None:
    cli = parser(__doc__, "growth.json")
    cli.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192])
    cli.add_argument("--arms", type=int, nargs="+", default=[1, 2, 4, 8])
    cli.add_argument("--tokens", type=int, default=512, help="of the row that several arms are trained on")
    cli.add_argument("--turns", type=int, default=3)
    args = cli.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    target = random_target(CONFIG)
    arms = [arm_of(target, {"name": "eagle"}, LOSS, TRAINER) for _ in range(max(args.arms))]
    made = by_length(steps(target, {tokens: (arms[:1], tokens) for tokens in args.lengths}, args.turns))
    made |= by_arms(steps(target, {count: (arms[:count], args.tokens) for count in args.arms}, args.turns), args.tokens)
    for row in (*made["lengths"], *made["arms"]):
        print(" ".join(f"{key} {value:,.5g}" for key, value in row.items()))
    about = {"target": CONFIG, "turns": args.turns, "tokens": args.tokens}
    keep(args.out, made | about | origin(" ".join(["python", *sys.argv])))
    picture(made).savefig(args.out.with_suffix(".png"))
    print(f"{args.out}: attention {made['attention_share']:.0%} of the longest step; arms {made['off_line']:.1%} off a line")


if __name__ == "__main__":
    main()
