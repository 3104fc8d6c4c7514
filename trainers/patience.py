"""Early stopping: a training ends where the number that it is judged by has not become better for so many evaluations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from headstart.trainers.optimizer import learning_rate

DECODED, EXPECTED = "decode/T0/accepted_length", "heldout/expected_length"  # what is judged by: the first where the gate decodes


def better(number: float, best: float) -> bool:
    """What ``trainer.patience`` waits for and ``trainer.keep=best`` keeps: of equal ones the first is the best, and stays it."""
    return number > best


@dataclass
class Patience:
    """The early stopping of one arm. ``evaluations``: it is stopped after so many without a better number; 0: never. Checkpoints keep the
    other fields.
    """

    evaluations: int = 0
    by: str = ""  # the number's name
    best: float = -math.inf
    step: int = 0  # where it was best
    since: int = 0  # evaluations after that

    @property
    def over(self) -> bool:
        """Whether the training should stop."""
        return 0 < self.evaluations <= self.since

    def judge(self, by: str, number: float, step: int) -> None:
        """Note an evaluation. ``by``: the name of the number; with another name than before, the best one is forgotten."""
        if by != self.by:
            self.by, self.best = by, -math.inf
        if better(number, self.best):
            self.best, self.step, self.since = number, step, 0
        else:
            self.since += 1

    def state(self) -> dict[str, Any]:
        """What a checkpoint or a report keeps; empty before the first evaluation."""
        return {key: value for key, value in asdict(self).items() if key != "evaluations"} if self.by else {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """What ``state`` said; nothing of checkpoints that say nothing."""
        for key, kind in (("by", str), ("best", float), ("step", int), ("since", int)) if state else ():
            setattr(self, key, kind(state[key]))

    def said(self, step: int, steps: int, warmup: float, schedule: str, lasting: bool) -> str:
        """Why the training ends at ``step``, and whether the learning rate was still high. ``lasting``: a longer run would have made the
        same steps, so that it can go on from here.
        """
        evaluations = f"{self.since} evaluations since then (trainer.patience={self.evaluations})"
        why = f"{self.by} was best at step {self.step}, {self.best:.2f}, and no better in {evaluations}"
        if schedule == "constant" or (rate := learning_rate(step, steps, warmup, schedule)) < 0.01:
            return why
        why += f". The learning rate is at {rate:.0%} of its peak and does not fall any more (trainer.schedule={schedule})"
        if schedule == "wsd" and rate == 1 and lasting:
            why += f": trainer.patience=0 trainer.steps={math.ceil(step / 0.8)} goes on from here and lets it fall"
        return why
