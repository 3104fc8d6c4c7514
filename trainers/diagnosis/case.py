"""``Case``, the input of a diagnosis, and ``Finding``, its result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from headstart.data.accepted import Answered
from headstart.data.batch import TokenBatch
from headstart.heads.base import Drafter
from headstart.inference.decoding.decode import Generation, generate, longest
from headstart.inference.decoding.policy import TreePolicy, fit_depth
from headstart.inference.decoding.target import Target

DEPTH = 4  # guesses of the chains that checks decode with


CURES = {  # key of a known cause -> its description, its cure
    "mask": (
        "the loss mask is shifted",
        "supervise what assistants say, from its first token on (the template's {% generation %} tags)",
    ),
    "template": ("the chat template or its thinking switch differs", "ask by the template, and with the switch, of the training rows"),
    "positions": ("positions or rope differ", "serve it with the rope_theta, the rope_scaling and the positions that it was trained with"),
    "tap": ("the tapped layer is off by one", "serve it with the taps that it was trained with: layer k is the stream behind k layers"),
    "norm": ("the state is taken on the wrong side of a norm", "serve it with the norms it was trained with: norm_output, or another tap"),
    "vocabulary": (
        "trimmed vocabulary",
        "check d2t (target id = row + d2t[row]), or train with a larger head.draft_vocab",
    ),
    "policy": ("off-policy text", "train on what the target says itself: python -m data regenerate, then data=regenerated"),
    "target": (
        "a quantised or differently typed target",
        "decode with the target that it was trained for, or train it further for this one (trainer.start=DIR)",
    ),
    "cache": ("cache, batch or padding", "report it, with both numbers: every token is the target's own all the same"),
    "tokenizer": ("the tokenizer differs", "make training rows and prompts with one tokenizer, and the same special tokens in front"),
    "embedding": (
        "the embedding is scaled otherwise",
        "train and serve with the target's table as it is, unscaled",
    ),
    "export": ("a stale export", "export again: the training command does it when it is given once more"),
    "served_target": (
        "the engine answers with another target",
        "start it with the target's weights, in the dtype that you train and decode with, and without a quantised cache",
    ),
    "served": (
        "the engine computes the drafter otherwise",
        "start it by the command of the model card, with a version that docs/engines.md names, or say guesses=N as it was started",
    ),
}


class Finding(NamedTuple):
    """A cause that was found, the evidence for it, and the cure."""

    cause: str
    evidence: str
    cure: str

    @classmethod
    def of(cls, key: str, evidence: str) -> Finding:
        """The finding of the cause ``key`` of ``CURES``."""
        cause, cure = CURES[key]
        return cls(cause, evidence, cure)


@dataclass
class Case:
    """A drafter as it is served, with its target. ``prompts``: token ids of prompts on which it does badly.

    ``rows``: some of its training rows or held-out rows. ``live``: its weights in the training. ``known``: facts from the training run:
    ``weights`` (a digest, as in ``TargetInfo.fingerprint``) and ``dtype`` of the target, and the ``step`` of ``live``. ``folder``: the
    exported drafter. ``answered``: answers of a running engine to prompts, in rounds of ``guesses`` guesses each; ``sampled``: they were
    drawn above temperature 0.
    """

    target: Target
    drafter: Drafter
    prompts: Sequence[Sequence[int]]
    rows: Sequence[TokenBatch] = ()
    live: Mapping[str, Any] | None = None
    known: Mapping[str, Any] = field(default_factory=dict)
    folder: Path | None = None
    new_tokens: int = 48
    answered: Sequence[Answered] = ()
    guesses: int = DEPTH
    sampled: bool = False

    @property
    def chain(self) -> TreePolicy:
        """Chains of DEPTH guesses, or of as many as the drafter has."""
        return fit_depth(TreePolicy("chain", depth=DEPTH), self.drafter)

    @cached_property
    def said(self) -> list[Generation]:
        """The target's own greedy continuation of every prompt."""
        return [generate(self.target, None, p, new_tokens=self.room(p)) for p in self.prompts]

    def room(self, prompt: Sequence[int]) -> int:
        """The number of tokens to generate after this prompt: ``new_tokens``, or as many as the target can still read."""
        return min(self.new_tokens, longest(self.target, len(prompt)) - len(prompt))

    def text(self, tokens: Sequence[int]) -> str:
        """The tokens as readable text: decoded, or their ids if there is no tokenizer."""
        return repr(self.target.tokenizer.decode(list(tokens))) if self.target.tokenizer is not None else str(list(tokens))
