"""Is the output of plain decoding kept, token by token, by everything that guesses?

    python benchmarks/exactness.py --target tiny       # 200 prompts, every proposer under every tree, both paths: half an hour on one core
    python benchmarks/exactness.py --target second     # the same on another small model (--second-target), all drafters untrained

Writes benchmarks/results/exactness.json, case by case. No timings: it may run beside other work. decode.py has it among its figures.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.alternatives import ROOT, accepted_length, console, settings
from benchmarks.pair import first_layers
from data.prompts import prompts as read_prompts
from heads import hub
from heads.base import Drafter
from heads.files import put_text
from inference.decode import Generation, generate
from inference.engine import generate_batch
from inference.propose import Drafting, TreePolicy, fit_depth
from inference.proposers.open import KEYS, open_proposer
from inference.provenance import provenance
from inference.report import differs
from inference.settings import open_decode, open_speculator, open_target
from inference.target import Target

ROWS = 8  # sequences at once in the static engine
Prompts = Sequence[Sequence[int]]
Many = Callable[[Prompts], Sequence[Generation]]


def trees() -> dict[str, TreePolicy]:
    """Those of conf/decode."""
    named = {p.stem: settings("inference", f"decode={p.stem}")["decode"] for p in sorted((ROOT / "conf" / "decode").glob("*.yaml"))}
    return {name: open_decode(found).policy for name, found in named.items() if found["proposer"]["kind"] == "drafter"}


def spread(path: Path, count: int, target: Target, new_tokens: int) -> list[list[int]]:
    """So many prompts, evenly over the file, cut to what fits the target's context."""
    found = [p["tokens"] for p in read_prompts(str(path), None, target.tokenizer)]
    count = min(count, len(found))
    return [found[i * len(found) // count][: target.shape.max_positions - new_tokens] for i in range(count)]


def untrained(name: str, target: Target) -> Drafter:
    """A fresh one with the arguments of conf/head, starting from the target as it does in training."""
    torch.manual_seed(0)
    overrides = ("target=folder", "target.path=.", "target.name=here", f"head={name}")
    given = {k: v for k, v in settings("config", *overrides)["head"].items() if k != "name"}
    drafter = hub.build(name, target.shape, **given)
    drafter.attach(target.ends)
    drafter.start_from(target.ends)
    return drafter.to(device=target.device, dtype=target.dtype).eval()


def cases(target: Target, trained: Drafter | None, new_tokens: int) -> dict[str, Many]:
    """Every proposer under every tree that it can grow, and the static engine. Without a trained drafter: all heads, untrained."""
    lm, heads = first_layers(target, target.shape.layers // 2), [p.stem for p in sorted((ROOT / "conf" / "head").glob("*.yaml"))]
    drafters = {"trained": trained} if trained is not None else {f"untrained {name}": untrained(name, target) for name in heads}
    drafters["first layers"] = lm
    main = trained or lm
    target.prepack()  # as the doors to decoding do; after the drafters that start as copies of its layers
    for drafter in drafters.values():
        drafter.prepack()
    found: dict[str, Many] = {}

    def one_by_one(proposer: Any, policy: TreePolicy) -> Many:
        return lambda prompts: [generate(target, proposer, p, new_tokens=new_tokens, policy=policy) for p in prompts]

    def batched(drafter: Drafter | None, policy: TreePolicy | None) -> Many:
        return lambda prompts: generate_batch(target, drafter, prompts, new_tokens=new_tokens, policy=policy, rows=ROWS)

    for kind in KEYS:
        if kind != "drafter":
            given = {"layers": target.shape.layers // 2} if "layers" in KEYS[kind] else {}
            alone = kind in ("cascade", "pipelined")  # their drafter is a language model of its own, and guesses chains
            proposer = open_proposer({"kind": kind, **given}, target, lm if alone else main)
            found[kind] = one_by_one(proposer, TreePolicy("chain", depth=4) if alone else fit_depth(TreePolicy(), main))
    found["static plain"] = batched(None, None)
    for tree, policy in trees().items():
        for name, drafter in drafters.items():
            fitted = fit_depth(policy, drafter)
            if name == "trained" or policy.kind == "dynamic" or (trained is None and name == "first layers"):
                found[f"{name}, {tree}"] = one_by_one(Drafting(drafter), fitted)
                found[f"static {name}, {tree}"] = batched(drafter, fitted)
    return found


def compare(target: Target, trained: Drafter | None, prompts: Prompts, new_tokens: int, title: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each case, and how many of its tokens differ from plain decoding, one sequence at a time, at temperature 0."""
    everything = cases(target, trained, new_tokens)
    plain = [generate(target, None, p, new_tokens=new_tokens).tokens for p in prompts]
    for name, run in track(everything.items(), description=f"exactness, {title}", console=console, transient=True):
        made = run(prompts)
        yield (
            name,
            {
                "compared": sum(map(len, plain)),
                "differing": sum(unequal(a, b.tokens) for a, b in zip(plain, made, strict=True)),
                "accepted_length": accepted_length(made),
            },
        )


def unequal(a: Sequence[int], b: Sequence[int]) -> int:
    return sum(x != y for x, y in zip(a, b, strict=False)) + abs(len(a) - len(b))


def half_precision(target: Target, drafter: Drafter, prompts: Prompts, new_tokens: int) -> dict[str, Any]:
    """In bf16 the shape of a pass decides between logits that are nearly equal: every difference is counted, with the gap between
    the two best logits where it begins. The tolerance is that of inference/report.py: 8 roundings of the best logit.
    """
    plain = [generate(target, None, p, new_tokens=new_tokens).tokens for p in prompts]
    compared, gaps = 0, []
    for policy in track(list(trees().values()), description="bf16", console=console, transient=True):
        for prompt, said in zip(prompts, plain, strict=True):
            made = generate(target, Drafting(drafter), prompt, new_tokens=new_tokens, policy=fit_depth(policy, drafter))
            compared += 1
            if (apart := differs(target, prompt, said, [made.tokens])) is not None:
                gaps.append(apart)
    return {
        "compared_outputs": compared,
        "differing_outputs": len(gaps),
        "over_tolerance": sum(not gap["tie"] for gap in gaps),
        "tolerance": "8 eps of bfloat16 times the best logit",
        "differences": gaps,
    }


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--target", choices=("tiny", "second"), default="tiny")
    cli.add_argument("--speculator", type=Path, default=ROOT / "assets" / "tiny_eagle", help="a drafter trained for the tiny target")
    cli.add_argument("--second-target", type=Path, default=ROOT.parent / "shared" / "targets" / "stories260K")
    cli.add_argument("--prompts", type=Path, default=ROOT.parent / "shared" / "data" / "eval" / "spec_bench.jsonl")
    cli.add_argument("--count", type=int, default=200, help="of prompts")
    cli.add_argument("--new-tokens", type=int, default=16)
    cli.add_argument("--threads", type=int, default=1)
    args = cli.parse_args()
    torch.set_num_threads(args.threads)
    choice = "target=tiny" if args.target == "tiny" else "target=folder"
    own = {} if args.target == "tiny" else {"path": str(args.second_target), "dtype": "float32"}
    target = open_target(settings("inference", choice)["target"] | own)
    trained = open_speculator(args.speculator, target) if args.target == "tiny" else None
    asked = spread(args.prompts, args.count, target, args.new_tokens)
    path, found, here = ROOT / "benchmarks" / "results" / "exactness.json", {}, provenance()
    for case, counted in compare(target, trained, asked, args.new_tokens, args.target):
        found[case] = counted
        counts = {f"{what}_tokens": sum(c[what] for c in found.values()) for what in ("differing", "compared")}
        made = {"prompts": len(asked), "new_tokens": args.new_tokens} | counts | here | {"cases": found}
        every = json.loads(path.read_text()) if path.is_file() else {}
        put_text(path, json.dumps(every | {args.target: made}, indent=1) + "\n")
        console.print(f"{args.target}, {case}: {counted['differing']} of {counted['compared']} tokens differ")


if __name__ == "__main__":
    main()
