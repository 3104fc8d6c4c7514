"""The loop: every drafter, one way. Packed documents, the target's states, an unroll, a fused loss, a step, checkpoints.

Several drafters (arms) are stepped on the very same batches, which the target reads once; each has its own optimiser,
schedule, random numbers, checkpoints and curves, and learns exactly what it would learn alone. One that fails stops alone.

It runs on accelerate: one process on a CPU or GPU, or several (DistributedDataParallel). The loss is a sum over
supervised (root, depth) pairs divided once by their global count, so that accumulation, packing and the number of
processes do not change the gradient (but under loss.weighting=dpace, which is normalised over each micro-batch by itself).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch
from accelerate import Accelerator
from rich.console import Console
from torch.profiler import record_function

from headstart.data.batch import TargetBatch, TokenBatch
from headstart.heads.errors import UserError
from headstart.trainers.arm import Arm, Step
from headstart.trainers.clock import Clock
from headstart.trainers.interrupt import Interrupt
from headstart.trainers.learner import evaluate
from headstart.trainers.patience import DECODED, EXPECTED
from headstart.trainers.processes import all_failed
from headstart.trainers.progress import Progress
from headstart.trainers.trace import Trace
from headstart.trainers.watch import Watch

T = TypeVar("T")
Observe = Callable[[TokenBatch, Collection[int]], TargetBatch]  # the target's pass over a batch; captured shards as they are


Evaluated = Callable[[Arm, Mapping[str, float]], None]  # an arm was evaluated on held-out text, with these figures
Decoded = Callable[[Arm], Mapping[str, float]]  # an arm's drafter is to be decoded with, as it is now (trainers/gate.py)


def fit(
    arms: Sequence[Arm],
    stream: Callable[[int, int, int], Iterator[TokenBatch]],
    observe: Observe,
    held_out: list[TargetBatch],
    accelerator: Accelerator,
    *,
    steps: int,
    accumulate: int,
    save_every: int,
    keep: int,
    eval_every: int,
    resume: bool,
    timeout: float = 600.0,
    evaluated: Evaluated | None = None,
    trace: Trace | None = None,
    decode_every: int = 0,
    decoded: Decoded | None = None,
) -> bool:
    """Train the arms in place. Returns whether it was interrupted. ``stream(start, rank, world)`` yields micro-batches from number
    ``start`` on. Arms that are behind (after a kill between two checkpoints, or added later) catch up first. An error of a single arm is
    raised; of several arms, each that fails is named and stopped, and the error of the last one raised. ``evaluated`` is called after every
    evaluation of an arm; a UserError that it raises ends that arm. ``decoded`` is called for every arm every ``decode_every`` steps; of
    several processes only the first has it. ``trace`` is told of every step.
    """
    for arm in arms:
        arm.open(accelerator, resume)
    progress, clock = Progress(steps, show=accelerator.is_main_process), Clock(accelerator.device, accelerator.num_processes)
    loop = _Loop(arms, observe, accelerator, progress.console, clock, Watch(accelerator, timeout), decoded)
    at, batches, trace = -1, iter(list[TokenBatch]()), trace or Trace()
    with Interrupt(say=accelerator.is_main_process) as interrupt, progress, trace, loop.watch, ExitStack() as savers:
        for arm in arms:
            savers.enter_context(arm.saver)
        while behind := [arm for arm in arms if not arm.failed and not arm.stopped and arm.fitted.steps < steps]:
            step = min(arm.fitted.steps for arm in behind)
            active = [arm for arm in behind if arm.fitted.steps == step]
            if at != step:
                batches = stream(step * accumulate, accelerator.process_index, accelerator.num_processes)
            at, shown = step + 1, (step + 1) % 10 == 0 or step + 1 in (1, steps)
            if (active := loop.step(active, batches, accumulate, steps, shown)) and shown:
                progress.numbers(at, _numbers(active, loop.alone), loop.speed)
            progress.at(at)
            trace.step()
            stop = loop.waited(active, interrupt)
            if held_out and (at == steps or at % eval_every == 0) and not stop:
                active = loop.evaluate(active, held_out, evaluated)
                stop = loop.asked(interrupt)
            if decode_every and at % decode_every == 0 and not stop:
                active = loop.decode(active)
                stop = loop.asked(interrupt)
            loop.stop_early(active, steps)
            due = stop or at == steps or at % save_every == 0
            with interrupt.writing():
                loop.save([arm for arm in active if due or arm.stopped or at == arm.before_the_fall(steps)], keep, steps, stop)
            if stop:
                accelerator.wait_for_everyone()  # until it is written: launchers end all when one has ended so
                return True
    for arm in arms:
        arm.drafter.eval()
    return False


@dataclass
class _Loop:
    """What all steps share."""

    arms: Sequence[Arm]
    observe: Observe
    accelerator: Accelerator
    console: Console
    clock: Clock
    watch: Watch
    decoded: Decoded | None = None
    speed: Mapping[str, float] = field(default_factory=dict)  # what the clock said last

    @property
    def alone(self) -> bool:
        return len(self.arms) == 1

    def step(self, active: list[Arm], batches: Iterator[TokenBatch], accumulate: int, steps: int, shown: bool) -> list[Arm]:
        """The next step of these arms, which are all at the same; ``shown``: with figures. Returns those that have not failed."""
        clock, accelerator = self.clock, self.accelerator
        clock.exact = shown
        number = active[0].fitted.steps + 1
        self.watch.at(f"step {number}, data")
        start = time.perf_counter()
        with record_function("data"):
            micro = [next(batches) for _ in range(accumulate)]
        clock.since(start, "data", [arm.name for arm in active])
        self._wait(active, shown)
        begun = self._of_each("start", active, lambda arm: arm.start(micro, steps))
        for i, tokens in enumerate(micro):
            active = [arm for arm in active if not arm.failed]
            self.watch.at(f"step {number}, target")
            names, start = [arm.name for arm in active], time.perf_counter()
            with record_function("target"), accelerator.autocast(), clock.counting(names):
                batch = self.observe(tokens, sorted({tap for arm in active for tap in arm.drafter.taps}))
            looked = clock.since(start, "target", names)
            for arm in active:
                arm.fitted.seconds += looked  # as if it had been alone
            if i == accumulate - 1:
                self._wait(active, shown)
            self._of_each(f"learn {i}", active, partial(_learn, clock, begun, batch, i, shown))
        tokens_seen = accelerator.num_processes * sum(m.tokens_BT.numel() for m in micro)
        self._of_each("step", active, lambda arm: arm.step(begun[arm.name], tokens_seen))
        for arm in (active := [arm for arm in active if not arm.failed]):
            clock.count(arm.name, tokens_seen)
            if shown:
                self.speed = clock.figures(arm.name)
                arm.log(arm.shown | self.speed)
        return active

    def _wait(self, active: list[Arm], shown: bool) -> None:
        """In a step with figures, wait for the slowest process here, so that the time is put down to waiting."""
        if shown and self.accelerator.num_processes > 1:
            start = time.perf_counter()
            self.accelerator.wait_for_everyone()
            self.clock.since(start, "waiting", [arm.name for arm in active])

    def asked(self, interrupt: Interrupt) -> bool:
        """Whether any process is asked to stop: the same answer in all of them, which enter what follows together or not at all."""
        if self.accelerator.num_processes == 1:
            return interrupt.asked
        return bool(self.accelerator.reduce(torch.tensor(float(interrupt.asked), device=self.accelerator.device), "sum"))

    def waited(self, active: Sequence[Arm], interrupt: Interrupt) -> bool:
        """``asked``, at the end of a step. It waits for the other processes, and for the optimiser where a GPU is still at work on it."""
        start = time.perf_counter()
        stop = self.asked(interrupt)
        if self.accelerator.num_processes > 1:
            took = self.clock.since(start, "waiting", [arm.name for arm in active])
            for arm in active:
                arm.fitted.seconds += took / len(active)
        return stop

    def evaluate(self, active: list[Arm], held_out: list[TargetBatch], evaluated: Evaluated | None) -> list[Arm]:
        """All arms on held-out text. Returns those that have not failed."""
        for arm in active:
            with self.watch.patiently(f"step {arm.fitted.steps}, evaluation"), self._guard(arm, "evaluation"):
                numbers = evaluate(arm.learner, held_out)
                self.console.print(f"step {arm.fitted.steps}{'' if self.alone else ' ' + arm.name}: held-out loss "
                                   f"{numbers['heldout_loss']:.3f}, expected length {numbers['heldout_expected_length']:.2f}")  # fmt: skip
                arm.log(numbers)
                arm.figures = {"step": arm.fitted.steps, **numbers}
                if self.decoded is None:
                    arm.patience.judge(EXPECTED, numbers["heldout_expected_length"], arm.fitted.steps)
                if evaluated is not None:
                    evaluated(arm, numbers)
        return [arm for arm in active if not arm.failed]

    def decode(self, active: list[Arm]) -> list[Arm]:
        """All arms, by the first process; the others wait. Returns those that have not failed."""
        for arm in active:
            with self.watch.patiently(f"step {arm.fitted.steps}, decoding"):  # in all processes: it counts the places they have come to
                if self.decoded is not None:
                    self._decode(arm, self.decoded)
                self.accelerator.wait_for_everyone()
        return [arm for arm in active if not arm.failed]

    def _decode(self, arm: Arm, decoded: Decoded) -> None:
        with self._guard(arm, "decoding"):
            arm.drafter.eval()
            if numbers := decoded(arm):
                lengths = "  ".join(f"T = {t}: {numbers[f'decode/T{t}/accepted_length']:.2f} (expected "
                                    f"{numbers.get(f'decode/T{t}/expected_length', math.nan):.2f})" for t in (0, 1))  # fmt: skip
                arm.patience.judge(DECODED, numbers[DECODED], arm.fitted.steps)
                self.console.print(f"step {arm.fitted.steps}{'' if self.alone else ' ' + arm.name}: decoded {lengths}")
            arm.drafter.train()

    def stop_early(self, active: Sequence[Arm], steps: int) -> None:
        """Stop arms whose patience is over. The first process decides for all, because it alone has decoded."""
        for arm in (arm for arm in active if arm.patience.evaluations and arm.fitted.steps < steps):
            enough = float(self.accelerator.is_main_process and arm.patience.over)
            arm.stopped = bool(self.accelerator.reduce(torch.tensor(enough, device=self.accelerator.device), "sum"))
            if arm.stopped:
                why = arm.patience.said(arm.fitted.steps, steps, arm.warmup, arm.schedule, arm.lasting)
                self.console.print(f"{arm.label}stopped early at step {arm.fitted.steps}: {why}", soft_wrap=True)

    def save(self, arms: Sequence[Arm], keep: int, steps: int, stop: bool) -> None:
        """Their checkpoints; ``stop``: their last."""
        for arm in arms:
            with self.watch.patiently(f"step {arm.fitted.steps}, checkpoint"):
                arm.save(keep, steps, self.console, stop)

    def _of_each(self, what: str, active: list[Arm], call: Callable[[Arm], T]) -> dict[str, T]:
        """Call ``call`` for each arm that has not failed, and count its seconds as the arm's. Returns the results by the arms' names,
        without those of arms that fail in it.
        """
        found: dict[str, T] = {}
        self.watch.at(f"step {max((arm.fitted.steps for arm in active), default=0) + 1}, {what}")
        for arm in (arm for arm in active if not arm.failed):
            start = time.perf_counter()
            with self._guard(arm, what):
                found[arm.name] = call(arm)
            arm.fitted.seconds += self.clock.since(start, "step", [arm.name])
        return found

    @contextmanager
    def _guard(self, arm: Arm, what: str) -> Iterator[None]:
        """An error inside ends this arm. It is raised where the arm was the only one, or the last of several."""
        try:
            yield
        except Exception as e:
            # of several processes all stop an arm, or the run ends: what is no UserError may have left an exchange half done
            several, where = self.accelerator.num_processes > 1, f"{arm.name} {arm.fitted.steps} {what}"
            if self.alone or (several and not isinstance(e, UserError)) or not all_failed(self.accelerator, where):
                raise
            arm.stop(e, self.console)
            if all(a.failed for a in self.arms):
                raise UserError(f"no arm is left, the last one to fail was {arm.name}: {arm.failed}") from e


def _learn(clock: Clock, begun: Mapping[str, Step], batch: TargetBatch, i: int, figures: bool, arm: Arm) -> None:
    with clock.counting([arm.name]):
        arm.learn(begun[arm.name], batch, i, figures)


def _numbers(arms: Sequence[Arm], alone: bool) -> str:
    if alone:
        return f"loss {arms[0].shown.get('loss', math.nan):.3f}  expected length {arms[0].shown['expected_length']:.2f}" if arms else ""
    return "expected length: " + "  ".join(f"{arm.name} {arm.shown['expected_length']:.2f}" for arm in arms)
