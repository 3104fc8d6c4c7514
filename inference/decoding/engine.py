"""The static path: many sequences at once, buffers preallocated, no waiting for the device inside a round (see decoding/rounds.py).

Sequences enter and leave at any time. Prompts are read in pieces between the rounds of the other sequences, several prompts side by side;
a beginning that two prompts share is read once. On CUDA the host reads the tokens of a round one round late, while the next round runs.
So a sequence that has ended runs one round too many, and the tokens of that round are dropped.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from headstart.heads.base import Drafter
from headstart.heads.errors import UserError
from headstart.inference.decoding.auto import WORTH, Pace, auto_of_rounds, known_of
from headstart.inference.decoding.context import CHUNK
from headstart.inference.decoding.decode import Guesses, check_prompt, stops_of
from headstart.inference.decoding.policy import TreePolicy, costs_as, shapes_of
from headstart.inference.decoding.rounds import Kind, Rounds
from headstart.inference.decoding.row import Row, likely_of, shared_by, told_of
from headstart.inference.decoding.said import Said
from headstart.inference.decoding.sampling import LogitsWarper, SamplingParams
from headstart.inference.decoding.target import Target
from headstart.inference.decoding.tree import depths_of
from headstart.inference.decoding.warm_up import prepare_expected

Plans = Mapping[int, TreePolicy | None]  # n -> the tree for up to n sequences at once (None: no drafting)
AT_ONCE = {"cpu": 2 * CHUNK, "cuda": 8 * CHUNK}  # tokens of prompts that one pass may read, padding counted
WAITS = 8  # rounds without drafting that the drafter may absorb later, under an auto policy


class Engine:
    """Decodes up to ``sequences`` sequences of up to ``max_length`` tokens at once. ``plans``: one tree at any load, or trees by load.

    While the plan is None, the drafter gets no input: it never reads the tokens of those rounds, nor the prompts that were read in that
    time. When it drafts again, its guesses for those sequences are worse; the output stays exact. Raises UserError for a rule that cannot
    verify the plans' trees.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        *,
        sequences: int,
        max_length: int,
        plans: Plans | TreePolicy | None = None,
        trees: Sequence[TreePolicy | None] = (),
        rule: str = "auto",
        graphs: bool | None = None,
    ) -> None:
        plans = plans if isinstance(plans, Mapping) else {sequences: plans}
        all_trees = [tree for tree in (*plans.values(), *trees) if tree is not None]
        if drafter is None or not all_trees:
            drafter, plans, all_trees = None, {sequences: None}, []
        self.target, self.drafter, self.plans, self.rule, self.max_length = target, drafter, dict(sorted(plans.items())), rule, max_length
        for tree in all_trees:
            tree.check(rule)
        self.auto = any(tree.kind == "auto" for tree in all_trees)
        shapes = [shape for tree in all_trees for heat in (0, 2) for shape in shapes_of(tree, rule, heat)]
        self.rounds = Rounds(target, drafter, sequences, max_length, shapes, rule, WAITS if self.auto else 0, graphs)
        self.late = target.device.type == "cuda"
        self.places: list[Row | None] = [None] * sequences
        self.pending: list[tuple[list[Row | None], Said, Any, TreePolicy | None]] = []  # rounds whose tokens the host has not read yet
        self.ready = True  # the next round can draft: no sequence lacks the states of its last accepted rows
        self.owed = 0  # the most rows of any sequence that may be waiting for the drafter
        self.continued = False  # whether the last pass over prompts continued prompts, rather than beginning new ones
        self.pace = Pace()
        self.preparations = 0  # how often a graph was captured, or the shapes of an auto policy measured

    @property
    def free(self) -> int:
        return self.places.count(None)

    @property
    def active(self) -> list[Row]:
        return [row for row in self.places if row is not None]

    def plan_for(self, load: int) -> TreePolicy | None:
        return next((p for size, p in self.plans.items() if load <= size), None)

    def warm_up(self) -> None:
        """Capture and measure rounds before the first sequence. Afterwards no graph is captured: all sequences would have to wait."""
        if self.rounds.graphs is not None or self.auto:
            self.run([[0]], new_tokens=2, sampling=[SamplingParams(rule=self.rule)], stop_ids=())  # makes the buffers that the graphs read
            prepare_expected(self.rounds, self.plan_for)

    def add_request(
        self,
        prompt: Sequence[int],
        *,
        new_tokens: int,
        sampling: SamplingParams | None = None,
        stop_ids: Sequence[int] | None = None,
        likely: int | None = None,
    ) -> Row:
        """Add a sequence; the next steps read its prompt. There must be a free place (``free``). ``likely``: see ``Row.likely``. Raises
        UserError for a prompt that does not fit, and for another rule than the engine's.
        """
        sampling, target = sampling or SamplingParams(rule=self.rule), self.target
        check_prompt(target, prompt, new_tokens)
        if len(prompt) + new_tokens > self.max_length:
            raise UserError(f"the prompt's {len(prompt)} tokens and {new_tokens} new ones exceed the engine's max_length={self.max_length}")
        if len(prompt) + new_tokens > self.rounds.positions:
            limit = f"the engine decodes {target.name} up to {self.rounds.positions} tokens, where it changes its rotation"
            raise UserError(f"{limit}: the prompt's {len(prompt)} and {new_tokens} new ones exceed it; decode such a sequence alone")
        if sampling.temperature > 0 and sampling.rule not in (self.rule, "auto") and self.drafter is not None:
            raise UserError(f"this engine verifies by the rule {self.rule}, a sequence asked for {sampling.rule}")
        assert self.free, "the engine is full: add a request when there is a free row"
        stop = stops_of(target, stop_ids)
        row = Row(prompt=list(prompt), most=new_tokens, stop=stop, sampling=sampling, began=time.perf_counter(), likely=likely)
        if new_tokens == 0:
            row.ended = "length"
            return row
        row.place = self.places.index(None)
        with torch.inference_mode():
            self.rounds.enter(row.place, row.prompt, sampling, sorted(stop))
        self.places[row.place] = row
        return row

    def drop(self, row: Row) -> None:
        """Free the place of a sequence that has ended, or whose result nobody waits for any more."""
        if row.place >= 0 and self.places[row.place] is row:
            self.places[row.place] = None
            with torch.inference_mode():
                self.rounds.active_B[row.place] = self.rounds.waiting_B[row.place] = 0
        row.ended = row.ended or "dropped"

    def clear(self) -> None:
        """Drop all sequences, and the rounds whose tokens were not read yet."""
        for row in self.active:
            self.drop(row)
        self.pending, self.ready, self.owed = [], True, 0

    def _settle(self, row: Row) -> None:
        if row.ended:
            row.seconds = time.perf_counter() - row.began
            self.drop(row)

    @torch.inference_mode()
    def step(self) -> list[Row]:
        """Run one round, then read a piece of the prompts that are not read yet. Returns the sequences that emitted tokens; on CUDA a
        round's tokens come with the next step. An error in reading prompts is raised; their rows end as "failed", the others go on.
        """
        rows = [row for row in self.active if row.read == len(row.prompt)]
        if rows:
            n = min(1 << (max(row.place for row in rows)).bit_length(), len(self.places))
            longest = max(len(row.prompt) + len(row.tokens) for row in rows) + self.rounds.path * (1 + len(self.pending))
            plan = self.plan_for(len(self.active))
            warp = LogitsWarper.over({k: v[:n] for k, v in self.rounds.warps.items()}, [row.sampling for row in rows])
            hold = any(row.stop and len(row.tokens) < row.sampling.min_tokens for row in rows)
            kind = Kind(n, self.rounds.padded_length(longest), plan if self.ready else None, plan is not None, likely_of(rows), hold)
            if kind.policy is not None and kind.policy.kind == "auto":
                kind = self._choose(kind, rows, warp)
            if kind.policy is None and kind.tap and self.owed >= self.rounds.waits:
                self.rounds.absorb(n, kind.padded_length, 0)
                self.owed = 0
            said = self._run(kind, warp)
            self.owed = 0 if not kind.tap else 1 + kind.policy.depth if kind.policy else self.owed + 1
            self.ready = plan is not None
            self.pending.append(([row if row in rows else None for row in self.places[:n]], *self._on_host(said), kind.policy))
        emitted = self._read_prompts()
        while self.pending and (not rows or len(self.pending) > int(self.late)):
            emitted += self._take(*self.pending.pop(0))
        return emitted

    def _run(self, kind: Kind, warp: LogitsWarper) -> Said:
        captures, began = self.rounds.captures, time.perf_counter()
        said = self.rounds.run(kind, warp)
        if self.rounds.captures > captures:
            self._prepared(began)
        return said

    def _prepared(self, began: float) -> None:
        """Take the time since ``began``, spent on capturing or measuring, out of the time of every sequence."""
        took, self.preparations = time.perf_counter() - began, self.preparations + 1
        for row in self.active:
            row.began += took

    def _on_host(self, said: Said) -> tuple[Said, Any]:
        """Begin to copy a round's results to the host. Returns the copies, and the event after which they are valid (None: at once)."""
        if not self.late:
            return said, None
        said = Said(said.tokens.to("cpu", non_blocking=True), None if said.likely is None else said.likely.to("cpu", non_blocking=True))
        if self.rounds.device.type != "cuda":
            return said, None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.rounds.device))
        return said, event

    def _choose(self, kind: Kind, rows: list[Row], warp: LogitsWarper) -> Kind:
        """The kind of the next round under an auto policy. Without graphs, a round keeps no states if all sequences end before the next
        choice of a shape.
        """
        known = (kind.policy, self.rule, costs_as(self.rule, warp.heat), kind.n) in known_of(self.target, self.drafter)
        full = self.owed >= self.rounds.waits  # measuring runs plain rounds, whose rows must find room to wait
        if not known and (full or 1 + max(row.most - len(row.tokens) for row in rows) < WORTH):  # 1: the token of the prompt's pass
            return kind._replace(policy=None)
        began, auto = time.perf_counter(), auto_of_rounds(self.rounds, kind, warp)
        if not known:
            self._prepared(began)
        shape = self.pace.choose(auto, [row.past for row in rows])
        tap = self.rounds.graphs is not None or any(row.most - len(row.tokens) > self.pace.resting for row in self.active)
        return kind._replace(policy=shape, tap=tap)

    def _take(self, places: list[Row | None], said: Said, event: Any, policy: TreePolicy | None) -> list[Row]:
        """Give the tokens of a round to its sequences, except those that have ended meanwhile. Returns the sequences that got tokens."""
        if event is not None:
            event.synchronize()
        emitted, path, likely = [], self.rounds.path, None if said.likely is None else said.likely.tolist()
        for b, (row, (count, *tokens)) in enumerate(zip(places, said.tokens.tolist(), strict=True)):
            if row is None or row.ended:
                continue
            nodes = (len(tokens) - path) // 2  # of the tree, whose tokens and parents follow the ``path`` new tokens: see ``Said``
            guesses, parents = tokens[path : path + nodes], tokens[path + nodes :]
            taken = row.take(tokens[: count + 1], row.most, row.stop)
            row.emitted.append(len(taken))
            row.asked.append(max(depths_of(parents), default=0))
            row.shapes.append(policy)
            row.guesses.append(Guesses(guesses, parents, count))
            if likely is not None:
                row.logprobs += [told_of(each, row.likely) for each in likely[b][: len(taken)]] if row.likely is not None else []
            if self.auto:
                row.past.see(policy, row.asked[-1], guesses, parents, tokens[:count])
            self._settle(row)
            emitted.append(row)
        return emitted

    # Prompts --------------------------------------------------------------------------------------------------------------

    def _read_prompts(self) -> list[Row]:
        rows = self._next_to_read()
        if not rows:
            return []
        drafts = self.plan_for(len(self.active)) is not None
        follow = self.drafter is not None and (drafts if rows[0].read == 0 else rows[0].follow)
        piece = min(max(len(row.prompt) - row.read for row in rows), CHUNK)
        pieces = [row.prompt[row.read : row.read + piece] for row in rows]
        ends = [row.prompt[row.read + piece] if row.read + piece < len(row.prompt) else None for row in rows]
        warp = LogitsWarper.over({k: v[[row.place for row in rows]] for k, v in self.rounds.warps.items()}, [row.sampling for row in rows])
        try:
            read, likely = [row.read for row in rows], likely_of(rows)
            said = self.rounds.read_prompts([row.place for row in rows], pieces, read, ends, warp, follow, likely)
        except Exception:
            for row in rows:
                row.ended = "failed"
                self.drop(row)
            raise
        self.owed = max(self.owed, 1)  # the last root of a prompt waits for the drafter
        self.ready = follow and (self.ready or all(row in rows for row in self.active))
        self.continued = rows[0].read > 0
        emitted, tokens, told = [], said.tokens.tolist(), None if said.likely is None else said.likely.tolist()
        for i, row in enumerate(rows):
            row.read, row.follow = row.read + len(pieces[i]), follow
            if ends[i] is None:
                row.take(tokens[i][1:], row.most, row.stop)
                if told is not None and row.likely is not None:
                    row.logprobs.append(told_of(told[i][0], row.likely))
                self._settle(row)
                emitted.append(row)
        return emitted

    def _next_to_read(self) -> list[Row]:
        """The rows whose prompts are read next, side by side: as many as fit into one pass, the oldest requests first. Passes that begin
        prompts alternate with passes that continue them, so that a new request need not wait until a long prompt is read. A row waits while
        another row reads a beginning that both prompts share, and then copies it.
        """
        found, unread = list[Row](), [row for row in self.active if row.read < len(row.prompt)]
        for row in sorted(unread, key=lambda row: ((row.read > 0) == self.continued, row.began)):
            if row.read == 0 and self._share(row, found):
                continue
            alike = not found or ((row.read == 0) == (found[0].read == 0) and (row.read == 0 or row.follow == found[0].follow))
            longest = max(min(len(r.prompt) - r.read, CHUNK) for r in [*found, row])
            if alike and (not found or longest * (len(found) + 1) <= AT_ONCE.get(self.rounds.device.type, AT_ONCE["cuda"])):
                found.append(row)
        return found

    def _share(self, row: Row, reading: list[Row]) -> bool:
        """Copy the longest beginning that another row has read. Returns True, copying nothing, where the row must wait for such a row."""
        follows = self.drafter is not None and self.plan_for(len(self.active)) is not None
        wait, source, rows = shared_by(row, self.active, reading, follows)
        if source is not None:
            self.rounds.share(source.place, row.place, rows, follows)
            row.read, row.follow = rows, follows
        return wait

    def run(
        self, prompts: Sequence[Sequence[int]], *, new_tokens: int, sampling: Sequence[SamplingParams],
        stop_ids: Sequence[int] | None = None,
    ) -> list[Row]:  # fmt: skip
        """Continue all of these prompts to their ends, as many at a time as there are free rows. Raises as ``add_request`` and ``step``."""
        made: list[Row] = []
        while len(made) < len(prompts) or self.active:
            while self.free and (i := len(made)) < len(prompts):
                made.append(self.add_request(prompts[i], new_tokens=new_tokens, sampling=sampling[i], stop_ids=stop_ids))
            self.step()
        return made
