"""The sentences that stand beside a report's table: on the terminal, in report.md, in report.html, in the model card."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from headstart.heads.errors import counted
from headstart.inference.reports.figures import too_much
from headstart.inference.reports.page import interval
from headstart.inference.reports.report import Report, shape_of

LARGE = 20  # guesses that a drafter makes in the time of a plain round, for a target much larger than its drafter

HARDLY = 0.9  # the share of rounds without guesses from which on decode=auto has hardly drafted


def _slower(report: Report, temperature: int) -> str:
    """A sentence if decode=auto was slower than a chain, by more than chance explains; else empty."""
    chosen, chain = report.get(f"auto_temperature_{temperature}"), report.get(f"chain_temperature_{temperature}")
    if not chosen or not chain or (interval(chain, "speedup") or [0.0])[0] <= chosen["speedup"]:
        return ""
    depth = report["tree"]["depth"]
    return (f"at temperature {temperature} a chain of {depth} is faster here than what decode=auto chose: {chain['speedup']:.2f} times "
            f"plain decoding (decode=chain decode.depth={depth}); `python -m inference tune` times every tree")  # fmt: skip


def _not_drafted(report: Report, temperature: int) -> str:
    """A sentence if decode=auto hardly drafted and a chain did not gain, on what a chain emits and costs; else empty. The cost is by the
    report's own times, as in its table: what decode=auto measured once, before it decoded, may differ.
    """
    name = f"temperature_{temperature}"
    auto, chain = report.get("auto", {}).get(name), report.get(f"chain_{name}")
    if not auto or not chain or auto["rounds"].get("no guesses", 0.0) < HARDLY or chain["speedup"] > 1:
        return ""
    cost = chain["accepted_length"] / chain["speedup"]
    return (f"at temperature {temperature} decode=auto leaves guessing out, because it gains nothing here: a round with a chain of "
            f"{report['tree']['depth']} yields {chain['accepted_length']:.2f} tokens and takes as long as {cost:.1f} plain rounds. On a "
            f"larger target, where a plain pass costs as much as {LARGE} guesses and checking guesses costs no more than a plain pass, "
            f"this acceptance would give {_elsewhere(chain['acceptance_by_depth']):.1f} times plain decoding")  # fmt: skip


def _lost(report: Report, temperature: int) -> str:
    """A sentence if decode=auto drafted and was slower than plain decoding, by more than chance explains; else empty."""
    name = f"temperature_{temperature}"
    auto, figures = report.get("auto", {}).get(name), report.get(f"auto_{name}") or {}
    if not auto or auto["rounds"].get("no guesses", 0.0) >= HARDLY or (interval(figures, "speedup") or [1.0])[-1] >= 1:
        return ""
    believed = sum(share * auto["costs"].get(what, 1.0) for what, share in auto["rounds"].items())  # 1: a round without guesses
    return (f"at temperature {temperature} decode=auto lost time here: a round took {figures['accepted_length'] / figures['speedup']:.2f} "
            f"plain rounds, and its measurement at the start said {believed:.2f}. Where these are far apart, other work on the machine "
            "distorted one of them: run again; otherwise decode plainly")  # fmt: skip


def _elsewhere(acceptance_by_depth: Sequence[float]) -> float:
    """The speed-up of the best chain if a plain round costs as much as ``LARGE`` guesses: tau / (1 + levels / LARGE)."""
    return max(tau / (1 + depth / LARGE) for depth, tau in enumerate(accumulate(acceptance_by_depth, initial=1.0)))


def _shared(report: Report, temperature: int) -> str:
    """A sentence on the numbers of sequences at once with which drafting gains, by the low ends of the intervals; empty for fewer than two
    numbers.
    """
    rows = [row for row in report.get("batches", []) if row["temperature"] == temperature]
    gains = {row["sequences"]: (interval(row, "speedup") or [row["speedup"]])[0] > 1 for row in rows}
    if len(gains) < 2:
        return ""
    faster, slower = (", ".join(str(size) for size, gain in gains.items() if gain is wanted) for wanted in (True, False))
    said = (
        f"faster than plain decoding with {faster}{', not with ' * bool(slower)}{slower}" if faster else f"not faster with any of {slower}"
    )
    return f"several sequences at once, at temperature {temperature}: drafting is {said}, as far as these prompts tell"


def _swap(report: Report) -> list[str]:
    """For a drafter that was trained further, a sentence that compares it with the one it began with, as far as the prompts tell."""
    if (first := report.get("began_with")) is None:
        return []
    said = []
    for temperature in (0, 1):
        found = first[f"temperature_{temperature}"]
        low, high = interval(found, "times") or (0.0, float("inf"))
        now = "longer now" if low > 1 else "SHORTER now" if high < 1 else "these prompts do not tell them apart"
        said.append(f"{found['accepted_length']:.2f} at temperature {temperature} ({now})")
    return [f"it began with {first['speculator']}, whose accepted length over the same prompts is {' and '.join(said)}"]


def summary(report: Report) -> list[str]:
    """The sentences of a report, a line each."""
    tree, chain = report["tree"], report.get("chain_temperature_0")
    verdict = "yes" if report["lossless"] else f"NO, {sum(not d['tie'] for d in report['differences'])} differ"
    if ties := [d["gap"] for d in report["differences"] if d["tie"]]:
        verdict += f", but for {counted(len(ties), 'prompt')} in which the target had a tie (two best logits at most {max(ties):.2g} apart)"
    shape = f"shape: {shape_of(report)}"
    for name, auto in report.get("auto", {}).items():
        most = [f"{what} {share:.0%}" for what, share in auto["rounds"].items() if share >= 0.05]
        shape += f"; rounds of decode=auto at {name.replace('_', ' ')}: {', '.join(most)}"
    if chain is not None and "expected_length" in chain:
        apart = abs(chain["accepted_length"] / chain["expected_length"] - 1)
        shape += f"; a chain of {tree['depth']} is accepted {chain['accepted_length']:.3f}, expected {chain['expected_length']:.3f} "
        shape += f"({apart:.2%} apart)"
    together = ", several at once too" if report.get("batches") else ""
    compared = counted(report["prompts"], "prompt")
    lines = [
        *_swap(report),
        f"lossless: {verdict} ({compared} compared with plain decoding and with transformers' generate{together})",
        f"transformers' generate with the same weights in memory: {report['hf_generate_tokens_per_second']:.0f} tokens/s",
        shape,
        f"{report['dtype']} on {report['device']}" + (f", the target's passes by {by}" if (by := report.get("passes")) else ""),
        *([report["auto_not_tried"]] if "auto_not_tried" in report else []),
        *too_much({t: report[f"temperature_{t}"] for t in (0, 1)}),
    ]
    lines += [said for temperature in (0, 1) if (said := _slower(report, temperature) or _not_drafted(report, temperature))]
    lines += [said for temperature in (0, 1) if (said := _lost(report, temperature))]
    lines += [said for temperature in (0, 1) if (said := _shared(report, temperature))]
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
        if gap > 0.25 * chain["expected_length"] and report.get("data") != "regenerated":
            lines[-1] += "; it has learnt what the target does not say: train on its own answers (python -m data regenerate)"
    return lines
