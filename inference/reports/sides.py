"""The sides that an evaluation compares: each is a way to decode prompts, one at a time or several at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from headstart.heads.base import Drafter
from headstart.inference.decoding.auto import WORTH
from headstart.inference.decoding.decode import Generation
from headstart.inference.decoding.decoder import Decoder
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.propose import Proposer
from headstart.inference.decoding.sampling import SamplingParams
from headstart.inference.decoding.target import Target
from headstart.inference.reports.generate import hf_generate

PLAIN = "plain"
Prompts = Sequence[Sequence[int]]


class Side(NamedTuple):
    """``decode`` takes prompts, the sampling of each, the number of new tokens and how many prompts are decoded at once; it returns a
    Generation for each prompt, and the seconds of all together. ``batches``: whether it can decode several at once. ``close`` frees what
    it keeps between calls.
    """

    name: str
    decode: Callable[[Prompts, Sequence[SamplingParams], int, int], tuple[Sequence[Generation], float]]
    batches: bool
    close: Callable[[], None]


def is_tried(policy: TreePolicy, new_tokens: int) -> bool:
    """Whether it drafts in answers of ``new_tokens``: decode=auto leaves short ones alone, which says nothing about the drafter."""
    return policy.kind != "auto" or new_tokens >= WORTH


def ours(name: str, target: Target, guesser: Drafter | Proposer | None, policy: TreePolicy | None, *, rule: str, longest: int) -> Side:
    """The decoder of this package, with a drafter or proposer or (``PLAIN``) without. ``longest``: most tokens of prompt and answer."""
    decoder = Decoder(target, guesser, policy, rule=rule, max_length=longest)

    def decode(prompts: Prompts, how: Sequence[SamplingParams], new_tokens: int, sequences: int) -> tuple[Sequence[Generation], float]:
        if sequences > 1:
            return decoder.timed_many(prompts, new_tokens=new_tokens, sequences=sequences, sampling=how)
        made = [decoder.timed(p, new_tokens=new_tokens, sampling=each)[0] for p, each in zip(prompts, how, strict=True)]
        return made, sum(g.seconds for g in made)

    return Side(name, decode, decoder.batches, decoder.close)


def transformers(name: str, target: Target, assisted: dict[str, Any]) -> Side:
    """transformers' assisted generation, one prompt at a time: it takes no batches."""

    def decode(prompts: Prompts, how: Sequence[SamplingParams], new_tokens: int, sequences: int) -> tuple[Sequence[Generation], float]:
        made = [hf_generate(target, p, new_tokens, each, assisted) for p, each in zip(prompts, how, strict=True)]
        return made, sum(g.seconds for g in made)

    return Side(name, decode, False, lambda: None)
