"""What decoding gains on a CPU: every figure against an alternative, in one process; the sides take turns on every prompt.

    python benchmarks/decode.py                      # about 20 minutes on two cores; writes benchmarks/results/decode_cpu.json
    python benchmarks/decode.py --vllm PYTHON        # also against vLLM: the Python of an environment with its CPU build; 40 minutes
    python benchmarks/decode.py --quick              # all figures over fewer prompts, in a few minutes: decode_cpu_quick.json
    python benchmarks/decode.py --only versus --out FILE      # only some parts; FILE keeps the others

Planted pair (planted.py, pair.py): a random Llama of 128M weights in bf16, whose first layer is the drafter of all sides. All settings of
both sides are tried on separate prompts; the fastest of each side is then measured, and its fastest repeat counts. Our models are
prepacked (heads/prepack.py, heads/native.cpp), as in normal decoding; transformers has the models as it loads them.

- ``vs_hf_assisted``: seconds of transformers' assisted generation over ours, prompts included, with the same pair and new tokens;
  ``vs_hf_assisted_default``: with its default settings (20 guesses, fewer if the drafter is not confident);
  ``vs_hf_assisted_not_prepacked``: with our models not prepacked either.
- A plain step is one pass of one row through the target's layers, its head and the arg-max.
- ``v``: a pass over a tree, by its number of nodes (nodes + 1 rows), over the plain step.
- ``c``: one level of drafting over the plain step: the drafter's pass over the rows expanded at a level, its head over them, and their
  top-k. A round of K levels is ``begin`` on the accepted rows and K - 1 ``step``; ``begin`` counts as one level.
- ``efficiency``: measured over predicted speed-up. Predicted: tau / (v(n) + K c), the mean over all decoded rounds, with their actual
  nodes and levels. Measured: seconds per plain round over seconds per round of ours, times tau, without each prompt's pass and its
  first round, in which the drafter reads the prompt. The loss is everything else: building trees, verdicts, caches, Python.

Tiny target with its trained drafter: ``speedup_tiny`` over plain decoding (the faster of our two paths), prompts included.

Many sequences: ``prefill_64x8_over_generate``: plain decoding of 64 prompts of 64 tokens, 8 new tokens each, over transformers'
``generate`` with the same batch; ``choices_8_over_generate``: 8 choices of 64 tokens for one prompt of 256 at temperature 1, over its
num_return_sequences.

Versus (versus.py): tokens per second of single sequences. The sides take turns on every prompt; of the ratios per round over all prompts
the median counts. ``plain_tiny_over_generate``, ``plain_pair_over_generate``: over transformers with unchanged weights. With --vllm
``plain_tiny_over_vllm``, ``drafted_tiny_over_vllm``, ``plain_pair_over_vllm``, ``drafted_pair_over_vllm``: over the fastest of vLLM's
settings; our drafted side is ``decode=auto``. ``auto_over_best_fixed``: decode=auto over the shape that the tuner finds fastest here
(inference/reports/tune.py, on other prompts). ``speedup_tiny_t1``, ``auto_over_best_fixed_t1``: at temperature 1, over plain decoding, and
over the best of plain decoding and two chains.

Measured by other scripts, and repeated here (``--only others`` does nothing else): ``differing_tokens`` of ``compared_tokens`` by
exactness.py, ``acceptance_by_rule_t1`` by rules.py (accepted length at temperature 1 of each rule's best shape).
``speedup_tiny_vs_generate`` is ``speedup_tiny`` times ``plain_tiny_over_generate``.

``parts``: the origin of each part.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import planted, tiny, versus
from benchmarks.alternatives import console
from benchmarks.frame import RESULTS, ROOT, keep, origin, parser
from headstart.inference.speculator import open_speculator

VERSUS = ["plain_tiny_over_vllm", "drafted_tiny_over_vllm", "plain_pair_over_vllm", "drafted_pair_over_vllm", "plain_tiny_over_generate",
          "plain_pair_over_generate", "auto_over_best_fixed", "auto_over_best_fixed_t1", "speedup_tiny_t1"]  # fmt: skip
PARTS = {  # part -> the figures that its function returns
    "planted": ["vs_hf_assisted", "vs_hf_assisted_default", "vs_hf_assisted_not_prepacked", "efficiency", "v", "c"],
    "tiny": ["speedup_tiny"],
    "many": ["prefill_64x8_over_generate", "choices_8_over_generate"],
    "versus": VERSUS,
    "others": ["differing_tokens", "compared_tokens", "acceptance_by_rule_t1", "speedup_tiny_vs_generate"],
}
Found = Iterator[dict[str, Any]]


def of_planted(args: argparse.Namespace) -> Found:
    yield planted.measure(args.quick)


def of_tiny(args: argparse.Namespace) -> Found:
    target = tiny.open_tiny(True)
    yield tiny.tiny(target, args.speculator, tiny.held_out(target, 5 if args.quick else 16), 2 if args.quick else 3)


def of_many(args: argparse.Namespace) -> Found:
    target = tiny.open_tiny(True)
    yield tiny.many(target, open_speculator(args.speculator, target), 3 if args.quick else 9)


def of_versus(args: argparse.Namespace) -> Found:
    return versus.measure(args.speculator, args.vllm, args.threads, args.quick)


def of_others(args: argparse.Namespace) -> Found:
    here, exact, rules = (json.loads(path.read_text()) for path in (args.out, RESULTS / "exactness.json", RESULTS / "rules.json"))
    found: dict[str, Any] = {key: sum(run[key] for run in exact.values()) for key in ("differing_tokens", "compared_tokens")}
    sampled = sorted((row for row in rules["rows"] if row["temperature"] == 1), key=lambda row: row["accepted_length"])
    found["acceptance_by_rule_t1"] = {row["rule"]: row["accepted_length"] for row in sampled}  # the largest comes last
    factors = [here.get(key) for key in ("speedup_tiny", "plain_tiny_over_generate")]
    yield found | {"speedup_tiny_vs_generate": None if None in factors else factors[0] * factors[1]}


def missing(args: argparse.Namespace) -> dict[str, str]:
    """The parts that cannot be measured -> why."""
    if (args.speculator / "config.json").is_file():
        return {}
    return dict.fromkeys(("tiny", "many", "versus"), f"--speculator: {args.speculator} has no config.json")


def main() -> None:
    cli = parser(__doc__)
    cli.add_argument("--quick", action="store_true", help="fewer prompts")
    cli.add_argument("--only", nargs="+", choices=PARTS, default=[*PARTS], metavar="PART", help=f"of {', '.join(PARTS)}")
    cli.add_argument("--vllm", metavar="PYTHON", help="the Python of an environment with vLLM's CPU build")
    cli.add_argument("--speculator", type=Path, default=ROOT / "assets" / "tiny_eagle", help="a drafter trained for the tiny target")
    cli.add_argument("--out", type=Path)
    cli.add_argument("--threads", type=int, default=2)
    args = cli.parse_args()
    args.out = args.out or RESULTS / ("decode_cpu_quick.json" if args.quick else "decode_cpu.json")
    torch.set_num_threads(args.threads)
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    said = {"--quick": args.quick, "--vllm PYTHON": args.vllm, f"--only {' '.join(args.only)}": set(args.only) != set(PARTS)}
    command = " ".join(["python benchmarks/decode.py", *(word for word, given in said.items() if given)])
    here = origin(command) | {"quick": args.quick}
    result: dict[str, Any] = {key: None for keys in PARTS.values() for key in keys}
    if args.out.is_file() and set(args.only) != set(PARTS):
        result |= json.loads(args.out.read_text())
    result |= here
    for part in args.only:
        if why := missing(args).get(part):
            console.print(f"{part}: not measured. {why}", style="red", markup=False, highlight=False)
            continue
        console.rule(part, align="left")
        result |= dict.fromkeys(PARTS[part])
        began = time.perf_counter()
        ways = {"planted": of_planted, "tiny": of_tiny, "many": of_many, "versus": of_versus, "others": of_others}
        for found in ways[part](args):
            measured = result.get("parts", {}) | {part: here | {"seconds": time.perf_counter() - began}}
            result |= found | {"parts": measured}
            keep(args.out, result)
        console.print({key: result[key] for key in PARTS[part]})
    console.print(f"{args.out}")


if __name__ == "__main__":
    main()
