"""Suffix decoding (the idea of SuffixDecoding, 2411.04975): find the longest suffix of the text that occurred in it before, and guess what
followed there, weighted by how often each continuation followed.

The suffix automaton of the text (Blumer et al., 1985) is updated online, in amortised constant time a token. A state stands for all
substrings that end at the same set of places. Its suffix link leads to the state of the longest of their suffixes that ends at more
places. So the link of the last state is the longest match, and the links from there lead to shorter matches with more places.

The probability of a guess is estimated as in PPM with the escape of method A (Cleary and Witten, 1984). The longest match has the mass 1.
A match with C places gives 1/(C+1) of its mass to each of them and leaves 1/(C+1) to the shorter matches. The probability of a guess is
the sum over the places at which it followed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

from headstart.inference.proposers.base import Lookup, Trie, check_whole

Place = tuple[int, int, float]  # index of a token in the text, index at which its match ends, weight of that place
Offer = tuple[float, int, int, int, int, list[Place]]  # -probability, parent, rank among siblings, token, depth, its places


class Automaton:
    """The suffix automaton of a text. State 0 is the empty substring."""

    def __init__(self) -> None:
        self.next: list[dict[int, int]] = [{}]
        self.link, self.length = [-1], [0]  # suffix link, and length of the longest substring, of each state
        self.end = [-1]  # the place of the token that a state was made for; -1: the initial state, or a copy
        self.below: list[dict[int, None]] = [{}]  # states whose link leads here, oldest first (a dict, as an ordered set)
        self.last = 0

    def _state(self, length: int, end: int, link: int, onward: dict[int, int]) -> int:
        self.next.append(onward)
        self.length.append(length)
        self.end.append(end)
        self.link.append(link)
        self.below.append({})
        self.below[link][len(self.link) - 1] = None
        return len(self.link) - 1

    def _relink(self, state: int, link: int) -> None:
        del self.below[self.link[state]][state]
        self.link[state] = link
        self.below[link][state] = None

    def push(self, token: int, place: int) -> None:
        """Append ``token``, which stands at index ``place`` of the text."""
        new = self._state(self.length[self.last] + 1, place, 0, {})
        p = self.last
        while p >= 0 and token not in self.next[p]:
            self.next[p][token], p = new, self.link[p]
        if p >= 0:
            q = self.next[p][token]
            if self.length[q] > self.length[p] + 1:  # only the shorter substrings of q end here too, so they get a state of their own
                copy = self._state(self.length[p] + 1, -1, self.link[q], dict(self.next[q]))
                while p >= 0 and self.next[p].get(token) == q:
                    self.next[p][token], p = copy, self.link[p]
                self._relink(q, copy)
                q = copy
            self._relink(new, q)
        self.last = new


class Suffix(Lookup):
    """``least``: the shortest match that counts, in tokens. ``places``: the most places of matches that are used, those of longer matches
    first. Raises UserError for a wrong value.
    """

    most = sys.maxsize

    def __init__(self, *, least: int = 1, places: int = 64) -> None:
        check_whole("suffix", least=least, places=places)
        self.least, self.places = least, places

    def clear(self) -> None:
        """Forget the text."""
        self.text, self.automaton = [], Automaton()

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text and the automaton."""
        for token in tokens:
            self.automaton.push(token, len(self.text))
            self.text.append(token)

    @property
    def matched(self) -> int:
        """The length of the longest match in tokens; 0 if it is shorter than ``least``."""
        length = self.automaton.length[max(self.automaton.link[self.automaton.last], 0)]
        return length if length >= self.least else 0

    def matches(self, after: Sequence[int]) -> list[Place]:
        """The places where a suffix of the text followed by ``after`` ended before, with their weights."""
        a, rest = self.automaton, 1.0
        state = max(a.link[a.last], 0)
        length = a.length[state]
        for token in after:
            while state and token not in a.next[state]:
                state = a.link[state]
                length = a.length[state]
            if token in a.next[state]:
                state, length = a.next[state][token], length + 1
        seen, ends, weights = {a.last}, list[int](), list[float]()  # the end of the text is no match, because nothing has followed it
        while state and length >= self.least and len(ends) < self.places:
            stack = [state]
            while stack and len(ends) < self.places:
                at = stack.pop()
                if at in seen:
                    continue
                seen.add(at)
                stack += a.below[at]
                if a.end[at] >= 0:
                    ends.append(a.end[at])
            rest /= len(ends) + 1
            weights = [weight + rest for weight in weights] + [rest] * (len(ends) - len(weights))
            state = a.link[state]
            length = a.length[state]
        return list(zip(ends, ends, weights, strict=True))

    def guess(self, after: Sequence[int], depth: int, nodes: int, branch: int, least: float) -> Trie:
        """The most probable paths, best first; a path less probable than ``least`` is not continued. A path that reaches the end of the
        text starts again after the match where it began.
        """
        trie = Trie(nodes, branch)
        heap: list[Offer] = []

        def offer(parent: int, depth: int, places: list[Place]) -> None:
            """Put the likeliest tokens that followed these places on the heap."""
            followed: dict[int, list[Place]] = {}
            for place, match, weight in places:
                place = place + 1 if place + 1 < len(self.text) + len(after) else match + 1
                token = self.text[place] if place < len(self.text) else after[place - len(self.text)]
                followed.setdefault(token, []).append((place, match, weight))
            values = sorted(((-sum(weight for *_, weight in at), token) for token, at in followed.items()), key=lambda x: x[0])
            for rank, (value, token) in enumerate(values[:branch]):  # among equals, the token met first
                heappush(heap, (value, parent, rank, token, depth, followed[token]))

        offer(-1, 1, self.matches(after))
        while heap and len(trie) < nodes:
            value, parent, _, token, deep, places = heappop(heap)
            node = trie.add(parent, token)
            if node is not None and deep < depth and -value >= least:
                offer(node, deep + 1, places)
        return trie
