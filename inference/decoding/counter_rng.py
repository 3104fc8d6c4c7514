"""Random numbers by hashing: each is a function of the sequence's seed, the root's position and a slot, which names its use.

So a sequence draws the same numbers on any device and in any batch, and there is no generator with a state to wait for.

Shape suffixes: B sequences, X rows of any kind, V target vocabulary.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

VERIFYING = 1 << 20  # the first slot of verification; drafting uses those below
SLOTS = 1 << 10  # slots of one depth
FEW = 64  # numbers that are made on the host at a time
WORD = (1 << 64) - 1


class CounterRNG:
    """The only source of randomness in decoding: the random numbers of one round, for B sequences. Within a round every use has a slot of
    its own; from round to round the position of the root differs.
    """

    host: int | None = None  # ``key_B`` of a single sequence on a CPU, where a few numbers are made faster without tensors

    def __init__(self, seeds_B: Tensor, positions_B: Tensor | int) -> None:
        self.seeds_B, self.positions_B = seeds_B, positions_B
        self.ready: dict[int, Tensor] = {}  # slot -> its first number of each sequence, [B]

    @cached_property
    def key_B(self) -> Tensor:  # computed on first use: at temperature 0 it is never needed
        """A hash of each sequence's seed and position, from which all numbers of the round follow, int64 [B]."""
        return _mix(_mix(self.seeds_B) + self.positions_B)

    @classmethod
    def of(cls, seed: int = 0, position: int = 0, device: torch.device | str = "cpu") -> CounterRNG:
        """The random numbers of one sequence."""
        made = cls(_seed(seed, torch.device(device)), position)
        if made.seeds_B.device.type == "cpu":
            made.host = _mixed(_mixed(seed) + position)
        return made

    def prepare(self, slots: Sequence[int]) -> None:
        """Compute the first number of each of these slots in one call, which is cheaper than one by one."""
        if self.host is not None:
            return  # ``uniform`` is as fast
        device = self.seeds_B.device
        index_X = torch.arange(slots.start, slots.stop, device=device) << 32 if isinstance(slots, range) else _indices(tuple(slots), device)
        self.ready |= zip(slots, self._numbers(index_X).unbind(1), strict=True)

    def uniform(self, slot: int, *shape: int) -> Tensor:
        """Uniform numbers of a slot in [0, 1), fp64 [B, *shape]. They have 52 bits, so that u times a sum stays below the sum."""
        count = math.prod(shape)
        if count == 1 and slot in self.ready:
            return self.ready[slot].view(-1, *shape)
        if self.host is not None and count <= FEW:
            return torch.tensor([_number(self.host, slot, i) for i in range(count)], dtype=torch.float64).view(-1, *shape)
        index_X = torch.arange(slot << 32, (slot << 32) + count, device=self.seeds_B.device)
        return self._numbers(index_X).view(-1, *shape)

    def _numbers(self, index_X: Tensor) -> Tensor:
        bits_BX = _shift(_mix(self.key_B[:, None] + _mix(index_X)), 12)
        return bits_BX.double() * 2.0**-52

    def flip(self, p_B: Tensor, slot: int) -> Tensor:
        """True with probability p, bool [B], on the device of the random numbers."""
        u_B = self.uniform(slot)
        return u_B < p_B.to(u_B.device)

    def flip_alone(self, p: float, slot: int) -> bool:
        """``flip`` for one sequence; computed on the host, without tensors, on a CPU."""
        if self.host is None:
            return bool(self.flip(torch.tensor([p], dtype=torch.float64), slot))
        return _number(self.host, slot, 0) < p

    def expand(self, tokens_BEK: Tensor, rows_BE: Tensor) -> None:
        """Called while a tree grows: the children ``tokens_BEK`` were chosen, and those at ``rows_BE`` (indices into [E, K] flattened) are
        expanded next. Does nothing here. A subclass that leads the tree along a known text (inference/reports/recorded.py) follows it.
        """

    def draws(self, probs_BXV: Tensor, slot: int, count: int = 1) -> Tensor:
        """Draw ``count`` independent tokens from each row, int64 [B, X, count]. Rows need not sum to 1; a row of zeros gives an arbitrary
        token.

        Tokens are drawn by inverting the cumulative sum, in fp64 so that no token of a large vocabulary is lost to rounding.
        """
        cdf_BXV = probs_BXV.cumsum(-1, dtype=torch.float64)
        u = self.uniform(slot, probs_BXV.shape[1], count) * cdf_BXV[..., -1:]
        at = torch.searchsorted(cdf_BXV, u, right=True)  # right=True: never a token of probability 0
        return at.clamp_(max=probs_BXV.shape[-1] - 1)


@functools.lru_cache(maxsize=1024)
def _indices(slots: tuple[int, ...], device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor([slot << 32 for slot in slots], device=device)


def _mix(x: Tensor) -> Tensor:
    """A bijection of int64 in which every output bit depends on every input bit (the finalizer of SplitMix64, Steele et al., 2014)."""
    x = x + -7046029254386353131
    x = (x ^ _shift(x, 30)) * -4658895280553007687
    x = (x ^ _shift(x, 27)) * -7723592293110705685
    return x ^ _shift(x, 31)


def _number(key: int, slot: int, i: int) -> float:
    return (_mixed(key + _mixed((slot << 32) + i)) >> 12) * 2.0**-52


def _mixed(x: int) -> int:
    """``_mix`` of one number. The result counts as unsigned."""
    x = (x - 7046029254386353131) & WORD
    x = ((x ^ (x >> 30)) * -4658895280553007687) & WORD
    x = ((x ^ (x >> 27)) * -7723592293110705685) & WORD
    return x ^ (x >> 31)


@functools.lru_cache(maxsize=1024)
def _seed(seed: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor([seed], device=device)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right: zeros come in, not copies of the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
