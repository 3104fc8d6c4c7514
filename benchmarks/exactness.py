"""Does every proposer keep the output of plain decoding, token by token?

    python benchmarks/exactness.py --target tiny       # 200 prompts, every proposer under every tree, both paths: half an hour on one core
    python benchmarks/exactness.py --target second     # the same on another small model (--second-target), all drafters untrained

Prompts are also read in pieces, in batches, and with shared beginnings. At temperature 1 other tree shapes draw other samples. There
``decode=auto`` must repeat itself, and its first tokens must have the target's distribution, which is known exactly: ``p_value`` is the
share of samples drawn exactly from it, equally many tokens each, that are at least as far from it (total variation).

Writes benchmarks/results/exactness.json, case by case. It measures no times, so other work may run.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from rich.progress import track

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.alternatives import accepted_length, console, settings
from benchmarks.frame import ROOT, keep, parser
from benchmarks.pair import first_layers
from headstart.data.prompts import read
from headstart.heads import hub
from headstart.heads.base import Drafter
from headstart.inference.decoding.auto import WORTH
from headstart.inference.decoding.decode import Generation, generate
from headstart.inference.decoding.decoder import generate_batch
from headstart.inference.decoding.policy import AUTO, TreePolicy, fit_depth
from headstart.inference.decoding.propose import Drafting
from headstart.inference.decoding.sampling import SamplingParams
from headstart.inference.decoding.target import Target
from headstart.inference.proposers.open import KEYS, open_proposer
from headstart.inference.provenance import provenance
from headstart.inference.settings import open_decode, open_target
from headstart.inference.speculator import open_speculator

ROWS = 8  # sequences at once in the static engine
PIECE = 7  # tokens of a piece when prompts are read in pieces
TOP_K, FIRST = 3, 4  # candidates per token at temperature 1; how many first tokens are compared
DRAWS = 999  # samples drawn exactly, to compare a decoder's sample with
Prompts = Sequence[Sequence[int]]
Many = Callable[[Prompts], Sequence[Generation]]


def trees() -> dict[str, TreePolicy]:
    """The trees of conf/decode, except tuned ones, which a folder holds."""
    named = {p.stem: settings("inference", f"decode={p.stem}")["decode"] for p in sorted((ROOT / "conf" / "decode").glob("*.yaml"))}
    opened = {name: open_decode(found) for name, found in named.items() if found["proposer"]["kind"] == "drafter"}
    return {name: decode.policy for name, decode in opened.items() if not decode.tuned}


def spread(path: Path, count: int, target: Target, new_tokens: int) -> list[list[int]]:
    """``count`` prompts, spread evenly over the file and cut to the target's context."""
    found = [p["tokens"] for p in read(str(path), target.tokenizer, "prompts")]
    count = min(count, len(found))
    return [found[i * len(found) // count][: target.shape.max_positions - new_tokens] for i in range(count)]


def untrained(name: str, target: Target) -> Drafter:
    """A new drafter with the settings of conf/head, initialised from the target as in training."""
    torch.manual_seed(0)
    overrides = ("target=folder", "target.path=.", "target.name=here", f"head={name}")
    given = {k: v for k, v in settings("config", *overrides)["head"].items() if k != "name"}
    drafter = hub.build(name, target.shape, **given)
    drafter.attach(target.ends)
    drafter.start_from(target.ends)
    return drafter.to(device=target.device, dtype=target.dtype).eval()


def cases(target: Target, trained: Drafter | None, new_tokens: int) -> dict[str, Many]:
    """Every proposer with every tree that it can grow, and the static engine. Without a trained drafter: all heads, untrained."""
    lm, heads = first_layers(target, target.shape.layers // 2), [p.stem for p in sorted((ROOT / "conf" / "head").glob("*.yaml"))]
    drafters = {"trained": trained} if trained is not None else {f"untrained {name}": untrained(name, target) for name in heads}
    drafters["first layers"] = lm
    main = trained or lm
    target.prepack()  # as in normal decoding; after creating drafters that copy its layers
    for drafter in drafters.values():
        drafter.prepack()
    found: dict[str, Many] = {}

    def one_by_one(proposer: Any, policy: TreePolicy) -> Many:
        def run(prompts: Prompts) -> Sequence[Generation]:
            if policy.kind == "auto":
                generate(
                    target, proposer, prompts[0][:8], new_tokens=WORTH, policy=policy, stop_ids=()
                )  # so that decode=auto has measured costs to choose by
            return [generate(target, proposer, p, new_tokens=new_tokens, policy=policy) for p in prompts]

        return run

    def batched(drafter: Drafter | None, policy: TreePolicy | None) -> Many:
        def run(prompts: Prompts) -> Sequence[Generation]:
            if policy is not None and policy.kind == "auto":
                generate_batch(target, drafter, [prompts[0][:8]] * ROWS, new_tokens=WORTH, policy=policy, sequences=ROWS, stop_ids=())
            return generate_batch(target, drafter, prompts, new_tokens=new_tokens, policy=policy, sequences=ROWS)

        return run

    for kind in KEYS:
        if kind != "drafter":
            given = {"layers": target.shape.layers // 2} if "layers" in KEYS[kind] else {}
            alone = kind in ("cascade", "pipelined")  # their drafter is a separate language model, and guesses chains
            proposer = open_proposer({"kind": kind, **given}, target, lm if alone else main)
            found[kind] = one_by_one(proposer, TreePolicy("chain", depth=4) if alone else fit_depth(TreePolicy(), main))
    shaped = fit_depth(AUTO, main)
    found |= {"static plain": batched(None, None), "static plain, in pieces": in_pieces(batched(None, None))}
    found |= {"auto, in pieces": in_pieces(one_by_one(Drafting(main), shaped)), "static auto, in pieces": in_pieces(batched(main, shaped))}
    found |= {"static plain, begun alike": begun_alike(batched(None, None)), "static auto, begun alike": begun_alike(batched(main, shaped))}
    for tree, policy in trees().items():
        for name, drafter in drafters.items():
            fitted = fit_depth(policy, drafter)
            if name == "trained" or policy.kind in ("auto", "dynamic") or (trained is None and name == "first layers"):
                found[f"{name}, {tree}"] = one_by_one(Drafting(drafter), fitted)
                found[f"static {name}, {tree}"] = batched(drafter, fitted)
    return found


def in_pieces(run: Many) -> Many:
    """Inside, prompts are read in pieces of few tokens."""

    def pieces(prompts: Prompts) -> Sequence[Generation]:
        with patch("headstart.inference.decoding.engine.CHUNK", PIECE), patch("headstart.inference.decoding.context.CHUNK", PIECE):
            return run(prompts)

    return pieces


def begun_alike(run: Many) -> Many:
    """Every prompt twice: the second request reuses what the first has read."""
    return lambda prompts: run([prompt for prompt in prompts for _ in range(2)])[1::2]


def compare(target: Target, trained: Drafter | None, prompts: Prompts, new_tokens: int, title: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each case and how many of its tokens differ from plain decoding of single sequences, at temperature 0."""
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


@torch.no_grad()
def exactly(target: Target, prompt: Sequence[int]) -> dict[tuple[int, ...], float]:
    """The exact probability of each short continuation at temperature 1, from the ``TOP_K`` likeliest tokens per position."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for length in range(FIRST):
        tokens = torch.tensor([[*prompt, *said] for said in found])
        _, final = target.read(tokens, torch.arange(len(prompt) + length).expand_as(tokens), ())
        top = target.logits(final[:, -1]).double().topk(TOP_K)
        shares, ids = top.values.softmax(-1).tolist(), top.indices.tolist()
        found = {(*said, ids[i][k]): p * shares[i][k] for (i, (said, p)), k in product(enumerate(found.items()), range(TOP_K))}
    return found


def sampled(target: Target, drafter: Drafter, prompts: Prompts, samples: int) -> dict[str, Any]:
    """``decode=auto`` at temperature 1, one sequence at a time and batched; target and drafter are prepacked."""
    policy, proposer, generator = fit_depth(AUTO, drafter), Drafting(drafter), torch.Generator().manual_seed(0)
    how = [SamplingParams(temperature=1.0, top_k=TOP_K, seed=seed) for seed in range(samples)]

    def alone(prompt: Sequence[int]) -> list[Generation]:
        return [generate(target, proposer, prompt, new_tokens=FIRST, policy=policy, sampling=each, stop_ids=()) for each in how]

    def batched(prompt: Sequence[int]) -> Sequence[Generation]:
        many = [prompt] * samples
        return generate_batch(target, drafter, many, new_tokens=FIRST, policy=policy, sampling=how, stop_ids=(), sequences=ROWS)

    generate(target, proposer, prompts[0], new_tokens=WORTH, policy=policy, sampling=how[0], stop_ids=())  # measures the costs of rounds
    generate_batch(target, drafter, list(prompts[:1]) * len(how[:ROWS]), new_tokens=WORTH, policy=policy, sampling=how[:ROWS], stop_ids=())
    found, again = dict[str, list[float]](), 0
    for prompt in track(prompts, description="temperature 1", console=console, transient=True):
        outcomes = exactly(target, prompt)
        p_X = torch.tensor([*outcomes.values()])
        drawn_DX = torch.stack(
            [torch.multinomial(p_X, samples, True, generator=generator).bincount(minlength=len(p_X)) for _ in range(DRAWS)]
        )
        for name, run in {"alone": alone, "batched": batched}.items():
            said = [tuple(made.tokens) for made in run(prompt)]
            again += sum(tuple(made.tokens) != before for made, before in zip(run(prompt), said, strict=True)) if name == "alone" else 0
            seen = Counter(said)
            seen_X = torch.tensor([seen[outcome] for outcome in outcomes])
            apart = (seen_X / samples - p_X).abs().sum() + 1 - seen_X.sum() / samples  # impossible continuations count in full
            farther = int(((drawn_DX / samples - p_X).abs().sum(1) >= apart).sum())
            found.setdefault(name, []).append((1 + farther) / (1 + DRAWS))
    return {"samples": samples, "tokens": FIRST, "top_k": TOP_K, "p_value": found, "samples_that_differ_when_repeated": again}


def main() -> None:
    cli = parser(__doc__, "exactness.json")
    cli.add_argument("--target", choices=("tiny", "second"), default="tiny")
    cli.add_argument("--speculator", type=Path, default=ROOT / "assets" / "tiny_eagle", help="a drafter trained for the tiny target")
    cli.add_argument("--second-target", type=Path, default=ROOT.parent / "shared" / "targets" / "stories260K")
    cli.add_argument("--prompts", type=Path, default=ROOT.parent / "shared" / "data" / "eval" / "spec_bench.jsonl")
    cli.add_argument("--count", type=int, default=200, help="of prompts")
    cli.add_argument("--new-tokens", type=int, default=16)
    cli.add_argument("--samples", type=int, default=400, help="of each of four prompts at temperature 1")
    cli.add_argument("--threads", type=int, default=1)
    args = cli.parse_args()
    torch.set_num_threads(args.threads)
    choice = "target=tiny" if args.target == "tiny" else "target=folder"
    own = {} if args.target == "tiny" else {"path": str(args.second_target), "dtype": "float32"}
    target = open_target(settings("inference", choice)["target"] | own)
    trained = open_speculator(args.speculator, target) if args.target == "tiny" else None
    asked = spread(args.prompts, args.count, target, args.new_tokens)
    made: dict[str, Any] = {"prompts": len(asked), "new_tokens": args.new_tokens, **provenance(), "cases": {}}

    def done(part: dict[str, Any]) -> None:
        made.update(part)
        every = json.loads(args.out.read_text()) if args.out.is_file() else {}
        keep(args.out, every | {args.target: made})

    for case, counted in compare(target, trained, asked, args.new_tokens, args.target):
        cases = made["cases"] | {case: counted}
        done({f"{what}_tokens": sum(c[what] for c in cases.values()) for what in ("differing", "compared")} | {"cases": cases})
        console.print(f"{args.target}, {case}: {counted['differing']} of {counted['compared']} tokens differ")
    if trained is not None:  # it and its target are prepacked by now
        done({"sampled": sampled(target, trained, spread(args.prompts, 4, target, WORTH), args.samples)})
        console.print(made["sampled"])


if __name__ == "__main__":
    main()
