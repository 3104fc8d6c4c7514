"""The loop: every drafter, one way. Packed documents, the target's states, an unroll, a fused loss, a step, checkpoints.

Several drafters (arms) are stepped on the very same batches, which the target reads once; each has its own optimiser,
schedule, random numbers, checkpoints and curves, and learns exactly what it would learn alone. One that fails stops alone.

It runs on accelerate: one process on a CPU or GPU, or several (DistributedDataParallel). The loss is a sum over
supervised (root, depth) pairs divided once by their global count, so that accumulation, packing and the number of
processes do not change the gradient (but under loss.weighting=dpace, which is normalised over each micro-batch by itself).
"""

from __future__ import annotations

import math
import reprlib
import signal
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor

from data.batch import TargetBatch, TokenBatch
from heads.base import Drafter
from heads.errors import UserError
from inference.target import Target
from trainers import checkpoint
from trainers.clock import Clock
from trainers.joint import Joint
from trainers.learner import Learner, evaluate
from trainers.losses import LossOut
from trainers.on_policy import OnPolicy
from trainers.optimizer import learning_rate, open_optimizers
from trainers.tracker import Tracker

Observe = Callable[[TokenBatch, Collection[int]], TargetBatch]  # the target's pass over a batch; captured shards as they are


@dataclass
class Fitted:
    """What a run has cost, over all its resumptions."""

    steps: int = 0
    seconds: float = 0.0
    tokens: int = 0


@dataclass
class _Interrupt:
    """Ctrl-C and SIGTERM ask for the end of the step; a second Ctrl-C ends at once."""

    asked: bool = False
    old: dict[int, Any] = field(default_factory=dict)

    def __enter__(self) -> _Interrupt:
        try:
            self.old = {s: signal.signal(s, self._ask) for s in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # not the main thread: nobody sends signals here
            self.old = {}
        return self

    def __exit__(self, *_: object) -> None:
        for s, handler in self.old.items():
            signal.signal(s, handler)

    def _ask(self, *_: object) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


class Arm:
    """One drafter in training. ``settings`` and ``record`` (of any other kind) are stored in every checkpoint; one with other
    settings is refused (UserError naming the key). ``target`` and ``seed`` are for ``loss.on_policy``.
    """

    def __init__(
        self,
        name: str,
        drafter: Drafter,
        run: Path,
        tracker: Tracker,
        settings: dict[str, Any],
        record: dict[str, Any],
        *,
        loss: dict[str, Any],
        optimizer: str,
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
        warmup: int,
        schedule: str,
        clip: float,
        lora: dict[str, Any] | None = None,
        target: Target | None = None,
        seed: int = 0,
    ) -> None:
        self.name, self.drafter, self.run, self.tracker, self.settings, self.record = name, drafter, run, tracker, settings, record
        self.learner = Joint(drafter, lora, **loss) if lora else Learner(drafter, **loss)
        self.optimizers = open_optimizers(drafter, optimizer, lr, betas, weight_decay) + self.learner.optimizers(betas)
        self.lr, self.warmup, self.schedule, self.clip = lr, warmup, schedule, clip
        self.fitted, self.failed = Fitted(), ""
        self.rng: Mapping[str, Tensor] = checkpoint.rng_state()
        self.shown: dict[str, float] = {}
        self.on_policy: OnPolicy | None = None
        if self.learner.on_policy is not None:
            if lora:
                raise UserError("loss.on_policy decodes with the target as it is, trainer.lora changes it: take one of them")
            assert target is not None
            self.on_policy = OnPolicy(self.learner.on_policy, drafter, self.learner.asked, target, seed)

    def open(self, accelerator: Accelerator, resume: bool) -> None:
        """Where an earlier run of the same settings stopped, or at the start."""
        self.accelerator = accelerator
        found = resumable(self.run, self.settings) if resume else None
        step = found[1]["step"] if found else 0
        steps = accelerator.gather(torch.tensor([step], device=accelerator.device)).tolist()
        if len(set(steps)) > 1:
            raise UserError(f"out must be a folder that all machines share: in {self.run} one process finds a checkpoint of step "
                            f"{max(steps)}, another stands at {min(steps)}")  # fmt: skip
        self.fresh = not found
        if found:
            newest, state = found
            if self.on_policy:
                rows = checkpoint.load_own_rows(newest, accelerator.num_processes, self.drafter.shape.vocab_size)
                self.on_policy.restore(rows, accelerator.process_index, accelerator.num_processes)
            self.rng = checkpoint.load(newest, self.learner.trained, self.optimizers)
            self.fitted = Fitted(state["step"], state["seconds"], state["tokens"])
            label = f"{self.name}: " if self.name else ""
            accelerator.print(f"{label}resuming after step {self.fitted.steps} ({newest})")
            if accelerator.is_main_process:
                self.tracker.go_on_after(self.fitted.steps)
        accelerator.wait_for_everyone()  # all have listed and read the same checkpoint before the first one writes
        self.module, *self.prepared = accelerator.prepare(self.learner, *self.optimizers)
        self.learner.train()

    @contextmanager
    def own_numbers(self) -> Iterator[None]:
        """Random numbers do not depend on who else is trained."""
        checkpoint.set_rng_state(self.rng)
        yield
        self.rng = checkpoint.rng_state()

    def start(self, micro: list[TokenBatch], steps: int) -> None:
        """A step begins: its anchors, its divisor, its learning rate."""
        accelerator = self.accelerator
        with self.own_numbers():
            self.asks = [self.learner.anchors(batch) for batch in micro]
        count = sum(self.learner.count(batch, ask) for batch, ask in zip(micro, self.asks, strict=True))
        self.count = accelerator.reduce(torch.tensor(count, device=accelerator.device), "sum")
        if self.count == 0 and self.fitted.steps == 0:
            raise UserError("no token of the first batch is supervised at any depth: the loss mask is empty, documents are "
                            "shorter than three tokens, or trainer.length and trainer.rows are too small for this data")  # fmt: skip
        self.count = self.count + (self.count == 0)  # later, a batch without any adds nothing and is no reason to stop
        self.rate, self.done = learning_rate(self.fitted.steps, steps, self.warmup, self.schedule), self.fitted.steps / steps
        for group in (g for x in self.optimizers for g in x.param_groups):
            group["lr"] = group["peak_lr"] * self.rate
        self.total = torch.zeros((), device=accelerator.device)
        if self.on_policy is not None:
            with self.own_numbers():
                self.learn_own(self.on_policy, micro)

    def learn_own(self, own: OnPolicy, micro: list[TokenBatch]) -> None:
        """A micro-batch of the drafter's own text beside those of the data. Its pairs weigh so much that they are ``share`` of the
        divisor, of all processes together; the arm alone pays for it.
        """
        accelerator, step = self.accelerator, self.fitted.steps
        if step % own.every == 0:
            self.shown |= own.collect(step, micro, accelerator)
        with accelerator.autocast():
            batch = own.draw(step, len(micro[0].tokens_BT), accelerator.process_index)
        ask_BA = None if batch is None else self.learner.anchors(batch)
        here = 0.0 if batch is None else self.learner.count(batch, ask_BA)
        count = accelerator.reduce(torch.tensor(here, device=accelerator.device), "sum")
        if count == 0:  # nothing was rejected
            return
        weight = own.share / (1 - own.share) * self.count / count
        self.count = self.count / (1 - own.share)
        if batch is not None:
            with accelerator.autocast():  # not through the module, which waits for processes that have no such batch
                out: LossOut = self.learner(batch, ask_BA=ask_BA, done=self.done)
            accelerator.backward(out.loss_sum * (weight * accelerator.num_processes / self.count))
            self.total += weight * out.loss_sum.detach()
            self.shown["on_policy_acceptance"] = float(out.alpha_KBT.sum() / out.count_K.sum().clamp(min=1))

    def learn(self, batch: TargetBatch, i: int, last: bool, figures: bool) -> None:
        """Forward and backward over micro-batch i."""
        accelerator = self.accelerator
        with self.own_numbers(), accelerator.accumulate(self.module) if last else accelerator.no_sync(self.module):
            with accelerator.autocast():
                self.out: LossOut = self.module(batch, figures=figures, ask_BA=self.asks[i], done=self.done)
            # DistributedDataParallel averages over processes; the count is global already
            accelerator.backward(self.out.loss_sum * (accelerator.num_processes / self.count))
        self.total += self.out.loss_sum.detach()
        if figures:
            self.shown |= {"expected_length": self.learner.expected_length(self.out, batch, self.asks[i]), **self.learner.also}

    def step(self, tokens: int) -> None:
        accelerator = self.accelerator
        norm = accelerator.clip_grad_norm_(self.learner.trained.parameters(), self.clip) if self.clip else torch.zeros(())
        mean = float(accelerator.reduce(self.total, "sum") / self.count)  # all processes see the same, and stop together
        if not math.isfinite(mean) or not math.isfinite(float(norm)):
            last_whole = checkpoint.folders(self.run)[-1:]
            raise UserError(f"step {self.fitted.steps + 1}: the loss is {mean}, the gradient's norm {float(norm)}: training diverged. "
                            f"Lower trainer.lr; the last checkpoint ({last_whole[0] if last_whole else 'none yet'}) is whole")  # fmt: skip
        for each in self.prepared:
            each.step()
            each.zero_grad(set_to_none=True)
        if self.fresh:
            self.forget_earlier()
        self.fitted.steps += 1
        self.fitted.tokens += tokens
        self.shown |= {"loss": mean, "lr": self.lr * self.rate, "gradient_norm": float(norm), "tokens": self.fitted.tokens}

    def forget_earlier(self) -> None:
        """What an earlier run has left goes once the first step of this one went through: settings that do not work cost nothing."""
        self.fresh = False
        if not self.accelerator.is_main_process:
            return
        self.tracker.go_on_after(0)
        if removed := checkpoint.clear(self.run):
            label = f"{self.name}: " if self.name else ""
            self.accelerator.print(f"{label}trainer.resume=false: starting over, {removed} earlier checkpoints removed")

    def log(self, numbers: Mapping[str, float]) -> None:
        if self.accelerator.is_main_process:
            self.tracker.log(numbers, self.fitted.steps)

    def save(self, keep: int, console: Console) -> None:
        self.accelerator.wait_for_everyone()
        own_rows = None if self.on_policy is None else self.on_policy.state(self.accelerator)
        if not self.accelerator.is_main_process:
            return
        state = {"seconds": self.fitted.seconds, "tokens": self.fitted.tokens, "settings": self.settings, **self.record}
        try:
            checkpoint.save(self.run, self.fitted.steps, self.learner.trained, self.optimizers, self.rng, state, keep, own_rows)
        except OSError as e:  # hours of training are worth more than one checkpoint: say so and go on
            last = checkpoint.folders(self.run)[-1:]
            console.print(f"checkpoint of step {self.fitted.steps} not written: {e}. Training goes on; the last whole one is "
                          f"{last[0] if last else 'none'}. Free some space.", style="red", markup=False, soft_wrap=True)  # fmt: skip

    def stop(self, why: BaseException, console: Console) -> None:
        """This one is trained no further; what it holds of the device's memory is given back."""
        self.failed = " ".join(str(why).split()) or repr(why)
        if not isinstance(why, UserError | torch.OutOfMemoryError):
            console.print("".join(traceback.format_exception(why)), style="red", markup=False, soft_wrap=True)
        console.print(f"{self.name}: stopped after step {self.fitted.steps}, the others go on: {self.failed}", style="red", markup=False)
        for p in self.learner.trained.parameters():
            p.grad = None
        for optimizer in self.optimizers:  # accelerate keeps them
            optimizer.state.clear()
        self.optimizers, self.prepared = [], []
        self.learner.trained.to("cpu")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


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
            # of several processes only what all of them see alike can stop one arm: the others would wait for ever
            if alone or (accelerator.num_processes > 1 and not isinstance(e, UserError)):
                raise
            arm.stop(e, console)
            if all(a.failed for a in arms):
                raise UserError(f"no arm is left, the last one to fail was {arm.name}: {arm.failed}") from e
        arm.fitted.seconds += clock.since(start, "step", [arm.name])

    with _Interrupt() as interrupt, bar:
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
            stop = bool(accelerator.reduce(torch.tensor(float(interrupt.asked), device=accelerator.device), "sum"))
            if held_out and (step + 1 == steps or (step + 1) % eval_every == 0) and not stop:
                for arm in active:
                    numbers = evaluate(arm.learner, held_out)
                    console.print(f"step {step + 1}{'' if alone else ' ' + arm.name}: held-out loss {numbers['heldout_loss']:.3f}, "
                                  f"expected length {numbers['heldout_expected_length']:.2f}")  # fmt: skip
                    arm.log(numbers)
            if stop or step + 1 == steps or (step + 1) % save_every == 0:
                for arm in active:
                    arm.save(keep, console)
            if stop:
                return True
    for arm in arms:
        arm.drafter.eval()
    return False


def _numbers(arms: Sequence[Arm], alone: bool) -> str:
    if alone:
        return f"loss {arms[0].shown['loss']:.3f}  expected length {arms[0].shown['expected_length']:.2f}" if arms else ""
    return "expected length: " + "  ".join(f"{arm.name} {arm.shown['expected_length']:.2f}" for arm in arms)


def resumable(run: Path, settings: dict[str, Any]) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint and its state. Raises UserError where it is damaged, or of a run with other settings."""
    newest = checkpoint.folders(run)[-1:]
    if not newest:
        return None
    state = checkpoint.read_state(newest[0])
    _same_settings(state["settings"], settings, newest[0])
    return newest[0], state


def _same_settings(saved: dict[str, Any], now: dict[str, Any], folder: Path) -> None:
    """Continuing with other settings would be a different run under the same name. Raises UserError naming the key."""

    def flat(x: Any, prefix: str = "") -> dict[str, Any]:
        if not isinstance(x, dict):
            return {prefix[:-1]: x}
        return {k: v for key, value in x.items() for k, v in flat(value, f"{prefix}{key}.").items()}

    a, b = flat(saved), flat(now)
    changed = sorted(k for k in a.keys() | b.keys() if a.get(k) != b.get(k))
    if changed:
        key = changed[0]
        raise UserError(f"{folder.parent.parent} holds a run with {key}={_short(a.get(key))}, now it is {_short(b.get(key))}: "
                        f"give the new run its own folder (out=DIR), or start over with trainer.resume=false")  # fmt: skip


def _short(value: Any) -> str:
    """A trimmed vocabulary has thousands of ids."""
    return value if isinstance(value, str) else reprlib.repr(value)
