"""Optimizers (AdamW, or Muon for hidden matrices and AdamW for the rest) and learning-rate schedules."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from headstart.heads.base import Drafter
from headstart.inference.decoding.placement import multiplies_bf16

Optimizer = torch.optim.Optimizer
FLOOR = 0.1  # share of the peak at which a cosine ends


class Muon(torch.optim.Muon):
    """torch's Muon, whose iteration runs in bf16, but in fp32 on devices that do not multiply bf16 natively. A CPU without bf16 products
    takes up to five hundred times as long for them as for fp32 (AMD EPYC limited to AVX2: 0.3 and 140 GFLOP/s), longer than for the rest
    of a training step. GPUs that only emulate bf16 use fp32, too.
    """

    def step(self, closure: Any = None) -> Any:
        devices = {p.device for group in self.param_groups for p in group["params"]}  # empty in a process that owns no matrix
        if all(device.type not in ("cpu", "cuda") or multiplies_bf16(device) for device in devices):
            return super().step(closure)
        with _InFp32():
            return super().step(closure)


class _InFp32(TorchFunctionMode):
    """Inside, ``tensor.bfloat16()`` returns an fp32 copy."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.bfloat16:
            return args[0].to(torch.float32, copy=True)
        return func(*args, **(kwargs or {}))


def open_optimizers(
    drafter: Drafter, name: str, lr: float, betas: tuple[float, float], weight_decay: float, muon_lr: float | None = None,
    momentum: float = 0.95, ns_steps: int = 5,
) -> list[Optimizer]:  # fmt: skip
    """The optimizers of a drafter: ``adamw`` (1711.05101), or ``muon``, which orthogonalizes the updates of hidden matrices (Jordan 2024;
    scaled to the size of AdamW's updates as in 2502.16982, section 2.2). AdamW updates embeddings, output heads and vectors in either
    case. With Muon, heads (which start as copies of the target's) and vectors have 0.3 of ``lr``. Vectors have no weight decay. Only Muon
    uses ``muon_lr`` (None: ``lr``), ``momentum`` and ``ns_steps``, the steps of its Newton-Schulz iteration.
    """
    muon = {"muon": True, "adamw": False}[name]
    trained = [p for p in drafter.parameters() if p.requires_grad]
    embeddings = {id(m.weight) for m in drafter.modules() if isinstance(m, nn.Embedding)}
    heads = {id(b) for d in range(1, (drafter.max_depth or 1) + 1) for b in drafter.unembedding(d).blocks} - embeddings
    scales = {id(getattr(m, name)) for m in drafter.modules() for name in getattr(m, "scales", ())}  # several vectors in one tensor

    def part(p: Tensor) -> str:
        if p.ndim <= 1 or id(p) in scales:
            return "vectors"
        if id(p) in heads:
            return "heads"
        return "hidden" if muon and p.ndim == 2 and id(p) not in embeddings else "rest"

    parts = {name: [p for p in trained if part(p) == name] for name in ("rest", "heads", "vectors", "hidden")}
    slow = 0.3 * lr if muon else lr
    groups = [
        {"params": parts["rest"], "lr": lr, "weight_decay": weight_decay},
        {"params": parts["heads"], "lr": slow, "weight_decay": weight_decay},
        {"params": parts["vectors"], "lr": slow, "weight_decay": 0.0},
    ]
    found: list[Optimizer] = [torch.optim.AdamW(groups, betas=betas, fused=True)]
    if parts["hidden"]:
        own: dict[str, Any] = {"lr": lr if muon_lr is None else muon_lr, "momentum": momentum, "ns_steps": ns_steps}
        found.append(Muon(parts["hidden"], **own, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"))
    for group in (g for optimizer in found for g in optimizer.param_groups):
        group["peak_lr"] = group["lr"]
    return found


def parameters(optimizer: Optimizer) -> list[Tensor]:
    """The parameters of an optimizer, in the order in which it and checkpoints number them."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def warmup_steps(warmup: float, steps: int) -> int:
    """``trainer.warmup`` in steps, rounded up: below 1 it is a share of all ``steps``."""
    return math.ceil(warmup * steps) if warmup < 1 else int(warmup)


def learning_rate(step: int, steps: int, warmup: float, schedule: str, floor: float = FLOOR) -> float:
    """The learning rate of step ``step`` (from 0) as a share of the peak. After a linear warm-up, ``cosine`` falls to ``floor``, ``linear``
    falls to zero, ``constant`` stays, and ``wsd`` stays until it falls linearly to zero over the last fifth of the steps (if that overlaps
    a long warm-up, the smaller rate counts). ``warmup``: as in ``warmup_steps``.
    """
    assert schedule in ("cosine", "linear", "constant", "wsd")
    warmup = warmup_steps(warmup, steps)
    rise = (step + 1) / warmup if step < warmup else 1.0
    if schedule == "wsd":
        return min(rise, (steps - step) / (0.2 * steps))
    if step < warmup or schedule == "constant":
        return rise
    done = (step - warmup) / max(1, steps - warmup)
    return 1 - done if schedule == "linear" else floor + (1 - floor) / 2 * (1 + math.cos(math.pi * done))


@functools.cache  # called after every step, and loops over all steps
def before_the_fall(steps: int, warmup: float, schedule: str) -> int | None:
    """The last step up to which the learning rate does not depend on ``steps``. A longer run can resume from its weights. None if no such
    step is worth keeping: ``cosine`` and ``linear`` fall from the first step after the warm-up.
    """
    if schedule in ("cosine", "linear"):
        return None
    return next((t for t in range(steps) if learning_rate(t, steps, warmup, schedule) < min(1.0, (t + 1) / max(warmup, 1))), steps)
