"""What proposers share: a tree that is gathered on the host, and guessing from the text alone."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from headstart.heads.base import Roots
from headstart.heads.errors import UserError
from headstart.inference.decoding.rng import CounterRNG
from headstart.inference.decoding.context import Context
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.propose import Proposer
from headstart.inference.decoding.sampling import SamplingParams
from headstart.inference.decoding.tree import Tree


class Trie:
    """Guesses merged by prefix: at most ``nodes`` of them, ``branch`` behind one row. Row 0 is the root row, row i + 1 node i."""

    def __init__(self, nodes: int, branch: int) -> None:
        self.nodes, self.branch = nodes, branch
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.rows: list[dict[int, int]] = [{}]  # of each row: token -> node

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, token: int) -> int | None:
        """The node of this token behind node ``parent`` (-1: the root row), a new one where there is room; None where there is none."""
        children = self.rows[parent + 1]
        if token not in children:
            if len(self) >= self.nodes or len(children) >= self.branch:
                return None
            self.append(parent, token)
        return children[token]

    def append(self, parent: int, token: int) -> None:
        """A node of its own, even where the row has this token already."""
        self.rows[parent + 1].setdefault(token, len(self))
        self.tokens.append(token)
        self.parents.append(parent)
        self.rows.append({})

    def tree(self, device: torch.device) -> Tree:
        """The guesses as a tree, in the order in which they were added."""
        return Tree.of(self.tokens, self.parents, device)


class Follower(Proposer):
    """A proposer that can also guess behind tokens that nobody has verified: the small one of a cascade."""

    @abstractmethod
    def follow(self, after: Sequence[int], count: int) -> list[int]:
        """At most ``count`` guesses, one after the other, of what follows the last root and then ``after``. Forgets ``after``."""


class Lookup(Follower):
    """Guesses from the text so far, the prompt and what the target has said: on the host, without a model.

    They hang on the text alone and are never drawn, so they are exact under every rule at any temperature.
    """

    taps: tuple[int, ...] = ()
    most: int  # the longest match it looks for, in tokens
    text: list[int]

    def start(self, context: Context, tokens: int) -> None:
        """Forget the text."""
        self.device = context.target.device
        self.clear()

    def absorb(self, roots: Roots) -> None:
        """Read what was verified."""
        if not self.text:
            self.extend(roots.read_BT[0, :1].tolist())
        self.extend(roots.chosen_BT[0].tolist())

    def propose(self, policy: TreePolicy, rng: CounterRNG, sampling: SamplingParams) -> Tree:
        """The guesses that the policy has room for; nothing is drawn."""
        if sampling.temperature > 0:
            policy.check(sampling.rule)
        return self.guess((), policy.depth, policy.nodes, policy.branch, policy.least).tree(self.device)

    def follow(self, after: Sequence[int], count: int) -> list[int]:
        """A single path, whatever its probability."""
        return self.guess(after, count, count, 1, 0.0).tokens

    @abstractmethod
    def clear(self) -> None:
        """Forget the text."""

    @abstractmethod
    def extend(self, tokens: Iterable[int]) -> None:
        """The text goes on."""

    @property
    @abstractmethod
    def matched(self) -> int:
        """Tokens at the end of the text that the guesses rest on: they were read before, and something followed. 0: none."""

    @abstractmethod
    def guess(self, after: Sequence[int], depth: int, nodes: int, branch: int, least: float) -> Trie:
        """What may follow the text and then ``after``."""


def joined(parts: Sequence[Roots]) -> Roots:
    """Roots that follow each other, as one."""

    def join(name: str) -> Tensor:
        return torch.cat([getattr(part, name) for part in parts], dim=1)

    states = {tap: torch.cat([part.states[tap] for part in parts], dim=1) for tap in parts[0].states}
    return Roots(join("read_BT"), join("chosen_BT"), states, join("positions_BT"))


def check_whole(kind: str, /, **values: object) -> None:
    """Raises UserError naming the first value that is not a whole number of at least 1."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UserError(f"proposer {kind}: {name} must be a whole number of at least 1, found {value!r}")
