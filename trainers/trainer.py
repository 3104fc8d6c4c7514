"""The training loop, the same for every drafter: packed documents, the target's states, an unroll, a fused loss, a step, checkpoints.

Several drafters (arms) train on the very same batches, which the target reads once. Each arm has its own optimizer, schedule,
random numbers, checkpoints and curves, and learns exactly what it would learn alone. An arm that fails stops; the others go on.

The loop runs on accelerate: one process on a CPU or GPU, or several (trainers/parallel.py). The loss is a sum over supervised
(root, depth) pairs, divided once by their global weighted count. So accumulation, packing and the number of processes do not
change the gradient. The exception is loss.weighting=dpace, which normalizes each micro-batch by itself.
"""

from __future__ import annotations

import itertools
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
from headstart.trainers.clock import Clock, Kind
from headstart.trainers.interrupt import Interrupt
from headstart.trainers.learner import evaluate
from headstart.trainers.patience import DECODED, EXPECTED
from headstart.trainers.processes import all_failed
from headstart.trainers.progress import Progress
from headstart.trainers.trace import Trace
from headstart.trainers.watch import Watch

T = TypeVar("T")
Observe = Callable[[TokenBatch, Collection[int]], TargetBatch]  # runs the target over a batch for these taps, if it is not captured


Decoded = Callable[[Arm], Mapping[str, float]]  # decodes with an arm's drafter as it is now and returns figures (trainers/gate.py)


def fit(
    arms: Sequence[Arm], stream: Callable[[int, int, int], Iterator[TokenBatch]], observe: Observe, held_out: list[TargetBatch],
    accelerator: Accelerator, *,
    steps: int, accumulate: int, save_every: int, keep: int, eval_every: int, log_every: int = 10, resume: bool, timeout: float = 600.0,
    trace: Trace | None = None, decode_every: int = 0, decode_last: bool = False, decoded: Decoded | None = None,
) -> bool:  # fmt: skip
    """Train the arms in place, up to ``steps`` steps. Returns whether it was interrupted. ``stream(start, rank, world)`` yields
    micro-batches from number ``start`` on. Arms that are behind (after a kill between two checkpoints, or added later) catch up first. A
    single arm's error is raised. Of several arms, each that fails is named and stopped; when the last one fails, UserError is raised.
    ``decoded`` is called for every arm every ``decode_every`` steps (with ``decode_last`` after the last one too), in the first process
    only. A resumed run first makes up the calls that an interrupt prevented. ``timeout``: seconds, see trainers/watch.py. ``trace`` is told
    of every step. Figures are computed and logged for every ``log_every``-th step, the first and the last.
    """
    main, at, batches = accelerator.is_main_process, -1, iter(list[TokenBatch]())
    with (
        _opened(arms, accelerator, resume, timeout) as watch, Interrupt(say=main) as interrupt, Progress(steps, show=main) as progress,
        trace or Trace() as trace, ExitStack() as savers,
    ):  # fmt: skip
        clock = Clock(accelerator.device, accelerator.num_processes)
        loop = _Loop(arms, observe, accelerator, progress.console, clock, watch, decoded)
        for arm in arms:
            savers.enter_context(arm.saver)
        while behind := [arm for arm in arms if not arm.failed and not arm.stopped and (arm.fitted.steps < steps or arm.due)]:
            step = min(arm.fitted.steps for arm in behind)
            active = [arm for arm in behind if arm.fitted.steps == step]
            if cut_off := [arm for arm in active if arm.due]:
                active = cut_off
            else:
                if at != step:
                    batches = stream(step * accumulate, accelerator.process_index, accelerator.num_processes)
                    if step:  # streamed data have no places: all rows before this one are read again
                        with watch.patiently(f"step {step + 1}, its place in the data"):
                            batches = itertools.chain([next(batches)], batches)
                at = step = step + 1
                shown = step % log_every == 0 or step in (1, steps)
                if (active := loop.step(active, batches, accumulate, steps, shown)) and shown:
                    progress.numbers(step, _numbers(active, loop.alone), loop.speed)
                progress.at(step)
                trace.step()
                last = step == steps
                now = {"evaluation": last or step % eval_every == 0,
                       "decoding": decode_every > 0 and (step % decode_every == 0 or (decode_last and last))}  # fmt: skip
                for arm in active:
                    arm.due = [what for what, due in now.items() if due]
            active, stop = loop.judge(active, held_out, interrupt)
            loop.stop_early(active, steps)
            due = stop or cut_off or step == steps or step % save_every == 0
            with interrupt.writing():
                loop.save([arm for arm in active if due or arm.stopped or step == arm.before_the_fall(steps)], keep, steps, stop)
            if stop:
                accelerator.wait_for_everyone()  # until the checkpoint is written: launchers kill all processes once one has exited
                return True
    for arm in arms:
        arm.drafter.eval()
        arm.tracker.cut()  # in case no step was left
    return False


@contextmanager
def _opened(arms: Sequence[Arm], accelerator: Accelerator, resume: bool, timeout: float) -> Iterator[Watch]:
    """Open the arms, and watch from then on: a process may hang in the first collective operation of a run, which is in ``Arm.open``."""
    with Watch(accelerator, timeout) as watch:
        for arm in arms:
            watch.at(f"the opening of {arm.run}")
            arm.open(accelerator, resume)
        yield watch


@dataclass
class _Loop:
    """State shared by all steps, and the parts of a step."""

    arms: Sequence[Arm]
    observe: Observe
    accelerator: Accelerator
    console: Console
    clock: Clock
    watch: Watch
    decoded: Decoded | None = None
    speed: Mapping[str, float] = field(default_factory=dict)  # the clock's latest figures

    @property
    def alone(self) -> bool:
        """Whether the run has a single arm."""
        return len(self.arms) == 1

    def step(self, active: list[Arm], batches: Iterator[TokenBatch], accumulate: int, steps: int, shown: bool) -> list[Arm]:
        """Run the next step of the ``active`` arms, which are all at the same step. ``shown``: compute and log figures. Returns the arms
        that have not failed.
        """
        clock, accelerator = self.clock, self.accelerator
        clock.exact = shown
        number = active[0].fitted.steps + 1
        self.watch.at(f"step {number}, data")
        start = time.perf_counter()
        with record_function("data"):
            micro = [next(batches) for _ in range(accumulate)]
        read = clock.since(start, "data", [arm.name for arm in active]) + self._wait(active, shown)
        for arm in active:
            arm.fitted.seconds += read  # in full for each arm, as if it trained alone; so is the target's pass
        kinds: dict[str, Kind] = {arm.name: (arm.name, arm.learner.phase(arm.fitted.steps / steps)) for arm in active}
        begun = self._of_each("start", active, lambda arm: arm.start(micro, steps), kinds)
        for i, tokens in enumerate(micro):
            active = [arm for arm in active if not arm.failed]
            self.watch.at(f"step {number}, target")
            names, start = [arm.name for arm in active], time.perf_counter()
            with record_function("target"), accelerator.autocast(), clock.counting([kinds[name] for name in names]):
                batch = self.observe(tokens, sorted({tap for arm in active for tap in arm.drafter.taps}))
            looked = clock.since(start, "target", names)
            if i == accumulate - 1:
                looked += self._wait(active, shown)
            for arm in active:
                arm.fitted.seconds += looked
            self._of_each(f"learn {i}", active, partial(_learn, begun, batch, i, shown), kinds)
        tokens_seen = accelerator.num_processes * sum(m.tokens_BT.numel() for m in micro)
        self._of_each("step", active, lambda arm: arm.step(begun[arm.name], tokens_seen))
        for arm in (active := [arm for arm in active if not arm.failed]):
            clock.count(kinds[arm.name], tokens_seen)
            if shown:
                self.speed = clock.figures(arm.name)
                arm.log(arm.shown | self.speed)
        return active

    def _wait(self, active: list[Arm], shown: bool) -> float:
        """In a step with figures, wait here for the slowest process, so that this time counts as waiting. Returns the seconds."""
        if not shown or self.accelerator.num_processes == 1:
            return 0.0
        start = time.perf_counter()
        self.accelerator.wait_for_everyone()
        return self.clock.since(start, "waiting", [arm.name for arm in active])

    def asked(self, interrupt: Interrupt) -> bool:
        """Whether any process was asked to stop. All processes get the same answer, so that they enter collective operations together."""
        if self.accelerator.num_processes == 1:
            return interrupt.asked
        return bool(self.accelerator.reduce(torch.tensor(float(interrupt.asked), device=self.accelerator.device), "sum"))

    def asked_after_step(self, active: Sequence[Arm], interrupt: Interrupt) -> bool:
        """``asked`` at the end of a step, timed: it waits for the other processes, and for optimizer work still queued on the GPU."""
        start = time.perf_counter()
        stop = self.asked(interrupt)
        if self.accelerator.num_processes > 1:
            took = self.clock.since(start, "waiting", [arm.name for arm in active])
            for arm in active:
                arm.fitted.seconds += took / len(active)
        return stop

    def judge(self, active: list[Arm], held_out: list[TargetBatch], interrupt: Interrupt) -> tuple[list[Arm], bool]:
        """Evaluate the arms and decode with them where that is due, until asked to stop: the rest stays due, and a resumed run makes it up.
        Returns the arms that have not failed, and whether any process was asked to stop.
        """
        stop = self.asked_after_step(active, interrupt)
        for what, call in (("evaluation", partial(self.evaluate, held_out)), ("decoding", self.decode)):
            if not stop and (judged := [arm for arm in active if what in arm.due and not arm.failed]):
                for arm in call(judged):
                    arm.due.remove(what)
                stop = self.asked(interrupt)
        return [arm for arm in active if not arm.failed], stop

    def evaluate(self, held_out: list[TargetBatch], active: list[Arm]) -> list[Arm]:
        """Evaluate the arms on held-out text, if there is any. Returns those that have not failed."""
        for arm in active if held_out else ():
            with self.watch.patiently(f"step {arm.fitted.steps}, evaluation"), self._guard(arm, "evaluation"):
                numbers = evaluate(arm.learner, held_out)
                self.console.print(f"{self._step_of(arm)}: held-out loss {numbers['heldout_loss']:.3f}, "
                                   f"expected length {numbers['heldout_expected_length']:.2f}")  # fmt: skip
                arm.log(numbers)
                arm.figures = {"step": arm.fitted.steps, **numbers}
                if self.decoded is None:
                    arm.patience.judge(EXPECTED, numbers["heldout_expected_length"], arm.fitted.steps)
        return [arm for arm in active if not arm.failed]

    def decode(self, active: list[Arm]) -> list[Arm]:
        """Decode with the arms' drafters in the first process; the others wait. Returns the arms that have not failed."""
        for arm in active:
            with self.watch.patiently(f"step {arm.fitted.steps}, decoding"):  # in all processes: the watch compares how far each has come
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
                self.console.print(f"{self._step_of(arm)}: decoded {lengths}")
            arm.drafter.train()

    def _step_of(self, arm: Arm) -> str:
        """The step of an arm, and its name if there are several: the beginning of a line of figures."""
        return f"step {arm.fitted.steps}" if self.alone else f"step {arm.fitted.steps} {arm.name}"

    def stop_early(self, active: Sequence[Arm], steps: int) -> None:
        """Stop arms whose patience is over. The first process decides for all, because only it decodes."""
        for arm in (arm for arm in active if arm.patience.evaluations and arm.fitted.steps < steps):
            enough = float(self.accelerator.is_main_process and arm.patience.over)
            arm.stopped = bool(self.accelerator.reduce(torch.tensor(enough, device=self.accelerator.device), "sum"))
            if arm.stopped:
                why = arm.patience.said(arm.fitted.steps, steps, arm.warmup, arm.schedule, arm.lasting, arm.floor, arm.out)
                self.console.print(f"{arm.label}stopped early at step {arm.fitted.steps}: {why}", soft_wrap=True)

    def save(self, arms: Sequence[Arm], keep: int, steps: int, stop: bool) -> None:
        """Write a checkpoint of each arm. ``stop``: it is the last one, because the training is interrupted."""
        for arm in arms:
            with self.watch.patiently(f"step {arm.fitted.steps}, checkpoint"):
                arm.save(keep, steps, self.console, stop)

    def _of_each(self, what: str, active: list[Arm], call: Callable[[Arm], T], kinds: Mapping[str, Kind] | None = None) -> dict[str, T]:
        """Run ``call`` for each arm that has not failed, and add the seconds to the arm's, and with ``kinds`` the operations to those of
        its step. Returns the results by arm name, without those of arms that fail during the call.
        """
        found: dict[str, T] = {}
        self.watch.at(f"step {max((arm.fitted.steps for arm in active), default=0) + 1}, {what}")
        for arm in (arm for arm in active if not arm.failed):
            start = time.perf_counter()
            with self._guard(arm, what), self.clock.counting([kinds[arm.name]] if kinds else []):
                found[arm.name] = call(arm)
            arm.fitted.seconds += self.clock.since(start, "step", [arm.name])
        return found

    @contextmanager
    def _guard(self, arm: Arm, what: str) -> Iterator[None]:
        """An error inside stops this arm. It is raised instead if this arm is the only one; UserError if it was the last of several."""
        try:
            yield
        except Exception as e:
            # Several processes must all stop the arm, else the run ends. An error other than UserError may have interrupted a collective
            # operation, so it always ends the run.
            several, where = self.accelerator.num_processes > 1, f"{arm.name} {arm.fitted.steps} {what}"
            if self.alone or (several and not isinstance(e, UserError)) or not all_failed(self.accelerator, where):
                raise
            arm.stop(e, self.console)
            if all(a.failed for a in self.arms):
                raise UserError(f"no arm is left, the last one to fail was {arm.name}: {arm.failed}") from e


def _learn(begun: Mapping[str, Step], batch: TargetBatch, i: int, figures: bool, arm: Arm) -> None:
    arm.learn(begun[arm.name], batch, i, figures)


def _numbers(arms: Sequence[Arm], alone: bool) -> str:
    if alone:
        return f"loss {arms[0].shown.get('loss', math.nan):.3f}  expected length {arms[0].shown['expected_length']:.2f}"
    return "expected length: " + "  ".join(f"{arm.name} {arm.shown['expected_length']:.2f}" for arm in arms)
