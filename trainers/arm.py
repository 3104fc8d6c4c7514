"""One drafter in training: its optimisers, schedule, random numbers, checkpoints and curves."""

from __future__ import annotations

import math
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from rich.console import Console
from torch import Tensor

from headstart.data.batch import TargetBatch, TokenBatch
from headstart.heads.base import Drafter
from headstart.heads.errors import UserError
from headstart.inference.decoding.target import Target
from headstart.trainers import checkpoint
from headstart.trainers.joint import Joint
from headstart.trainers.learner import Learner
from headstart.trainers.losses import LossOut
from headstart.trainers.on_policy import OnPolicy
from headstart.trainers.optimizer import before_the_fall, learning_rate, open_optimizers
from headstart.trainers.resume import counts_in_shares, resumable
from headstart.trainers.space import Room
from headstart.trainers.tracker import Tracker


@dataclass
class Fitted:
    """What a run has cost, over all its resumptions."""

    steps: int = 0
    seconds: float = 0.0
    tokens: int = 0


@dataclass
class Step:
    """One step of one arm: ``start`` makes it, ``learn`` adds to it, ``step`` takes it."""

    asks: list[Tensor | None]  # of each micro-batch: the roots that are supervised [B, A], None: all
    count: Tensor  # of supervised (root, depth) pairs of all processes, weighted: what the loss is divided by
    rate: float  # of the peak learning rate
    done: float  # share of the training that is behind
    loss_sum: Tensor  # of this process


class Arm:
    """One drafter in training. ``settings`` and ``record`` (of any other kind) are stored in every checkpoint; one with other
    settings is refused (UserError naming the key). ``target`` and ``seed`` are for ``loss.on_policy``. ``spare``: the run folder on
    another disk, for when ``run`` is full.
    """

    def __init__(
        self, name: str, drafter: Drafter, run: Path, tracker: Tracker, settings: dict[str, Any], record: dict[str, Any], *,
        loss: dict[str, Any], optimizer: str, lr: float, betas: tuple[float, float], weight_decay: float, warmup: int, schedule: str,
        clip: float, lora: dict[str, Any] | None = None, target: Target | None = None, seed: int = 0, spare: Path | None = None,
    ) -> None:  # fmt: skip
        self.name, self.drafter, self.run, self.tracker, self.settings, self.record = name, drafter, run, tracker, settings, record
        self.learner = Joint(drafter, lora, **loss) if lora else Learner(drafter, **loss)
        self.optimizers = open_optimizers(drafter, optimizer, lr, betas, weight_decay) + self.learner.optimizers(betas)
        self.lr, self.warmup, self.schedule, self.clip = lr, warmup, schedule, clip
        self.lasting = not counts_in_shares(lora, {"base_until": self.learner.base_until})  # its early steps are those of a longer run
        self.places: Sequence[Path] = [run] if spare is None else [run, spare]
        self.fitted, self.failed, self.unsaved = Fitted(), "", False
        self.label = f"{name}: " if name else ""
        self.rng: Mapping[str, Tensor] = checkpoint.rng_state()
        self.shown: dict[str, float] = {}
        self.own_rows: dict[str, Tensor] | None = None
        self.on_policy: OnPolicy | None = None
        if self.learner.on_policy is not None:
            if lora:
                raise UserError("loss.on_policy decodes with the target as it is, trainer.lora changes it: take one of them")
            assert target is not None
            self.on_policy = OnPolicy(self.learner.on_policy, drafter, self.learner.asked, target, seed)

    def open(self, accelerator: Accelerator, resume: bool) -> None:
        """Where an earlier run of the same settings stopped, or at the start."""
        self.accelerator = accelerator
        found = resumable(self.places, self.settings) if resume else None
        step = found[1]["step"] if found else 0
        steps = accelerator.gather(torch.tensor([step], device=accelerator.device)).tolist()
        if len(set(steps)) > 1:
            raise UserError(f"out must be a folder that all machines share: in {self.run} one process finds a checkpoint of step "
                            f"{max(steps)}, another stands at {min(steps)}")  # fmt: skip
        self.began = step
        if found:
            newest, state = found
            if self.on_policy:
                rows = checkpoint.load_own_rows(newest, accelerator.num_processes, self.drafter.shape.vocab_size)
                self.on_policy.restore(rows, accelerator.process_index, accelerator.num_processes)
            self.rng = checkpoint.load(newest, self.learner.trained, self.optimizers)
            self.fitted = Fitted(state["step"], state["seconds"], state["tokens"])
            then, now = (x.get("trainer", {}).get("steps") for x in (state["settings"], self.settings))
            longer = f", now to step {now} instead of {then}" if then != now else ""
            accelerator.print(f"{self.label}resuming after step {self.fitted.steps} ({newest}){longer}")
            if accelerator.is_main_process:
                self.tracker.go_on_after(self.fitted.steps)
        accelerator.wait_for_everyone()  # all have listed and read the same checkpoint before the first one writes
        self.module, *self.prepared = accelerator.prepare(self.learner, *self.optimizers)
        self.learner.train()

    def close(self) -> None:
        """Nothing of accelerate's is held any more (see ``processes.leave``)."""
        self.module, self.prepared = self.learner, []

    @contextmanager
    def own_numbers(self) -> Iterator[None]:
        """Random numbers do not depend on who else is trained."""
        checkpoint.set_rng_state(self.rng)
        yield
        self.rng = checkpoint.rng_state()

    def start(self, micro: list[TokenBatch], steps: int) -> Step:
        """A step begins: its anchors, its divisor, its learning rate. Raises UserError where there is nothing to learn."""
        accelerator = self.accelerator
        with self.own_numbers():
            asks = [self.learner.anchors(batch) for batch in micro]
        here = sum(self.learner.count(batch, ask) for batch, ask in zip(micro, asks, strict=True))
        count = accelerator.reduce(torch.tensor(here, device=accelerator.device), "sum")
        if count == 0 and self.fitted.steps == 0:
            raise UserError("no token of the first batch is supervised at any depth: the loss mask is empty, documents are "
                            "shorter than three tokens, or trainer.length and trainer.batch_size are too small for this data")  # fmt: skip
        count = count + (count == 0)  # later, a batch without any adds nothing and is no reason to stop
        rate = learning_rate(self.fitted.steps, steps, self.warmup, self.schedule)
        for group in (g for x in self.optimizers for g in x.param_groups):
            group["lr"] = group["peak_lr"] * rate
        step = Step(asks, count, rate, self.fitted.steps / steps, torch.zeros((), device=accelerator.device))
        if self.on_policy is not None:
            with self.own_numbers():
                self.learn_own(self.on_policy, step, micro)
        return step

    def learn_own(self, own: OnPolicy, step: Step, micro: list[TokenBatch]) -> None:
        """A micro-batch of the drafter's own text beside those of the data. Its pairs weigh so much that they are ``share`` of the
        divisor, of all processes together; the arm alone pays for it.
        """
        accelerator, number = self.accelerator, self.fitted.steps
        if number % own.every == 0:
            self.shown |= own.collect(number, micro, accelerator)
        with accelerator.autocast():
            batch = own.draw(number, len(micro[0].tokens_BT), accelerator.process_index)
        ask_BA = None if batch is None else self.learner.anchors(batch)
        here = 0.0 if batch is None else self.learner.count(batch, ask_BA)
        count = accelerator.reduce(torch.tensor(here, device=accelerator.device), "sum")
        if count == 0:  # nothing was rejected
            return
        weight = own.share / (1 - own.share) * step.count / count
        step.count = step.count / (1 - own.share)
        if batch is not None:
            with accelerator.autocast():  # not through the module, which waits for processes that have no such batch
                out: LossOut = self.learner(batch, ask_BA=ask_BA, done=step.done)
            accelerator.backward(out.loss_sum * (weight * accelerator.num_processes / step.count))
            step.loss_sum += weight * out.loss_sum.detach()
            self.shown["on_policy_acceptance"] = float(out.alpha_KBT.sum() / out.count_K.sum().clamp(min=1))

    def learn(self, step: Step, batch: TargetBatch, i: int, figures: bool) -> LossOut:
        """Forward and backward over micro-batch i."""
        accelerator, last, ask_BA = self.accelerator, i == len(step.asks) - 1, step.asks[i]
        with self.own_numbers(), accelerator.accumulate(self.module) if last else accelerator.no_sync(self.module):
            with accelerator.autocast():
                out: LossOut = self.module(batch, figures=figures, ask_BA=ask_BA, done=step.done)
            # DistributedDataParallel averages over processes; the count is global already
            accelerator.backward(out.loss_sum * (accelerator.num_processes / step.count))
        step.loss_sum += out.loss_sum.detach()
        if figures:
            self.shown |= {"expected_length": self.learner.expected_length(out, batch, ask_BA), **self.learner.also}
        return out

    def step(self, step: Step, tokens: int) -> None:
        """The optimisers' step, over so many tokens. Raises UserError where training diverged."""
        accelerator = self.accelerator
        norm = accelerator.clip_grad_norm_(self.learner.trained.parameters(), self.clip) if self.clip else torch.zeros(())
        mean = float(accelerator.reduce(step.loss_sum, "sum") / step.count)  # all processes see the same, and stop together
        if not math.isfinite(mean) or not math.isfinite(float(norm)):
            raise UserError(f"step {self.fitted.steps + 1}: the loss is {mean}, the gradient's norm {float(norm)}: training diverged. "
                            f"Lower trainer.lr; the last checkpoint ({self.newest() or 'none yet'}) is whole")  # fmt: skip
        for each in self.prepared:
            each.step()
            each.zero_grad(set_to_none=True)
        if self.fitted.steps == self.began:
            self.forget_earlier()
        self.fitted.steps += 1
        self.fitted.tokens += tokens
        self.shown |= {"loss": mean, "lr": self.lr * step.rate, "gradient_norm": float(norm), "tokens": self.fitted.tokens}

    def forget_earlier(self) -> None:
        """What an earlier run has left goes once the first step of this one went through: settings that do not work cost nothing.

        That is everything where this one starts over, and what lies beyond its beginning where it is longer or shorter than that one.
        """
        if not self.accelerator.is_main_process:
            return
        if self.began == 0:
            self.tracker.go_on_after(0)
        try:
            removed = sum(checkpoint.clear(place, after=self.began) for place in self.places)
        except OSError as e:
            raise UserError(f"the earlier checkpoints in {self.run} cannot be removed: {e}") from e
        if removed:
            why = f"those after step {self.began} led to another number of steps" if self.began else "trainer.resume=false: starting over"
            self.accelerator.print(f"{self.label}{why}, {removed} earlier checkpoints removed")

    def log(self, numbers: Mapping[str, float]) -> None:
        if self.accelerator.is_main_process:
            self.tracker.log(numbers, self.fitted.steps)

    def save(self, keep: int, steps: int, console: Console) -> None:
        """A checkpoint, by the main process. A disk that refuses it is said to, and is no reason to stop."""
        self.accelerator.wait_for_everyone()
        if self.on_policy is not None:
            self.own_rows = self.on_policy.state(self.accelerator)
        if not self.accelerator.is_main_process:
            return
        self.unsaved, refused = True, ""
        for place in self.places:
            try:
                self.write(place)
                self.unsaved = False
                break
            except OSError as e:  # hours of training are worth more than one checkpoint: say so and go on
                refused = refused or str(e)
        if refused:
            goes_on = "Training goes on; the" if self.fitted.steps < steps else "The"
            there = f"not written: {refused}. {goes_on} last whole one is {self.newest() or 'none'}"
            if not self.unsaved:
                there = f"is in {self.newest()} (out_fallback), where the same command finds it: {refused}"
            console.print(f"{self.label}checkpoint of step {self.fitted.steps} {there}. Free some space.", style="red", markup=False,
                          soft_wrap=True)  # fmt: skip
        try:
            for place in self.places:
                checkpoint.prune(place, keep, self.before_the_fall(steps))
        except OSError as e:
            console.print(f"{self.label}earlier checkpoints are not removed: {e}", style="red", markup=False, soft_wrap=True)

    def before_the_fall(self, steps: int) -> int | None:
        """The step whose checkpoint is kept for a longer run (see ``optimizer.before_the_fall``)."""
        return before_the_fall(steps, self.warmup, self.schedule) if self.lasting else None

    def newest(self) -> Path | None:
        """The last whole checkpoint."""
        return max((folder for place in self.places for folder in checkpoint.folders(place)), key=checkpoint.step_of, default=None)

    def write(self, place: Path) -> None:
        """A checkpoint of this step into a run folder. Raises OSError."""
        state = {"seconds": self.fitted.seconds, "tokens": self.fitted.tokens, "settings": self.settings, **self.record}
        checkpoint.save(place, self.fitted.steps, self.learner.trained, self.optimizers, self.rng, state, self.own_rows)

    def secure(self, room: Room, patient: bool) -> None:
        """The checkpoint that ``save`` could not write, when training is over; by the main process alone, which may take its time.

        Raises UserError where no disk takes it.
        """
        moments = (x for optimizer in self.optimizers for state in optimizer.state.values() for x in state.values())
        tensors = [x for x in (*self.learner.trained.state_dict().values(), *moments) if isinstance(x, Tensor)]
        what, size = f"{self.label}the checkpoint of step {self.fitted.steps}", sum(x.numel() * x.element_size() for x in tensors)
        room.keep(what, size, self.places, self.write, self.make_room, patient, advice=self.advice())
        self.unsaved = False

    def make_room(self) -> list[Path]:
        """Remove all checkpoints of this run's folder but the newest; returns them."""
        gone = checkpoint.folders(self.run)[:-1]
        try:
            for folder in gone:
                checkpoint.remove(folder)
        except OSError:
            return []
        return gone

    def advice(self) -> str:
        """What a user has who cannot be given more."""
        newest = self.newest()
        if newest and not self.unsaved:
            return f"the weights are safe in {newest}: free some space and run the same command again"
        lost = f"the weights of step {self.fitted.steps} are on no disk"
        return f"{lost}: the same command goes on from {newest}" if newest else lost

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
