"""The loop: every drafter, one way. Packed documents, the target's states, an unroll, a fused loss, a step, checkpoints.

It runs on accelerate: one process on a CPU or GPU, or several (DistributedDataParallel). The loss is a sum over
supervised (root, depth) pairs divided once by their global count, so that accumulation, packing and the number of
processes do not change the gradient.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import nn

from data.batch import TargetBatch, TokenBatch
from heads.base import Drafter
from heads.errors import UserError
from heads.unroll import unroll
from inference.walk import walk_rows
from trainers import checkpoint
from trainers.losses import LossOut, feature_loss, fused_loss
from trainers.optimizer import learning_rate, open_optimizers
from trainers.tracker import Tracker

Observe = Callable[[TokenBatch], TargetBatch]  # the target's pass over a batch, or the identity for captured shards


class Learner(nn.Module):
    """Unroll and loss as one forward, so that DistributedDataParallel sees the gradients."""

    def __init__(self, drafter: Drafter, *, depth: int, terms: dict[str, float], decay: float, chunk: int) -> None:
        super().__init__()
        depth = drafter.max_depth or depth  # heads of their own are all trained: an untrained one would guess nonsense
        self.drafter, self.decay, self.chunk = drafter, decay, chunk
        self.depth, self.asked = (depth if drafter.unrolls else 1), depth
        self.feature = terms.get("feature", 0.0)
        self.terms = {name: weight for name, weight in terms.items() if name != "feature"}

    def count(self, batch: TokenBatch) -> float:
        """The batch's share of the divisor: supervised (root, depth) pairs, weighted by the decay."""
        return sum(self.decay ** (d - 1) * float(batch.supervised(d).sum()) for d in range(1, self.depth + 1))

    def forward(self, batch: TargetBatch, figures: bool = True) -> LossOut:
        roots = batch.roots()
        if not torch.is_autocast_enabled(batch.final_BTD.device.type):  # a bf16 target, a drafter trained in fp32
            dtype = next(self.drafter.parameters()).dtype
            roots.states = {tap: state.to(dtype) for tap, state in roots.states.items()}
        drafts = unroll(self.drafter, roots, batch.documents_BT, self.depth)
        supervised = [batch.supervised(d) for d in range(1, self.depth + 1)]
        out = fused_loss(
            [draft.hidden_BNH for draft in drafts],
            [self.drafter.unembedding(d) for d in range(1, self.depth + 1)],
            batch.final_BTD,
            self.drafter.ends,
            batch.tokens_BT,
            supervised,
            self.terms,
            self.decay,
            self.chunk,
            figures,
        )
        if self.asked > self.depth:  # the deeper guesses are later roots' guesses of depth 1: for the figures only
            later = [torch.roll(out.match_KBT[0], -d, dims=-1) & batch.supervised(d + 1) for d in range(self.asked)]
            out.match_KBT = torch.stack(later)
        if self.feature:
            states = [draft.state_BNH for draft in drafts]
            if any(s is None or s.shape[-1] != batch.final_BTD.shape[-1] for s in states):
                raise UserError("loss.terms.feature compares the drafter's states with the target's: this drafter has none of that size")
            out.loss_sum = out.loss_sum + self.feature * feature_loss(states, batch.final_BTD, supervised, self.decay)  # type: ignore[arg-type]
        return out


@dataclass
class Fitted:
    """What a run has cost, over all its resumptions."""

    steps: int = 0
    seconds: float = 0.0
    tokens: int = 0
    interrupted: bool = False


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


def fit(
    drafter: Drafter,
    stream: Callable[[int, int, int], Iterator[TokenBatch]],
    observe: Observe,
    held_out: list[TargetBatch],
    run: Path,
    tracker: Tracker,
    accelerator: Accelerator,
    settings: dict[str, Any],
    record: dict[str, Any],
    *,
    loss: dict[str, Any],
    steps: int,
    accumulate: int,
    optimizer: str,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
    warmup: int,
    schedule: str,
    clip: float,
    save_every: int,
    keep: int,
    eval_every: int,
    resume: bool,
) -> Fitted:
    """Train ``drafter`` in place. ``stream(start, rank, world)`` yields micro-batches from the start-th on.

    ``settings`` and ``record`` (of any other kind) are stored in every checkpoint; one with other settings is refused
    (UserError naming the key).
    """
    learner = Learner(drafter, **loss)
    optimizers = open_optimizers(drafter, optimizer, lr, betas, weight_decay)
    fitted = Fitted()
    found = resumable(run, settings) if resume else None
    if found:
        newest, state = found
        checkpoint.load(newest, drafter, optimizers)
        fitted = Fitted(state["step"], state["seconds"], state["tokens"])
        accelerator.print(f"resuming after step {fitted.steps} ({newest})")
    elif accelerator.is_main_process and (removed := checkpoint.clear(run)):
        accelerator.print(f"trainer.resume=false: starting over, {removed} earlier checkpoints removed")
    accelerator.wait_for_everyone()  # all have listed and read the same checkpoint before the first one writes
    if accelerator.is_main_process:
        tracker.go_on_after(fitted.steps)
    module, *prepared = accelerator.prepare(learner, *optimizers)
    batches = stream(fitted.steps * accumulate, accelerator.process_index, accelerator.num_processes)
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[numbers]}"))
    bar = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), disable=not accelerator.is_main_process)
    start, before = time.perf_counter(), fitted.seconds
    learner.train()

    def save() -> None:
        accelerator.wait_for_everyone()
        if not accelerator.is_main_process:
            return
        state = {"seconds": fitted.seconds, "tokens": fitted.tokens, "settings": settings, **record}
        try:
            checkpoint.save(run, fitted.steps, drafter, optimizers, state, keep)
        except OSError as e:  # hours of training are worth more than one checkpoint: say so and go on
            last = checkpoint.folders(run)[-1:]
            bar.console.print(f"checkpoint of step {fitted.steps} not written: {e}. Training goes on; the last whole one is "
                              f"{last[0] if last else 'none'}. Free some space.", style="red", markup=False, soft_wrap=True)  # fmt: skip

    with _Interrupt() as interrupt, bar:
        task = bar.add_task("", total=steps, completed=fitted.steps, numbers="")
        while fitted.steps < steps:
            micro = [next(batches) for _ in range(accumulate)]
            count = accelerator.reduce(torch.tensor(sum(map(learner.count, micro)), device=accelerator.device), "sum")
            if count == 0 and fitted.steps == 0:
                raise UserError("no token of the first batch is supervised at any depth: the loss mask is empty, documents are "
                                "shorter than three tokens, or trainer.length and trainer.rows are too small for this data")  # fmt: skip
            count = count + (count == 0)  # later, a batch without any adds nothing and is no reason to stop
            rate = learning_rate(fitted.steps, steps, warmup, schedule)
            for group in (g for x in optimizers for g in x.param_groups):
                group["lr"] = group["peak_lr"] * rate
            total = torch.zeros((), device=accelerator.device)
            shown = (fitted.steps + 1) % 10 == 0 or fitted.steps + 1 in (1, steps)
            for i, tokens in enumerate(micro):
                with accelerator.accumulate(module) if i == accumulate - 1 else accelerator.no_sync(module):
                    with accelerator.autocast():
                        batch = observe(tokens)
                        out = module(batch, figures=shown)
                    # DistributedDataParallel averages over processes; the count is global already
                    accelerator.backward(out.loss_sum * (accelerator.num_processes / count))
                total += out.loss_sum.detach()
            norm = accelerator.clip_grad_norm_(drafter.parameters(), clip) if clip else torch.zeros(())
            mean = float(accelerator.reduce(total, "sum") / count)  # all processes see the same, and stop together
            if not math.isfinite(mean) or not math.isfinite(float(norm)):
                last_whole = checkpoint.folders(run)[-1:]
                raise UserError(f"step {fitted.steps + 1}: the loss is {mean}, the gradient's norm {float(norm)}: training diverged. Lower "
                                f"trainer.lr; the last checkpoint ({last_whole[0] if last_whole else 'none yet'}) is whole")  # fmt: skip
            for each in prepared:
                each.step()
                each.zero_grad(set_to_none=True)
            fitted.steps += 1
            fitted.tokens += accelerator.num_processes * sum(m.tokens_BT.numel() for m in micro)
            fitted.seconds = before + time.perf_counter() - start
            if shown:
                length = walk_rows(out.match_KBT, batch.supervised(1)).expected_length
                numbers = {"loss": mean, "expected_length": length, "lr": lr * rate, "gradient_norm": float(norm), "tokens": fitted.tokens}
                bar.update(task, numbers=f"loss {mean:.3f}  expected length {length:.2f}")
                if accelerator.is_main_process:
                    tracker.log(numbers, fitted.steps)
            bar.update(task, completed=fitted.steps)
            stop = bool(accelerator.reduce(torch.tensor(float(interrupt.asked), device=accelerator.device), "sum"))
            last = fitted.steps == steps
            if held_out and (last or fitted.steps % eval_every == 0) and not stop:
                numbers = evaluate(learner, held_out)
                bar.console.print(f"step {fitted.steps}: held-out loss {numbers['heldout_loss']:.3f}, "
                                  f"expected length {numbers['heldout_expected_length']:.2f}")  # fmt: skip
                if accelerator.is_main_process:
                    tracker.log(numbers, fitted.steps)
            if stop or last or fitted.steps % save_every == 0:
                save()
            if stop:
                fitted.interrupted = True
                break
    drafter.eval()
    return fitted


@torch.no_grad()
def evaluate(learner: Learner, batches: list[TargetBatch], depth: int | None = None) -> dict[str, float]:
    """Loss and expected length over the held-out text itself (off the target's policy), teacher-forced.

    The length is that of a chain of ``depth`` guesses; None: as many as the learner unrolls.
    """
    training = learner.drafter.training
    learner.eval()
    loss = count = rounds = tokens = 0.0
    for batch in batches:
        out = learner(batch)
        walked = walk_rows(out.match_KBT[:depth], batch.supervised(1))
        loss, count = loss + float(out.loss_sum), count + float(out.weight_sum)
        rounds, tokens = rounds + walked.rounds, tokens + walked.tokens
    learner.train(training)
    return {"heldout_loss": loss / max(count, 1.0), "heldout_expected_length": tokens / max(rounds, 1)}


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
        raise UserError(f"{folder.parent.parent} holds a run with {key}={a.get(key)}, now it is {b.get(key)}: "
                        f"give the new run its own folder (out=DIR), or start over with trainer.resume=false")  # fmt: skip
