"""Why a drafter is accepted less often than its training says: the causes that are known, each looked for by itself.

A look is a function of a ``Case`` that returns what it has found: nothing, where there is nothing, or where it cannot tell.
"""

from __future__ import annotations

from collections.abc import Sequence

from headstart.trainers.diagnosis import serving, text, wiring
from headstart.trainers.diagnosis.case import CURES as CURES
from headstart.trainers.diagnosis.case import Case as Case
from headstart.trainers.diagnosis.case import Finding as Finding

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
    """All that is found, the surest first."""
    return [finding for look in LOOKS for finding in look(case)]


def lines(findings: Sequence[Finding]) -> list[str]:
    """For people."""
    if not findings:
        return ["none of the known causes was found: " + ", ".join(look.__name__ for look in LOOKS) + " were looked at"]
    return [line for f in findings for line in (f"{f.cause}: {f.evidence}", f"    {f.cure}")]
