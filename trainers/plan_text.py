"""Prints a plan (trainers/plan.py), and finds settings that fit if it does not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from typing import Any

from rich.console import Console

from headstart.data.source import HELD_OUT_ROWS, is_captured
from headstart.heads.base import TargetShape
from headstart.heads.errors import UserError
from headstart.inference.reports.render import table
from headstart.inference.settings import config_of
from headstart.trainers.parallel import DDP
from headstart.trainers.plan import MEASURED, REACHED, Plan, Settings, plan
from headstart.trainers.prepare import runs_target


def show_plan(settings: Settings) -> None:
    """Print what a run of these settings needs. ``settings``: those of a run, and ``nodes``, ``gpus``, ``gpu`` and ``gpu_hour`` (the price
    of a GPU per hour, or None).

    Raises UserError if the run does not fit, naming the nearest settings that do.
    """
    found, console = plan(settings), Console()
    title = f"{settings['target']['name']}, {found.gpus} x {found.gpu}, {processes(found)}"
    memory = table(title, ("memory of a GPU", "GB"), [(part, f"{size / 1e9:,.2f}") for part, size in found.memory.items()])
    memory.add_section()
    memory.add_row("in all", f"{found.needed / 1e9:,.2f}")
    memory.add_row("there is", f"{found.usable / 1e9:,.2f}")
    console.print(memory)
    for line in lines(found, settings):
        console.print(line, highlight=False, soft_wrap=True)
    if any(arm["loss"]["on_policy"] for arm in (settings["arms"] or {"": settings}).values()):
        console.print("loss.on_policy: what the drafter decodes, and learns from it, is not counted: it comes on top", soft_wrap=True)
    if settings["capture"]["out"] is not None:
        console.print(f"capture.out: at most {capturing(found, settings) / 1e9:,.1f} GB, every token of the run and of held-out rows; "
                      "less where epochs repeat rows, or not all is supervised", highlight=False, soft_wrap=True)  # fmt: skip
    if not found.fits:
        ways = [f"{' '.join(words)} ({other.needed / 1e9:.1f} GB)" for words, other in nearest(settings)]
        other = "nothing that a plan can change: a GPU with more memory, a smaller drafter, or a smaller target"
        raise UserError(f"{found.needed / 1e9:.1f} GB do not fit into the {found.usable / 1e9:.1f} GB of one {found.gpu}: "
                        f"{'; '.join(ways) or other}")  # fmt: skip


def capturing(found: Plan, settings: Settings) -> float:
    """The most bytes that ``capture.out`` takes on disk."""
    size = found.captured if settings["capture"]["storage"] == "bf16" else found.captured_fp8
    return size * (1 + HELD_OUT_ROWS * settings["trainer"]["length"] / found.tokens)


def processes(found: Plan) -> str:
    """The number of processes, in words."""
    if found.processes == 1 and found.gpus > 1:
        return f"one process over {found.gpus} GPUs, which take turns"
    return "one process" if found.processes == 1 else f"{found.processes} processes, one a GPU"


def lines(found: Plan, settings: Settings) -> Iterator[str]:
    """The plan below the table of memory, line by line."""
    yield f"target: {found.target_parameters / 1e9:,.2f} billion weights"
    for name, size in found.drafters.items():
        yield f"drafter{f' {name}' if name else ''}: {size / 1e6:,.1f} million weights to train"
    total = sum(found.flops.values())
    shares = ", ".join(f"{name} {size / total:.0%}" for name, size in found.flops.items())
    yield f"operations: {total:.3g} a batch and process ({shares})"
    fast, slow = found.seconds
    hours = " to ".join(f"{float(f'{seconds / 3600:.2g}'):,g}" for seconds in (fast, slow)) + " hours"
    rates = f"{found.tokens / slow:,.0f} to {found.tokens / fast:,.0f} tokens/s"
    yield (
        f"time: {hours} for {found.tokens:,} tokens ({rates}), if {REACHED[0]:.0%} to {REACHED[1]:.0%} of what the GPU can compute "
        f"are reached (one H100 did {MEASURED[0]:.0%} to {MEASURED[1]:.0%}): a guess, what stands above is counted"
    )
    if (gpu_hour := settings["gpu_hour"]) is not None:
        cost = [seconds / 3600 * found.gpus * gpu_hour for seconds in found.seconds]
        yield f"cost: {cost[0]:,.0f} to {cost[1]:,.0f}, at {gpu_hour:g} a GPU and hour"
    if is_captured(settings["data"]):
        return
    yield (
        f"captured beforehand (python -m data), if no token is read twice: {found.captured / 1e9:,.1f} GB; with storage=fp8 or int8: "
        f"{found.captured_fp8 / 1e9:,.1f} GB"
    )


# What would fit ------------------------------------------------------------------------------------------------------

TRIMMED = 32000  # size of the trimmed vocabulary of published drafters: 32,000 of 128,256 tokens
LESS = (*["trainer.batch_size"] * 3, "loss.chunk", *["trainer.length"] * 2)  # settings to halve, in this order


def nearest(settings: Settings) -> Iterator[tuple[list[str], Plan]]:
    """Changes with which the run fits, as words of the command line, each with its plan: smaller batches, a trimmed vocabulary, one arm at
    a time, more sharding over these GPUs or over more GPUs, states captured beforehand.
    """
    yield from smaller(settings, {})
    arms, device = settings["arms"] or {}, settings["target"]["device"]
    if not arms and _can_be_trimmed(settings):
        yield from smaller(settings | {"head": settings["head"] | {"draft_vocab": TRIMMED}}, {"head.draft_vocab": TRIMMED})
    if len(arms) > 1:
        alone = [plan(settings | {"arms": {name: arm}}) for name, arm in arms.items()]
        if all(found.fits for found in alone):
            yield ["each arm in a run of its own"], max(alone, key=lambda found: found.needed)
    held = runs_target(settings["data"], settings.get("served"))
    more = [gpus for gpus in (2, 4, 8, 16) if gpus > settings["gpus"]]
    if device != "map" and not _adapts(settings):
        yield from _first(_sharded(settings, gpus, held) for gpus in (settings["gpus"], *more))
    if not held or _adapts(settings):
        return
    spread = settings | {"nodes": 1, "target": settings["target"] | {"device": "map"}}
    over = more if device == "map" else [max(settings["gpus"], 2), *more]
    yield from _first(smaller(spread | {"gpus": gpus}, {"target.device": "map", "gpus": gpus}) for gpus in dict.fromkeys(over))
    yield from smaller(settings | {"data": {"name": "shards"}}, {"data": "shards", "path": "DIR"})


def _adapts(settings: Settings) -> bool:
    """Whether the target is trained too: then it is neither spread nor sharded, and its layers are needed."""
    return any(arm["trainer"]["lora"] is not None for arm in (settings["arms"] or {"": settings}).values())


def _first(ways: Iterable[Iterator[tuple[list[str], Plan]]]) -> Iterator[tuple[list[str], Plan]]:
    """The changes of the first of these ways that has any."""
    return next((iter(found) for way in ways if (found := list(way))), iter(()))


def _can_be_trimmed(settings: Settings) -> bool:
    """Whether the drafter has the target's whole vocabulary, but could have a trimmed one that is smaller."""
    head = settings["head"]
    if "draft_vocab" not in head or head["draft_vocab"] is not None:
        return False
    return TargetShape.of(config_of(settings["target"])[1]).vocab_size > TRIMMED


def _sharded(settings: Settings, gpus: int, held: bool) -> Iterator[tuple[list[str], Plan]]:
    """Changes that use ``gpus`` GPUs per node and shard more. Only settings that have their default value are changed. ``held``: whether
    the run holds the target's layers.
    """
    changed = settings | {"gpus": gpus}
    words: dict[str, Any] = {"gpus": gpus} if gpus > settings["gpus"] else {}
    if settings["nodes"] * gpus == 1:
        return
    if settings["target"]["device"] == "auto" and gpus > 1 and held:
        device = "tp" if settings["nodes"] == 1 else f"tp:{gpus}"
        words |= {"target.device": device, "report": "none"}
        changed |= {"target": settings["target"] | {"device": device}}
    if settings.get("parallel", DDP) == DDP:
        words |= {"parallel": "fsdp"}
        changed |= {"parallel": {"name": "fsdp"}}
    if words:
        yield from smaller(changed, words)


def smaller(
    settings: Settings, words: Mapping[str, Any], enough: Callable[[Plan], bool] = lambda found: found.fits
) -> Iterator[tuple[list[str], Plan]]:
    """Yields at most one change, the first that is ``enough``: ``words`` alone, or with smaller and smaller batches, chunks and rows.
    Accumulation grows as batches shrink.
    """
    changed, words = deepcopy(settings), dict(words)
    for key in (None, *LESS):
        if key == "loss.chunk" and settings["target"]["device"] != "cpu":
            continue  # on a GPU a chunk is at least a strip (chunks.py)
        if key is not None:
            group, name = key.split(".")
            value = changed[group][name]
            if value == 1:
                continue
            less = value // 2 if name != "batch_size" else next(n for n in range(value // 2, 0, -1) if value % n == 0)
            words[key] = less
            for part in [changed, *(changed["arms"] or {}).values()]:
                part[group][name] = less
            if name == "batch_size":
                changed["trainer"]["accumulate"] *= value // less
                words["trainer.accumulate"] = changed["trainer"]["accumulate"]
        if words and enough(found := plan(changed)):
            yield [f"{k}={v}" for k, v in words.items()], found
            return
