"""A plan as people read it (trainers/plan.py), and what would fit in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from typing import Any

from rich.console import Console
from rich.table import Table

from headstart.data.source import HELD_OUT_ROWS, is_captured
from headstart.heads.errors import UserError
from headstart.trainers.gpus import GPUS
from headstart.trainers.parallel import DDP
from headstart.trainers.plan import REACHED, USABLE, Plan, Settings, plan


def show_plan(settings: Settings) -> None:
    """Print what a run of these settings would take. ``settings``: those of a run, and ``nodes``, ``gpus``, ``gpu``, ``gpu_hour``.

    Raises UserError where it does not fit, naming the nearest settings that do.
    """
    found, console = plan(settings), Console()
    room = USABLE * GPUS[found.gpu].memory
    table = Table(title=f"{settings['target']['name']}, {found.gpus} x {found.gpu}, {processes(found)}", title_justify="left")
    table.add_column("memory of a GPU")
    table.add_column("GB", justify="right")
    for part, size in found.memory.items():
        table.add_row(part, f"{size / 1e9:,.2f}")
    table.add_section()
    table.add_row("in all", f"{found.needed / 1e9:,.2f}")
    table.add_row("there is", f"{room / 1e9:,.2f}")
    console.print(table)
    for line in lines(found, settings["gpu_hour"]):
        console.print(line, highlight=False, soft_wrap=True)
    if settings["capture"]["out"] is not None:
        console.print(f"capture.out: at most {capturing(found, settings) / 1e9:,.1f} GB, every token of the run and of held-out rows; "
                      "less where epochs repeat rows, or not all is supervised", highlight=False, soft_wrap=True)  # fmt: skip
    if not found.fits:
        ways = [f"{' '.join(words)} ({other.needed / 1e9:.1f} GB)" for words, other in nearest(settings)]
        advice = "; ".join(ways) if ways else "nothing that a plan can change: a GPU with more memory, or a smaller target"
        raise UserError(f"{found.needed / 1e9:.1f} GB do not fit into the {room / 1e9:.1f} GB of one {found.gpu}: {advice}")


def capturing(found: Plan, settings: Settings) -> float:
    """Bytes on disk of ``capture.out``, at most."""
    size = found.captured if settings["capture"]["storage"] == "bf16" else found.captured_fp8
    return size * (1 + HELD_OUT_ROWS * settings["trainer"]["length"] / found.tokens)


def processes(found: Plan) -> str:
    if found.processes == 1 and found.gpus > 1:
        return f"one process over {found.gpus} GPUs"
    return "one process" if found.processes == 1 else f"{found.processes} processes, one a GPU"


def lines(found: Plan, gpu_hour: float | None) -> Iterator[str]:
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
        "are reached: a guess, everything above is counted"
    )
    if gpu_hour is not None:
        cost = [hours * found.gpus * gpu_hour / 3600 for hours in found.seconds]
        yield f"cost: {cost[0]:,.0f} to {cost[1]:,.0f}, at {gpu_hour:g} a GPU and hour"
    yield (
        f"captured beforehand (python -m data), every token once: {found.captured / 1e9:,.1f} GB; with storage=fp8 or int8: "
        f"{found.captured_fp8 / 1e9:,.1f} GB"
    )


# What would fit ------------------------------------------------------------------------------------------------------

LESS = (*["trainer.batch_size"] * 3, "loss.chunk", *["trainer.length"] * 2)  # halved in this order


def nearest(settings: Settings) -> Iterator[tuple[list[str], Plan]]:
    """Changes of these settings, as they are written on the command line, with which the run would fit: with the target where it is, over
    more GPUs, and captured beforehand.
    """
    yield from smaller(settings, {})
    if settings["target"]["device"] != "map" and settings["nodes"] * settings["gpus"] > 1 and (words := _shared_out(settings)):
        device = words.get("target.device", settings["target"]["device"])
        way = {"name": "fsdp"} if "parallel" in words else settings["parallel"]
        out = {"parallel": way, "target": settings["target"] | {"device": device}}
        yield from smaller(settings | out, words)
    if is_captured(settings["data"]):
        return
    for gpus in (2, 4, 8, 16):
        if gpus > settings["gpus"] or settings["target"]["device"] != "map":
            spread = settings | {"nodes": 1, "gpus": gpus, "target": settings["target"] | {"device": "map"}}
            if found := list(smaller(spread, {"target.device": "map", "gpus": gpus})):
                yield from found
                break
    yield from smaller(settings | {"data": {"name": "shards"}}, {"data": "shards", "path": "DIR"})


def _shared_out(settings: Settings) -> dict[str, Any]:
    """What shares out more between the processes, where these settings do not say."""
    found: dict[str, Any] = {}
    if settings["target"]["device"] == "auto" and settings["gpus"] > 1 and not is_captured(settings["data"]):
        found |= {"target.device": "tp" if settings["nodes"] == 1 else f"tp:{settings['gpus']}", "report": "none"}
    return found | ({"parallel": "fsdp"} if settings.get("parallel", DDP) == DDP else {})


def smaller(
    settings: Settings, words: Mapping[str, Any], enough: Callable[[Plan], bool] = lambda found: found.fits
) -> Iterator[tuple[list[str], Plan]]:
    """As they are, or with ever smaller batches, of which as many more are accumulated; the first that are ``enough``."""
    changed, said = deepcopy(settings), dict(words)
    for key in (None, *LESS):
        if key == "loss.chunk" and settings["target"]["device"] != "cpu":
            continue  # it is a strip at least there (chunks.py)
        if key is not None:
            group, name = key.split(".")
            value = changed[group][name]
            if value == 1:
                continue
            less = value // 2 if name != "batch_size" else next(n for n in range(value // 2, 0, -1) if value % n == 0)
            said[key] = less
            for part in [changed, *(changed["arms"] or {}).values()]:
                part[group][name] = less
            if name == "batch_size":
                changed["trainer"]["accumulate"] *= value // less
                said["trainer.accumulate"] = changed["trainer"]["accumulate"]
        if said and enough(found := plan(changed)):
            yield [f"{k}={v}" for k, v in said.items()], found
            return
