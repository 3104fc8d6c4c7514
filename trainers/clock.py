"""Where the seconds of training go: fetching data, the target's passes, the drafter's steps. And how much memory it takes.

clock = Clock(device)
clock.exact = True                              # in this step the parts are told apart (on a GPU: by waiting for it)
start = time.perf_counter()
...                                             # fetch, look, or step
seconds = clock.since(start, "data", arms)      # of these arms, as if each had been alone
clock.figures(arm)                              # of this arm since it was last asked: speed/..., system/...
"""

from __future__ import annotations

import resource
import sys
import time
from collections import Counter
from collections.abc import Iterable

import torch

PARTS = ("data", "target", "step")


class Clock:
    """By name of an arm. Held-out evaluation and checkpoints are not counted: ``speed`` is that of the training itself."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.exact = device, True
        self.whole: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.parts: dict[str, Counter[str]] = {part: Counter() for part in PARTS}

    def since(self, start: float, part: str, arms: Iterable[str]) -> float:
        """Seconds since ``start`` (of ``time.perf_counter``), put down to ``part`` of each of these arms."""
        if self.exact and self.device.type == "cuda":  # what was launched is counted where it was launched
            torch.cuda.synchronize(self.device)
        took = time.perf_counter() - start
        for arm in arms:
            self.whole[arm] += took  # type: ignore[assignment]
            if self.exact or self.device.type == "cpu":
                self.parts[part][arm] += took  # type: ignore[assignment]
        return took

    def count(self, arm: str, tokens: int) -> None:
        """An arm has trained on so many more tokens."""
        self.tokens[arm] += tokens

    def figures(self, arm: str) -> dict[str, float]:
        """Tokens per second and the share of each part since this was last asked, and memory."""
        known = {part: seconds[arm] for part, seconds in self.parts.items()}
        made = {f"speed/{part}_share": seconds / max(sum(known.values()), 1e-9) for part, seconds in known.items()}
        made["speed/tokens_per_second"] = self.tokens[arm] / max(self.whole[arm], 1e-9)
        for counter in (self.whole, self.tokens, *self.parts.values()):
            counter[arm] = 0
        return made | memory(self.device)


def memory(device: torch.device) -> dict[str, float]:
    """The most there has been, in GiB: of this process, and of its tensors on the GPU."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    made = {"system/memory_gib": most / 2**30}
    if device.type == "cuda":
        made["system/gpu_memory_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
    return made
