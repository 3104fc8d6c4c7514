"""The work of the static path on the device: it reads prompts, grows trees and verifies them, all in buffers of fixed shape.

A round is two functions. ``draft``: the drafter absorbs the rows verified last, and grows the trees. ``verify``: the target reads the
trees, verification accepts a path of each, and the accepted rows are kept. Neither waits for the device. On CUDA each is captured once as
a graph and replayed; where an operation of the target or the drafter does wait, both are launched kernel by kernel instead. Rows that a
round without drafting verifies are buffered: the drafter absorbs them before its next draft, or when the buffer is full.

Shape suffixes: B sequences, n sequences of a pass, N nodes, R = N + 1 rows of a tree, A rows that wait to be absorbed, P rows of an
accepted path, V vocabulary, T tokens of a piece of a prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headstart.heads.base import Drafter, Roots
from headstart.heads.errors import first_line, warn_once
from headstart.inference.decoding.capture import Captured, Graphs, can_capture
from headstart.inference.decoding.counter_rng import CounterRNG
from headstart.inference.decoding.fixed import FixedMemory
from headstart.inference.decoding.growth import grow
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.said import Said, likeliest
from headstart.inference.decoding.sampling import LogitsWarper, SamplingParams, columns, hold_stops, settings_of, wide
from headstart.inference.decoding.target import Target
from headstart.inference.decoding.tree import Tree
from headstart.inference.decoding.verify import choose, rule_of, seen_rows

GRAIN = {"cpu": 64, "cuda": 512}  # a pass sees the kept rows up to a multiple of this; other devices as CUDA


class Kind(NamedTuple):
    """The properties of a round that its operations depend on. Each kind is a device graph of its own."""

    n: int  # how many places the round covers: the first n
    padded_length: int  # kept rows that the pass sees
    policy: TreePolicy | None  # None: no drafting
    tap: bool  # keep the tapped states, because a later round may draft
    likely: int  # log-probabilities to return per new token: its own and those of the likely - 1 likeliest tokens; 0: none at all
    hold: bool  # some sequence must not end yet (min_tokens)


class Rounds:
    """The buffers for ``sequences`` sequences of up to ``max_length`` tokens, and the passes over them. ``trees``: all shapes that rounds
    may have. ``waits``: how many rows of a sequence may wait for the drafter. ``graphs``: None captures graphs where possible.
    """

    def __init__(
        self, target: Target, drafter: Drafter | None, sequences: int, max_length: int, trees: Sequence[TreePolicy], rule: str, waits: int,
        graphs: bool | None = None,
    ) -> None:  # fmt: skip
        self.target, self.drafter, self.rule, self.device = target, drafter, rule, target.device
        self.path = 1 + max((p.depth for p in trees), default=0)  # P
        self.waits = max(self.path, waits)  # A
        can = can_capture(target) if graphs is None else graphs
        self.graphs = Graphs(self.device) if can else None
        self.looks = self.device.type == "cpu" and not can  # reading a value costs nothing on a CPU, so rows that nobody needs are skipped
        self.positions = min(target.shape.max_positions, target.rope_switch or target.shape.max_positions)  # every position is below this
        # Slack, ``path`` rows each: a sequence's last round, the next one (begun before the last is read), and writes after it has left.
        room = max_length + 3 * self.path + self.waits
        scratch = max([1 + p.nodes for p in trees] + [p.reads for p in trees], default=1)
        self.cache = FixedMemory(sequences, room, scratch, self.device, target.layers_on())
        self.memory = FixedMemory(sequences, room, scratch, self.device)
        whole: dict[str, Any] = {"dtype": torch.int64, "device": self.device}
        # per sequence: the last token, the seed, 1 while it decodes, how many rows wait, the position before which it must not end
        self.token_B, self.seed_B, self.active_B, self.waiting_B, self.hold_B = (torch.zeros(sequences, **whole) for _ in range(5))
        self.cache.active_B = self.active_B
        self.read_BA, self.chosen_BA = (torch.zeros(sequences, self.waits + self.path, **whole) for _ in range(2))
        self.states: dict[int, Tensor] = {}  # tap -> the waiting rows' states
        self.warps = columns([settings_of(SamplingParams())] * sequences, self.device)
        self.seen_BV: Tensor | None = None
        self.stops_BV: Tensor | None = None
        self.extra, self.captures = 0, 0  # rows per sequence in the drafter's memory besides its roots; rounds captured as graphs

    def padded_length(self, rows: int) -> int:
        """``rows`` kept rows, rounded up to a multiple of GRAIN; with graphs to GRAIN times a power of two, so that few are captured."""
        grain = GRAIN.get(self.device.type, GRAIN["cuda"])
        grains = -(-rows // grain)
        return min((1 << (grains - 1).bit_length() if self.graphs else grains) * grain, self.cache.capacity)

    def padded_lengths(self) -> list[int]:
        """All values that ``padded_length`` can return, ascending."""
        return sorted({self.padded_length(rows) for rows in range(1, self.cache.capacity + 1)})

    # Prompts --------------------------------------------------------------------------------------------------------------

    def enter(self, b: int, prompt: Sequence[int], sampling: SamplingParams, stop: Sequence[int]) -> None:
        """Begin a sequence at place b: store its settings. ``stop``: its stop tokens."""
        V = self.target.shape.vocab_size
        self.seed_B[b], self.active_B[b], self.waiting_B[b] = sampling.seed, 0, 0
        self.cache.kept_B[b] = self.memory.kept_B[b] = 0
        for name, value in settings_of(sampling).items():
            self.warps[name][b] = value
        if sampling.repetition_penalty != 1:
            seen_BV = self.remember()
            seen_BV[b] = False
            seen_BV[b, torch.tensor(prompt, device=self.device)] = True
        self.hold_B[b] = hold = len(prompt) - 1 + sampling.min_tokens if sampling.min_tokens and stop else 0
        if hold:
            if self.stops_BV is None:
                self.stops_BV = torch.zeros(len(self.token_B), V, dtype=torch.bool, device=self.device)
            self.stops_BV[b] = False
            self.stops_BV[b, torch.tensor(list(stop), device=self.device)] = True

    def read_prompts(
        self, places: Sequence[int], pieces: Sequence[Sequence[int]], read: Sequence[int], ends: Sequence[int | None], warp: LogitsWarper,
        follow: bool, likely: int,
    ) -> Said:  # fmt: skip
        """Read the next pieces of these sequences' prompts side by side. ``read``: how many tokens of each prompt were read before.
        ``ends``: the prompt's token after the piece; None: it is the last piece. ``follow``: the drafter reads the pieces too. ``likely``:
        as in ``Kind``. Returns the token after each piece: the first new token after a last piece, the prompt's own after any other.
        """
        device, T = self.device, max(map(len, pieces))
        if self.looks:  # padded to few lengths, because oneDNN keeps a kernel for every number of rows that it has seen
            padded = -(-T // 8) * 8 if T <= 32 else -(-T // 32) * 32
            T = min(padded, self.cache.capacity - 1)  # below the capacity: ``FixedMemory.load`` requires it
        tokens_nT = torch.tensor([[*piece, *[0] * (T - len(piece))] for piece in pieces], device=device)
        read_n1, length_n1, place_n = (torch.tensor(x, device=device) for x in (read, [*map(len, pieces)], places))
        read_n1, length_n1 = read_n1[:, None], length_n1[:, None]
        positions_nT = (read_n1 + torch.arange(T, device=device)).clamp_(max=self.positions - 1)
        taps = self.drafter.taps if follow and self.drafter is not None else ()
        try:
            sees = self.cache.load(places, read, T, [*map(len, pieces)])
            states, final = self.target.read_rows(tokens_nT, positions_nT, self.cache, sees, taps)
            last_n1 = length_n1 - 1
            raw_n1V = logits_n1V = wide(self.target.logits(final.gather(1, last_n1[..., None].expand(-1, -1, final.shape[2]))))
            seen = None if self.seen_BV is None or not warp.penalty else self.seen_BV[place_n][:, None]
            if self.stops_BV is not None:
                logits_n1V = hold_stops(logits_n1V, (read_n1 + last_n1) < self.hold_B[place_n][:, None], self.stops_BV[place_n])
            length_n = (read_n1 + length_n1)[:, 0]
            empty = Tree.empty(device, len(pieces))
            verdict = choose(logits_n1V, empty, warp, "top_plus_one", CounterRNG(self.seed_B[place_n], length_n - 1), seen)
            said_n = torch.tensor([-1 if x is None else x for x in ends], device=device)
            done_n = said_n < 0
            next_n = torch.where(done_n, verdict.token_B, said_n)
            if follow and self.drafter is not None:
                self._follow(places, tokens_nT, next_n, length_n1, positions_nT, states, done_n)
            self.cache.kept_B[place_n] = length_n
            self.token_B[place_n], self.active_B[place_n] = next_n, done_n.long()
            if self.seen_BV is not None:
                self.seen_BV[place_n, next_n] |= done_n
        finally:
            self.cache.loading = self.memory.loading = None
        told = likeliest(raw_n1V, verdict.token_B[:, None], likely) if likely else None
        return Said(torch.stack([torch.zeros_like(next_n), next_n], 1), told)

    def _follow(
        self, places: Sequence[int], tokens_nT: Tensor, next_n: Tensor, length_n1: Tensor, positions_nT: Tensor, states: dict[int, Tensor],
        done_n: Tensor,
    ) -> None:  # fmt: skip
        """Let the drafter read the roots of these pieces. At the end of a prompt its last root is then removed from memory again and
        becomes the first waiting row, because every draft begins by absorbing the waiting rows.
        """
        assert self.drafter is not None
        place_n, T = torch.tensor(places, device=self.device), tokens_nT.shape[1]
        chosen_nT = torch.cat([tokens_nT[:, 1:], next_n[:, None]], 1).scatter(1, length_n1 - 1, next_n[:, None])
        sees = self.memory.load(places, self.memory.kept_B[place_n].tolist(), T)
        self.drafter.begin(Roots(tokens_nT, chosen_nT, states, positions_nT), self.memory, sees, length_n1 - 1)
        if self.memory.written:  # a drafter without attention writes nothing
            more = self.memory.written - T  # a drafter that reads x[0] too, which no root chose, writes one row more
            self.extra = max(self.extra, more)
            self.memory.kept_B[place_n] += length_n1[:, 0] + more - done_n.long()
        self.read_BA[place_n, 0], self.chosen_BA[place_n, 0] = tokens_nT.gather(1, length_n1 - 1)[:, 0], next_n
        self.waiting_B[place_n] = done_n.long()
        for tap, state in states.items():
            self._buffer(tap, state)[place_n, 0] = state.gather(1, (length_n1 - 1)[..., None].expand(-1, -1, state.shape[2]))[:, 0]

    def share(self, source: int, goal: int, rows: int, follow: bool) -> None:
        """Copy the first ``rows`` rows of sequence ``source`` to ``goal``, whose prompt begins alike. ``follow``: the drafter's too."""
        self.cache.copy(source, goal, rows)
        if follow and self.memory.layers:
            self.memory.copy(source, goal, rows + self.extra)

    def _buffer(self, tap: int, like: Tensor) -> Tensor:
        if tap not in self.states:
            self.states[tap] = like.new_zeros(len(self.token_B), self.read_BA.shape[1], like.shape[-1])
        return self.states[tap]

    # One round: fixed shapes, no waiting ------------------------------------------------------------------------------------

    def run(self, kind: Kind, warp: LogitsWarper) -> Said:
        found = None if self.graphs is None else self.graphs.find(kind, warp)
        if found is None and self.graphs is not None and not self.graphs.complete and (found := self.capture(kind, warp)):
            self.graphs.keep(kind, warp, found)
            self.captures += 1
        if found is None:
            return self.verify(self.draft(kind, warp), kind, warp)
        found.draft()
        found.verify()
        return found.result

    def parts(self, kind: Kind, warp: LogitsWarper) -> tuple[Callable[[], Any], Callable[[], Any]]:
        """The drafting and the verification of a round as two functions, which can be timed separately."""
        if found := self.capture(kind, warp):
            return found.draft, found.verify
        return partial(self.draft, kind, warp), partial(self.verify, self.draft(kind, warp), kind, warp)

    def absorb(self, n: int, padded_length: int, nodes: int) -> Any:
        """Let the drafter read the waiting rows of the first n sequences. Returns its drafts at the last root of each."""
        assert self.drafter is not None
        memory, waiting_B = self.memory, self.waiting_B[:n]
        A = max(int(waiting_B.max()), 1) if self.looks else self.waits
        memory.use(n, padded_length, nodes)
        positions_BA = (self.cache.kept_B[:n] - waiting_B)[:, None] + torch.arange(A, device=self.device)
        states = {tap: s[:n, :A] for tap, s in self.states.items()}
        roots = Roots(self.read_BA[:n, :A], self.chosen_BA[:n, :A], states, positions_BA.clamp_(0, self.positions - 1))
        draft = self.drafter.begin(roots, memory, memory.sees_roots(A), ask=(waiting_B - 1).clamp(min=0)[:, None])
        memory.kept_B[:n] += waiting_B * self.active_B[:n]
        waiting_B.zero_()
        return draft

    def draft(self, kind: Kind, warp: LogitsWarper) -> Tree:
        if kind.policy is None:
            return Tree.empty(self.device, kind.n)
        n, length_B = kind.n, self.cache.kept_B[: kind.n]
        assert self.drafter is not None
        draft = self.absorb(n, kind.padded_length, kind.policy.reads)
        rule = rule_of(self.rule, kind.policy)
        last_B1 = (length_B - 1).clamp(0, self.positions - 1)[:, None]  # clamped: an unused place has length 0
        return grow(self.drafter, draft, last_B1, self.memory, kind.policy, warp, rule, CounterRNG(self.seed_B[:n], length_B))

    def verify(self, tree: Tree, kind: Kind, warp: LogitsWarper) -> Said:
        target, cache, n, R = self.target, self.cache, kind.n, len(tree) + 1
        length_B, token_B, active_B = cache.kept_B[:n].clone(), self.token_B[:n], self.active_B[:n]
        tokens_BR = torch.cat([token_B[:, None], tree.tokens_BN], 1)
        positions_BR = (length_B[:, None] + F.pad(tree.depths_BN, (1, 0))).clamp_(max=self.positions - 1)
        cache.use(n, kind.padded_length, R)
        taps = self.drafter.taps if kind.tap and self.drafter else ()
        states, final_BRD = target.read_rows(tokens_BR, positions_BR, cache, cache.sees_nodes(tree.rows()), taps)
        raw_BRV = logits_BRV = target.logits(final_BRD)
        seen_BRV = seen_rows(self.seen_BV[:n], token_B, tree) if warp.penalty and self.seen_BV is not None else None
        if kind.hold and self.stops_BV is not None:
            logits_BRV = hold_stops(wide(logits_BRV), positions_BR < self.hold_B[:n, None], self.stops_BV[:n])
        rule = rule_of(self.rule, tree)
        verdict = choose(logits_BRV, tree, warp, rule, CounterRNG(self.seed_B[:n], length_B), seen_BRV)
        rows_BP, count_B = F.pad(verdict.rows_BA, (0, self.path - verdict.rows_BA.shape[1])), verdict.count_B
        cache.keep(rows_BP[:, : tree.depth + 1], (count_B + 1) * active_B)
        read_BP = tokens_BR.gather(1, rows_BP)
        place_P = torch.arange(self.path, device=self.device)
        chosen_BP = torch.where(place_P < count_B[:, None], F.pad(read_BP[:, 1:], (0, 1)), verdict.token_B[:, None])
        self.token_B[:n] = verdict.token_B
        if kind.tap:
            at_BP = self.waiting_B[:n, None] + place_P  # after the rows that wait already
            self.read_BA[:n].scatter_(1, at_BP, read_BP)
            self.chosen_BA[:n].scatter_(1, at_BP, chosen_BP)
            for k, state in states.items():
                index = rows_BP[..., None].expand(-1, -1, state.shape[2])
                self._buffer(k, state)[:n].scatter_(1, at_BP[..., None].expand_as(index), state.gather(1, index))
            self.waiting_B[:n] += (count_B + 1) * active_B
        else:
            self.waiting_B[:n] = 0
        if seen_BRV is not None and self.seen_BV is not None:
            # Behind the accepted tokens, chosen_BP repeats the target's own token. Inactive sequences (prompts being read) add none.
            new_BV = torch.zeros_like(self.seen_BV[:n]).scatter_(1, chosen_BP, True)
            self.seen_BV[:n] |= new_BV & (active_B > 0)[:, None]
        told = None
        if kind.likely:
            path_BPV = raw_BRV.gather(1, rows_BP[..., None].expand(-1, -1, raw_BRV.shape[2]))
            told = likeliest(path_BPV, chosen_BP, kind.likely)
        return Said(torch.cat([count_B[:, None], chosen_BP, tree.tokens_BN, tree.parents_BN], 1), told)

    def capture(self, kind: Kind, warp: LogitsWarper) -> Captured | None:
        """Capture a round as graphs; the sequences stay as they are. Returns None, now and later, if an operation waits for the device."""
        if self.graphs is None:
            return None
        draft = None if kind.policy is None else partial(self.draft, kind, warp)
        try:
            return self.graphs.capture(draft, lambda tree: self.verify(tree, kind, warp), self.snapshot(), partial(self.draft, kind, warp))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as e:
            self.graphs = None
            what = f"{self.target.name}: its rounds cannot be device graphs ({first_line(e)})"
            warn_once(f"{what}: they are launched kernel by kernel, which is slower")
            return None

    def snapshot(self) -> Any:
        """Save the state of all sequences. Returns a function that restores it."""
        state = [self.cache.kept_B, self.memory.kept_B, self.token_B, self.waiting_B, self.read_BA, self.chosen_BA, *self.states.values()]
        saved = [(x, x.clone()) for x in [*state, *([] if self.seen_BV is None else [self.seen_BV])]]

        def put_back() -> None:
            for x, old in saved:
                x.copy_(old)

        return put_back

    def remember(self) -> Tensor:
        """The tokens that each sequence has seen, for repetition penalties, bool [B, V]; the buffer is made at the first call."""
        if self.seen_BV is None:
            self.seen_BV = torch.zeros(len(self.token_B), self.target.shape.vocab_size, dtype=torch.bool, device=self.device)
        return self.seen_BV
