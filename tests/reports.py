"""Invented reports and rows of comparisons, for the tests of the code that shows them."""

from __future__ import annotations

from typing import Any


def figures(length: float, speedup: float, depth: int = 6) -> dict[str, Any]:
    shares = [max(0.0, (length - 1) / 2 - 0.1 * d) for d in range(depth)]
    return {"accepted_length": length, "acceptance_by_depth": shares, "conditional_acceptance_by_depth": shares, "speedup": speedup,
            "tokens_per_second": 100 * speedup, "plain_tokens_per_second": 100.0, "target_passes": 10, "new_tokens": 64}  # fmt: skip


def a_report(head: str = "eagle", **changes: Any) -> dict[str, Any]:
    depth = changes.pop("depth", 6)
    return {
        "head": head, "target": "tiny", "temperature_0": figures(3.2, 1.6, depth), "temperature_1": figures(2.1, 0.9, depth),
        "chain_temperature_0": figures(3.0, 1.5, depth) | {"expected_length": 3.0},
        "chain_temperature_1": figures(2.0, 0.8, depth) | {"expected_length": 2.0},
        "hf_generate_tokens_per_second": 90.0, "lossless": True, "differing_prompts": 0, "differences": [], "prompts": 4,
        "prompt_tokens": 40, "new_tokens": 16, "prompts_from": "held-out text of chat",
        "tree": {"kind": "dynamic", "nodes": 15, "depth": depth},
        "proposer": {"kind": "drafter"}, "drafter_parameters": 1234, "dtype": "float32", "device": "a CPU", "versions": {"torch": "2.13.0"},
        "commit": "abc", "train_steps": 7, "train_tokens": 700, "train_seconds": 3.0, "data": "chat", **changes,
    }  # fmt: skip


def some_batches(sizes: tuple[int, ...], *gains: tuple[float, ...]) -> list[dict[str, Any]]:
    """``gains``: the speed-ups for these ``sizes``, at temperature 0, then at 1."""
    return [
        {"sequences": size, "temperature": temperature, "accepted_length": 2.0, "tokens_per_second": 100 * gain,
         "plain_tokens_per_second": 100.0, "speedup": gain}
        for temperature, each in enumerate(gains) for size, gain in zip(sizes, each, strict=True)
    ]  # fmt: skip


def a_row(name: str, at: int, depth: int = 6, **changes: Any) -> dict[str, Any]:
    shares = [max(0.0, 0.95 - 0.05 * at - 0.15 * d) for d in range(depth)]
    return {"name": name, "acceptance_by_depth": shares, "speedup": 1.8 - 0.07 * at, "t1_speedup": 1.2 - 0.04 * at,
            "predicted_speedup": 2.0 - 0.07 * at, "t0_tree": 4 - 0.13 * at, "t0_chain": 3.9 - 0.13 * at, "t1_tree": 2.6 - 0.05 * at,
            "t1_chain": 2.4 - 0.05 * at, **changes}  # fmt: skip


def an_evaluation() -> dict[str, Any]:
    """An evaluation with five categories, three sides (two with several sequences), two temperatures and two numbers of sequences."""
    rows = [
        {"name": name, "temperature": temperature, "sequences": sequences, "category": category, "prompts": 80, "answers": 160,
         **figures(3.2 - i, 1.6 - 0.4 * i), "repetition": 0.31 - 0.3 * temperature,
         "intervals": {"speedup": [1.41, 1.83], "accepted_length": [3.0, 3.4], "acceptance_by_depth": [[0.1, 0.9]] * 6}}
        for sequences in (1, 8) for temperature in (0.0, 1.0) for category in ("overall", "mt_bench", "translation", "math_reasoning", "qa")
        for i, name in enumerate(("plain", "a_drafter", "prompt_lookup")[: 2 if sequences > 1 else 3])
    ]  # fmt: skip
    return {
        "suite": "spec_bench", "target": "tiny", "speculator": "runs/one/speculator", "skipped": 3, "cut": 2, "left_out": 1, "prompts": 480,
        "turns": 560, "new_tokens": 128, "raw": False, "dtype": "float32", "device": "a CPU", "versions": {"torch": "2.13.0"},
        "commit": "abc", "rows": rows, "lossless": {"a_drafter": {"compared": 560, "differing": 2, "ties": 1}},
    }  # fmt: skip
