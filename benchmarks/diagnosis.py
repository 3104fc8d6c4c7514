"""Does a diagnosis name each planted cause, and does it stay silent on healthy drafters?

    python benchmarks/diagnosis.py      # about ten minutes on one core

Plants every cause of benchmarks/causes.py into the tiny target with its drafter. Healthy cases are this drafter with other prompts,
lengths and vocabularies, other drafters trained for seconds or not at all, and another target. Writes benchmarks/results/diagnosis.json:
``planted``, ``named``, ``healthy``, ``false_alarms``, and what was found in each case. It measures no times, so other work may run.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import causes
from benchmarks.exactness import untrained
from benchmarks.frame import RESULTS, ROOT, keep, parser
from benchmarks.truth import random_target
from headstart.inference.decoding.target import Target
from headstart.inference.provenance import provenance
from headstart.inference.speculator import load_attached
from headstart.trainers.diagnosis import CURES, Case, Finding, diagnose

TAUGHT = ("eagle1", "mtp", "medusa", "hydra", "eagle")  # trained for seconds on the target's answers
UNTAUGHT = ("dflash", "mlp_speculator", "redrafter", "exit_head", "draft_lm")


def base(target: Target) -> Case:
    """The tiny target with its drafter."""
    drafter, prompts = load_attached(ROOT / "assets" / "tiny_eagle", target), causes.prompts_of(target)
    known = {"weights": target.fingerprint["weights"], "dtype": "float32"}
    return Case(target, drafter, prompts, causes.rows_of(target, prompts), drafter.state_dict(), known, new_tokens=32)


def taught(case: Case, head: str) -> Case:
    """Another drafter of the same target, trained for seconds."""
    drafter = causes.taught(head, case.target, case.prompts)
    return replace(case, drafter=drafter, live=None)


def healthy(case: Case) -> Iterator[tuple[str, Case]]:
    """The twenty healthy cases."""
    target = case.target
    yield "as it is", case
    for seed in range(1, 4):
        yield f"other rows, {seed}", replace(case, rows=causes.rows_of(target, case.prompts, seed=100 * seed))
    for new_tokens in (16, 64):
        yield f"{new_tokens} new tokens", replace(case, new_tokens=new_tokens)
    texts = [p[3:] for p in causes.prompts_of(target)]
    yield "other prompts", replace(case, prompts=causes.prompts_of(target, [f"{text}\n" for text in causes.ASKED[::-1]]))
    yield "no rows, text as it is", replace(case, prompts=texts, rows=[])
    said = {t for made in case.said for t in made.tokens}
    few = sorted(said | set(range(0, target.shape.vocab_size, 2)))
    yield "a trimmed vocabulary", replace(case, drafter=causes.trimmed(case.drafter, target, few), live=None)
    yield "no training at hand", replace(case, live=None, known={})
    for head in TAUGHT:
        yield f"{head}, trained for seconds", taught(case, head)
    other = random_target()
    prompts = [list(range(5 + i, 14 + i)) for i in range(6)]
    for head in UNTAUGHT:
        yield f"{head}, untrained, on {other.name}", Case(other, untrained(head, other), prompts, new_tokens=32)


def planted(case: Case) -> Iterator[tuple[str, list[Finding]]]:
    """What a diagnosis finds for each planted cause."""
    unnormed = taught(case, causes.UNNORMED)
    for key, plant in causes.PLANTS.items():
        yield key, diagnose(plant(unnormed if key in causes.ON_ANOTHER else case))
    with causes.mixed_up(case) as mixed:
        yield "cache", diagnose(mixed)


def main() -> None:
    cli = parser(__doc__)
    cli.parse_args()
    case = base(Target.load(str(ROOT / "assets" / "tiny"), dtype="float32", device="cpu"))
    rows: list[dict[str, Any]] = []
    for key, found in planted(case):
        named = [each.cause for each in found]
        rows.append({"planted": CURES[key][0], "named": named, "evidence": [each.evidence for each in found]})
        print(f"{CURES[key][0]}: {named}", flush=True)
    calm: list[dict[str, Any]] = []
    for name, each in healthy(case):
        found = diagnose(each)
        calm.append({"healthy": name, "named": [f.cause for f in found], "evidence": [f.evidence for f in found]})
        print(f"{name}: {calm[-1]['named']}", flush=True)
    kept = {
        "planted": len(rows),
        "named": sum(set(row["named"]) == {row["planted"]} for row in rows),
        "healthy": len(calm),
        "false_alarms": sum(bool(row["named"]) for row in calm),
        "cases": rows + calm,
        **provenance(),
    }
    keep(RESULTS / "diagnosis.json", kept)
    print({k: kept[k] for k in ("planted", "named", "healthy", "false_alarms")})


if __name__ == "__main__":
    main()
