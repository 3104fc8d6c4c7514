"""Sampling settings, and the probabilities that they make of logits: for many sequences side by side, each with its own settings.

Shape suffixes: B sequences, R rows of a tree, X rows of any kind, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headstart.heads.errors import UserError

RULES = ("auto", "token", "block", "traversal", "multi_round", "without_replacement", "top_plus_one")  # see inference/decoding/verify.py


WARM = 0.5  # from this temperature on, fixed trees have a larger accepted length than dynamic ones (EXPERIMENTS.md, 2026-11-26)


# Factor on a drafter's logits at temperature 0. Drafters learn the target's whole distribution, but a greedy target takes its likeliest
# token: first guesses are right more often than their probabilities say (EXPERIMENTS.md, 2026-11-26). A factor of 2 rounds nothing.
SHARPER = 2.0


def heat_of(temperature: float) -> int:
    """The class of a temperature by which tree shapes are chosen. 0: greedy, 1: below ``WARM``, 2: at least ``WARM``."""
    return 0 if temperature == 0 else 1 if temperature < WARM else 2


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one sequence are chosen: transformers' settings, applied in transformers' order (penalty, min_tokens, temperature,
    top_k, top_p, min_p). Temperature 0 is greedy. Above it ``rule`` verifies the guesses (auto: the best one for their shape, see
    ``verify.rule_of``). ``min_tokens``: no stop token is chosen before there are this many new tokens. A setting is off at top_k 0,
    top_p 1, min_p 0, repetition_penalty 1, min_tokens 0. Raises UserError naming a setting that is out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    rule: str = "auto"
    seed: int = 0
    min_tokens: int = 0

    def __post_init__(self) -> None:
        for name, (right, meaning) in LIMITS.items():
            if not right(getattr(self, name)):
                raise UserError(f"sampling: {name} must be {meaning}, found {getattr(self, name)!r}")
        if self.rule not in RULES:
            raise UserError(f"there is no verification rule {self.rule!r}: choose one of {', '.join(RULES)}")


LIMITS: dict[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (lambda x: x >= 0, "at least 0 (0: greedy)"),
    "top_k": (lambda x: x >= 0, "at least 0 (0: off)"),
    "top_p": (lambda x: 0 < x <= 1, "above 0 and at most 1 (1: off)"),
    "min_p": (lambda x: 0 <= x < 1, "at least 0 and below 1 (0: off)"),
    "repetition_penalty": (lambda x: x > 0, "above 0 (1: off)"),
    "min_tokens": (lambda x: x >= 0, "at least 0 (0: off)"),
}


@dataclass
class LogitsWarper:
    """The sampling settings of B sequences as tensors, and on the host which of the settings any sequence uses."""

    values: dict[str, Tensor]  # name -> [B]
    sampled: bool  # some sequence has a temperature above 0
    greedy: bool  # some sequence has temperature 0
    top_k: int  # at least the largest of the sequences' own; 0: none uses it
    top_p: bool
    min_p: bool
    penalty: bool
    heat: int = 0  # of the warmest sequence: see ``heat_of``
    alone: dict[str, float] | None = None  # a single sequence's values on the host; never in a graph, which would fix them

    @classmethod
    def of(cls, samplings: Sequence[SamplingParams], device: torch.device | str = "cpu") -> LogitsWarper:
        """The warper of these sequences, with new tensors on ``device``, [B] each."""
        used = [settings_of(s) for s in samplings]
        return replace(cls.over(columns(used, device), samplings), alone=used[0] if len(used) == 1 else None)

    @classmethod
    def over(cls, values: dict[str, Tensor], samplings: Sequence[SamplingParams]) -> LogitsWarper:
        """The warper over tensors that exist: ``values`` hold the settings of ``samplings``, and maybe rows that no sequence uses."""
        used = [settings_of(s) for s in samplings]
        top_k = max(int(s["top_k"]) for s in used)
        return cls(
            values,
            sampled=any(s["temperature"] > 0 for s in used),
            greedy=any(s["temperature"] == 0 for s in used),
            top_k=1 << (top_k - 1).bit_length() if top_k else 0,  # rounded up to a power of two, because each value needs its own graph
            top_p=any(s["top_p"] < 1 for s in used),
            min_p=any(s["min_p"] > 0 for s in used),
            penalty=any(s["repetition_penalty"] != 1 for s in used),
            heat=max(heat_of(s["temperature"]) for s in used),
        )

    @property
    def temperature_B(self) -> Tensor:
        """Temperatures, 0 where a sequence is greedy."""
        return self.values["temperature"]

    def scores(self, logits_BRV: Tensor, seen_BRV: Tensor | None) -> Tensor:
        """Logits in fp32 or fp64, with the repetition penalty on seen tokens: positive are divided, negative multiplied (1909.05858)."""
        x = wide(logits_BRV)
        if not self.penalty or seen_BRV is None:
            return x
        penalty_B11 = self.values["repetition_penalty"].to(x.dtype)[:, None, None]
        return torch.where(seen_BRV, torch.where(x < 0, x * penalty_B11, x / penalty_B11), x)

    def target(self, logits_BRV: Tensor, seen_BRV: Tensor | None = None) -> Tensor:
        """The target's distribution; for a greedy sequence a point mass on its likeliest token."""
        x = self.scores(logits_BRV, seen_BRV)
        p_BRV = self._filtered(x)
        if not self.greedy:
            return p_BRV
        only_BRV = torch.zeros_like(x).scatter_(-1, x.argmax(-1, keepdim=True), 1.0)
        return torch.where((self.temperature_B > 0)[:, None, None], p_BRV, only_BRV)

    def drafter(self, logits_BXV: Tensor) -> Tensor:
        """The drafter's distribution under the same settings. A greedy sequence takes its likeliest tokens; there it is sharpened."""
        return self._filtered(wide(logits_BXV))

    def _filtered(self, x: Tensor) -> Tensor:
        """Probabilities after temperature, top_k, top_p and min_p: transformers' order and conventions.

        top_k keeps ties with the k-th logit. top_p drops the least likely tokens whose joint mass is at most 1 - top_p, never the
        likeliest token. min_p drops tokens less probable than min_p times the likeliest.
        """

        def value(name: str) -> Tensor:
            return self.values[name][:, None, None]

        if self.alone is not None and self.alone["temperature"] == 1 and not (self.top_k or self.top_p or self.min_p):
            return x.softmax(-1)  # the same numbers, to the bit, in fewer operations
        least = torch.finfo(x.dtype).smallest_normal  # below it a temperature would become 0 in the dtype of x
        temperature = torch.where(value("temperature") > 0, value("temperature").clamp(min=least), 1 / SHARPER).to(x.dtype)
        x = (x - x.amax(-1, keepdim=True)) / temperature  # at most 0: exp cannot overflow
        if self.top_k:
            best = x.topk(min(self.top_k, x.shape[-1])).values
            kth = best.gather(-1, (value("top_k").clamp(1, best.shape[-1]) - 1).expand(*x.shape[:-1], 1))
            x = x.masked_fill((x < kth) & (value("top_k") > 0), -torch.inf)
        if self.top_p:
            ascending, order = x.sort(dim=-1)
            drop = ascending.softmax(-1).cumsum(-1) <= (1 - value("top_p")).to(x.dtype)
            drop[..., -1:].fill_(False)
            x = x.masked_fill(torch.empty_like(drop).scatter_(-1, order, drop), -torch.inf)
        p = x.softmax(-1)
        if self.min_p:
            kept = p.masked_fill(p < value("min_p").to(p.dtype) * p.amax(-1, keepdim=True), 0.0)
            p = torch.where(value("min_p") > 0, kept / kept.sum(-1, keepdim=True), p)  # without min_p a row stays the same to the bit
        return p


def settings_of(sampling: SamplingParams) -> dict[str, float]:
    """The settings that ``LogitsWarper`` reads, by name. At temperature 0 the filters would change nothing and are off."""
    warm = sampling.temperature > 0
    return {
        "temperature": float(sampling.temperature),
        "top_k": sampling.top_k if warm else 0,
        "top_p": float(sampling.top_p) if warm else 1.0,
        "min_p": float(sampling.min_p) if warm else 0.0,
        "repetition_penalty": float(sampling.repetition_penalty),
    }


def columns(used: Sequence[dict[str, float]], device: torch.device | str) -> dict[str, Tensor]:
    """A tensor [B] for each setting, top_k in int64, the others in fp64 (so that 1 - top_p is the number that Python computes)."""
    return {k: torch.tensor([u[k] for u in used], dtype=torch.int64 if k == "top_k" else torch.float64, device=device) for k in used[0]}


def wide(x: Tensor) -> Tensor:
    """``x`` in fp32, or in fp64 where it is that already."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def hold_stops(logits_BRV: Tensor, held_BR: Tensor, stops_BV: Tensor) -> Tensor:
    """Logits with -inf for a sequence's stop tokens (``stops_BV``) at the rows after which it must go on (``held_BR``)."""
    return logits_BRV.masked_fill(held_BR[..., None] & stops_BV[:, None], -torch.inf)
