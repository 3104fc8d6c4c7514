"""The tiny target and its trained drafter: single sequences, and many sequences at once. See decode.py."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.alternatives import (
    Run,
    dynamic,
    figures,
    in_turn,
    over,
    rates,
    seconds,
    settings,
    static,
    turns,
)
from headstart.data import stdlib
from headstart.heads.base import Drafter
from headstart.inference.decoding.decode import Generation
from headstart.inference.decoding.decoder import generate_batch
from headstart.inference.decoding.policy import fit_depth
from headstart.inference.decoding.propose import Drafting
from headstart.inference.decoding.sampling import SamplingParams
from headstart.inference.decoding.target import Target
from headstart.inference.settings import open_decode, open_guesser, open_target

MANY, CHOICES = (64, 8), (8, 64)  # prompts and new tokens of each; choices of one prompt and new tokens of each
LONG = 256  # tokens of the prompt that gets several choices


def open_tiny(to_decode: bool, *overrides: str) -> Target:
    return open_target(settings("inference", "target=tiny", *overrides)["target"], to_decode)


def held_out(target: Target, count: int, tokens: int = 64) -> list[list[int]]:
    """The same prompts as in the report of ``python train.py`` with its seed 0."""
    found = stdlib.prompts(count, settings("config")["trainer"]["seed"], target.tokenizer, tokens)
    return [target.tokenizer(p["text"])["input_ids"] for p in found]  # begins with the tokenizer's first token, as in training


def tiny(target: Target, speculator: Path, prompts: list[list[int]], repeats: int) -> dict[str, Any]:
    """Measure single sequences with the default decoding."""
    decode = open_decode(settings("inference")["decode"])
    drafter, _, policy = open_guesser(decode, str(speculator), target)
    assert drafter is not None
    policy, new_tokens = fit_depth(policy or decode.policy, drafter), decode.new_tokens
    alternatives = {
        "plain": dynamic(target, None, None, new_tokens),
        "ours": dynamic(target, Drafting(drafter), policy, new_tokens),
        "plain, static": static(target, None, None, new_tokens),
        "ours, static": static(target, drafter, policy, new_tokens),
    }
    in_turn(alternatives, prompts[:1], "tiny: first calls are slow")
    runs = in_turn(alternatives, prompts, "tiny", repeats)
    took = {name: seconds(made) for name, made in runs.items()}
    best = min(took["ours"], took["ours, static"])
    return {
        "speedup_tiny": min(took["plain"], took["plain, static"]) / best,
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


def many(target: Target, drafter: Drafter, repeats: int) -> dict[str, Any]:
    """Many short answers at once, and several for one prompt, against transformers' batched ``generate``. No sequence stops early."""
    (count, new), (choices, longer), stock = MANY, CHOICES, open_tiny(False)
    stock.model.generation_config.eos_token_id = None
    policy = fit_depth(open_decode(settings("inference")["decode"]).policy, drafter)
    sampled = [SamplingParams(temperature=1.0, seed=seed) for seed in range(choices)]
    short: dict[str, Run] = {
        "ours": batched(target, None, new_tokens=new),
        "ours, drafted": batched(target, drafter, new_tokens=new, policy=policy),
        "generate": transformers_batched(stock, max_new_tokens=new, do_sample=False),
    }
    several: dict[str, Run] = {
        "ours": batched(target, None, new_tokens=longer, sampling=sampled),
        "ours, drafted": batched(target, drafter, new_tokens=longer, policy=policy, sampling=sampled),
        "generate": transformers_batched(stock, max_new_tokens=longer, do_sample=True, top_k=0),
    }
    measured = []
    for name, sides, asked in (("many prompts", short, held_out(target, count)), ("choices", several, held_out(target, 1, LONG) * choices)):
        turns(sides, [asked], f"{name}: first calls are slow")
        measured.append(turns(sides, [asked], name, repeats))
    of_short, of_several = measured
    return {
        "prefill_64x8_over_generate": over(of_short["ours"], of_short["generate"]),
        "choices_8_over_generate": over(of_several["ours"], of_several["generate"]),
        "many": {
            "repeats": repeats,
            "prompts": {"prompts": count, "prompt_tokens": 64, "new_tokens": new, "tokens_per_second": rates(of_short)},
            "choices": {"choices": choices, "prompt_tokens": LONG, "new_tokens": longer, "tokens_per_second": rates(of_several)},
            "prompts_that_differ": differing(of_short, new),
        },
    }


def differing(made: dict[str, list[list[Generation]]], new_tokens: int) -> int:
    """The number of answers, of ``new_tokens`` tokens each, on which the sides do not all agree."""
    said = [each[0][0].tokens for each in made.values()]
    return sum(any(a[i : i + new_tokens] != said[0][i : i + new_tokens] for a in said) for i in range(0, len(said[0]), new_tokens))


def batched(target: Target, drafter: Drafter | None, **how: Any) -> Run:
    """Decode all prompts as one batch. Returns the tokens of all, concatenated."""

    def run(prompts: Sequence[Sequence[int]]) -> Generation:
        start = time.perf_counter()
        made = generate_batch(target, drafter, prompts, sequences=len(prompts), stop_ids=(), **how)
        return Generation([t for row in made for t in row.tokens], seconds=time.perf_counter() - start)

    return run


def transformers_batched(target: Target, **how: Any) -> Run:
    """The same with transformers, padded on the left; equal prompts are one prompt with several choices."""

    def run(prompts: Sequence[Sequence[int]]) -> Generation:
        start = time.perf_counter()
        few = prompts if any(p != prompts[0] for p in prompts) else prompts[:1]
        longest = max(map(len, few))
        ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in few])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in few])
        choices = {"num_return_sequences": len(prompts)} if len(few) < len(prompts) else {}
        out = target.model.generate(ids, attention_mask=mask, pad_token_id=0, **choices, **how)
        return Generation(out[:, longest:].flatten().tolist(), seconds=time.perf_counter() - start)

    return run
