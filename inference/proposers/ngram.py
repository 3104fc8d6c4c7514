"""Prompt lookup (Saxena, 2023): find where the text's last n tokens occurred before, n as large as possible, and guess what followed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headstart.heads.errors import UserError
from headstart.inference.proposers.base import Lookup, Trie, check_whole


class Ngram(Lookup):
    """Looks up n-grams with n from ``most`` down to ``least`` tokens, until ``matches`` places are found; for each n, later places first.

    The continuations of these places are merged by prefix into one tree. A continuation that reaches the end of the text starts again from
    its own beginning. Raises UserError for a wrong value.
    """

    def __init__(self, *, most: int = 4, least: int = 1, matches: int = 3) -> None:
        check_whole("ngram", most=most, least=least, matches=matches)
        if least > most:
            raise UserError(f"proposer ngram: least={least} must not exceed most={most}")
        self.most, self.least, self.matches = most, least, matches

    def clear(self) -> None:
        """Forget the text and where its n-grams end."""
        self.text = []
        self.ends: dict[tuple[int, ...], list[int]] = {}  # n-gram -> the indices after its ends, ascending

    def extend(self, tokens: Iterable[int]) -> None:
        """Note where each n-gram of the new tokens ends."""
        for token in tokens:
            self.text.append(token)
            for n in range(self.least, min(self.most, len(self.text)) + 1):
                self.ends.setdefault(tuple(self.text[-n:]), []).append(len(self.text))

    @property
    def matched(self) -> int:
        """The largest n for which the text's last n tokens occurred before; 0: none."""
        return self._match(())[0]

    def _match(self, after: Sequence[int]) -> tuple[int, list[int]]:
        """The largest n with a match at the end of text and ``after``, and the indices after up to ``matches`` matches."""
        tail, longest, places = [*self.text[-self.most :], *after][-self.most :], 0, list[int]()
        for n in range(len(tail), self.least - 1, -1):
            for place in reversed(self.ends.get(tuple(tail[-n:]), [])):
                if place == len(self.text) or place in places:  # nothing has followed yet, or a larger n has found it
                    continue
                longest = longest or n
                places.append(place)
                if len(places) == self.matches:
                    return longest, places
        return longest, places

    def guess(self, after: Sequence[int], depth: int, nodes: int, branch: int, least: float) -> Trie:
        """The continuations of the matches, merged by prefix. ``least`` is not used, because n-gram matches have no probabilities."""
        trie = Trie(nodes, branch)
        for place in self._match(after)[1]:
            followed, node = [*self.text[place : place + depth], *after], -1
            for i in range(depth):
                if (found := trie.add(node, followed[i % len(followed)])) is None:
                    break
                node = found
        return trie
