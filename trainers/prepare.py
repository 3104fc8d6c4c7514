"""A run made ready: everything checked, from what costs nothing to what takes loading; drafters, data, trackers and locks opened."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from headstart.data.batch import TargetBatch
from headstart.data.lock import locked
from headstart.data.prompts import check_prompts
from headstart.data.source import is_captured, open_source
from headstart.heads.base import Drafter
from headstart.heads.errors import UserError
from headstart.heads.files import put_text
from headstart.inference.decoding.info import DTYPES, TargetInfo
from headstart.inference.provenance import provenance
from headstart.inference.settings import Settings, open_decode, open_target, read_target
from headstart.trainers.arm import Arm
from headstart.trainers.checkpoint import set_rng_state
from headstart.trainers.job import Job
from headstart.trainers.joint import check_lora
from headstart.trainers.processes import is_main, open_accelerator, processes
from headstart.trainers.resume import check_earlier, lasting
from headstart.trainers.space import Room, places_of
from headstart.trainers.start import check_start, first_drafter
from headstart.trainers.terms import check_loss
from headstart.trainers.tracker import Tracker

SHARED = ("steps", "rows", "length", "accumulate", "precision", "seed", "save_every", "keep", "eval_every", "resume")  # by all arms
HELD_OUT_ROWS = 16  # of held-out text, for the curve while training


def prepare(
    *, target: Settings, head: Settings, data: Settings, loss: Settings, trainer: Settings, decode: Settings, export: Settings,
    tracker: Settings, out: str, out_fallback: str | None = None, out_wait: float = 0.0, arms: dict[str, Settings] | None = None,
    report: str = "here",
) -> Job:  # fmt: skip
    """Check everything, from what costs nothing to what takes loading; then the drafters, where they begin or go on.

    ``arms``: name -> its own ``head``, ``loss`` and ``trainer``: several drafters, trained side by side from one pass of the target.
    Each gets its run folder out/NAME, and ``out`` the comparison (comparison.json, .md, .png). What they share must be equal.
    ``out_fallback``: a folder on another disk, for what ``out`` has no space for once it is trained; after that, ``out_wait`` seconds
    are waited for space. ``report``: here, or none: then nothing is decoded. Raises UserError naming the key or the file; numbers and
    words have been looked at before (door/schema.py).
    """
    own = {name: dict(each) for name, each in (arms or {"": {"head": head, "loss": loss, "trainer": trainer}}).items()}
    decoding, places = open_decode(decode), places_of(out, out_fallback)
    if decoding.proposer["kind"] != "drafter":
        raise UserError("a training reports what its own drafter guesses: take decode=dynamic, best_first, chain or fixed")
    runs = {name: [place / name for place in places] for name in own}
    _check_arms(own, trainer, runs)
    with ExitStack() as stack:
        for key, place in zip(("out", "out_fallback"), places, strict=False):
            for folder in dict.fromkeys([place, *(place / name for name in own)]) if is_main() else ():
                stack.enter_context(locked(folder, key))
        for name, each in own.items():  # what can be known before the target is loaded
            check_earlier(runs[name], lasting(each, data, processes()), trainer["resume"])
        about = _target(target, data, own)
        source = open_source(data, about, length=trainer["length"], seed=trainer["seed"])
        drafters = {name: first_drafter(name, each, about, source, runs[name][0]) for name, each in own.items()}
        job = Job(
            places=places,
            target=about,
            source=source,
            accelerator=open_accelerator(trainer["precision"], about.device),
            several=arms is not None,
            settings={"target": target, "data": data, "decode": decode, "export": export, "tracker": tracker, "trainer": trainer},
            own=own,
            taps=sorted({tap for drafter, _ in drafters.values() for tap in drafter.taps}),
            decoding=decoding,
            reported=report == "here",
            dtype=about.dtype if export["dtype"] == "auto" else DTYPES[export["dtype"]],
            room=Room(out_wait),
        )
        if job.reported:  # before the training: they may not be what is wanted
            job.prompts = source.prompts(decoding.prompts, decoding.new_tokens)
            check_prompts(job.prompts, decoding.new_tokens, about)
        job.held_out = _held_out(job)
        known = dict(target=about.fingerprint, rows=source.digest())
        same = {name: lasting(each, data, processes(), **known) for name, each in own.items()}
        for name in own:
            check_earlier(runs[name], same[name], trainer["resume"])  # refused before anything in the folder changes
        record = {"provenance": provenance()}
        job.arms = [_open_arm(job, stack, name, *drafters[name], runs[name], same[name], record) for name in own]
        job.held = stack.pop_all()
        return job


def _check_arms(own: dict[str, Settings], trainer: Settings, runs: dict[str, list[Path]]) -> None:
    for name, each in own.items():
        if different := [k for k in SHARED if each["trainer"][k] != trainer[k]]:
            raise UserError(f"arm {name}: all arms share trainer.{different[0]}: set it for the whole run")
        check_loss(each["loss"]["terms"], each["loss"]["weighting"], each["loss"].get("constants"))
        check_start(each["trainer"]["start"], each["head"], [run[0] for run in runs.values()])


def needs_layers(data: Settings, own: Mapping[str, Settings]) -> bool:
    """Whether the training passes anything through the target's layers: data that it has yet to read, text of a drafter's own, an adapter.
    (Beside that, some drafters share its layers.)
    """
    return not is_captured(data) or any(each["trainer"]["lora"] is not None or each["loss"]["on_policy"] for each in own.values())


def _target(settings: Settings, data: Settings, own: dict[str, Settings]) -> TargetInfo:
    """With its layers where they are needed."""
    if not needs_layers(data, own):
        return read_target(settings)
    target = open_target(settings)
    for each in own.values():
        if (lora := each["trainer"]["lora"]) is not None:
            check_lora(lora, target)
    return target


def _held_out(job: Job) -> list[TargetBatch]:
    if (packed := job.source.held_out) is None:
        return []
    share, rows = range(min(HELD_OUT_ROWS, len(packed))), job.settings["trainer"]["batch_size"]
    seen = (job.source.observe(packed.batch(slice(i, i + rows)), job.taps) for i in share[::rows])
    return [batch.to(torch.device("cpu")) for batch in seen]  # a GPU has them one at a time, where they are evaluated


def _open_arm(
    job: Job, stack: ExitStack, name: str, drafter: Drafter, rng: Mapping[str, Tensor], runs: list[Path], same: Settings, record: Settings
) -> Arm:
    """With its tracker, which ``stack`` closes. ``rng``: the random numbers that its training begins with; ``same``: what a checkpoint
    must have in common with it.
    """
    each, main, trainer = job.own[name], job.accelerator.is_main_process, job.settings["trainer"]
    settings = {group: job.settings[group] for group in ("target", "data", "decode", "export")} | each
    if main:
        _put_settings(runs[0], settings | record)
    tracker = job.settings["tracker"]
    about = settings | record | {"tracker": tracker, "out": str(runs[0]), "processes": job.accelerator.num_processes}
    epoch = trainer["length"] * (len(job.source.packed) if job.source.packed else job.source.rows)
    log = Tracker(runs[0], about, main=main, resume=trainer["resume"], arm=name, epoch=epoch, **tracker)
    stack.callback(log.close)
    set_rng_state(rng)
    loop = {k: v for k, v in each["trainer"].items() if k not in (*SHARED, "start")}
    target = job.target.opened() if each["loss"]["on_policy"] else None
    more = dict(target=target, seed=trainer["seed"], spare=next(iter(runs[1:]), None))
    return Arm(name, drafter, runs[0], log, same, {"config": settings, **record}, loss=each["loss"], **more, **loop)


def _put_settings(folder: Path, settings: Settings) -> None:
    try:
        put_text(folder / "config.json", json.dumps(settings, indent=2) + "\n")
    except OSError as e:
        raise UserError(f"the run folder out={folder} cannot be written: {e}") from e
