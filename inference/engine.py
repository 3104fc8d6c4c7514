"""The static path: many sequences at once, everything preallocated, nothing inside a round waits for the device.

A round is two functions of fixed shape: draft (the drafter absorbs what the last verdict accepted, the trees grow) and
verify (the target reads the trees, verdicts, the accepted rows are kept). On CUDA each is captured once as a graph and
replayed, and the tokens of a round are read one round late, while the next one runs; a sequence that has ended runs one
round too many, whose tokens are dropped. On a CPU the same functions are called as they are. Sequences enter and leave at any time.

Shape suffixes: B sequences, N nodes, R = N + 1 rows of a tree, A rows that a round may keep, M rows in memory, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from heads.base import Drafter, Roots
from heads.errors import UserError
from heads.visibility import causal
from inference.decode import Generation, check_prompt
from inference.fixed import FixedMemory
from inference.propose import TreePolicy, grow
from inference.target import Context, Target
from inference.tree import Tree
from inference.verify import Chance, Sampling, Warp, choose, columns, seen_rows, settings_of

Plans = Mapping[int, TreePolicy | None]  # up to so many sequences at once: this tree (None: no drafting)


@dataclass
class Row(Generation):
    """A sequence in the engine."""

    place: int = -1
    prompt: int = 0  # its tokens
    most: int = 0  # new tokens
    stop: frozenset[int] = frozenset()
    sampling: Sampling = field(default_factory=Sampling)
    began: float = 0.0

    @property
    def done(self) -> bool:
        return bool(self.ended)


class Engine:
    """``rows`` sequences of up to ``capacity`` tokens each. ``policy`` holds at any load, or ``plans`` say which at how many sequences.

    While nothing is drafted (a plan of None), nothing is kept for the drafter either: what is read meanwhile, whole prompts even, is
    missing in its memory. If it drafts again, those sequences are guessed worse, never wrongly.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        *,
        rows: int,
        capacity: int,
        policy: TreePolicy | None = None,
        plans: Plans | None = None,
        rule: str = "top_plus_one",
        graphs: bool | None = None,
    ) -> None:
        plans = plans or {rows: policy}
        if drafter is None or all(p is None for p in plans.values()):
            drafter, plans = None, {rows: None}
        trees = [p for p in plans.values() if p is not None]
        for tree in trees:
            tree.check(rule)
        self.target, self.drafter, self.plans, self.rule = target, drafter, dict(sorted(plans.items())), rule
        self.capacity, self.device = capacity, target.device
        self.keeps = 1 + max((p.depth for p in trees), default=0)  # A
        # a graph spans one device; these rotations are chosen by the longest position of a pass, which waits for the device
        turns = (getattr(target.config, "rope_parameters", None) or {}).get("rope_type") in ("dynamic", "longrope")
        self.graphs = (target.device.type == "cuda" and not target.spread and not turns) if graphs is None else graphs
        self.late = target.device.type == "cuda"
        self.positions = min(target.shape.max_positions, target.turn or target.shape.max_positions)  # that all rows may reach
        # rows of the round behind the last token, of the one begun before that was read, and of what is written after a row has left
        slack = 3 * self.keeps
        scratch = max([1 + p.nodes for p in trees] + [p.reads for p in trees], default=1)
        self.cache = FixedMemory(rows, capacity + slack, scratch, self.device, target.reader.memory_dtype)
        self.memory = FixedMemory(rows, capacity + slack, scratch, self.device, drafter and drafter.memory_dtype)
        self.places: list[Row | None] = [None] * rows
        self.pending: list[tuple[list[Row | None], Tensor, Any, int]] = []  # rounds whose tokens were not read yet
        self.seen_BV: Tensor | None = None
        self.states: dict[int, Tensor] = {}
        self.ready = True  # whether these are of what the last verdicts kept: the next round can draft
        self.captured: dict[Any, Any] = {}
        self.pool: Any = None  # of the memory of all graphs: they run one after the other
        whole = {"dtype": torch.int64, "device": self.device}
        self.token_B, self.seed_B, self.active_B, self.count_B = (torch.zeros(rows, **whole) for _ in range(4))  # count: accepted last
        self.read_BA, self.chosen_BA = (torch.zeros(rows, self.keeps, **whole) for _ in range(2))
        self.warps = columns([settings_of(Sampling())] * rows, self.device)

    @property
    def free(self) -> int:
        return self.places.count(None)

    @property
    def active(self) -> list[Row]:
        return [row for row in self.places if row is not None]

    def _plan(self, load: int) -> TreePolicy | None:
        return next((p for size, p in self.plans.items() if load <= size), None)

    @torch.no_grad()
    def admit(
        self,
        prompt: Sequence[int],
        *,
        new_tokens: int,
        sampling: Sampling | None = None,
        stop_ids: Sequence[int] | None = None,
        load: int = 0,
    ) -> Row:
        """Read a prompt and emit its first token. Raises UserError for what does not fit; there must be a free row.

        ``load``: how many sequences there are about to be, where the caller knows of more to come.
        """
        sampling, target = sampling or Sampling(rule=self.rule), self.target
        check_prompt(target, prompt, new_tokens)
        if len(prompt) + new_tokens > self.capacity:
            raise UserError(f"the prompt's {len(prompt)} tokens and {new_tokens} new ones exceed the engine's capacity of {self.capacity}")
        if len(prompt) + new_tokens > self.positions:
            raise UserError(f"the engine decodes {target.name} up to {self.positions} tokens, where it changes its rotation: the prompt's "
                            f"{len(prompt)} tokens and {new_tokens} new ones exceed it; decode such a sequence alone")  # fmt: skip
        if sampling.temperature > 0 and sampling.rule != self.rule and self.drafter is not None:
            raise UserError(f"this engine verifies by the rule {self.rule}, a sequence asked for {sampling.rule}")
        if not self.free:
            raise RuntimeError("the engine is full: admit when there is a free row")
        stop = frozenset(target.stop_ids if stop_ids is None else stop_ids)
        row = Row(
            place=self.places.index(None), prompt=len(prompt), most=new_tokens, stop=stop, sampling=sampling, began=time.perf_counter()
        )
        if new_tokens == 0:
            row.ended = "length"
            return row
        load = max(min(load, len(self.places)), len(self.active) + 1)
        drafter = None if self._plan(load) is None else self.drafter
        try:
            return self._begin(row, prompt, drafter)
        except BaseException:
            self.cache.loading = self.memory.loading = None
            self.active_B[row.place] = 0
            raise

    def _begin(self, row: Row, prompt: Sequence[int], drafter: Drafter | None) -> Row:
        target, sampling, b = self.target, row.sampling, row.place
        context = Context(target, drafter.taps if drafter else ())
        tokens_T = torch.as_tensor(prompt, dtype=torch.int64, device=self.device)
        states, final = context.read(tokens_T)
        segments = [(k[:, :, : len(prompt)], v[:, :, : len(prompt)]) for layer, [(k, v)] in context.memory.layers.items() if layer >= 0]
        if not self.cache.layers:
            self.cache.allocate(segments)
        self.cache.load(b)
        for i, (k, v) in enumerate(segments):
            self.cache.write(i, k, v)
        self.cache.loading = None
        self.cache.kept_B[b] = len(prompt)
        seen_1RV = None
        if sampling.repetition_penalty != 1:
            if self.seen_BV is None:
                self.seen_BV = torch.zeros(len(self.places), target.shape.vocab_size, dtype=torch.bool, device=self.device)
            self.seen_BV[b] = False
            self.seen_BV[b, tokens_T] = True
            seen_1RV = self.seen_BV[b, None, None]
        chance = Chance.of(sampling.seed, len(prompt) - 1, self.device)
        verdict = choose(
            target.logits(final[:, -1:]), Tree.empty(self.device), Warp.of([sampling], self.device), self.rule, chance, seen_1RV
        )
        self.token_B[b], self.seed_B[b], self.active_B[b], self.count_B[b] = verdict.token_B[0], sampling.seed, 1, 0
        for name, value in settings_of(sampling).items():
            self.warps[name][b] = value
        if self.seen_BV is not None:
            self.seen_BV[b, verdict.token_B] = True
        self.memory.kept_B[b] = 0
        if drafter is not None:
            self._absorb_prompt(b, drafter, tokens_T, states)
        self.ready = drafter is not None and (self.ready or not self.active)
        row.take([int(verdict.token_B)], row.most, row.stop)
        self.places[b] = row
        self._settle(row)
        return row

    def _absorb_prompt(self, b: int, drafter: Drafter, tokens_T: Tensor, states: dict[int, Tensor]) -> None:
        """All its roots; the last one is then taken back, for every round begins by absorbing what the last verdict kept."""
        T = len(tokens_T)
        chosen_T = torch.cat([tokens_T[1:], self.token_B[b, None]])
        last = torch.tensor([[T - 1]], device=self.device)
        self.memory.load(b)
        positions_T = torch.arange(T, device=self.device)
        drafter.begin(Roots(tokens_T[None], chosen_T[None], states, positions_T[None]), self.memory, causal(T, T, self.device), last)
        self.memory.loading = None
        self.memory.kept_B[b] = max(self.memory.written - 1, 0)
        self.read_BA[b, 0], self.chosen_BA[b, 0] = tokens_T[-1], self.token_B[b]
        for tap, state in states.items():
            self._buffer(tap, state)[b, 0] = state[0, -1]

    def _buffer(self, tap: int, like: Tensor) -> Tensor:
        if tap not in self.states:
            self.states[tap] = like.new_zeros(len(self.places), self.keeps, like.shape[-1])
        return self.states[tap]

    def drop(self, row: Row) -> None:
        """Forget a sequence: it has ended, or nobody waits for it any more."""
        if row.place >= 0 and self.places[row.place] is row:
            self.places[row.place] = None
            self.active_B[row.place] = 0
        row.ended = row.ended or "dropped"

    def _settle(self, row: Row) -> None:
        if row.ended:
            row.seconds = time.perf_counter() - row.began
            self.drop(row)

    @torch.no_grad()
    def step(self) -> list[Row]:
        """One round over the sequences in the engine. Returns those that emitted tokens (on CUDA: in the round before)."""
        rows = self.active
        if rows:
            used = 1 + max(row.place for row in rows)
            n = min(1 << (used - 1).bit_length(), len(self.places))
            bucket = self.bucket(max(row.prompt + len(row.tokens) for row in rows) + self.keeps * (1 + len(self.pending)))
            plan = self._plan(len(rows))
            policy = plan if self.ready else None  # a plain round first, which keeps what a drafter absorbs
            self.ready = plan is not None
            warp = Warp.over({k: v[:n] for k, v in self.warps.items()}, [row.sampling for row in rows])
            result = self._run(n, bucket, policy, warp, self.ready)
            event = None
            if self.late:
                result = result.to("cpu", non_blocking=True)
                if self.device.type == "cuda":
                    event = torch.cuda.Event()
                    event.record(torch.cuda.current_stream(self.device))
            self.pending.append((self.places[:n], result, event, 0 if policy is None else policy.depth))
        emitted = []
        while self.pending and (not rows or len(self.pending) > int(self.late)):
            emitted += self._read(*self.pending.pop(0))
        return emitted

    def bucket(self, rows: int) -> int:
        """So many kept rows, rounded up: every size is a graph of its own on CUDA."""
        grain = GRAIN.get(self.device.type, GRAIN["cuda"])
        return min(-(-rows // grain) * grain, self.cache.capacity)

    def run(
        self, prompts: Sequence[Sequence[int]], *, new_tokens: int, sampling: Sequence[Sampling], stop_ids: Sequence[int] | None = None
    ) -> list[Row]:
        """Continue these prompts to their ends, as many at a time as there are free rows."""
        made: list[Row] = []
        while len(made) < len(prompts) or self.active:
            while self.free and (i := len(made)) < len(prompts):
                load = len(self.active) + len(prompts) - i
                made.append(self.admit(prompts[i], new_tokens=new_tokens, sampling=sampling[i], stop_ids=stop_ids, load=load))
            self.step()
        return made

    def _read(self, places: list[Row | None], result: Tensor, event: Any, depth: int) -> list[Row]:
        """The tokens of a round, to those that still wait for them."""
        if event is not None:
            event.synchronize()
        emitted = []
        for row, (count, *tokens) in zip(places, result.tolist(), strict=True):
            if row is None or row.ended:
                continue
            row.emitted.append(len(row.take(tokens[: count + 1], row.most, row.stop)))
            row.asked.append(depth)
            self._settle(row)
            emitted.append(row)
        return emitted

    # One round: fixed shapes, no waiting ------------------------------------------------------------------------------

    def _run(self, n: int, bucket: int, policy: TreePolicy | None, warp: Warp, tap: bool = True) -> Tensor:
        """The round's result, [n, 1 + A]: accepted guesses, then the tokens. ``tap``: the next round may draft."""
        if not self.graphs:
            return self._verify(self._draft(n, bucket, policy, warp), n, bucket, warp, tap)
        key = (n, bucket, policy, tap, warp.sampled, warp.greedy, warp.top_k, warp.top_p, warp.min_p, warp.penalty)
        if key not in self.captured:
            if len(self.captured) >= MOST_GRAPHS:
                torch.cuda.synchronize(self.device)
                self.captured.pop(next(iter(self.captured)))
            self.captured[key] = self._capture(n, bucket, policy, warp, tap)
        draft, verify, result = self.captured[key]
        if draft is not None:
            draft.replay()
        verify.replay()
        return result

    def _draft(self, n: int, bucket: int, policy: TreePolicy | None, warp: Warp) -> Tree:
        if policy is None:
            return Tree.empty(self.device, n)
        assert self.drafter is not None
        memory, length_B, count_B = self.memory, self.cache.kept_B[:n], self.count_B[:n]
        memory.use(n, bucket, policy.reads)
        last_B1 = (length_B - 1)[:, None]
        positions_BA = last_B1 - count_B[:, None] + torch.arange(self.keeps, device=self.device)
        roots = Roots(self.read_BA[:n], self.chosen_BA[:n], {tap: s[:n] for tap, s in self.states.items()}, positions_BA)
        draft = self.drafter.begin(roots, memory, memory.sees_roots(self.keeps), ask=count_B[:, None])
        memory.kept_B[:n] += (count_B + 1) * self.active_B[:n]
        return grow(self.drafter, draft, last_B1, memory, policy, warp, self.rule, Chance(self.seed_B[:n], length_B))

    def _verify(self, tree: Tree, n: int, bucket: int, warp: Warp, tap: bool = True) -> Tensor:
        target, cache, R = self.target, self.cache, len(tree) + 1
        length_B, token_B, active_B = cache.kept_B[:n].clone(), self.token_B[:n], self.active_B[:n]
        tokens_BR = torch.cat([token_B[:, None], tree.tokens_BN], 1)
        positions_BR = (length_B[:, None] + F.pad(tree.depths_BN, (1, 0))).clamp_(max=self.positions - 1)
        cache.use(n, bucket, R)
        taps = self.drafter.taps if tap and self.drafter else ()
        states, final_BRD = target.read_rows(tokens_BR, positions_BR, cache, cache.sees_nodes(tree.rows()), taps)
        seen_BRV = seen_rows(self.seen_BV[:n], token_B, tree) if warp.penalty and self.seen_BV is not None else None
        chance = Chance(self.seed_B[:n], length_B)
        verdict = choose(target.logits(final_BRD), tree, warp, self.rule, chance, seen_BRV)
        rows_BA, count_B = F.pad(verdict.rows_BA, (0, self.keeps - verdict.rows_BA.shape[1])), verdict.count_B
        cache.keep(rows_BA[:, : tree.depth + 1], (count_B + 1) * active_B)
        read_BA = tokens_BR.gather(1, rows_BA)
        place_A = torch.arange(self.keeps, device=self.device)
        chosen_BA = torch.where(place_A < count_B[:, None], F.pad(read_BA[:, 1:], (0, 1)), verdict.token_B[:, None])
        self.read_BA[:n], self.chosen_BA[:n], self.count_B[:n], self.token_B[:n] = read_BA, chosen_BA, count_B, verdict.token_B
        for k, state in states.items():
            self._buffer(k, state)[:n] = state.gather(1, rows_BA[..., None].expand(-1, -1, state.shape[2]))
        if seen_BRV is not None and self.seen_BV is not None:
            self.seen_BV[:n].scatter_(1, chosen_BA, True)  # behind the accepted ones stands the target's own token again
        return torch.cat([count_B[:, None], chosen_BA], 1)

    def _capture(self, n: int, bucket: int, policy: TreePolicy | None, warp: Warp, tap: bool = True) -> tuple[Any, Any, Tensor]:
        """Both functions as CUDA graphs. They are run before (kernels are chosen, memory is found), so the state is put back after."""
        state = [self.cache.kept_B, self.memory.kept_B, self.token_B, self.count_B, self.read_BA, self.chosen_BA, *self.states.values()]
        state += [self.seen_BV] if self.seen_BV is not None else []
        before = [x.clone() for x in state]

        def put_back() -> None:
            for x, old in zip(state, before, strict=True):
                x.copy_(old)

        here, side = torch.cuda.current_stream(self.device), torch.cuda.Stream(self.device)  # which need not be the current device
        side.wait_stream(here)
        with torch.cuda.stream(side):
            for _ in range(2):
                self._verify(self._draft(n, bucket, policy, warp), n, bucket, warp, tap)
                put_back()
        here.wait_stream(side)
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        draft, verify = None if policy is None else torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        tree = Tree.empty(self.device, n)
        if draft is not None:
            with torch.cuda.graph(draft, pool=self.pool, stream=side):
                tree = self._draft(n, bucket, policy, warp)
        with torch.cuda.graph(verify, pool=self.pool, stream=side):
            result = self._verify(tree, n, bucket, warp, tap)
        return draft, verify, result


MOST_GRAPHS = 128  # the oldest goes: what clients ask for (top-k, penalties, lengths) must not fill the device
GRAIN = {"cpu": 64, "cuda": 512}  # kept rows that a pass sees are rounded up to a multiple; other devices as CUDA


def generate_batch(
    target: Target,
    drafter: Drafter | None,
    prompts: Sequence[Sequence[int]],
    *,
    new_tokens: int,
    policy: TreePolicy | None = None,
    plans: Plans | None = None,
    sampling: Sampling | Sequence[Sampling] | None = None,
    stop_ids: Sequence[int] | None = None,
    rows: int = 8,
) -> list[Row]:
    """Continue many prompts, ``rows`` of them at a time; one ``Sampling`` for all of them or one each. Raises what ``generate`` raises."""
    each = [sampling or Sampling()] * len(prompts) if sampling is None or isinstance(sampling, Sampling) else list(sampling)
    for prompt in prompts:
        check_prompt(target, prompt, new_tokens)
    if not prompts:
        return []
    capacity = max(map(len, prompts)) + new_tokens
    engine = Engine(target, drafter, rows=min(rows, len(prompts)), capacity=capacity, policy=policy, plans=plans, rule=each[0].rule)
    return engine.run(prompts, new_tokens=new_tokens, sampling=each, stop_ids=stop_ids)
