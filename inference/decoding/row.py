"""A sequence in the engine: its request, how much of its prompt was read, and its new tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from headstart.inference.decoding.auto import Past
from headstart.inference.decoding.decode import Generation
from headstart.inference.decoding.sampling import SamplingParams

LOOKED = 512  # tokens of two prompts that are compared at once
ALIKE = 16  # a beginning is copied from another prompt only if they share at least this many first tokens


@dataclass(eq=False)
class Row(Generation):
    """A sequence in the engine."""

    place: int = -1  # its index in the engine's buffers; -1: none
    prompt: list[int] = field(default_factory=list)
    read: int = 0  # tokens of the prompt that were read
    most: int = 0  # new tokens that it may get
    stop: frozenset[int] = frozenset()
    sampling: SamplingParams = field(default_factory=SamplingParams)
    began: float = 0.0  # time of the request, plus the time that the engine spent on capturing or measuring since
    follow: bool = False  # the drafter has read the prompt too
    likely: int | None = None  # how many likeliest tokens are reported with each new token's log-probability; None: not even its own
    logprobs: list[tuple[float, list[tuple[int, float]]]] = field(default_factory=list)  # per token: its own, [(token, log p)] of the best
    past: Past = field(default_factory=Past)

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return bool(self.ended)


def in_common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many first tokens two prompts share."""
    least, at = min(len(a), len(b)), 0
    while at < least and a[at : at + LOOKED] == b[at : at + LOOKED]:  # whole slices at once, which is faster than token by token in Python
        at += LOOKED
    return next((i for i in range(min(at, least), least) if a[i] != b[i]), least)


def shared_by(row: Row, rows: Sequence[Row], reading: Sequence[Row], follows: bool) -> tuple[bool, Row | None, int]:
    """Find a row from which ``row``, whose prompt is unread, can copy the beginning of its prompt. Returns (True, None, 0) if it should
    wait for another row that is about to read their common beginning (it is in ``reading``, or has begun). Otherwise returns False, the row
    that has read most of a common beginning (or None), and how many tokens to copy. ``follows``: the drafter must have read them too.
    """
    best, source = 0, None
    for other in rows:
        if other is row or not (other.read or other in reading):
            continue
        same = in_common(row.prompt, other.prompt)
        if same >= ALIKE and (other in reading or 0 < other.read < min(same, len(other.prompt))):
            return True, None, 0
        same = min(same, other.read) - 1  # the last token is read again: its states are the drafter's next root
        if same > best and same + 1 >= ALIKE and (other.follow or not follows):
            best, source = same, other
            if best == len(row.prompt) - 1:  # no other row can share more
                break
    return False, source, best


def likely_of(rows: Sequence[Row]) -> int:
    """How many log-probabilities a pass must return for each token: its own and the most that any row asks for. 0: none."""
    return max((0 if row.likely is None else 1 + row.likely for row in rows), default=0)


def told_of(numbers: Sequence[float], likely: int | None) -> tuple[float, list[tuple[int, float]]]:
    """A token's log-probability, and (token, its own) of the ``likely`` likeliest. ``numbers``: [1 + 2 K] as in ``Said.likely``."""
    own, rest = numbers[0], numbers[1:]
    half = len(rest) // 2
    return own, [(int(token), log_p) for log_p, token in zip(rest[:half], rest[half:], strict=True)][: likely or 0]
