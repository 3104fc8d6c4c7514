"""An arm: one drafter in training, with its optimizers, schedule, random numbers, checkpoints and curves."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from rich.console import Console
from torch import Tensor
from torch.profiler import record_function

from headstart.data.batch import TargetBatch, TokenBatch
from headstart.heads.base import Drafter
from headstart.heads.errors import UserError, counted
from headstart.inference.decoding.placement import say
from headstart.inference.decoding.target import Target
from headstart.trainers import checkpoint, earlier
from headstart.trainers.guard import DIVERGED, FILE, OVERFLOWS, WINDOW, Guard, describe, note, overflowed
from headstart.trainers.joint import Joint
from headstart.trainers.learner import Learner, Seen, Wanted
from headstart.trainers.losses import LossOut
from headstart.trainers.on_policy import OnPolicy
from headstart.trainers.operations import uncounted
from headstart.trainers.optimizer import FLOOR, before_the_fall, learning_rate, open_optimizers
from headstart.trainers.parallel import DDP, spread
from headstart.trainers.patience import Patience
from headstart.trainers.resume import check_alike, counts_in_shares, resumable
from headstart.trainers.saver import Saver
from headstart.trainers.tracker import Tracker


@dataclass
class Fitted:
    """What the training has used so far, including earlier sessions of the same run."""

    steps: int = 0
    seconds: float = 0.0
    tokens: int = 0  # of all processes


@dataclass
class Step:
    """One step of one arm: ``Arm.start`` makes it, ``Arm.learn`` adds each micro-batch, ``Arm.step`` updates the weights with it."""

    wanted: list[Wanted]  # one per micro-batch
    count: Tensor  # weighted number of supervised (root, depth) pairs in all processes: the divisor of the loss
    rate: float  # learning rate as a share of the peak
    done: float  # share of the training that is over
    loss_sum: Tensor  # of this process
    micro: list[TokenBatch]  # the micro-batches of this process
    latest: TargetBatch | None = None  # the one that was learned from last, with the target's states
    seen: Seen = field(default_factory=Seen)  # figures of this process


class Arm:
    """One drafter in training. Every checkpoint stores ``settings`` and ``record``. A checkpoint with other ``settings`` is refused
    (UserError naming the key); ``record`` is not compared. Only ``loss.on_policy`` uses ``target`` and ``seed``. ``spare`` is a run folder
    on another disk, used when ``run`` is full.
    """

    def __init__(
        self, name: str, drafter: Drafter, run: Path, tracker: Tracker, settings: dict[str, Any], record: dict[str, Any], *,
        loss: dict[str, Any], optimizer: str, lr: float, betas: tuple[float, float], weight_decay: float, warmup: float, schedule: str,
        clip: float, skips: int = 0, spike: float = 0.0, background: bool = False, lora: dict[str, Any] | None = None,
        gradient_checkpointing: bool = False, patience: int = 0, target: Target | None = None, seed: int = 0, spare: Path | None = None,
        parallel: Mapping[str, Any] = DDP, floor: float = FLOOR, **muon: Any,
    ) -> None:  # fmt: skip
        self.name, self.drafter, self.run, self.tracker, self.settings, self.record = name, drafter, run, tracker, settings, record
        self.learner = Joint(drafter, lora, **loss) if lora else Learner(drafter, **loss)
        self.learner.checkpointing = gradient_checkpointing
        self.optimizers = open_optimizers(drafter, optimizer, lr, betas, weight_decay, **muon) + self.learner.optimizers(betas)
        self.parallel_settings = parallel
        self.lr, self.warmup, self.schedule, self.floor, self.clip = lr, warmup, schedule, floor, clip
        self.lasting = not counts_in_shares(warmup, lora, self.learner.base_until)  # whether a longer run has the same early steps
        self.places: Sequence[Path] = [run] if spare is None else [run, spare]
        self.fitted, self.failed, self.due = Fitted(), "", list[str]()  # due: evaluations that an interrupt prevented after the step
        self.guard, self.figures = Guard(skips, spike), dict[str, float]()
        self.patience, self.stopped = Patience(patience), False  # stopped early
        self.label, self.out = (f"{name}: ", run.parent) if name else ("", run)
        self.saver = Saver(self.label, self.places, background)
        self.rng: Mapping[str, Tensor] = checkpoint.rng_state()
        self.shown: dict[str, float] = {}
        self.on_policy: OnPolicy | None = None
        if self.learner.on_policy is not None:
            if lora:
                raise UserError("loss.on_policy decodes with the target as it is, trainer.lora changes it: take one of them")
            assert target is not None
            self.on_policy = OnPolicy(self.learner.on_policy, drafter, self.learner.asked, target, seed)

    def open(self, accelerator: Accelerator, resume: bool) -> None:
        """Prepare for training: with ``resume`` from the newest checkpoint of the same settings, else from the start. Raises UserError if
        processes find different checkpoints or have different settings, or if a checkpoint is damaged or has other settings.
        """
        self.accelerator = accelerator
        found = resumable(self.places, self.settings) if resume else None
        self.began, self.cleared = found[1]["step"] if found else 0, False
        check_alike(self.run, self.began, self.settings)
        moments = self._restore(*found) if found else None
        if accelerator.is_main_process:
            self.tracker.go_on_after(self.began)
        accelerator.wait_for_everyone()  # all must have read the same checkpoint before the first process writes
        self.learner.share = (accelerator.process_index, accelerator.num_processes)
        self.parallel = spread(self.parallel_settings, accelerator, self.learner, self.optimizers)
        self.module = self.parallel.module
        if moments is not None:
            self.parallel.restore(moments)
        self.learner.train()

    def _restore(self, folder: Path, state: Mapping[str, Any]) -> dict[str, Tensor]:
        """Restore this arm from a checkpoint that ``resumable`` has found, except for the optimizers' moments, which are returned."""
        accelerator = self.accelerator
        if self.on_policy:
            rows = checkpoint.load_own_rows(folder, accelerator.num_processes, self.drafter.shape.vocab_size)
            self.on_policy.restore(rows, accelerator.process_index, accelerator.num_processes)
        moments, self.rng = checkpoint.load(folder, self.learner.trained, self.optimizers)
        self.fitted = Fitted(state["step"], state["seconds"], state["tokens"])
        self.due, self.figures = list(state.get("due", ())), dict(state.get("figures", {}))
        self.guard.restore(state.get("guard", {}))
        self.patience.restore(state.get("patience", {}))
        then, now = (x.get("trainer", {}).get("steps") for x in (state["settings"], self.settings))
        longer = f", now to step {now} instead of {then}" if then != now else ""
        say(f"{self.label}resuming after step {self.fitted.steps} ({folder}){longer}")
        self.stopped = self.patience.over and self.fitted.steps != now
        if self.stopped:
            say(f"{self.label}it was stopped early there; more trainer.patience, or 0, with out={self.out} goes on")
        return moments

    def close(self) -> None:
        """Release the process group (see ``processes.leave``). Afterwards the first process holds the whole drafter."""
        if not self.failed:
            self.parallel.close()
        self.module = self.learner

    @contextmanager
    def own_numbers(self) -> Iterator[None]:
        """Inside, random numbers come from this arm's own state, so that they do not depend on which other arms train beside it."""
        checkpoint.set_rng_state(self.rng)
        yield
        self.rng = checkpoint.rng_state()

    def start(self, micro: list[TokenBatch], steps: int) -> Step:
        """Begin a step: choose the anchors, count the supervised pairs (the divisor of the loss), set the learning rate, and with
        ``loss.on_policy`` learn from the drafter's own text. Raises UserError if the first batch has no supervised token.
        """
        accelerator = self.accelerator
        with self.own_numbers():
            wanted = [self.learner.wanted(batch) for batch in micro]
        here = sum(map(self.learner.count, wanted))
        count = accelerator.reduce(torch.tensor(here, device=accelerator.device), "sum")
        if count == 0 and self.fitted.steps == 0:
            raise UserError("no token of the first batch is supervised at any depth: the loss mask is empty, documents are "
                            "shorter than three tokens, or trainer.length and trainer.batch_size are too small for this data")  # fmt: skip
        count = count + (count == 0)  # later, a batch without supervised tokens adds nothing and does not stop the run
        rate = learning_rate(self.fitted.steps, steps, self.warmup, self.schedule, self.floor)
        for group in (g for x in self.optimizers for g in x.param_groups):
            group["lr"] = group["peak_lr"] * rate
        step = Step(wanted, count, rate, self.fitted.steps / steps, torch.zeros((), device=accelerator.device), micro)
        if self.on_policy is not None:
            with self.own_numbers():
                self.learn_own(self.on_policy, step, micro)
        return step

    def learn_own(self, own: OnPolicy, step: Step, micro: list[TokenBatch]) -> None:
        """Learn from one micro-batch of the drafter's own text in addition to those of the data. Its pairs are weighted so that they make
        up ``loss.on_policy.share`` of the divisor, over all processes together.
        """
        accelerator, number = self.accelerator, self.fitted.steps
        if number % own.every == 0:
            with uncounted():
                self.shown |= own.collect(number, micro, accelerator)
        with accelerator.autocast():
            batch = own.draw(number, len(micro[0].tokens_BT), accelerator.process_index)
        wanted = None if batch is None else self.learner.wanted(batch)
        here = 0.0 if wanted is None else self.learner.count(wanted)
        count = accelerator.reduce(torch.tensor(here, device=accelerator.device), "sum")
        if count == 0:  # nothing was rejected
            return
        weight = own.share / (1 - own.share) * step.count / count
        step.count = step.count / (1 - own.share)
        if batch is not None:
            with accelerator.autocast():  # not through the wrapped module: it would wait for processes without such a batch
                out: LossOut = self.learner(batch, done=step.done, wanted=wanted)
            self.parallel.backward(out.loss_sum * (weight * accelerator.num_processes / step.count))
            step.loss_sum += weight * out.loss_sum.detach()
            self.shown["on_policy_acceptance"] = float(out.alpha_KBT.sum() / out.count_K.sum().clamp(min=1))

    def learn(self, step: Step, batch: TargetBatch, i: int, figures: bool) -> LossOut:
        """Forward and backward pass over micro-batch ``i``. ``figures``: update the logged figures too. Returns the undivided loss."""
        accelerator, last, wanted = self.accelerator, i == len(step.wanted) - 1, step.wanted[i]
        with self.own_numbers(), self.parallel.together(last):
            with accelerator.autocast():
                out: LossOut = self.module(batch, figures=figures, done=step.done, wanted=wanted)
            with record_function("backward"):  # times num_processes: gradients are averaged over processes, but the count is global
                self.parallel.backward(out.loss_sum * (accelerator.num_processes / step.count))
        step.loss_sum += out.loss_sum.detach()
        step.latest = batch
        if figures:
            self.shown |= self.learner.figures(out, wanted, step.seen)
        return out

    def step(self, step: Step, tokens: int) -> None:
        """Update the weights at the end of a step that read ``tokens`` tokens in all processes. Raises UserError if training diverged."""
        accelerator = self.accelerator
        norm = self.parallel.clip(self.clip)
        mean = float(accelerator.reduce(step.loss_sum, "sum") / step.count)  # the same in all processes, so they decide alike
        if why := self.guard.wrong(mean, norm):
            self.parallel.forget()
            self.skip(step, why, f"the loss is {mean}, the gradient's norm {norm}")
        else:
            self.guard.took(mean, norm)
            self.shown |= {"loss": mean, "gradient_norm": norm}
            with record_function("optimiser"):
                self.parallel.step()
            if not self.cleared:
                self.forget_earlier()
            self.cleared = True
        self.fitted.steps += 1
        self.fitted.tokens += tokens
        self.shown |= {"lr": self.lr * step.rate, "tokens": self.fitted.tokens} | self.guard.shown(self.fitted.steps)

    def skip(self, step: Step, why: str, figures: str) -> None:
        """Record the rows of a skipped step in skipped.jsonl. Raises UserError if too many steps were skipped."""
        accelerator, number = self.accelerator, self.fitted.steps + 1
        rows = [row for batch in step.micro for row in describe(accelerator.gather(batch.tokens_BT.to(accelerator.device)))]
        if accelerator.is_main_process:
            with suppress(OSError):  # the message below names the step as well
                note(self.run, number, why, [(number - 1) * len(rows), number * len(rows)], rows)
        for name in ("loss", "gradient_norm"):  # the figures of the previous step must not pass for this one's
            self.shown.pop(name, None)
        if self.guard.skip(number):
            say(f"{self.label}step {number} is skipped: {why} (its rows: {self.run / FILE})")
            return
        self.saver.wait()
        overflows = accelerator.reduce(torch.tensor(float(overflowed(step.latest)), device=accelerator.device), "sum")
        often = f" in {len(self.guard.skipped)} of the latest {WINDOW} steps (their rows: {self.run / FILE})" if self.guard.skips else ""
        raise UserError(f"step {number}: {figures}: {OVERFLOWS if overflows else DIVERGED.format(often)}; the last checkpoint "
                        f"({self.saver.newest() or 'none yet'}) is whole")  # fmt: skip

    def forget_earlier(self) -> None:
        """Remove what an earlier run left. This happens after the first step succeeds, so that settings that fail destroy nothing.

        A run that starts over removes all of it; a resumed run removes what belongs to steps after the one it resumes from. Raises
        UserError if checkpoints cannot be removed.
        """
        if not self.accelerator.is_main_process:
            return
        self.tracker.cut()
        try:
            removed = earlier.forget(self.places, self.began, max(self.guard.skipped, default=0))
        except OSError as e:
            raise UserError(f"the earlier checkpoints in {self.run} cannot be removed: {e}") from e
        if removed:
            why = f"those after step {self.began} led to another number of steps" if self.began else "trainer.resume=false: starting over"
            say(f"{self.label}{why}, {counted(removed, 'earlier checkpoint')} removed")

    def log(self, numbers: Mapping[str, float]) -> None:
        """Send figures of the present step to the tracker, in the main process."""
        if self.accelerator.is_main_process:
            self.tracker.log(numbers, self.fitted.steps)

    def save(self, keep: int, steps: int, console: Console, stop: bool = False) -> None:
        """Write a checkpoint in the main process; all processes call this. ``stop``: it is the last one. A full disk is reported and does
        not end the training.
        """
        self.accelerator.wait_for_everyone()
        own_rows = {} if self.on_policy is None else {"on_policy": self.on_policy.state(self.accelerator)}
        parts = self.parallel.snapshot()
        if not self.accelerator.is_main_process:
            return
        for file, tensors in {"rng": self.rng, **own_rows}.items():
            parts[file] = {name: checkpoint.copied(x) for name, x in tensors.items()}
        last = self.fitted.steps == steps or stop or self.stopped
        self.saver.save((self.fitted.steps, parts, self._state()), keep, self.before_the_fall(steps), console, last=last)

    def before_the_fall(self, steps: int) -> int | None:
        """The step whose checkpoint is kept so that a longer run can resume from it (see ``optimizer.before_the_fall``); None: no step."""
        return before_the_fall(steps, self.warmup, self.schedule) if self.lasting else None

    def _state(self) -> dict[str, Any]:
        """What a checkpoint of this step keeps in state.json, besides the step itself."""
        state = {"seconds": self.fitted.seconds, "tokens": self.fitted.tokens, "settings": self.settings, **self.record}
        figures = self.figures if self.figures.get("step") == self.fitted.steps else {}
        return state | {"guard": self.guard.state(), "figures": figures, "patience": self.patience.state(), "due": list(self.due)}

    def stop(self, why: BaseException, console: Console) -> None:
        """Stop training this arm after an error: print the reason and free its device memory."""
        self.failed = " ".join(str(why).split()) or repr(why)
        if not isinstance(why, UserError | torch.OutOfMemoryError):
            console.print("".join(traceback.format_exception(why)), style="red", markup=False, soft_wrap=True)
        console.print(f"{self.name}: stopped after step {self.fitted.steps}, the others go on: {self.failed}", style="red", markup=False)
        self.parallel.drop()
        self.optimizers = []
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
