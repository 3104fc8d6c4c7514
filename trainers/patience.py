"""Early stopping: a training ends when the number it is judged by has not improved for ``trainer.patience`` evaluations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

DECODED, EXPECTED = "decode/T0/accepted_length", "heldout/expected_length"  # the number judged by: the first if the gate decodes


def too_much(patience: int, steps: int, decode_every: int, eval_every: int) -> str:
    """Why this ``trainer.patience`` cannot stop a training of ``steps`` steps early; "" if it can."""
    key, what, every = ("decode_every", "decodings", decode_every) if decode_every else ("eval_every", "evaluations", eval_every)
    if not patience or (judged := (steps - 1) // every) > patience:  # those before the last step
        return ""
    instead = ", or take trainer.decode_every=0 to go by evaluations" if decode_every else ""
    return f"trainer.patience={patience} takes {patience + 1} {what} at least, and before step {steps} there are {judged}: lower " \
           f"trainer.{key}={every}{instead}"  # fmt: skip


@dataclass
class Patience:
    """The early stopping of one arm: after ``evaluations`` evaluations without a better number; 0: never. Checkpoints keep the other
    fields.
    """

    evaluations: int = 0
    by: str = ""  # the number's name
    best: float = -math.inf
    step: int = 0  # the step of the best number
    since: int = 0  # evaluations since then

    @property
    def over(self) -> bool:
        """Whether the training should stop."""
        return 0 < self.evaluations <= self.since

    def judge(self, by: str, number: float, step: int) -> None:
        """Note an evaluation at ``step``. Of equal numbers the first stays the best. ``by``: the number's name; if it differs from the
        last one, the best number is reset.
        """
        if by != self.by:
            self.by, self.best = by, -math.inf
        if number > self.best:
            self.best, self.step, self.since = number, step, 0
        else:
            self.since += 1

    def state(self) -> dict[str, Any]:
        """What a checkpoint or a report keeps; empty before the first evaluation."""
        return {key: value for key, value in asdict(self).items() if key != "evaluations"} if self.by else {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state`` returned; an empty state changes nothing."""
        for key, kind in (("by", str), ("best", float), ("step", int), ("since", int)) if state else ():
            setattr(self, key, kind(state[key]))

    def said(self, step: int, steps: int, warmup: float, schedule: str, lasting: bool, floor: float, out: Path) -> str:
        """A phrase that says why the training ends at ``step``, and whether the learning rate was still high. ``lasting``: whether a
        longer run has the same early steps and can resume from here. ``out``: the run folder.
        """
        evaluations = f"{self.since} evaluations since then (trainer.patience={self.evaluations})"
        from headstart.trainers.optimizer import learning_rate  # here, because door/ reads this file before torch is loaded

        why = f"{self.by} was best at step {self.step}, {self.best:.2f}, and no better in {evaluations}"
        if schedule == "constant" or (rate := learning_rate(step, steps, warmup, schedule, floor)) < 0.01:
            return why
        why += f". The learning rate is at {rate:.0%} of its peak and does not fall any more (trainer.schedule={schedule})"
        if schedule == "wsd" and rate == 1 and lasting:
            why += f": trainer.patience=0 trainer.steps={math.ceil(step / 0.8)} out={out} goes on from here and lets it fall"
        return why
