"""The choice between the two decoding paths, in one place for reports, the tuner, the terminal and ``hf.generate``.

The engine (inference/decoding/engine.py) decodes several sequences at once. It also decodes a single sequence on a GPU, because its
rounds are replayed as device graphs, provided that a drafter or nothing guesses. Every other single sequence goes through
``decode.generate``: with any other proposer, with a function that changes the target's scores, with more tokens than the engine may
hold, and always on a CPU, where that path is faster.
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
LEAST = 512  # an engine has room for at least this many tokens per sequence, unless ``max_length`` is given
ATTEMPTS = 3  # ``timed`` repeats a run that captured or measured something, up to this many runs

T = TypeVar("T")


class Decoder:
    """Decodes with one target and one guesser. It makes an engine when a call first needs one, replaces it when a call needs a larger
    one, and keeps it until ``close``.

    ``guesser``: a drafter on the target's device, any other proposer, or None for plain decoding. ``plans``: one tree policy for any
    number of sequences, or a mapping from n to the tree for up to n sequences at once (key ``ALONE``: for a sequence decoded alone; None
    as the tree: no drafting). The trees are cut to the depth that the drafter can guess. ``trees``: further trees that ``generate`` will
    be asked for. ``rule``: verifies above temperature 0. ``max_length``: tokens of the longest sequence, prompt included, if known.
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
        self.made = self.before = 0  # engines made; preparations of the engines that were closed

    def _fitted(self, tree: TreePolicy | None) -> TreePolicy | None:
        return None if self.proposer is None or tree is None else tree if self.drafter is None else fit_depth(tree, self.drafter)

    @property
    def alone(self) -> TreePolicy | None:
        """The tree for a single sequence; None: no drafting."""
        return next(iter(self.plans.values()))

    @property
    def several(self) -> dict[int, TreePolicy | None]:
        """The trees for sequences that an engine decodes together, by how many there are."""
        return {n: tree for n, tree in self.plans.items() if n != ALONE} or {MANY: self.alone}

    @property
    def batches(self) -> bool:
        """Whether an engine can serve this guesser, so that several sequences are decoded at once: a drafter, or none."""
        return self.proposer is None or self.drafter is not None

    def by_engine(self, tokens: int) -> bool:
        """Whether a single sequence of ``tokens`` tokens, prompt included, goes through an engine."""
        return self.target.device.type in BY_ENGINE and self.batches and self.engine_holds(tokens)

    def engine_holds(self, tokens: int) -> bool:
        """Whether an engine can decode sequences of ``tokens`` tokens: not beyond the target's ``rope_switch``, where it would have to read
        each sequence again from its start.
        """
        return self.target.rope_switch is None or tokens <= self.target.rope_switch

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
        """Continue one prompt, with the arguments of ``decode.generate``. ``policy``: the shape of the trees; "planned": as ``plans`` say;
        None: no drafting. The result's ``seconds`` leave out the time for capturing graphs and measuring shapes.

        Raises what ``decode.generate`` raises.
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
        """``generate`` with the arguments ``how``. Returns its result, and its seconds by ``clock``. A call that captured or measured
        something is repeated, at most ``ATTEMPTS`` calls in all.
        """
        return self._timed(lambda: self.generate(prompt, **how), clock)

    def timed_many(self, prompts: Sequence[Sequence[int]], *, sequences: int, **how: Any) -> tuple[list[Row], float]:
        """``generate_many`` with the arguments ``how``. Returns its result and its wall-clock seconds; repeated as in ``timed``."""
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
        """Continue many prompts, at most ``sequences`` at a time. ``sampling``: one for all prompts, or one for each. Returns one row per
        prompt, in their order. Raises UserError for a prompt that does not fit.
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
        """A context that gives the engine, with room for ``sequences`` sequences of ``max_length`` tokens. On exit it is emptied, and kept
        for later calls.
        """
        engine = self.engine_for(sequences, max_length, plans)
        try:
            yield engine
        finally:
            engine.clear()

    def engine_for(self, sequences: int, max_length: int, plans: Plans) -> Engine:
        """``held`` without a context: the caller must empty the engine with ``Engine.clear``."""
        more = [tree for tree in plans.values() if tree is not None and tree not in self.trees]
        if self.engine is None or sequences > len(self.engine.places) or max_length > self.engine.max_length or more:
            self._make(sequences, max_length, more)
        assert self.engine is not None
        self.engine.plans = dict(sorted(plans.items()))
        return self.engine

    def _make(self, sequences: int, max_length: int, more: Sequence[TreePolicy]) -> None:
        sequences = sequences if self.engine is None else max(sequences, len(self.engine.places))
        self.close()  # first, so that no two engines hold memory at once
        self.trees += more
        if max_length > self.max_length:  # doubled, so that texts that grow from call to call need few engines
            shortest, longest = max_length, self.target.rope_switch or self.target.shape.max_positions
            self.max_length = max(min(max(1 << (max_length - 1).bit_length(), LEAST), longest), shortest)
        self.engine = Engine(self.target, self.drafter, sequences=sequences, max_length=self.max_length, trees=self.trees, rule=self.rule)
        self.made += 1

    @property
    def preparations(self) -> int:
        """How often an engine was made, a round captured, or the shapes of an auto policy measured, so far."""
        return self.made + self.before + (0 if self.engine is None else self.engine.preparations)

    def close(self) -> None:
        """Free the engine and its graphs. The next call that needs an engine makes a new one."""
        if self.engine is not None:
            self.before, self.engine = self.before + self.engine.preparations, None


def generate_batch(
    target: Target,
    drafter: Drafter | None,
    prompts: Sequence[Sequence[int]],
    *,
    new_tokens: int,
    policy: TreePolicy | Plans | None = None,
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    stop_ids: Sequence[int] | None = None,
    sequences: int = 8,
) -> list[Row]:
    """``Decoder.generate_many`` with a decoder that is made for this call alone. ``policy``: the decoder's ``plans``."""
    first = sampling if isinstance(sampling, SamplingParams) else next(iter(sampling or ()), SamplingParams())
    max_length = max(map(len, prompts), default=0) + new_tokens
    decoder = Decoder(target, drafter, policy, rule=first.rule, max_length=max_length)
    return decoder.generate_many(prompts, new_tokens=new_tokens, sequences=sequences, sampling=sampling, stop_ids=stop_ids)
