"""The door to decoding: a report for any exported folder.

python -m inference speculator=DIR target=NAME prompts=FILE.jsonl
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from door import enter


def main(config: dict[str, Any]) -> None:
    from data.prompts import check_prompts, prompts  # here, so that --help need not wait for torch
    from inference.report import make_report, show, write_report
    from inference.settings import open_decode, open_speculator, open_target

    policy, sampling, count = open_decode(config["decode"])
    target = open_target(config["target"])
    drafter = open_speculator(config["speculator"], target)
    found = prompts(config["prompts"], count["prompts"], target.tokenizer)
    asked = [p["tokens"] for p in found]
    check_prompts(asked, count["new_tokens"], target, [p["id"] for p in found])
    report = make_report(target, drafter, asked, policy, sampling, new_tokens=count["new_tokens"])
    folder = Path(config["out"] or Path(config["speculator"]).parent / f"report-{Path(config['prompts']).stem}")
    write_report(report, folder)
    show(report)
    print(f"report: {folder / 'report.md'}, report.json, report.png")


if __name__ == "__main__":
    enter("inference", main)
