"""On-policy training: an arm also learns from text that its own drafter has generated, with the target as teacher.

``samples`` (DistillSpec, 2310.08461, section 4; GKD, 2306.13649, algorithm 1): the drafter alone continues prefixes of the training
rows at a temperature. Every sampled token is supervised. This is for drafters that read no states of the target.

``rejected`` (Draft-OPD, 2605.29343): speculative decoding continues such prefixes, with chains as drafts. Every round with a rejected
guess becomes a row: the verified tokens x[0..t+1] of its root t, followed by the whole drafted chain, accepted and rejected guesses
alike. Only root t is supervised, at every drafted depth. So the drafter is fed its own guesses and learns the target's distribution
after them.

New rows are collected every ``every`` steps with the weights of that step. Checkpoints hold them, so that a resumed run continues with
the same rows. Each process collects from its own rows of the data. All draws are functions of seed, step and process. So arms that train
side by side start from the same prefixes, and none changes the random numbers of another.

Shape suffixes: R rows kept, T tokens of a row, B rows of a batch, N new tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from headstart.data.batch import ReplayBatch, TargetBatch, TokenBatch
from headstart.data.live import look
from headstart.heads.base import Drafter, Roots
from headstart.heads.errors import UserError
from headstart.inference.decoding.context import Context
from headstart.inference.decoding.counter_rng import CounterRNG
from headstart.inference.decoding.decode import Generation, generate
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.propose import Drafting
from headstart.inference.decoding.sampling import SamplingParams
from headstart.inference.decoding.target import Target
from headstart.inference.decoding.tree import Tree


def check_on_policy(kind: str, drafter: Drafter) -> None:
    """Raises UserError if the drafter cannot be trained with this kind of ``loss.on_policy``."""
    if kind == "samples" and drafter.taps:
        raise UserError("loss.on_policy.kind=samples is for drafters that go on alone: this one reads the target's states, take rejected")


class Own(NamedTuple):
    """A row: its tokens, and the index of the first one that the drafter generated."""

    tokens: list[int]
    begin: int


class Recording(Drafting):
    """A proposer that records every chain its drafter proposes."""

    def start(self, context: Context | None, tokens: int) -> None:
        super().start(context, tokens)
        self.chains: list[list[int]] = []

    def absorb(self, roots: Roots) -> None:
        super().absorb(roots.to(next(self.drafter.parameters()).dtype))

    def propose(self, policy: TreePolicy, rng: CounterRNG, sampling: SamplingParams) -> Tree:
        tree = super().propose(policy, rng, sampling)
        self.chains.append(tree.tokens_BN[0].tolist())
        return tree


def rejected_rounds(prompt: Sequence[int], made: Generation, chains: Sequence[list[int]]) -> list[Own]:
    """The rounds in which a guess was rejected, as rows, from a decoding with chains. ``chains``: the drafted chain of each round that
    drafted. A round that ended the text with an accepted guess is not among them.
    """
    text, at, found = [*prompt, *made.tokens], len(prompt) + 1, []  # at: index of the round's first guess, x[t+2]
    proposed = iter(chains)
    for asked, emitted in zip(made.asked, made.emitted, strict=True):
        chain = next(proposed) if asked else []
        last = emitted - 1  # the number of accepted guesses; the target's own token follows them
        if last < len(chain) and chain[last] != text[at + last]:
            found.append(Own([*text[:at], *chain], at))
        at += emitted
    return found


class OnPolicy:
    """The on-policy rows of one arm. ``settings``: those of ``loss.on_policy``. ``depth``: guesses of a chain. ``target``: the teacher."""

    def __init__(self, settings: Mapping[str, Any], drafter: Drafter, depth: int, target: Target, seed: int) -> None:
        self.drafter, self.target, self.seed = drafter, target, seed
        self.kind, self.share, self.wanted = str(settings["kind"]), float(settings["share"]), int(settings["rows"])
        self.every, self.new_tokens, self.temperature = settings["every"], settings["new_tokens"], float(settings["temperature"])
        self.policy = TreePolicy("chain", depth=depth)
        self.kept: dict[str, Tensor] | None = None  # tokens [R, T], begin [R], length [R]; padding is 0, an unused row has length 0

    def collect(self, step: int, micro: Sequence[TokenBatch], accelerator: Accelerator) -> dict[str, float]:
        """Make new rows with the present weights, from prefixes of the rows in ``micro``. Returns figures over all processes.

        Raises UserError if no prefix in any process leaves room for the new tokens.
        """
        rng = np.random.default_rng((self.seed, step, accelerator.process_index))
        prompts = self._prompts(micro, rng)
        training, rows = self.drafter.training, []
        rounds = emitted = 0
        self.drafter.eval()
        ends, speaker = self.drafter.ends, Recording(self.drafter)
        # the target's head may be bf16 and the drafter fp32: cast the head once, not for every guess
        self.drafter.attach(replace(ends, head_VD=ends.head_VD.to(next(self.drafter.parameters()).dtype)))
        for prompt in prompts:
            sampling = SamplingParams(self.temperature, rule="token", seed=int(rng.integers(2**62)))
            if self.kind == "samples":
                rows.append(self._sample(speaker, prompt, sampling))
                continue
            settings: dict[str, Any] = dict(new_tokens=self.new_tokens, policy=self.policy, sampling=sampling)
            made = generate(self.target, speaker, prompt, **settings)
            rows += rejected_rounds(prompt, made, speaker.chains)
            drafted = [tokens for asked, tokens in zip(made.asked, made.emitted, strict=True) if asked]  # tokens of rounds that drafted
            rounds, emitted = rounds + len(drafted), emitted + sum(drafted)
        self.drafter.attach(ends)
        self.drafter.train(training)
        had = self.kept is not None and bool(self.kept["length"].any())
        counts = torch.tensor([len(prompts), len(rows), rounds, emitted, had], dtype=torch.float32, device=accelerator.device)
        prompts_made, rows_made, rounds, emitted, had = accelerator.reduce(counts, "sum").tolist()
        T = micro[0].tokens_BT.shape[1]
        if prompts_made or self.kept is None:
            self.kept = _stacked(rows, T)
        if not prompts_made and not had:  # in any process, so that all raise together
            raise UserError(f"loss.on_policy.new_tokens={self.new_tokens} leaves no room for a prompt in documents of rows of {T} tokens: "
                            "lower it, or take a larger trainer.length")  # fmt: skip
        figures = {"on_policy_rows": rows_made}
        if rounds:
            figures |= {"on_policy_rejected_rounds": rows_made / rounds, "on_policy_accepted_length": emitted / rounds}
        return figures

    def draw(self, step: int, count: int, rank: int) -> TargetBatch | None:
        """A batch of up to ``count`` rows with the target's states, padded to the longest of them; None if there are no rows."""
        assert self.kept is not None
        live = self.kept["length"].nonzero()[:, 0]
        if not len(live):
            return None
        picked_B = live[torch.from_numpy(np.random.default_rng((self.seed, step, rank, 1)).permutation(len(live))[:count])]
        begin_B, length_B = self.kept["begin"][picked_B], self.kept["length"][picked_B]
        tokens_BT = self.kept["tokens"][picked_B, : int(length_B.max())]
        positions_BT = torch.arange(tokens_BT.shape[1]).repeat(len(picked_B), 1)  # the padding at the end is visible to no token
        own_BT = (positions_BT >= begin_B[:, None]) & (positions_BT < length_B[:, None])
        seen = look(TokenBatch(tokens_BT, own_BT, positions_BT, torch.zeros_like(tokens_BT)), self.target, self.drafter.taps)
        if self.kind == "samples" or not self.drafter.unrolls:  # one depth suffices: every generated token is guessed once
            return seen
        root_B, drafted_B = (x.to(seen.tokens_BT.device) for x in (begin_B - 2, length_B - begin_B))
        return ReplayBatch(**vars(seen), root_B=root_B, drafted_B=drafted_B)

    def state(self, accelerator: Accelerator) -> dict[str, Tensor]:
        """What a checkpoint keeps: the rows of all processes, concatenated and padded to equal numbers. All processes call this."""
        assert self.kept is not None
        padded = {k: accelerator.pad_across_processes(x.to(accelerator.device), dim=0) for k, x in self.kept.items()}
        return {k: accelerator.gather(x).cpu() for k, x in padded.items()}

    def restore(self, kept: Mapping[str, Tensor], rank: int, world: int) -> None:
        """Take this process's part of what ``state`` returned."""
        R = len(kept["length"]) // world
        self.kept = {k: x[rank * R : (rank + 1) * R] for k, x in kept.items()}

    def _prompts(self, micro: Sequence[TokenBatch], rng: np.random.Generator) -> list[list[int]]:
        """Prefixes of documents up to x[t+1], for supervised roots t drawn at random such that the new tokens still fit into a row. (Above
        temperature 0 the last chain may reach beyond them: see ``decode.run``.)
        """
        T, roots = micro[0].tokens_BT.shape[1], []
        beyond = self.policy.depth - 1 if self.kind == "rejected" and self.temperature > 0 else 0
        most = min(T, self.target.rope_switch or T) - self.new_tokens - 2 - beyond
        for batch in micro:
            roots += [(batch, b, t) for b, t in (batch.supervised(1) & (batch.positions_BT <= most)).nonzero().tolist()]
        drawn = [roots[i] for i in rng.permutation(len(roots))[: self.wanted]]
        return [batch.tokens_BT[b, t - int(batch.positions_BT[b, t]) : t + 2].tolist() for batch, b, t in drawn]

    def _sample(self, speaker: Drafting, prompt: list[int], sampling: SamplingParams) -> Own:
        """The drafter's own continuation of ``prompt``. Each sampled token counts as verified, up to a stop token."""
        device, tokens, read = self.target.device, list(prompt), 0
        speaker.start(None, len(prompt) + self.new_tokens)
        for _ in range(self.new_tokens):
            new_N, position_1N = torch.tensor(tokens[read:], device=device), torch.arange(read, len(tokens) - 1, device=device)[None]
            speaker.absorb(Roots(new_N[None, :-1], new_N[None, 1:], {}, position_1N))
            read = len(tokens) - 1
            guess = speaker.propose(TreePolicy("chain", depth=1), CounterRNG.of(sampling.seed, read, device), sampling)
            tokens.append(int(guess.tokens_BN))
            if tokens[-1] in self.target.stop_ids:
                break
        return Own(tokens, len(prompt))


def _stacked(rows: Sequence[Own], T: int) -> dict[str, Tensor]:
    tokens_RT = torch.zeros(max(len(rows), 1), T, dtype=torch.int64)
    begin_R, length_R = (torch.zeros(len(tokens_RT), dtype=torch.int64) for _ in range(2))
    for i, row in enumerate(rows):
        tokens_RT[i, : len(row.tokens)] = torch.tensor(row.tokens)
        begin_R[i], length_R[i] = row.begin, len(row.tokens)
    return {"tokens": tokens_RT, "begin": begin_R, "length": length_R}
