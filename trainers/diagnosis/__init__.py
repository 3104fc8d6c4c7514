"""Diagnoses why a drafter is accepted less often than its training expects: one check for each known cause.

A check (a "look") is a function that takes a ``Case`` and returns its findings. It returns none if it finds nothing or cannot tell.
"""

from __future__ import annotations

from collections.abc import Sequence

from headstart.trainers.diagnosis import serving, text, wiring
from headstart.trainers.diagnosis.case import CURES as CURES
from headstart.trainers.diagnosis.case import Case as Case
from headstart.trainers.diagnosis.case import Finding as Finding
from headstart.trainers.diagnosis.served import served

FILE = "diagnosis.json"
LOOKS = (
    serving.stale,
    serving.typed,
    serving.cache,
    text.tokenizer,
    text.mask,
    text.template,
    text.policy,
    wiring.vocabulary,
    wiring.wiring,
)


def diagnose(case: Case) -> list[Finding]:
    """The findings of all checks: the surest first, those of a running engine last."""
    return [finding for look in (*LOOKS, served) for finding in look(case)]


def lines(findings: Sequence[Finding]) -> list[str]:
    """The findings as text, line by line."""
    if not findings:
        return ["none of the known causes was found: " + ", ".join(look.__name__ for look in LOOKS) + " were looked at"]
    return [line for f in findings for line in (f"{f.cause}: {f.evidence}", f"    {f.cure}")]
