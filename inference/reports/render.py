"""A report as people read it: on the terminal, as report.md, as report.png. What is in it is measured in report.py."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from headstart.heads.files import put, put_text
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.reports.pictures import report_picture
from headstart.inference.reports.report import Report


def write_report(report: Report, folder: Path) -> None:
    """report.json, rounds.jsonl, report.md and report.png, each written at once or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    report.write(folder)
    put_text(folder / "report.md", markdown(report))
    put(folder / "report.png", lambda beside: report_picture(report).savefig(beside, format="png"))


def rows(report: Report) -> list[tuple[str, str, str]]:
    """(what, at temperature 0, at temperature 1), as people read them."""
    cold, warm = report["temperature_0"], report["temperature_1"]

    def both(name: str, key: str, unit: str = ".2f") -> tuple[str, str, str]:
        return name, f"{cold[key]:{unit}}", f"{warm[key]:{unit}}"

    return [
        both("accepted length (tokens per target pass)", "accepted_length"),
        ("acceptance by depth", shares(cold), shares(warm)),
        *([both("expected length of a chain, teacher-forced", "expected_length")] if "expected_length" in cold else []),
        both("tokens/s with the drafter", "tokens_per_second", ".0f"),
        both("tokens/s without, same engine", "plain_tokens_per_second", ".0f"),
        both("speed-up", "speedup"),
    ]


def shares(figures: Mapping[str, Any]) -> str:
    return "  ".join(f"{x:.0%}" for x in figures["acceptance_by_depth"])


def summary(report: Report) -> list[str]:
    tree, chain = report["tree"], report.get("chain_temperature_0")
    verdict = "yes" if report["lossless"] else f"NO, {sum(not d['tie'] for d in report['differences'])} differ"
    if ties := [d["gap"] for d in report["differences"] if d["tie"]]:
        verdict += f", but for {len(ties)} prompts in which the target had a tie (two best logits at most {max(ties):.2g} apart)"
    shape = f"shape: {TreePolicy(**tree)}"
    for name, auto in report.get("auto", {}).items():
        most = [f"{what} {share:.0%}" for what, share in auto["rounds"].items() if share >= 0.05]
        shape += f"; at {name.replace('_', ' ')} chosen for {', '.join(most)} of the rounds"
    if chain is not None and "expected_length" in chain:
        apart = abs(chain["accepted_length"] / chain["expected_length"] - 1)
        shape += f"; a chain of {tree['depth']} is accepted {chain['accepted_length']:.3f}, expected {chain['expected_length']:.3f} "
        shape += f"({apart:.2%} apart)"
    lines = [
        f"lossless: {verdict} ({report['prompts']} prompts compared with plain decoding and with transformers' generate)",
        f"transformers' generate with the same weights in memory: {report['hf_generate_tokens_per_second']:.0f} tokens/s",
        shape,
        f"{report['dtype']} on {report['device']}",
    ]
    if "target_changed" in report:
        lora = report["target_changed"]
        lines.append(f"the target was CHANGED by the training (LoRA of rank {lora['rank']}), all of this is the changed one's: "
                     f"KL(original, changed) {lora['kl']:.4f} nats a token, another likeliest token at {lora['other_token']:.2%} "
                     "of the positions")  # fmt: skip
    if "lost_by_trimming" in report:
        lost = report["lost_by_trimming"]
        lines.append(f"a draft vocabulary of {report['draft_vocabulary']}: {lost['temperature_0']:.2%} of what the target says is outside "
                     f"it and cannot be guessed ({lost['temperature_1']:.2%} at temperature 1)")  # fmt: skip
    if chain is not None and "expected_length" in chain and "off_policy_expected_length" in report:
        off = report["off_policy_expected_length"]
        gap = off - chain["expected_length"]
        lines.append(f"over held-out text instead of the target's own: expected {off:.3f} (off-policy gap {gap:+.3f})")
    return lines


def show(report: Report) -> None:
    table = Table(title=f"{report['head']} for {report['target']}", title_justify="left")
    for column in ("", "temperature 0", "temperature 1"):
        table.add_column(column, justify="left" if not column else "right")
    for row in rows(report):
        table.add_row(*row)
    console = Console()
    console.print(table)
    for line in summary(report):
        console.print(line, highlight=False)


def show_serving(report: Report) -> None:
    """The lines one types next, not wrapped, so that they can be copied."""
    if report.get("unserved"):
        print(f"no serving engine loads this folder: {report['unserved']}")
    for command in report.get("serving", []):
        if command["language"] == "bash":
            print(f"{command['engine']} ({command['needs']}):\n  {command['text']}")


def figures_table(report: Report) -> list[str]:
    """The rows that people read, and those of a chain, which is what most engines draft."""
    cold, warm = report.get("chain_temperature_0"), report.get("chain_temperature_1")
    chain = f"a chain of {report['tree']['depth']}"
    found = rows(report)
    if cold and warm:
        found.append((f"{chain}: accepted length", f"{cold['accepted_length']:.2f}", f"{warm['accepted_length']:.2f}"))
        found.append((f"{chain}: acceptance by depth", shares(cold), shares(warm)))
    return ["| | temperature 0 | temperature 1 |", "| --- | ---: | ---: |", *(f"| {a} | {b} | {c} |" for a, b, c in found)]


def serving_lines(report: Report) -> list[str]:
    lines = []
    if report.get("unserved"):
        lines += [f"No serving engine loads this folder: {report['unserved']}.", ""]
    for command in report.get("serving", []):
        lines += [f"{command['engine']} ({command['needs']}):", "", f"```{command['language']}", command["text"], "```", ""]
    return lines


def markdown(report: Report) -> str:
    lines = [f"# {report['head']} for {report['target']}", "", *figures_table(report)]
    lines += ["", *(f"- {line}" for line in summary(report)), "", "![acceptance by depth and speed](report.png)", ""]
    if "serving" in report:
        lines += ["## How it is served", "", *serving_lines(report)]
    known = ", ".join(f"{k} {v}" for k, v in report["versions"].items())
    return "\n".join([*lines, f"Commit {report['commit']}; {known}.", ""])
