"""The planted pair: our decoding against transformers' assisted generation, and against what v and c predict. See decode.py."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.alternatives import Run, dynamic, fastest, figures, in_turn, seconds, static, transformers
from benchmarks.pair import planted_pair
from headstart.heads.base import Drafter, Roots
from headstart.inference.decoding.context import Context
from headstart.inference.decoding.decode import Generation, generate
from headstart.inference.decoding.policy import AUTO, TreePolicy
from headstart.inference.decoding.propose import Drafting
from headstart.inference.decoding.target import Target
from headstart.inference.decoding.tree import Tree

NODES = (1, 2, 4, 8, 12, 16)
# Settings of both sides. They are tried on separate prompts; the fastest of each side is then measured.
TREES = [
    TreePolicy("chain", depth=3),
    TreePolicy("dynamic", depth=3, nodes=8, branch=3, expand=2),
    TreePolicy("dynamic", depth=4, nodes=10, branch=3, expand=2, least=0.1),
    TreePolicy("dynamic", depth=5, nodes=12, branch=4, expand=3, least=0.1),
    TreePolicy("dynamic", depth=6, nodes=16, branch=4, expand=3, least=0.05),
    TreePolicy("best_first", depth=6, nodes=16, branch=4, least=0.1),
]
ASSISTED: list[dict[str, Any]] = [
    {"num_assistant_tokens": tokens, "num_assistant_tokens_schedule": schedule, "assistant_confidence_threshold": least}
    for tokens, schedule, least in (
        (2, "constant", 0.0), (3, "constant", 0.0), (4, "constant", 0.0), (6, "constant", 0.0), (4, "heuristic", 0.0), (8, "constant", 0.4)
    )
]  # fmt: skip
DEFAULT = {"num_assistant_tokens": 20, "num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.4}


DIAL = 0.05  # gives an acceptance near 0.6; the lower it is, the more a tree gains over a chain


SHAPE = {"vocab_size": 16000, "hidden_size": 768, "intermediate_size": 1792, "num_hidden_layers": 16, "num_attention_heads": 12}
NEW_TOKENS = 64


def open_pair() -> tuple[Any, Any]:
    """The same target and drafter twice: as transformers loads them, and prepacked."""
    from transformers import LlamaConfig

    config = LlamaConfig(max_position_embeddings=1024, **SHAPE)
    stock, ours = (planted_pair(config, first=1, dial=DIAL, confidence=8.0, seed=0) for _ in range(2))
    return stock, (ours[0].prepack(), ours[1].prepack())


def random_prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    found: list[list[int]] = torch.randint(SHAPE["vocab_size"], (count, 32), generator=generator).tolist()
    return found


def measure(quick: bool) -> dict[str, Any]:
    (stock, stock_drafter), (target, drafter) = open_pair()
    proposer, lm, new_tokens = Drafting(drafter), stock_drafter.lm, NEW_TOKENS
    count, repeats = ((3, 1), 3) if quick else ((8, 2), 3)
    drawn = random_prompts(sum(count))
    prompts, trial = drawn[: count[0]], drawn[count[0] :]

    ours = {f"tree {i}": dynamic(target, proposer, policy, new_tokens) for i, policy in enumerate(TREES)}
    theirs = {f"assisted {i}": transformers(stock, new_tokens, lm, how) for i, how in enumerate(ASSISTED)}
    warm = {"ours": dynamic(target, proposer, TREES[1], 8), "theirs": transformers(stock, 8, lm, ASSISTED[0])}
    in_turn(warm, trial[:1], "planted pair: first calls are slow")
    tried = {name: seconds(made) for name, made in in_turn(ours | theirs, trial, "planted pair: settings", 2).items()}
    policy = TREES[list(ours).index(min(ours, key=tried.__getitem__))]
    how = ASSISTED[list(theirs).index(min(theirs, key=tried.__getitem__))]

    costs, watch, plain_rounds = Costs(target, drafter, policy), Watch(target, drafter), Watch(target, drafter)

    def plain(prompt: Sequence[int]) -> Generation:
        made = plain_rounds.over(None, prompt, new_tokens, None)
        costs.measure([*prompt, *made.tokens[: new_tokens // 2]], repeats=4)
        return made

    alternatives: dict[str, Run] = {
        "plain": plain,
        "ours": lambda prompt: watch.over(proposer, prompt, new_tokens, policy),
        "ours, auto": dynamic(target, proposer, AUTO, new_tokens),
        "ours, not prepacked": dynamic(stock, Drafting(stock_drafter), policy, new_tokens),
        "assisted": transformers(stock, new_tokens, lm, how),
        "assisted, default settings": transformers(stock, new_tokens, lm, DEFAULT),
        "plain, static": static(target, None, None, new_tokens),
        "ours, static": static(target, drafter, policy, new_tokens),
        "generate": transformers(stock, new_tokens),
    }
    runs = in_turn(alternatives, prompts, "planted pair", repeats)
    took = {name: seconds(made) for name, made in runs.items()}
    v, c = costs.v(), costs.c()
    rounds, plain_seconds = watch.rounds(), statistics.mean(r.seconds for r in plain_rounds.rounds())
    tau = statistics.mean(r.emitted for r in rounds)
    cost = statistics.mean(float(np.interp(r.nodes, list(v), list(v.values()))) + r.levels * c for r in rounds)
    speedup = plain_seconds / statistics.mean(r.seconds for r in rounds) * tau
    best = min(("ours", "ours, static", "ours, auto"), key=took.__getitem__)
    return {
        "vs_hf_assisted": took["assisted"] / took[best],
        "vs_hf_assisted_default": took["assisted, default settings"] / took[best],
        "vs_hf_assisted_not_prepacked": took["assisted"] / took["ours, not prepacked"],
        "efficiency": speedup / (tau / cost),
        "v": {str(nodes): ratio for nodes, ratio in v.items()},
        "c": c,
        "planted": {
            "parameters": sum(p.numel() for p in target.model.parameters()),
            "drafter_parameters": sum(p.numel() for p in drafter.parameters()),
            "acceptance": agreement(lm, prompts, runs["plain"]),
            "distinct_tokens": statistics.mean(len(set(g.tokens)) / len(g.tokens) for g in runs["plain"]),
            "ours_is": best,
            "tree": vars(policy),
            "assisted": how,
            "runs": figures(runs),
            "prompts_with_the_tokens_of_plain": {
                name: sum(a.tokens == b.tokens for a, b in zip(made, runs["plain"], strict=True)) for name, made in runs.items()
            },
            "speedup": min(took["plain"], took["plain, static"]) / took[best],
            "rounds": {
                "count": len(rounds),
                "tau": tau,
                "nodes": statistics.mean(r.nodes for r in rounds),
                "levels": statistics.mean(r.levels for r in rounds),
                "seconds": statistics.mean(r.seconds for r in rounds),
                "plain_seconds": plain_seconds,
                "plain_step_seconds": costs.seconds(0),
                "speedup": speedup,
                "predicted": tau / cost,
            },
            "settings_tried": [
                {"seconds": tried[name], **what}
                for name, what in zip([*ours, *theirs], [*map(vars, TREES), *ASSISTED], strict=True)
            ],
        },
    }  # fmt: skip


@dataclass
class Round:
    nodes: int
    levels: int  # passes of the drafter
    emitted: int
    seconds: float


class Watch:
    """Records the rounds of ``generate``, without the first of each prompt, which reads the prompt. Keeps the fastest run."""

    def __init__(self, target: Target, drafter: Any) -> None:
        self.target, self.readers = target, {"target": target.reader, "drafter": drafter.reader}
        self.fastest: dict[tuple[int, ...], list[Round]] = {}

    def rounds(self) -> list[Round]:
        return [r for run in self.fastest.values() for r in run]

    def over(self, proposer: Drafting | None, prompt: Sequence[int], new_tokens: int, policy: TreePolicy | None) -> Generation:
        rows: dict[str, list[int]] = {"target": [], "drafter": []}
        ends: list[float] = []
        rounds: list[Round] = []

        def counted(name: str, read: Callable[..., Any]) -> Callable[..., Any]:
            def counts(tokens_BN: Tensor, *args: Any) -> Any:
                rows[name].append(tokens_BN.shape[1])
                return read(tokens_BN, *args)

            return counts

        def end(tokens: list[int]) -> None:
            ends.append(time.perf_counter())
            if len(ends) > 2:  # without the prompt's pass and the first round
                rounds.append(Round(rows["target"][-1] - 1, len(rows["drafter"]), len(tokens), ends[-1] - ends[-2]))
            rows["drafter"].clear()

        for name, reader in self.readers.items():
            reader.read = counted(name, reader.read)  # replaces its method during this run
        try:
            made = generate(self.target, proposer, prompt, new_tokens=new_tokens, policy=policy, on_tokens=end)
        finally:
            for reader in self.readers.values():
                del reader.read
        before = self.fastest.setdefault(tuple(prompt), rounds)
        self.fastest[tuple(prompt)] = min(before, rounds, key=lambda run: sum(r.seconds for r in run))
        return made


class Costs:
    """Seconds of a plain step, of verifying trees, and of one level of drafting. They take turns on the same contexts; the fastest
    time per context counts.
    """

    def __init__(self, target: Target, drafter: Drafter, policy: TreePolicy) -> None:
        self.target, self.drafter, self.policy = target, drafter, policy
        self.fastest: dict[tuple[int, ...], dict[int | str, float]] = {}

    @torch.inference_mode()
    def measure(self, tokens: Sequence[int], repeats: int) -> None:
        target, drafter, E = self.target, self.drafter, self.policy.expand or 1
        context, proposer, T = Context(target, drafter.taps), Drafting(drafter), len(tokens)
        tokens_1T, positions_1T = torch.tensor([list(tokens)]), torch.arange(T)[None]
        states, _ = context.read(tokens_1T[0])
        context.keep(T)
        proposer.start(context, T)
        proposer.absorb(Roots(tokens_1T, tokens_1T.roll(-1, 1), states, positions_1T))
        draft, memory = proposer.draft, proposer.memory
        assert draft is not None
        held, chain = memory.rows(), self.policy.kind == "chain"
        trees = {n: Tree.of(tokens[1 : n + 1], [max(i - (1 if chain else 2), -1) for i in range(n)]) for n in (0, *NODES)}

        def verify(nodes: int) -> None:
            _, final = context.read(tokens_1T[0, : nodes + 1], trees[nodes])
            target.logits(final).argmax(-1)
            context.keep(0)

        def level() -> None:
            sees = memory.sees_nodes(torch.eye(E, dtype=torch.bool)[None], chain=E == 1)
            parent = draft.at(torch.zeros(1, E, dtype=torch.int64))
            next_draft = drafter.step(2, tokens_1T[:, :E], parent, positions_1T[:, -1:].expand(1, E) + 1, memory, sees)
            drafter.unembedding(2).logits(next_draft.hidden_BNH).float().topk(self.policy.branch)
            memory.rewind(held)

        calls: dict[int | str, Callable[[], None]] = {n: lambda n=n: verify(n) for n in (0, *NODES)} | {"level": level}
        before = self.fastest.get(tuple(tokens), {})
        self.fastest[tuple(tokens)] = {name: min(took, before.get(name, took)) for name, took in fastest(calls, repeats).items()}

    def seconds(self, name: int | str) -> float:
        return statistics.mean(each[name] for each in self.fastest.values())

    def v(self) -> dict[int, float]:
        return {n: self.seconds(n) / self.seconds(0) for n in (0, *NODES)}

    def c(self) -> float:
        return self.seconds("level") / self.seconds(0)


@torch.no_grad()
def agreement(lm: Any, prompts: Sequence[Sequence[int]], said: Sequence[Generation]) -> float:
    """The share of tokens of plain decoding that are the assistant's likeliest token, fed with the true tokens."""
    same: list[bool] = []
    for prompt, run in zip(prompts, said, strict=True):
        choice_T = lm(torch.tensor([[*prompt, *run.tokens]])).logits[0, len(prompt) - 1 : -1].argmax(-1)
        same += (choice_T == torch.tensor(run.tokens)).tolist()
    return statistics.mean(same)
