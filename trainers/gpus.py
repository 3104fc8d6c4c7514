"""What makers say of their GPUs."""

from __future__ import annotations

import re
from typing import NamedTuple

import torch


class Gpu(NamedTuple):
    """Of the makers' data sheets: memory in 10^9 bytes, dense bf16 operations a second without sparsity."""

    memory: float
    flops: float


GPUS = {
    "h100": Gpu(80e9, 989e12),
    "h200": Gpu(141e9, 989e12),
    "b200": Gpu(180e9, 2250e12),
    "a100": Gpu(80e9, 312e12),
    "a100_40gb": Gpu(40e9, 312e12),
    "l40s": Gpu(48e9, 362e12),
    "a10": Gpu(24e9, 125e12),
    "rtx4090": Gpu(24e9, 165e12),
    "rtx3090": Gpu(24e9, 71e12),
    "mi300x": Gpu(192e9, 1307e12),
}
SLOWER = {"h100": {"pcie", "nvl"}, "h200": {"nvl"}, "rtx4090": {"laptop", "d"}, "rtx3090": {"ti"}}  # variants with another peak


def peak(device: torch.device) -> float | None:
    """Dense bf16 operations a second of this GPU; None where nobody has said it here."""
    return peak_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def peak_of(name: str) -> float | None:
    """By the name that its driver gives it, "NVIDIA H100 80GB HBM3" for example."""
    words = re.split(r"[^a-z0-9]+", name.lower())
    pairs = {a + b for a, b in zip(words, words[1:], strict=False)}  # "RTX 4090"
    kind = next((kind for kind in GPUS if kind in {*words, *pairs}), None)
    return None if kind is None or SLOWER.get(kind, set()) & {*words} else GPUS[kind].flops
