"""Measures where the seconds of training go (fetching data, the target's passes, the drafter's steps, waiting for other processes), the
number of operations, and memory.

clock = Clock(device)
clock.exact = True                              # time the parts of this step one by one (on a GPU this synchronizes)
start = time.perf_counter()
...                                             # fetch a batch, run the target, or step
seconds = clock.since(start, "data", arms)      # added to each of these arms in full, as if it trained alone
with clock.counting(kinds): ...                 # counts operations, in the first step of a kind only
clock.figures(arm)                              # the arm's figures since the last call: speed/..., system/...
"""

from __future__ import annotations

import resource
import sys
import time
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator
from contextlib import contextmanager

import torch

from headstart.trainers.gpus import peak
from headstart.trainers.operations import Operations

PARTS = ("data", "target", "step", "waiting")
Kind = tuple[str, Hashable]  # (arm, its present Learner.phase): all steps of one kind take equally many operations


class Clock:
    """The times of each arm, by its name, in seconds. Evaluation and checkpoints are not counted, so that speed is that of training."""

    def __init__(self, device: torch.device, processes: int = 1) -> None:
        self.device, self.processes, self.exact, self.peak = device, processes, True, peak(device)
        self.operations: dict[Kind, float] = {}  # operations in the first step of a kind, in this process
        self.per_token: dict[Kind, float] = {}  # operations per token
        self.whole: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.done: Counter[str] = Counter()  # operations of all processes
        self.parts: dict[str, Counter[str]] = {part: Counter() for part in PARTS}

    def since(self, start: float, part: str, arms: Iterable[str]) -> float:
        """Seconds since ``start`` (from ``time.perf_counter``). They are added to ``part`` of each of these arms."""
        if self.exact and self.device.type == "cuda":  # else kernels would count in a later part than the one that launched them
            torch.cuda.synchronize(self.device)
        took = time.perf_counter() - start
        for arm in arms:
            self.whole[arm] += took  # type: ignore[assignment]
            if self.exact or self.device.type == "cpu":
                self.parts[part][arm] += took  # type: ignore[assignment]
        return took

    @contextmanager
    def counting(self, kinds: Collection[Kind]) -> Iterator[None]:
        """Count the operations inside as part of a step of each of these ``kinds``. Kinds that were counted before are left out."""
        new = [kind for kind in kinds if kind not in self.per_token]
        if not new:
            yield
            return
        with Operations() as found:
            yield
        for kind in new:
            self.operations[kind] = self.operations.get(kind, 0.0) + found.count

    def count(self, kind: Kind, tokens: int) -> None:
        """Note the end of a step of that kind, which has trained on ``tokens`` tokens in all processes."""
        if kind not in self.per_token:
            self.per_token[kind] = self.operations.pop(kind, 0.0) * self.processes / max(tokens, 1)
        self.tokens[kind[0]] += tokens
        self.done[kind[0]] += self.per_token[kind] * tokens  # type: ignore[assignment]

    def figures(self, arm: str) -> dict[str, float]:
        """Figures since the last call: tokens per second, each part's share of the time, memory, and 10^12 operations per second of one
        process. Operations are counted in the first step of each kind only, because all rows are equally long.
        """
        known = {part: seconds[arm] for part, seconds in self.parts.items()}
        made = {f"speed/{part}_share": seconds / max(sum(known.values()), 1e-9) for part, seconds in known.items()}
        made["speed/tokens_per_second"] = self.tokens[arm] / max(self.whole[arm], 1e-9)
        if operations := self.done[arm]:
            per_second = operations / max(self.whole[arm], 1e-9) / self.processes
            made["speed/teraflops"] = per_second / 1e12
            if self.peak is not None:
                made["speed/mfu"] = per_second / self.peak
        for counter in (self.whole, self.tokens, self.done, *self.parts.values()):
            counter[arm] = 0
        return made | memory(self.device)


def memory(device: torch.device) -> dict[str, float]:
    """Peak memory in GiB: of this process, and of its tensors on the GPU."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    made = {"system/memory_gib": most / 2**30}
    if device.type == "cuda":
        made["system/gpu_memory_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
    return made
