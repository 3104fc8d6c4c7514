"""What decoding gains on a CPU: every figure beside its alternative, in one process, prompt by prompt in turn, of repeats the fastest.

    python benchmarks/decode.py            # 10 to 15 minutes on two cores; writes benchmarks/results/decode_cpu.json
    python benchmarks/decode.py --quick    # every key again, over fewer prompts, in under 3 minutes

Planted pair (planted.py, pair.py): a random Llama of 128M weights in bf16, its first layer is the drafter of both sides. All
settings of both sides are tried on prompts of their own, the fastest of each side is measured on others. Ours are prepacked
(heads/prepack.py), as every door to decoding does it; transformers has the models as it loads them.

- ``vs_hf_assisted``: seconds of transformers' assisted generation over ours, prompts included, same pair and new tokens;
  ``vs_hf_assisted_default``: with its settings as they come (20 guesses, stopped where the drafter is in doubt);
  ``vs_hf_assisted_not_prepacked``: our seconds with the models as transformers has them.
- A plain step is one pass of one row through the target's layers, its head and the arg-max.
- ``v``: the same for a tree of so many nodes (nodes + 1 rows), over the plain step.
- ``c``: one level of drafting over the plain step: the drafter's pass over the rows expanded at a level, its head over them,
  their top-k. A round of K levels is ``begin`` on the rows that were accepted and K - 1 ``step``: begin counts as one level.
- ``efficiency``: measured over predicted speed-up. Predicted: tau / (v(n) + K c), the mean over the rounds that were decoded,
  whose nodes and levels are counted as they run. Measured: seconds a round of plain decoding over seconds a round of
  ours, times tau, without each prompt's pass and its first round, in which the drafter reads it. What is lost is
  everything else: building trees, verdicts, caches, Python.

Tiny target, its trained drafter: ``speedup_tiny`` over plain decoding (the faster one of our two paths), ``speedup_tiny_vs_generate``
over transformers' ``generate``, prompts included. ``acceptance_by_rule_t1``: accepted length at temperature 1.

Exactness (exactness.py): ``differing_tokens`` of ``compared_tokens``, every proposer under every tree, one sequence at a time and
batched, against plain decoding in fp32. Where nothing is trained for a target, its first layers and untrained drafters guess.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import exactness, planted
from benchmarks.alternatives import ROOT, accepted_length, console, dynamic, figures, in_turn, seconds, settings, static, transformers
from data import stdlib
from heads.base import Drafter
from heads.files import put_text
from inference.engine import generate_batch
from inference.propose import Drafting, fit_depth
from inference.provenance import machine, provenance
from inference.sampling import Sampling
from inference.settings import open_decode, open_guesser, open_speculator, open_target
from inference.target import Target
from inference.verify import RULES

FIXED = ["vs_hf_assisted", "efficiency", "speedup_tiny", "speedup_tiny_vs_generate", "v", "c"]  # keys of the result
FIXED += ["differing_tokens", "compared_tokens", "acceptance_by_rule_t1", "commit"]


def open_tiny(to_decode: bool, *overrides: str) -> Target:
    return open_target(settings("inference", "target=tiny", *overrides)["target"], to_decode)


def tiny(target: Target, speculator: Path, prompts: list[list[int]], repeats: int) -> dict[str, Any]:
    """The settings of conf/decode, or those that the tuner has left beside the speculator."""
    decode = open_decode(settings("inference")["decode"])
    drafter, _, policy = open_guesser(decode, str(speculator), target, decode.tuned)
    assert drafter is not None
    policy, new_tokens = fit_depth(policy or decode.policy, drafter), decode.new_tokens
    alternatives = {
        "plain": dynamic(target, None, None, new_tokens),
        "ours": dynamic(target, Drafting(drafter), policy, new_tokens),
        "plain, static": static(target, None, None, new_tokens),
        "ours, static": static(target, drafter, policy, new_tokens),
        "generate": transformers(open_tiny(False), new_tokens),
    }
    in_turn(alternatives, [prompts[0][:8]], "tiny: first calls are slow")
    runs = in_turn(alternatives, prompts, "tiny", repeats)
    took = {name: seconds(made) for name, made in runs.items()}
    best = min(took["ours"], took["ours, static"])
    return {
        "speedup_tiny": min(took["plain"], took["plain, static"]) / best,
        "speedup_tiny_vs_generate": took["generate"] / best,
        "tiny": {
            "tree": vars(policy),
            "drafter": drafter.config["head"],
            "dtype": str(target.dtype),
            "new_tokens": new_tokens,
            "prompts": len(prompts),
            "runs": figures(runs),
            "prompts_that_differ": sum(len({tuple(made[i].tokens) for made in runs.values()}) > 1 for i in range(len(prompts))),
        },
    }


def rules(target: Target, drafter: Drafter, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
    """Accepted length at temperature 1 of every rule, with a tree that suits it."""
    trees = exactness.trees()
    suited = {name: "chain" if r.chain_only else "dynamic" if r.draw == "top_plus_one" else "fixed" for name, r in RULES.items()}
    cases = {name: (name, tree) for name, tree in suited.items()} | {"top_plus_one_fixed": ("top_plus_one", "fixed")}
    found, shapes = {}, {}
    for name, (rule, tree) in cases.items():
        how = [Sampling(temperature=1.0, rule=rule, seed=i) for i in range(len(prompts))]
        policy = fit_depth(trees[tree], drafter)
        made = generate_batch(target, drafter, prompts, new_tokens=new_tokens, policy=policy, sampling=how)
        found[name] = accepted_length(made)
        shapes[name] = f"{policy.kind}, {policy.nodes} nodes, depth {policy.depth}; {sum(len(g.emitted) for g in made)} rounds"
    return {"acceptance_by_rule_t1": found, "trees_of_rules": shapes}


def held_out(target: Target, count: int) -> list[list[int]]:
    """The prompts of the report of ``python train.py`` (its seed is 0)."""
    found = stdlib.prompts(count, settings("config")["trainer"]["seed"], target.tokenizer)
    return [target.tokenizer(p["text"], add_special_tokens=False)["input_ids"] for p in found]


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--quick", action="store_true", help="fewer prompts: under 3 minutes on two cores")
    cli.add_argument("--speculator", type=Path, default=ROOT / "assets" / "tiny_eagle", help="a drafter trained for the tiny target")
    cli.add_argument("--prompts", type=Path, default=ROOT.parent / "shared" / "data" / "eval" / "spec_bench.jsonl", help="for exactness")
    cli.add_argument("--second-target", type=Path, default=ROOT.parent / "shared" / "targets" / "stories260K", help="for exactness")
    cli.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "decode_cpu.json")
    cli.add_argument("--threads", type=int, default=2)
    args = cli.parse_args()
    torch.set_num_threads(args.threads)
    from transformers.utils import logging

    logging.set_verbosity_error()
    began, quick = time.perf_counter(), args.quick
    result: dict[str, Any] = dict.fromkeys(FIXED) | {"quick": quick} | provenance()
    result |= {"machine": machine(torch.device("cpu")), "command": "python benchmarks/decode.py" + (" --quick" if quick else "")}

    def done(part: dict[str, Any]) -> None:
        result.update(part)
        result["seconds"] = time.perf_counter() - began
        args.out.parent.mkdir(parents=True, exist_ok=True)
        put_text(args.out, json.dumps(result, indent=1) + "\n")

    done(planted.measure(quick))
    console.print("planted pair:", {key: result[key] for key in ("vs_hf_assisted", "vs_hf_assisted_default", "efficiency", "v", "c")})
    if not quick:
        done({"planted_of_higher_acceptance": planted.measure(True, planted.SMALLER)})
    target = open_tiny(True)
    prompts = held_out(target, 5 if quick else 16)
    trained = None
    if (args.speculator / "config.json").is_file():
        done(tiny(target, args.speculator, prompts, 2 if quick else 3))
        trained = open_speculator(args.speculator, target)
        done(rules(target, trained, held_out(target, 16 if quick else 64), 64))
        half = open_tiny(True, "target.dtype=bfloat16")
        done({"bf16": exactness.half_precision(half, open_speculator(args.speculator, half), prompts, 64)})
        console.print("tiny:", {key: result[key] for key in ("speedup_tiny", "speedup_tiny_vs_generate", "acceptance_by_rule_t1")})
    else:
        console.print("speedup_tiny, acceptance_by_rule_t1: not measured, --speculator has no trained drafter of the tiny target")
    if not args.prompts.is_file():
        console.print("differing_tokens: not measured, --prompts is not there: give a JSONL file of prompts")
        return
    fresh = open_tiny(False)  # of whose layers drafters are copied
    targets = {"tiny": (fresh, trained and open_speculator(args.speculator, fresh))}
    if args.second_target.is_dir():
        second = settings("inference", "target=folder")["target"] | {"path": str(args.second_target), "dtype": "float32"}
        targets["second"] = (open_target(second), None)
    else:
        console.print("exactness on a second target: not measured, --second-target is not there")
    found: dict[str, Any] = {}
    for name, (model, drafter) in targets.items():
        asked = exactness.spread(args.prompts, 2 if quick else 200, model, 32)
        for case, counted in exactness.compare(model, drafter, asked, 32, name):
            found[f"{name}: {case}"] = counted
            counts = {f"{what}_tokens": sum(c[what] for c in found.values()) for what in ("differing", "compared")}
            done(counts | {"exactness": {"prompts": len(asked), "targets": list(targets), "cases": found}})
    console.print(f"exactness: {result['differing_tokens']} of {result['compared_tokens']} tokens differ, {len(found)} cases")
    console.print(f"{args.out}: {result['seconds']:.0f} seconds")


if __name__ == "__main__":
    main()
