"""Checks whether the drafter is served as it was trained: same weights, same target, and the same rounds with a cache and in a batch."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, isfinite
from typing import Any

import torch

from headstart.inference.decoding.decode import generate
from headstart.inference.decoding.decoder import generate_batch
from headstart.inference.decoding.propose import Drafting
from headstart.inference.decoding.sampling import SamplingParams
from headstart.inference.reports.lossless import EXACT
from headstart.inference.reports.recorded import Recorded, replay
from headstart.trainers.diagnosis.case import Case, Finding

OFF = {True: 0.02, False: 0.1}  # tolerated relative difference in rounds: in exact dtypes (EXACT), in others
ROUNDED = 0.02  # norm of a tensor's difference relative to its norm: rounding to half precision stays below
TOGETHER = 4  # sequences in a batch


def stale(case: Case) -> list[Finding]:
    """Whether the exported weights differ from those of the training."""
    if case.live is None:
        return []
    own, off = case.drafter.state_dict(), []
    for name, tensor in case.live.items():
        if name in own and own[name].shape == tensor.shape and tensor.is_floating_point():
            ours, theirs = own[name].float().cpu(), tensor.float().cpu()
            apart = float((ours - theirs).norm() / theirs.norm().clamp(min=1e-12))
            off.append((apart if isfinite(apart) else inf, name))  # NaN could not be compared
    if not off or max(off)[0] <= ROUNDED:
        return []
    worst, name = max(off)
    step = f" of step {case.known['step']}" if "step" in case.known else ""
    where = case.folder or "the exported folder"
    how = f"differs by {worst:.0%} of its norm" if isfinite(worst) else "holds values that are not finite"
    many = f"{sum(x > ROUNDED for x, _ in off)} of {len(off)} tensors in {where} are not those of the training{step}"
    return [Finding.of("export", f"{many}: {name} {how}")]


def typed(case: Case) -> list[Finding]:
    """Whether the target differs in weights or dtype from the one in training."""
    target, known = case.target, case.known
    here = {"weights": target.fingerprint["weights"], "dtype": str(target.dtype).removeprefix("torch.")}
    other = [key for key in here if known.get(key) not in (None, here[key])]
    if not other:
        return []
    quantised = getattr(target.config, "quantization_config", None)
    what = [f"dtype {here['dtype']}, in training {known['dtype']}"] if "dtype" in other else []
    if "weights" in other:
        what.append(f"weights {here['weights'][:12]}, in training {known['weights'][:12]}" + " (it is quantised here)" * bool(quantised))
    return [Finding.of("target", f"the target is another here: {'; '.join(what)}")]


@torch.no_grad()
def cache(case: Case) -> list[Finding]:
    """Whether the number of rounds depends on the drafter's cache (decoding one prompt at a time, against the drafter without a cache over
    the same texts), or on the batch (decoding several prompts at a time, against one at a time).
    """
    target, drafter, chain = case.target, case.drafter, case.chain
    prompts, limit = list(case.prompts), OFF[case.target.dtype in EXACT]
    rooms = [case.room(p) for p in prompts]
    alone = [generate(target, Drafting(drafter), p, new_tokens=room, policy=chain) for p, room in zip(prompts, rooms, strict=True)]
    recorded = (Recorded.by(target, drafter.taps, p, made.tokens) for p, made in zip(prompts, alone, strict=True))
    walked = [replay(each, drafter, chain, SamplingParams()) for each in recorded]
    looks: list[tuple[str, Sequence[Any], Sequence[Any]]] = [("decoded alone", alone, walked)]
    if len(prompts) > 1 and (room := min(rooms)):
        batched = generate_batch(target, drafter, prompts, new_tokens=room, policy=chain, sequences=TOGETHER)
        few = alone
        if room < max(rooms):  # a batch has a single limit, the smallest
            few = [generate(target, Drafting(drafter), p, new_tokens=room, policy=chain) for p in prompts]
        looks.append((f"decoded {TOGETHER} at a time", batched, few))
    for what, one, other in looks:
        taken, wanted = (sum(len(each.emitted) for each in some) for some in (one, other))
        if abs(taken - wanted) > limit * max(wanted, 1):
            place = next(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if len(a.emitted) != len(b.emitted))
            against = "over the same texts without a cache" if one is alone else "alone"
            evidence = f"{what} the prompts take {taken} rounds, {against} {wanted}; the first that differs is prompt {place + 1}, of "
            return [Finding.of("cache", evidence + f"{len(prompts[place])} tokens")]
    return []
