"""Memory, peak operations and bandwidth of GPUs, from the makers' data sheets."""

from __future__ import annotations

import re
from typing import NamedTuple

import torch

from headstart.heads.errors import UserError


class Gpu(NamedTuple):
    """One GPU's figures."""

    memory: float  # bytes
    flops: float  # dense bf16 operations per second, without sparsity
    bandwidth: float  # bytes read per second


GPUS = {
    "h100": Gpu(80e9, 989e12, 3.35e12),
    "h200": Gpu(141e9, 989e12, 4.8e12),
    "b200": Gpu(180e9, 2250e12, 8e12),
    "a100": Gpu(80e9, 312e12, 2.04e12),
    "a100_40gb": Gpu(40e9, 312e12, 1.56e12),
    "l40s": Gpu(48e9, 362e12, 0.86e12),
    "a10": Gpu(24e9, 125e12, 0.6e12),
    "rtx4090": Gpu(24e9, 165e12, 1.01e12),
    "rtx3090": Gpu(24e9, 71e12, 0.94e12),
    "mi300x": Gpu(192e9, 1307e12, 5.3e12),
}
SLOWER = {"h100": {"pcie", "nvl"}, "h200": {"nvl"}, "rtx4090": {"laptop", "d"}, "rtx3090": {"ti"}}  # variants with another peak


def gpu_of(name: str) -> Gpu:
    """The GPU of that name. Raises UserError for an unknown name."""
    if name not in GPUS:
        raise UserError(f"gpu must be one of {', '.join(GPUS)}, found {name!r}")
    return GPUS[name]


def peak(device: torch.device) -> float | None:
    """Peak dense bf16 operations per second of this GPU; None if it is not known."""
    return peak_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def peak_of(name: str) -> float | None:
    """As ``peak``, from the name that the driver reports, for example "NVIDIA H100 80GB HBM3"."""
    words = re.split(r"[^a-z0-9]+", name.lower())
    pairs = {a + b for a, b in zip(words, words[1:], strict=False)}  # "RTX 4090"
    kind = next((kind for kind in GPUS if kind in {*words, *pairs}), None)
    return None if kind is None or SLOWER.get(kind, set()) & {*words} else GPUS[kind].flops
