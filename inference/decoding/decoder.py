"""Which path serves: one place decides it for reports, the tuner, the terminal and transformers' conventions.

One sequence on a GPU goes through an engine (inference/decoding/engine.py), whose rounds are replayed as graphs, where a drafter's own
trees or nothing guesses. Everything else that is decoded alone goes through ``decode.generate``: any other proposer, a function that
changes the target's scores, a sequence longer than an engine may hold, and all on a CPU, where it is the faster one. Several sequences
at once are always an engine's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

from headstart.heads.base import Drafter
from headstart.inference.decoding import decode
from headstart.inference.decoding.decode import Generation, OnTokens, Process, check_prompt
from headstart.inference.decoding.engine import Engine, Plans
from headstart.inference.decoding.plans import ALONE, MANY
from headstart.inference.decoding.policy import TreePolicy, fit_depth
from headstart.inference.decoding.propose import Drafting, Proposer
from headstart.inference.decoding.row import Row
from headstart.inference.decoding.sampling import SamplingParams
from headstart.inference.decoding.target import Target

BY_ENGINE = ("cuda",)  # devices on which one sequence is fastest through an engine
LEAST = 512  # tokens that an engine has room for, where nobody knows how many are needed
ATTEMPTS = 3  # to decode without having to capture or to measure anything

T = TypeVar("T")


class Decoder:
    """What decodes with one target and one guesser. It keeps its engine between calls, a larger one in its place where it must, until
    ``close``.

    ``guesser``: a drafter on the target's device, any other proposer, or None. ``plans``: its trees, for up to so many sequences
    (``ALONE``: for one alone), or one for any number; they become no deeper than it can guess. ``trees``: others that ``generate`` will
    be asked for. ``rule`` verifies above temperature 0. ``max_length``: tokens of the longest sequence, where that is known.
    """

    def __init__(
        self,
        target: Target,
        guesser: Drafter | Proposer | None = None,
        plans: Plans | TreePolicy | None = None,
        *,
        trees: Sequence[TreePolicy] = (),
        rule: str = "auto",
        max_length: int = 0,
    ) -> None:
        self.target, self.rule, self.max_length = target, rule, max_length
        self.drafter = guesser if isinstance(guesser, Drafter) else None
        self.proposer = Drafting(guesser.eval()) if isinstance(guesser, Drafter) else guesser
        given = {MANY: plans} if plans is None or isinstance(plans, TreePolicy) else plans
        self.plans = {n: self._fitted(tree) for n, tree in given.items()}
        self.trees = list(dict.fromkeys([*filter(None, self.plans.values()), *map(self._fitted, trees)]))
        self.engine: Engine | None = None
        self.made = self.before = 0  # so many engines; preparations of those that are gone

    def _fitted(self, tree: TreePolicy | None) -> TreePolicy | None:
        return None if self.proposer is None or tree is None else tree if self.drafter is None else fit_depth(tree, self.drafter)

    @property
    def alone(self) -> TreePolicy | None:
        """The tree for a sequence that is decoded alone."""
        return next(iter(self.plans.values()))

    @property
    def several(self) -> dict[int, TreePolicy | None]:
        """The trees for sequences that share their rounds."""
        return {n: tree for n, tree in self.plans.items() if n != ALONE} or {MANY: self.alone}

    @property
    def batches(self) -> bool:
        """Whether an engine can draft for it: several sequences at once."""
        return self.proposer is None or self.drafter is not None

    def by_engine(self, tokens: int) -> bool:
        """Whether one sequence of so many tokens, prompt and all, goes through an engine."""
        turn = self.target.turn  # behind it an engine would have to read everything anew
        return self.target.device.type in BY_ENGINE and self.batches and (turn is None or tokens <= turn)

    def generate(
        self,
        prompt: Sequence[int],
        *,
        new_tokens: int,
        policy: TreePolicy | Literal["planned"] | None = "planned",
        sampling: SamplingParams | None = None,
        stop_ids: Sequence[int] | None = None,
        on_tokens: OnTokens | None = None,
        process: Process | None = None,
    ) -> Generation:
        """Continue one prompt, as ``decode.generate`` does. ``policy``: of all trees those of this shape; None: nothing is guessed.

        Its seconds hold neither capturing nor measuring. Raises what ``decode.generate`` raises.
        """
        tree = self.alone if policy == "planned" else self._fitted(policy)
        check_prompt(self.target, prompt, new_tokens)
        if process is not None or not self.by_engine(len(prompt) + new_tokens):
            how: dict[str, Any] = dict(policy=tree, sampling=sampling, stop_ids=stop_ids, on_tokens=on_tokens, process=process)
            return decode.generate(self.target, None if tree is None else self.proposer, prompt, new_tokens=new_tokens, **how)
        with self.held(1, len(prompt) + new_tokens, {MANY: tree}) as engine:
            row, told = engine.add_request(prompt, new_tokens=new_tokens, sampling=sampling, stop_ids=stop_ids), 0
            while not row.done or told < len(row.tokens):
                if on_tokens is not None and told < len(row.tokens):
                    on_tokens(row.tokens[told:])
                told = len(row.tokens)
                if not row.done:
                    engine.step()
            return row

    def timed(self, prompt: Sequence[int], *, clock: Callable[[], float] = time.perf_counter, **how: Any) -> tuple[Generation, float]:
        """``generate`` (``how`` is what it takes) and its seconds by ``clock``: of a time in which nothing was captured or measured."""
        return self._timed(lambda: self.generate(prompt, **how), clock)

    def timed_many(self, prompts: Sequence[Sequence[int]], *, sequences: int, **how: Any) -> tuple[list[Row], float]:
        """The same of ``generate_many``."""
        return self._timed(lambda: self.generate_many(prompts, sequences=sequences, **how), time.perf_counter)

    def _timed(self, call: Callable[[], T], clock: Callable[[], float]) -> tuple[T, float]:
        for _ in range(ATTEMPTS):
            prepared, start = self.preparations, clock()
            made = call()
            took = clock() - start
            if self.preparations == prepared:
                break
        return made, took

    def generate_many(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        new_tokens: int,
        sequences: int,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        stop_ids: Sequence[int] | None = None,
    ) -> list[Row]:
        """Continue many prompts, ``sequences`` at a time; one ``SamplingParams`` for all of them or one each. Raises what ``generate``
        raises.
        """
        each = [sampling or SamplingParams()] * len(prompts) if sampling is None or isinstance(sampling, SamplingParams) else list(sampling)
        for prompt in prompts:
            check_prompt(self.target, prompt, new_tokens)
        if not prompts:
            return []
        with self.held(min(sequences, len(prompts)), max(map(len, prompts)) + new_tokens, self.several) as engine:
            return engine.run(prompts, new_tokens=new_tokens, sampling=each, stop_ids=stop_ids)

    # The engine -------------------------------------------------------------------------------------------------------------

    @contextmanager
    def held(self, sequences: int, max_length: int, plans: Plans) -> Iterator[Engine]:
        """The engine, with room for so many sequences of so many tokens, under these plans. Afterwards it is empty, and kept."""
        engine = self.engine_for(sequences, max_length, plans)
        try:
            yield engine
        finally:
            engine.clear()

    def engine_for(self, sequences: int, max_length: int, plans: Plans) -> Engine:
        """The same, for a caller who keeps it busy to the end."""
        more = [tree for tree in plans.values() if tree is not None and tree not in self.trees]
        if self.engine is None or sequences > len(self.engine.places) or max_length > self.engine.max_length or more:
            self._make(sequences, max_length, more)
        assert self.engine is not None
        self.engine.plans = dict(sorted(plans.items()))
        return self.engine

    def _make(self, sequences: int, max_length: int, more: Sequence[TreePolicy]) -> None:
        sequences = sequences if self.engine is None else max(sequences, len(self.engine.places))
        self.close()  # not two at a time
        self.trees += more
        if max_length > self.max_length:  # by doubling: texts that grow from call to call need few engines
            shortest, longest = max_length, self.target.turn or self.target.shape.max_positions
            self.max_length = max(min(max(1 << (max_length - 1).bit_length(), LEAST), longest), shortest)
        room = dict(enumerate(self.trees, start=sequences))  # for any of them
        self.engine = Engine(self.target, self.drafter, sequences=sequences, max_length=self.max_length, plans=room, rule=self.rule)
        self.made += 1

    @property
    def preparations(self) -> int:
        """How often an engine was made, a graph captured, or a shape measured."""
        return self.made + self.before + (0 if self.engine is None else self.engine.preparations)

    def close(self) -> None:
        """Let the engine and its graphs go. The next call that needs one makes it anew."""
        if self.engine is not None:
            self.before, self.engine = self.before + self.engine.preparations, None


def generate_batch(
    target: Target,
    drafter: Drafter | None,
    prompts: Sequence[Sequence[int]],
    *,
    new_tokens: int,
    policy: TreePolicy | None = None,
    plans: Plans | None = None,
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    stop_ids: Sequence[int] | None = None,
    sequences: int = 8,
) -> list[Row]:
    """``Decoder.generate_many`` of a decoder that is not kept."""
    first = sampling if isinstance(sampling, SamplingParams) else next(iter(sampling or ()), SamplingParams())
    max_length = max(map(len, prompts), default=0) + new_tokens
    decoder = Decoder(target, drafter, plans or policy, rule=first.rule, max_length=max_length)
    return decoder.generate_many(prompts, new_tokens=new_tokens, sequences=sequences, sampling=sampling, stop_ids=stop_ids)
