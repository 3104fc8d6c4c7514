"""Memory ended: which setting to lower, and by how much.

What a run takes is what its plan counts (trainers/plan.py). The advice is the first of the smaller batches that a plan tries which frees
as much as was asked for in vain. While the rows of a step stay as many, a run that is under way goes on so (trainers/resume.py).
"""

from __future__ import annotations

import re
from typing import Any

import torch

from headstart.trainers.plan import plan
from headstart.trainers.plan_text import smaller

UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40, "PiB": 1 << 50, "EiB": 1 << 60}
ASKED = re.compile(r"(?:[Tt]ried to|Unable to) allocate ([\d.]+) (bytes|[KMGTPE]iB)")  # CUDA's, the CPU's, numpy's


def asked_for(error: BaseException) -> int | None:
    """The bytes that an allocation asked for in vain (0: the error does not say); None for an error that is not about memory."""
    text = str(error)
    none_left = ("can't allocate memory", "not enough memory")
    if not isinstance(error, torch.OutOfMemoryError | MemoryError) and not any(words in text for words in none_left):
        return None
    found = ASKED.search(text)
    return int(float(found[1]) * UNITS[found[2]]) if found else 0


def advice(settings: dict[str, Any], wanted: int) -> str:
    """Which setting to lower. ``settings``: those of a run, as a plan takes them; ``wanted``: the bytes that were asked for in vain."""
    trainer = settings["trainer"]
    try:
        before = plan(settings).needed
        for words, found in smaller(settings, {}, lambda found: before - found.needed >= max(wanted, 1)):
            return f"{' '.join(words)} takes {(before - found.needed) / 1e9:.2g} GB less (of {before / 1e9:.2g})"
    except Exception:  # a plan is for what it knows, and memory has ended in any case
        if trainer["batch_size"] > 1 and trainer["batch_size"] % 2 == 0:
            return (
                f"trainer.batch_size={trainer['batch_size'] // 2} trainer.accumulate={2 * trainer['accumulate']} halves what a batch takes"
            )
    return "no smaller batch frees that: spread the target (target.device=map) or capture it beforehand (python -m data); plan=true says " \
           "what each part takes"  # fmt: skip
