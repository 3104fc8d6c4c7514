"""The loop: every drafter, one way. Packed documents, the target's states, an unroll, a fused loss, a step, checkpoints.

Several drafters (arms) are stepped on the very same batches, which the target reads once; each has its own optimiser,
schedule, random numbers, checkpoints and curves, and learns exactly what it would learn alone. One that fails stops alone.

It runs on accelerate: one process on a CPU or GPU, or several (DistributedDataParallel). The loss is a sum over
supervised (root, depth) pairs divided once by their global count, so that accumulation, packing and the number of
processes do not change the gradient (but under loss.weighting=dpace, which is normalised over each micro-batch by itself).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from headstart.data.batch import TargetBatch, TokenBatch
from headstart.heads.errors import UserError
from headstart.trainers.arm import Arm
from headstart.trainers.clock import Clock
from headstart.trainers.interrupt import Interrupt
from headstart.trainers.learner import evaluate
from headstart.trainers.processes import all_failed

Observe = Callable[[TokenBatch, Collection[int]], TargetBatch]  # the target's pass over a batch; captured shards as they are


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
) -> bool:
    """Train the arms in place. ``stream(start, rank, world)`` yields micro-batches from the start-th on.

    Arms that are behind (a run that was killed between two checkpoints, an arm that was added) catch up first. Returns whether it
    was interrupted. What ends a single arm is raised; of several, each that fails is named and stopped, and the last failure raised.
    """
    for arm in arms:
        arm.open(accelerator, resume)
    alone, columns = len(arms) == 1, (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[numbers]}"))
    bar = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), disable=not accelerator.is_main_process)
    console, at, clock = bar.console, -1, Clock(accelerator.device)
    batches: Iterator[TokenBatch] = iter(())

    def guarded(arm: Arm, call: Callable[..., None], *arguments: Any) -> None:
        start = time.perf_counter()
        try:
            call(*arguments)
        except Exception as e:
            # of several processes all stop an arm, or the run ends: what is no UserError may have left an exchange half done
            where = f"{arm.name} {arm.fitted.steps} {call.__name__}"
            if alone or (accelerator.num_processes > 1 and not isinstance(e, UserError)) or not all_failed(accelerator, where):
                raise
            arm.stop(e, console)
            if all(a.failed for a in arms):
                raise UserError(f"no arm is left, the last one to fail was {arm.name}: {arm.failed}") from e
        arm.fitted.seconds += clock.since(start, "step", [arm.name])

    with Interrupt(say=accelerator.is_main_process) as interrupt, bar:
        task = bar.add_task("", total=steps, completed=0, numbers="")
        while behind := [arm for arm in arms if not arm.failed and arm.fitted.steps < steps]:
            step = min(arm.fitted.steps for arm in behind)
            active = [arm for arm in behind if arm.fitted.steps == step]
            if at != step:
                batches, at = stream(step * accumulate, accelerator.process_index, accelerator.num_processes), step
            clock.exact = shown = (step + 1) % 10 == 0 or step + 1 in (1, steps)
            start = time.perf_counter()
            micro = [next(batches) for _ in range(accumulate)]
            clock.since(start, "data", [arm.name for arm in active])
            for arm in active:
                guarded(arm, arm.start, micro, steps)
            for i, tokens in enumerate(micro):
                active = [arm for arm in active if not arm.failed]
                start = time.perf_counter()
                with accelerator.autocast():
                    batch = observe(tokens, sorted({tap for arm in active for tap in arm.drafter.taps}))
                looked = clock.since(start, "target", [arm.name for arm in active])
                for arm in active:
                    arm.fitted.seconds += looked  # as if it had been alone
                    guarded(arm, arm.learn, batch, i, i == accumulate - 1, shown)
            for arm in active:
                if not arm.failed:
                    tokens_seen = accelerator.num_processes * sum(m.tokens_BT.numel() for m in micro)
                    guarded(arm, arm.step, tokens_seen)
                    clock.count(arm.name, tokens_seen)
            active, at = [arm for arm in active if not arm.failed], step + 1
            if shown:
                for arm in active:
                    arm.log(arm.shown | clock.figures(arm.name))
                bar.update(task, numbers=_numbers(active, alone))
            bar.update(task, completed=step + 1)
            if held_out and (step + 1 == steps or (step + 1) % eval_every == 0) and not interrupt.asked:
                for arm in active:
                    numbers = evaluate(arm.learner, held_out)
                    console.print(f"step {step + 1}{'' if alone else ' ' + arm.name}: held-out loss {numbers['heldout_loss']:.3f}, "
                                  f"expected length {numbers['heldout_expected_length']:.2f}")  # fmt: skip
                    arm.log(numbers)
            stop = bool(accelerator.reduce(torch.tensor(float(interrupt.asked), device=accelerator.device), "sum"))
            due = stop or step + 1 == steps or (step + 1) % save_every == 0
            with interrupt.writing():
                for arm in active:
                    if due or step + 1 == arm.before_the_fall(steps):
                        arm.save(keep, steps, console)
            if stop:
                accelerator.wait_for_everyone()  # until it is written: launchers end all when one has ended so
                return True
    for arm in arms:
        arm.drafter.eval()
    return False


def _numbers(arms: Sequence[Arm], alone: bool) -> str:
    if alone:
        return f"loss {arms[0].shown['loss']:.3f}  expected length {arms[0].shown['expected_length']:.2f}" if arms else ""
    return "expected length: " + "  ".join(f"{arm.name} {arm.shown['expected_length']:.2f}" for arm in arms)
