"""Advice when a run is out of memory: which setting to lower, and by how much.

The plan (trainers/plan.py) counts the memory of a run. The advice is the first of its smaller batches that frees as much memory as the
failed allocation asked for. As long as the number of rows in a step stays the same, a run can resume this way, unless its loss
depends on the rows that are read together (trainers/resume.py).
"""

from __future__ import annotations

import re
from typing import Any

import torch

from headstart.trainers.plan import plan
from headstart.trainers.plan_text import smaller
from headstart.trainers.resume import read_together

UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40, "PiB": 1 << 50, "EiB": 1 << 60}
ASKED = re.compile(r"(?:[Tt]ried to|Unable to) allocate ([\d.]+) (bytes|[KMGTPE]iB)")  # in messages of CUDA, the CPU, numpy


def asked_for(error: BaseException) -> int | None:
    """The bytes that a failed allocation asked for (0: the error does not say); None for an error that is not about memory."""
    text = str(error)
    none_left = ("can't allocate memory", "not enough memory")
    if not isinstance(error, torch.OutOfMemoryError | MemoryError) and not any(words in text for words in none_left):
        return None
    found = ASKED.search(text)
    return int(float(found[1]) * UNITS[found[2]]) if found else 0


def advice(settings: dict[str, Any], wanted: int) -> str:
    """A phrase that says which setting to lower. ``settings``: those of a run, as for a plan, and its folder ``out``, which is named if the
    run can resume with the lower setting. ``wanted``: the bytes that are missing.
    """
    trainer, goes_on = settings["trainer"], f"; with out={settings['out']} the run goes on"
    kept = next(filter(None, (read_together(each["loss"]) for each in (settings["arms"] or {"": settings}).values())), "")
    fewer = f"; in a run of its own (out=DIR), as {kept}" if kept else goes_on
    try:
        before = plan(settings).needed
        for words, found in smaller(settings, {}, lambda found: before - found.needed >= max(wanted, 1)):
            if any(word.startswith("trainer.length") for word in words):
                goes_on = ""
            elif any(word.startswith("trainer.batch_size") for word in words):
                goes_on = fewer
            return f"{' '.join(words)} takes {(before - found.needed) / 1e9:.2g} GB less (of {before / 1e9:.2g}){goes_on}"
    except Exception:  # a plan may not know this run; the user still needs advice
        if trainer["batch_size"] > 1 and trainer["batch_size"] % 2 == 0:
            half = f"trainer.batch_size={trainer['batch_size'] // 2} trainer.accumulate={2 * trainer['accumulate']}"
            return f"{half} halves what a batch takes{fewer}"
    return "no smaller batch frees that: spread the target (target.device=map) or capture it beforehand (python -m data); plan=true says " \
           "what each part takes"  # fmt: skip
