"""A sequence in the engine: what it asked for, what was read and said of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from headstart.inference.decoding.auto import Past
from headstart.inference.decoding.decode import Generation
from headstart.inference.decoding.sampling import SamplingParams

LOOKED = 512  # tokens that are compared at once
ALIKE = 16  # tokens that two prompts must begin with alike for the one to wait for the other


@dataclass(eq=False)
class Row(Generation):
    """A sequence in the engine."""

    place: int = -1
    prompt: list[int] = field(default_factory=list)
    read: int = 0  # tokens of it that were read
    most: int = 0  # new tokens
    stop: frozenset[int] = frozenset()
    sampling: SamplingParams = field(default_factory=SamplingParams)
    began: float = 0.0
    follow: bool = False  # the drafter has read it too
    likely: int | None = None  # log-probabilities told beside each token's own; None: not even that
    logprobs: list[tuple[float, list[tuple[int, float]]]] = field(default_factory=list)  # of each new token, and (token, its own) of those
    past: Past = field(default_factory=Past)

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return bool(self.ended)


class ReadFailed(Exception):
    """Reading the prompts of these rows failed; the others are as they were."""

    def __init__(self, rows: list[Row]) -> None:
        super().__init__(f"{len(rows)} prompts could not be read")
        self.rows = rows


def in_common(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens that both begin with."""
    least, at = min(len(a), len(b)), 0
    while at < least and a[at : at + LOOKED] == b[at : at + LOOKED]:  # so many at once: not one by one in Python
        at += LOOKED
    return next((i for i in range(min(at, least), least) if a[i] != b[i]), least)


def shared_by(row: Row, rows: Sequence[Row], reading: Sequence[Row], follows: bool) -> tuple[bool, Row | None, int]:
    """For a row that has read nothing: whether it waits for another one that is about to read (is in ``reading``, or has begun) what it
    begins with; else which one has read the most of that, and how many tokens. ``follows``: with a drafter that has read them too.
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
            if best == len(row.prompt) - 1:  # nobody has more to give
                break
    return False, source, best


def likely_of(rows: Sequence[Row]) -> int:
    """Log-probabilities that must be told of each token: its own, and as many of the likeliest as one of ``rows`` asks for. 0: none."""
    return max((0 if row.likely is None else 1 + row.likely for row in rows), default=0)


def told_of(numbers: Sequence[float], likely: int | None) -> tuple[float, list[tuple[int, float]]]:
    """The token's own log-probability, and (token, its own) of the ``likely`` likeliest. ``numbers``: own, likeliest, their tokens."""
    own, rest = numbers[0], numbers[1:]
    half = len(rest) // 2
    return own, [(int(token), log_p) for log_p, token in zip(rest[:half], rest[half:], strict=True)][: likely or 0]
