"""Expected beside decoded accepted length of a drafter: for every decoded shape, at temperature 0 and above, over the decoded texts.

For chains all guesses come from one teacher-forced pass (inference/reports/expected.py: what training computes). Trees are grown again
over the recorded text (inference/reports/recorded.py: what decoding computes, without the target's passes).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from headstart.heads.base import Drafter
from headstart.inference.decoding.decode import Generation
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.sampling import SamplingParams
from headstart.inference.decoding.target import Target
from headstart.inference.reports.expected import expected_walk
from headstart.inference.reports.lengths import Lengths, compared
from headstart.inference.reports.lossless import EXACT
from headstart.inference.reports.recorded import Recorded, replay
from headstart.inference.reports.walk import Walk

REPLAYS = 2  # of a text above temperature 0; the expected number of rounds is their mean


class Truth:
    """Collects expected and decoded lengths. ``drafter`` computes the expected ones: it is the drafter that decoded the texts, or the same
    drafter before it was exported.
    """

    def __init__(self, target: Target, drafter: Drafter) -> None:
        self.target, self.drafter = target, drafter
        made = lambda: (Lengths(), Lengths())  # noqa: E731
        self.found: Mapping[tuple[str, bool], tuple[Lengths, Lengths]] = defaultdict(made)  # (shape, sampled) -> expected, decoded
        self.walks = {False: Walk(), True: Walk()}  # sampled -> the walks over the chain's texts

    def add(self, kind: str, shape: TreePolicy, prompt: Sequence[int], made: Generation, sampling: SamplingParams, new_tokens: int) -> None:
        """Add a text that was decoded with this shape. Texts for which nothing can be expected are skipped: under a repetition penalty,
        those above temperature 0 and those of chains.
        """
        sampled = sampling.temperature > 0
        if not made.emitted or (sampling.repetition_penalty != 1 and (sampled or shape.kind == "chain")):
            return
        expected, decoded = self.found[kind, sampled]
        decoded.add(len(made.emitted), sum(made.emitted))
        if shape.kind == "chain":
            walk = expected_walk(self.target, self.drafter, prompt, made.tokens, shape.depth, sampling)
            self.walks[sampled].add(walk)
            expected.add(walk.rounds, walk.tokens)
            return
        recorded = Recorded.by(self.target, self.drafter.taps, prompt, made.tokens)
        seeds = [sampling.seed + (i << 24) for i in range(REPLAYS if sampled else 1)]
        again = [replay(recorded, self.drafter, shape, replace(sampling, seed=seed), new_tokens=new_tokens) for seed in seeds]
        expected.add(sum(len(each.emitted) for each in again) / len(again), sum(made.emitted))

    def table(self) -> dict[str, dict[str, dict[str, Any]]]:
        """temperature -> shape -> what ``compared`` returns."""
        table: dict[str, dict[str, dict[str, Any]]] = {}
        for (kind, sampled), (expected, decoded) in self.found.items():
            certain = not sampled and self.target.dtype in EXACT
            table.setdefault(f"temperature_{int(sampled)}", {})[kind] = compared(expected, decoded, certain)
        return table
