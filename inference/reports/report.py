"""What a drafter gains: decode held-out prompts with the exported folder and with nothing, in the same run.

Every prompt is decoded by the alternatives in turn, so that a noisy machine disturbs them alike. ``accepted_length``
comes from decoding only; ``expected_length`` from one teacher-forced pass over what the target itself said, for a
chain (see inference/reports/walk.py). The prompt's own pass is no round: it drafts nothing and is not counted.

Shape suffixes: K depths, T positions, V vocabulary.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import track
from torch import Tensor

from headstart.heads.base import Drafter, Roots
from headstart.heads.errors import UserError
from headstart.heads.unroll import unroll
from headstart.inference.decoding.auto import WORTH, known_of
from headstart.inference.decoding.decode import Generation, generate
from headstart.inference.decoding.engine import Engine
from headstart.inference.decoding.policy import TreePolicy, fit_depth
from headstart.inference.decoding.propose import Drafting, Proposer
from headstart.inference.decoding.sampling import Sampling, Warp
from headstart.inference.decoding.target import Target
from headstart.inference.provenance import machine, provenance
from headstart.inference.reports.walk import Walk, walk

Report = dict[str, Any]
Decoder = Callable[[Sequence[int], int, Sampling], Generation]  # prompt, new tokens


class Contender:
    """A drafter under a tree policy, or (``proposer``, called ``name``) anything else that guesses; and what it made of the prompts.

    Of a drafter the chain is decoded as well, and expected from one teacher-forced pass over what plain decoding said (a repetition
    penalty would hang on the path: then it is not). A proposer has no chain of its own.
    """

    def __init__(
        self, drafter: Drafter | None, policy: TreePolicy, *, proposer: Proposer | None = None, name: str = "", extra: Any = None
    ) -> None:
        self.drafter, self.policy, self.name, self.extra = drafter, policy, name, extra or {}
        self.own_chain = proposer is None
        if proposer is None:
            assert drafter is not None
            self.policy, self.name = fit_depth(policy, drafter), name or drafter.config["head"]
            proposer = Drafting(drafter.eval())
        self.proposer = proposer
        self.made: dict[str, list[Generation]] = {}  # tree, tree_warm, chain, chain_warm
        self.walks = {"cold": Walk(), "warm": Walk()}

    def open(self, target: Target, longest: int, sampling: Sampling) -> None:
        chain = TreePolicy("chain", depth=self.policy.depth)
        shapes = {"tree": self.policy, **({"chain": chain} if self.own_chain and sampling.repetition_penalty == 1 else {})}
        self.target = target
        self.decoders = {kind: decoder(target, self.proposer, shape, longest, sampling.rule) for kind, shape in shapes.items()}
        self.made = {kind + warmth: [] for kind in shapes for warmth in ("", "_warm")}

    def decode(self, prompt: Sequence[int], new_tokens: int, cold: Sampling, warm: Sampling) -> None:
        for kind, decode in self.decoders.items():
            self.made[kind].append(decode(prompt, new_tokens, cold))
            self.made[kind + "_warm"].append(decode(prompt, new_tokens, warm))

    def auto(self) -> dict[bool, dict[TreePolicy, float]]:
        """What a round of each shape costs over a plain one, as it was measured for an auto policy; False: at temperature 0."""
        known = known_of(self.target, self.proposer)
        found = {sampled: known.get((self.policy, sampled)) or known.get((self.policy, 1, sampled)) for sampled in (False, True)}
        return {sampled: dict(zip(auto.shapes, auto.costs, strict=True)) for sampled, auto in found.items() if auto is not None}

    def expect(self, target: Target, prompt: Sequence[int], said: dict[str, Sequence[int]], how: dict[str, Sampling]) -> None:
        if "chain" in self.made and self.drafter is not None:
            for kind, sum_of in self.walks.items():
                sum_of.add(expected_walk(target, self.drafter, prompt, said[kind], self.policy.depth, how[kind]))


def make_report(
    target: Target,
    drafter: Drafter | None,
    prompts: Sequence[Sequence[int]],
    policy: TreePolicy,
    sampling: Sampling,
    *,
    new_tokens: int,
    proposer: Proposer | None = None,
    name: str = "",
    extra: dict[str, Any] | None = None,
) -> Report:
    """Decode ``prompts`` at temperature 0 and 1. ``sampling`` gives the filters, rule and seed; ``extra`` is added to the report."""
    contender = Contender(drafter, policy, proposer=proposer, name=name, extra=extra)
    return make_reports(target, [contender], prompts, sampling, new_tokens=new_tokens)[0]


def make_reports(
    target: Target, contenders: Sequence[Contender], prompts: Sequence[Sequence[int]], sampling: Sampling, *, new_tokens: int
) -> list[Report]:
    """One report each, of one run: every prompt is decoded plainly, by transformers, and by all contenders in turn."""
    if not prompts:
        raise UserError("no prompts to decode: raise decode.prompts, or give another prompts file")
    cold, warm = replace(sampling, temperature=0.0), replace(sampling, temperature=1.0)
    longest = max(map(len, prompts)) + new_tokens
    plain = decoder(target, None, None, longest, sampling.rule)
    few = min(WORTH, new_tokens)  # first calls are slow, and this many are enough to have rounds measured
    for sampled in (cold, warm):
        plain(prompts[0], few, sampled)
    _hf_generate(target, prompts[0], 8, cold)
    for c in contenders:
        c.open(target, longest, sampling)
        c.decode(prompts[0], few, cold, warm)
        c.made = {kind: [] for kind in c.made}
    said: dict[str, list[Generation]] = {"cold": [], "warm": []}
    hf: list[Generation] = []
    for i, prompt in enumerate(track(list(prompts), description="decoding", transient=True)):
        how = {"cold": replace(cold, seed=sampling.seed + i), "warm": replace(warm, seed=sampling.seed + i)}
        for kind, each in said.items():
            each.append(plain(prompt, new_tokens, how[kind]))
        hf.append(_hf_generate(target, prompt, new_tokens, cold))
        for c in contenders:
            c.decode(prompt, new_tokens, how["cold"], how["warm"])
            c.expect(target, prompt, {kind: each[-1].tokens for kind, each in said.items()}, how)
    return [_report(target, c, prompts, sampling, said, hf, new_tokens) for c in contenders]


def _report(
    target: Target,
    c: Contender,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    said: dict[str, list[Generation]],
    hf: list[Generation],
    new_tokens: int,
) -> Report:
    greedy = [hf, *(made for kind, made in c.made.items() if not kind.endswith("_warm"))]
    found = (differs(target, prompt, said["cold"][i].tokens, [g[i].tokens for g in greedy]) for i, prompt in enumerate(prompts))
    differences, depth = [x for x in found if x is not None], c.policy.depth

    settings = asdict(sampling)
    del settings["temperature"]

    def figures(kind: str, warmth: str) -> dict[str, Any]:
        return decoding_figures(c.made[kind + ("_warm" if warmth == "warm" else "")], said[warmth], depth, c.walks[warmth].expected_length)

    of_chain = (
        {"chain_temperature_0": figures("chain", "cold"), "chain_temperature_1": figures("chain", "warm")} if "chain" in c.made else {}
    )
    parameters = 0 if c.drafter is None else c.drafter.size
    trimmed = {}
    if c.drafter is not None and (ids_V := c.drafter.unembedding(1).ids_V) is not None:
        known = set(ids_V.tolist())  # what the target says beyond it is lost, whatever the drafter learns
        shares = {w: sum(t not in known for g in each for t in g.tokens) / sum(len(g.tokens) for g in each) for w, each in said.items()}
        trimmed = {"draft_vocabulary": len(known), "lost_by_trimming": {"temperature_0": shares["cold"], "temperature_1": shares["warm"]}}
    return {
        "head": c.name,
        "target": Path(target.name).name,
        "temperature_0": figures("tree", "cold") | {"repetition_penalty": sampling.repetition_penalty},
        "temperature_1": figures("tree", "warm") | settings,
        **of_chain,
        "hf_generate_tokens_per_second": _speed(hf),
        "lossless": all(x["tie"] for x in differences),
        "differing_prompts": len(differences),
        "differences": differences,
        "prompts": len(prompts),
        "new_tokens": new_tokens,
        "prompt_tokens": sum(map(len, prompts)),
        "prompts_from": "these prompts",  # of doors ``extra`` says which
        "tree": asdict(c.policy) | {"paths": [list(path) for path in c.policy.paths]},
        **_auto(c),
        "proposer": {"kind": "drafter"},  # of another ``extra`` says what it is
        "drafter_parameters": parameters,
        **trimmed,
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": machine(target.device),
        **provenance(),
        **c.extra,
    }


def _auto(c: Contender) -> dict[str, Any]:
    """Of an auto policy what rounds cost here, over a plain one, and the share of rounds that each shape was chosen for."""
    found = {}
    for sampled, costs in c.auto().items():
        chosen = Counter(str(shape or "no guesses") for made in c.made["tree_warm" if sampled else "tree"] for shape in made.shapes)
        shares = {name: n / chosen.total() for name, n in chosen.most_common()}
        found[f"temperature_{int(sampled)}"] = {"costs": {str(shape): cost for shape, cost in costs.items()}, "rounds": shares}
    return {"auto": found} if found else {}


def decoder(target: Target, proposer: Proposer | None, policy: TreePolicy | None, longest: int, rule: str) -> Decoder:
    """The fastest way there is to decode one sequence: on a GPU the static path for a drafter's trees and for plain decoding."""
    if target.device.type == "cuda" and (proposer is None or isinstance(proposer, Drafting)):
        engine = Engine(target, proposer.drafter if proposer else None, rows=1, capacity=longest, policy=policy, rule=rule)
        return lambda prompt, new, sampling: engine.run([prompt], new_tokens=new, sampling=[sampling])[0]
    return lambda prompt, new, sampling: generate(target, proposer, prompt, new_tokens=new, policy=policy, sampling=sampling)


@torch.no_grad()
def differs(target: Target, prompt: Sequence[int], said: Sequence[int], others: Sequence[Sequence[int]]) -> dict[str, Any] | None:
    """Where the first of ``others`` leaves what plain decoding ``said``, and whether the target itself had a tie there.

    In half precision the shape of a batch decides between logits that are nearly equal: a tie is a gap between the two
    best of at most 8 roundings of the best one. In float32 no difference passes as a tie. None: all are equal.
    """
    wrong = next((other for other in others if list(other) != list(said)), None)
    if wrong is None:
        return None
    at = next((i for i, (a, b) in enumerate(zip(said, wrong, strict=False)) if a != b), min(len(said), len(wrong)))
    tokens_1T = torch.tensor([[*prompt, *said[:at]]], device=target.device)
    _, final_1TD = target.read(tokens_1T, torch.arange(tokens_1T.shape[1], device=target.device)[None], ())
    best = target.logits(final_1TD[0, -1:])[0].float().topk(2).values
    gap, tolerance = float(best[0] - best[1]), 8 * torch.finfo(target.dtype).eps * float(best[0].abs())
    return {"token": at, "gap": gap, "tolerance": tolerance, "tie": target.dtype != torch.float32 and gap <= tolerance}


def decoding_figures(drafted: list[Generation], plain: list[Generation], depth: int, expected: float) -> dict[str, Any]:
    rounds, asked = [n for g in drafted for n in g.emitted], [n for g in drafted for n in g.asked]
    reached = [sum(n > d for n in rounds) for d in range(depth + 1)]  # rounds with at least d guesses accepted
    tried = [sum(n >= d and k >= d for n, k in zip(rounds, asked, strict=True)) for d in range(1, depth + 1)]  # that had one more to accept
    return {
        "accepted_length": sum(rounds) / max(len(rounds), 1),
        "acceptance_by_depth": [n / max(len(rounds), 1) for n in reached[1:]],
        "conditional_acceptance_by_depth": [b / a if a else 0.0 for a, b in zip(tried, reached[1:], strict=True)],
        **({"expected_length": expected} if expected else {}),
        "tokens_per_second": _speed(drafted),
        "plain_tokens_per_second": _speed(plain),
        "speedup": _speed(drafted) / _speed(plain),
        "target_passes": len(rounds),
        "new_tokens": sum(rounds),
    }


def _speed(runs: list[Generation]) -> float:
    """Tokens per second of wall clock, the prompt's pass and token included."""
    return sum(len(g.tokens) for g in runs) / sum(g.seconds for g in runs)


def _hf_generate(target: Target, prompt: Sequence[int], new_tokens: int, sampling: Sampling) -> Generation:
    """transformers' own greedy ``generate``."""
    ids = torch.tensor([list(prompt)], device=target.device)
    start = time.perf_counter()
    stop = list(target.stop_ids) or None
    how = {"do_sample": False, "repetition_penalty": sampling.repetition_penalty, "eos_token_id": stop, "pad_token_id": 0}
    out = target.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, **how)
    return Generation(out[0, len(prompt) :].tolist(), seconds=time.perf_counter() - start)


@torch.no_grad()
def guesses_over(
    target: Target, drafter: Drafter, prompt: Sequence[int], said: Sequence[int], depth: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """One teacher-forced pass over prompt and continuation. For depths 1, 2, ..: the draft logits over the target's vocabulary [N, V] of
    the N roots from the prompt's last token on that have a token to guess, these tokens [N], and the target's states that chose them.
    """
    tokens_BT = torch.tensor([[*prompt, *said]], device=target.device)
    T, first = tokens_BT.shape[1], len(prompt) - 1
    positions_BT = torch.arange(T, device=target.device)[None]
    states, final_BTD = target.read(tokens_BT, positions_BT, drafter.taps)
    roots = Roots(tokens_BT, F.pad(tokens_BT[:, 1:], (0, 1)), states, positions_BT)
    for d, draft in enumerate(unroll(drafter, roots, None, depth), start=1):
        if first + 1 + d >= T:
            return
        unembedding = drafter.unembedding(d)
        logits_NV = unembedding.logits(draft.hidden_BNH[0, first : T - 1 - d]).float()
        yield unembedding.to_target(logits_NV, target.shape.vocab_size), tokens_BT[0, first + 1 + d :], final_BTD[0, first + d : T - 1]


@torch.no_grad()
def expected_walk(target: Target, drafter: Drafter, prompt: Sequence[int], said: Sequence[int], depth: int, sampling: Sampling) -> Walk:
    """The walk of a chain over the target's own continuation ``said``, from one teacher-forced pass."""
    first, T = len(prompt) - 1, len(prompt) + len(said)
    accept_KT = torch.zeros(depth, T, dtype=torch.float64)
    for d, (q_NV, x_N, final_ND) in enumerate(guesses_over(target, drafter, prompt, said, depth)):
        accept_KT[d, first : first + len(x_N)] = accept_probability(q_NV, target.logits(final_ND), x_N, sampling).double().cpu()
    return walk(accept_KT, first, T)


def accept_probability(q_NV: Tensor, p_NV: Tensor, x_N: Tensor, sampling: Sampling) -> Tensor:
    """From draft and target logits: whether, or how probably, emitted token x was an accepted guess."""
    if sampling.temperature == 0:
        return (q_NV.argmax(-1) == x_N).float()
    warp = Warp.of([sampling], x_N.device)
    q, p = (y[0].gather(-1, x_N[:, None])[:, 0] for y in (warp.drafter(q_NV[None]), warp.target(p_NV[None])))
    return (q / p.clamp_min(1e-30)).clamp_max(1.0)
