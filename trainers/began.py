"""The drafters that a run began with (trainer.start), decoded with beside those that it made: is it worth a swap?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headstart.heads.base import Drafter
from headstart.heads.errors import UserError
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.target import Target
from headstart.inference.reports import prior
from headstart.inference.reports.figures import times_as_long
from headstart.inference.reports.measure import TEMPERATURES, Contender
from headstart.inference.settings import Settings
from headstart.inference.speculator import open_speculator


class Began:
    """The drafters in the folders of ``trainer.start``, each once for every target that arms serve. Open them before a target is prepacked.

    A resumed run does not need these folders: a printed line says why one cannot be opened any more.
    """

    def __init__(self, own: Mapping[str, Settings], targets: Mapping[str, Target]) -> None:
        """``own``: arm -> its settings; ``targets``: arm -> the target that its drafter is served with."""
        self.starts = {
            name: (str(start), target) for name, target in targets.items() if (start := own[name]["trainer"]["start"]) is not None
        }
        self.drafters: dict[tuple[str, Target], Drafter] = {}
        for start, target in dict.fromkeys(self.starts.values()):
            try:
                self.drafters[start, target] = open_speculator(start, target)
            except UserError as e:
                print(f"the report cannot compare with the drafter of trainer.start: {e}")
        self.contenders: dict[tuple[str, Target], Contender] = {}

    def of(self, target: Target, policy: TreePolicy, prompts: Sequence[Sequence[int]]) -> dict[str, Contender]:
        """The contenders for this target, by the name of their rows in a comparison. ``prompts``: to measure their acceptance again, as it
        may have been measured with another target.
        """
        for (start, of), drafter in self.drafters.items():
            if of is target:
                drafter.acceptance = prior.measure(target, drafter, prompts)
                self.contenders[start, of] = Contender(drafter, policy)
        return {self._row(*key): each for key, each in self.contenders.items() if key[1] is target}

    def _row(self, start: str, target: Target) -> str:
        """The name of a row. Where the same drafter is decoded with several targets (trainer.lora), it also names the target's arms."""
        alone = sum(other == start for other, _ in self.drafters) == 1
        arms = ", ".join(name for name, each in self.starts.items() if each == (start, target))
        return f"trainer.start={start}" + ("" if alone else f" with the target of {arms}")

    def beside(self, name: str, ended: Contender) -> dict[str, Any]:
        """The report's key ``began_with`` for the arm ``name``, whose drafter is ``ended``: the accepted lengths of the drafter that it
        began with, over the same prompts, and how many times as long its own are. Empty for an arm that began with new weights.
        """
        if (key := self.starts.get(name)) not in self.contenders:
            return {}
        made, before = ended.made, self.contenders[key].made
        figures = {f"temperature_{t}": times_as_long(made["tree", t], before["tree", t]) for t in TEMPERATURES}
        return {"began_with": {"speculator": key[0], **figures}} if all(figures.values()) else {}
