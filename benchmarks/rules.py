"""Accepted lengths: above temperature 0 per tree shape and verification rule, at temperature 0 per ranking of nodes.

    python benchmarks/rules.py     # of assets/tiny_eagle: some minutes
    python benchmarks/rules.py --speculator runs/eagle-tiny-stdlib/speculator --out FILE.json

Writes benchmarks/results/rules.json. ``rows``: for each temperature, shape and rule the accepted length (tokens per target pass, the
target's own token included), its standard error over the prompts (jackknife), and the number of rounds. Prompts and seeds are the same
for all. ``traversal_over_dynamic``: at temperature 1, the tree of decode=auto from temperature 0.5 on (a caterpillar verified by
``traversal``) over the dynamic tree with the same number of nodes.

``ranking``: at temperature 0, dynamic trees whose nodes are ranked by the normalised draft probabilities to the power of ``factor``
(1: unchanged; the default is ``sampling.SHARPER``), with ``least`` and without. Texts have 16 tokens, because tiny repeats itself in
longer ones.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.alternatives import accepted_length, console, jackknife, settings
from benchmarks.frame import ROOT, keep, origin, parser
from benchmarks.tiny import held_out, open_tiny
from headstart.heads.base import Drafter
from headstart.inference.decoding import growth
from headstart.inference.decoding.decoder import generate_batch
from headstart.inference.decoding.policy import AUTO, TreePolicy, caterpillar, fit_depth
from headstart.inference.decoding.sampling import SHARPER, SamplingParams
from headstart.inference.decoding.target import Target
from headstart.inference.settings import open_decode
from headstart.inference.speculator import open_speculator

TEMPERATURES, DYNAMIC = (1.0, 0.6, 0.3), "dynamic"
FACTORS, SHORT = (1.0, 1.5, SHARPER, 3.0), (192, 16)  # SHORT: prompts of ``ranking``, and tokens of each


def cases() -> list[tuple[str, TreePolicy, tuple[str, ...]]]:
    """Shapes of decode=auto's size, by name, with the rules that can verify them."""
    medusa = open_decode(settings("inference", "decode=fixed")["decode"]).policy
    planned = ("top_plus_one", "multi_round", "without_replacement", "traversal")
    return [
        ("chain", TreePolicy("chain", depth=AUTO.depth), ("token", "block")),
        (DYNAMIC, AUTO.own_shape("auto", heat=0), ("top_plus_one",)),
        ("decode=fixed", medusa, planned),
        ("caterpillar", caterpillar(AUTO.depth, AUTO.nodes, AUTO.branch), planned),
    ]


def ranking(target: Target, drafter: Drafter) -> list[dict[str, float]]:
    """The rows of ``ranking``."""
    prompts, rows = held_out(target, SHORT[0]), list[dict[str, float]]()
    for least in (AUTO.least, 0.0):
        shape = fit_depth(replace(AUTO.own_shape("auto", heat=0), least=least), drafter)
        for factor in FACTORS:
            growth.SHARPER = factor
            made = generate_batch(target, drafter, prompts, new_tokens=SHORT[1], policy=shape)
            rows.append({"least": least, "factor": factor, "accepted_length": accepted_length(made), "error": jackknife(made)})
            console.print(rows[-1])
    growth.SHARPER = SHARPER
    return rows


def main() -> None:
    cli = parser(__doc__, "rules.json")
    cli.add_argument("--speculator", type=Path, default=ROOT / "assets" / "tiny_eagle", help="a drafter trained for the tiny target")
    cli.add_argument("--prompts", type=int, default=64)
    cli.add_argument("--new-tokens", type=int, default=96)
    args = cli.parse_args()
    target = open_tiny(True)
    drafter, prompts = open_speculator(args.speculator, target), held_out(target, args.prompts)
    rows: list[dict[str, Any]] = []
    table = Table("temperature", "shape", "nodes", "rule", "accepted length", "error")
    for temperature in TEMPERATURES:
        for name, shape, rules in cases():
            policy = fit_depth(shape, drafter)
            for rule in rules:
                how = [SamplingParams(temperature, rule=rule, seed=i) for i in range(len(prompts))]
                made = generate_batch(target, drafter, prompts, new_tokens=args.new_tokens, policy=policy, sampling=how)
                row = {"temperature": temperature, "shape": name, "nodes": policy.nodes, "depth": policy.depth, "rule": rule}
                length, error, rounds = accepted_length(made), jackknife(made), sum(len(each.emitted) for each in made)
                rows.append(row | {"accepted_length": length, "error": error, "rounds": rounds})
                table.add_row(f"{temperature:g}", name, str(policy.nodes), rule, f"{length:.2f}", f"{error:.2f}")
                console.print(rows[-1])
    at_1 = {(row["shape"], row["rule"]): row["accepted_length"] for row in rows if row["temperature"] == 1}
    gain = at_1["caterpillar", "traversal"] / at_1[DYNAMIC, "top_plus_one"]
    found = {
        "rows": rows,
        "ranking": ranking(target, drafter),
        "traversal_over_dynamic": gain,
        "drafter": drafter.config["head"],
        "new_tokens": args.new_tokens,
        "prompts": len(prompts),
    }
    keep(args.out, found | origin("python benchmarks/rules.py"))
    console.print(table)
    console.print(f"{args.out}: traversal of a caterpillar over the dynamic tree: {gain:.2f}")


if __name__ == "__main__":
    main()
