"""Expected accepted length from one teacher-forced pass, by walking as decoding does.

Not every root starts a round, so the mean over all roots is biased. The walk starts at the first root, takes the round's accepted guesses
and the target's own token, and goes on from the root that they lead to. At temperature 0 the text decides which guesses are accepted, so
there is one walk. Above temperature 0, given that the tokens x were emitted, the token rule (2211.17192) has accepted the guess x[i] with
probability min(1, q(x[i]) / p(x[i])), independently of the others: of the mass p(x) on emitting x, min(p, q)(x) comes from acceptance. The
walk is then a distribution over roots, summed exactly.

Shape suffixes: K depths, B batch, T roots.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch.nn.functional as F
from torch import Tensor


@dataclass
class Walk:
    """Sums over rounds (expected numbers above temperature 0)."""

    rounds: float = 0.0
    tokens: float = 0.0
    reached: list[float] = field(default_factory=list)  # rounds in which depth d was reached and accepted
    tried: list[float] = field(default_factory=list)  # rounds in which depth d was reached, accepted or not; not those that end there

    @property
    def expected_length(self) -> float:
        """Tokens per round, the target's own counted."""
        return self.tokens / self.rounds if self.rounds else 0.0

    def add(self, other: Walk) -> None:
        self.rounds, self.tokens = self.rounds + other.rounds, self.tokens + other.tokens
        self.reached = [a + b for a, b in zip(self.reached or [0.0] * len(other.reached), other.reached, strict=True)]
        self.tried = [a + b for a, b in zip(self.tried or [0.0] * len(other.tried), other.tried, strict=True)]


def walk(accept_KT: Tensor, first: int, tokens: int) -> Walk:
    """The walk of a chain of K guesses over a sequence of ``tokens`` known tokens, from root ``first`` on.

    ``accept_KT[d-1, t]``: probability (or truth) that root t's guess of depth d, x[t+1+d], is accepted once reached.
    The last round is cut where the sequence ends, as decoding cuts it at its limit.
    """
    K = accept_KT.shape[0]
    accept = accept_KT.T.tolist()
    arrive = [0.0] * tokens
    result = Walk(reached=[0.0] * K, tried=[0.0] * K)
    if first < tokens:
        arrive[first] = 1.0
    for t in range(first, tokens - 2):
        here = arrive[t]
        if here == 0:
            continue
        left = tokens - 2 - t  # tokens after x[t+1]
        result.rounds += here
        for k in range(K + 1):  # exactly k guesses accepted
            more = accept[t][k] if k < K else 0.0
            ends = here * (1 - more) if k + 1 < left else here
            result.tokens += ends * (k + 1)
            if k + 1 < left:
                arrive[t + k + 1] += ends
                if k < K:
                    result.tried[k] += here
            here -= ends
            if here <= 0 or k == K:
                break
            result.reached[k] += here
    return result


def walk_rows(accept_KBT: Tensor, valid_BT: Tensor) -> Walk:
    """The walks over every run of valid roots (those whose guess of depth 1 is supervised) of packed rows, summed."""
    result = Walk(reached=[0.0] * accept_KBT.shape[0], tried=[0.0] * accept_KBT.shape[0])
    edges = F.pad(valid_BT.int(), (1, 1)).diff()  # 1 where a run starts, -1 right after its end
    for b, row in enumerate(edges.tolist()):
        starts, stops = [i for i, x in enumerate(row) if x == 1], [i for i, x in enumerate(row) if x == -1]
        for start, stop in zip(starts, stops, strict=True):  # the last root's guess is x[stop + 1]
            result.add(walk(accept_KBT[:, b, start:stop], 0, stop - start + 2))
    return result
