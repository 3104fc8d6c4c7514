"""Base classes of proposers: a tree that is built on the host, and proposers that guess from the text alone."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from headstart.heads.base import Roots
from headstart.heads.errors import UserError
from headstart.inference.decoding.context import Context
from headstart.inference.decoding.counter_rng import CounterRNG
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.propose import Proposer
from headstart.inference.decoding.sampling import SamplingParams
from headstart.inference.decoding.tree import Tree


class Trie:
    """A tree built on the host; guesses with the same prefix share nodes. At most ``nodes`` nodes, and ``branch`` children of a row. Row 0
    is the root row, row i + 1 is node i.
    """

    def __init__(self, nodes: int, branch: int) -> None:
        self.nodes, self.branch = nodes, branch
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.rows: list[dict[int, int]] = [{}]  # of each row: token -> its child node

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, token: int) -> int | None:
        """The child of node ``parent`` (-1: the root row) with this token, added if it is missing. None where there is no room for it."""
        children = self.rows[parent + 1]
        if token not in children:
            if len(self) >= self.nodes or len(children) >= self.branch:
                return None
            self.append(parent, token)
        return children[token]

    def append(self, parent: int, token: int) -> None:
        """Add a node, even if the parent has a child with this token already. The limits are not checked."""
        self.rows[parent + 1].setdefault(token, len(self))
        self.tokens.append(token)
        self.parents.append(parent)
        self.rows.append({})

    def tree(self, device: torch.device) -> Tree:
        """The guesses as a tree, in the order in which they were added."""
        return Tree.of(self.tokens, self.parents, device)


class Follower(Proposer):
    """A proposer that can also guess after unverified tokens, as the small proposer of a cascade must."""

    @abstractmethod
    def follow(self, after: Sequence[int], count: int) -> list[int]:
        """A chain of at most ``count`` guesses that follow the verified text and then ``after``. ``after`` is not remembered."""


class Lookup(Follower):
    """Guesses looked up in the verified text, prompt and answer: on the host, without a model.

    The guesses depend on the text alone and are never drawn, so every rule verifies them exactly at any temperature.
    """

    taps: tuple[int, ...] = ()
    most: int  # the longest match that it looks for, in tokens
    text: list[int]

    def start(self, context: Context, tokens: int) -> None:
        """Forget the text of the last sequence."""
        self.device = context.target.device
        self.clear()

    def absorb(self, roots: Roots) -> None:
        """Add newly verified tokens to the text."""
        if not self.text:
            self.extend(roots.read_BT[0, :1].tolist())
        self.extend(roots.chosen_BT[0].tolist())

    def propose(self, policy: TreePolicy, rng: CounterRNG, sampling: SamplingParams) -> Tree:
        """The guesses within the limits of the policy; none is drawn. Raises UserError for a rule that cannot verify the policy's trees."""
        if sampling.temperature > 0:
            policy.check(sampling.rule)
        return self.guess((), policy.depth, policy.nodes, policy.branch, policy.least).tree(self.device)

    def follow(self, after: Sequence[int], count: int) -> list[int]:
        """The chain of likeliest guesses, however improbable."""
        return self.guess(after, count, count, 1, 0.0).tokens

    @abstractmethod
    def clear(self) -> None:
        """Forget the text."""

    @abstractmethod
    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text."""

    @property
    @abstractmethod
    def matched(self) -> int:
        """The length of the longest match: how many of the text's last tokens occurred in it before, with a continuation. 0: none."""

    @abstractmethod
    def guess(self, after: Sequence[int], depth: int, nodes: int, branch: int, least: float) -> Trie:
        """Guesses that follow the text and then the tokens ``after``, within these limits (see ``TreePolicy``)."""


def joined(parts: Sequence[Roots]) -> Roots:
    """Join roots that follow each other into one."""

    def join(name: str) -> Tensor:
        return torch.cat([getattr(part, name) for part in parts], dim=1)

    states = {tap: torch.cat([part.states[tap] for part in parts], dim=1) for tap in parts[0].states}
    return Roots(join("read_BT"), join("chosen_BT"), states, join("positions_BT"))


def check_whole(kind: str, /, **values: object) -> None:
    """Raises UserError naming the first value that is not a whole number of at least 1."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UserError(f"proposer {kind}: {name} must be a whole number of at least 1, found {value!r}")
