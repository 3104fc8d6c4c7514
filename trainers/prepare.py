"""Prepares a run: checks everything, cheap checks first, then opens the drafters, data, trackers and locks."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

from headstart.data.batch import TargetBatch
from headstart.data.prompts import check_prompts
from headstart.data.source import HELD_OUT_ROWS, Source, check_to_capture, is_captured, open_source
from headstart.heads.base import Drafter
from headstart.heads.errors import UserError
from headstart.heads.files import put_text
from headstart.inference.decoding.info import DTYPES, TargetInfo
from headstart.inference.decoding.placement import is_main, is_sharded, processes, say
from headstart.inference.provenance import provenance
from headstart.inference.reports.several import sizes_of
from headstart.inference.settings import Decode, Settings, open_decode, open_target, read_target
from headstart.trainers.arm import Arm
from headstart.trainers.checkpoint import set_rng_state
from headstart.trainers.job import Job
from headstart.trainers.joint import check_lora
from headstart.trainers.parallel import DDP, check_parallel
from headstart.trainers.patience import too_much
from headstart.trainers.processes import open_accelerator
from headstart.trainers.resume import Batch, batch_of, check_alike, check_earlier, lasting
from headstart.trainers.sinks import Input
from headstart.trainers.space import Room, places_of, taken
from headstart.trainers.start import check_start, first_drafter
from headstart.trainers.terms import check_kernel, check_loss
from headstart.trainers.tracker import Tracker

if TYPE_CHECKING:
    from headstart.data.served import ServedTarget

SHARED = (  # settings of the trainer that all arms share
    "steps", "epochs", "batch_size", "length", "accumulate", "precision", "seed", "save_every", "keep", "eval_every", "resume", "timeout",
    "profile", "decode_every", "log_every",
)  # fmt: skip
BEGINNING = 32  # tokens of a held-out text that serve as a prompt for measuring acceptance


def prepare(
    *, target: Settings, head: Settings, data: Settings, loss: Settings, trainer: Settings, decode: Settings, export: Settings,
    tracker: Settings, out: str, out_fallback: str | None = None, out_wait: float = 0.0, arms: dict[str, Settings] | None = None,
    report: str = "here", parallel: Settings = DDP, served: Settings | None = None, capture: Settings | None = None,
    changed: dict[str, Settings] | None = None,
) -> Job:  # fmt: skip
    """Check all settings and files, cheap checks first, and return a ``Job`` that is ready to train.

    ``arms``: name -> its own ``head``, ``loss`` and ``trainer``, for several drafters trained side by side from one pass of the target.
    Each gets the run folder out/NAME; ``out`` gets the comparison (comparison.json, .md, .png). The settings in SHARED must be equal.
    ``out_fallback``: a folder on another disk, used when ``out`` is full. If both are full when results are written, the run waits up to
    ``out_wait`` seconds for space. ``report``: "here", or "none" to decode nothing. ``parallel``: how the training is spread over the
    processes (trainers/parallel.py). ``served``: a server that runs the target (data/served.py). ``capture``: where the target's states are
    stored (data/capturing.py). ``changed``: for each arm the settings that differ from the defaults, for its report. Raises UserError
    naming the key or the file; door/schema.py has checked types and ranges before.
    """
    capture = None if capture is None or capture["out"] is None else capture
    own = {name: dict(each) for name, each in (arms or {"": {"head": head, "loss": loss, "trainer": trainer}}).items()}
    decoding, places = open_decode(decode), places_of(out, out_fallback)
    _check_decode(decoding)
    runs = {name: [place / name for place in places] for name in own}
    _check_arms(own, trainer, runs)
    check_parallel(parallel, own)
    if trainer["epochs"] is not None and data.get("stream"):
        raise UserError("trainer.epochs: the length of an epoch of streamed data is not known: give trainer.steps, or data.stream=false")
    with ExitStack() as stack:
        if is_main():
            stack.enter_context(taken(places, own))
        trainer, batch = _shared_out(trainer, own, runs, bool(data.get("stream")))
        if trainer["epochs"] is None:  # else the number of steps is not known before the data are read
            for name, each in own.items():
                check_earlier(runs[name], lasting(each, data, batch), trainer["resume"])
        if capture is not None:
            _check_capture(capture, data, own, [folder for folders in runs.values() for folder in (*places, *folders)])
        about = _target(target, data, own, served, stack)
        source = open_source(data, about, length=trainer["length"], seed=trainer["seed"])
        trainer = trainer | {"steps": _steps(trainer, own, source)}
        own = {name: each | {"trainer": each["trainer"] | {"steps": trainer["steps"]}} for name, each in own.items()}
        drafters = {name: first_drafter(name, each, about, source, runs[name]) for name, each in own.items()}
        parts = dict(target=target, data=data, decode=decode, export=export, tracker=tracker, trainer=trainer, parallel=parallel)
        taps = sorted({tap for drafter, _ in drafters.values() for tap in drafter.taps})
        about.expect(taps, trainer["length"])  # before the processes meet: the first may read all weights, while no watch counts yet
        job = Job(
            places, about, source, open_accelerator(trainer["precision"], about.device, trainer["timeout"]), several=arms is not None,
            settings=parts | {"served": served}, own=own, changed=changed or {}, taps=taps, decoding=decoding,
            dtype=about.dtype if export["dtype"] == "auto" else DTYPES[export["dtype"]], reported=report == "here", room=Room(out_wait),
        )  # fmt: skip
        if capture is not None:
            job.source = _capturing(job, capture, stack)
        job.prompts = _report_prompts(decoding, source, about) if job.reported else []
        known: Settings = {"target": about.fingerprint, "rows": source.digest(), "capture": capture and capture["storage"]}
        same = {name: lasting(each, data, batch, **known, **_vocab_digest(each["head"], drafters[name][0])) for name, each in own.items()}
        for name in own:  # refuse before anything in the folder changes
            check_earlier(runs[name], same[name], trainer["resume"])
            if is_sharded(target["device"]):  # the processes read held-out text together, and would fail there if their rows differ
                check_alike(runs[name][0], 0, same[name])
        job.held_out = _held_out(job)
        job.arms = [_open_arm(job, stack, name, *drafters[name], runs[name], same[name]) for name in own]
        job.held = stack.pop_all()
        return job


def _shared_out(trainer: Settings, own: Mapping[str, Settings], runs: Mapping[str, list[Path]], streamed: bool) -> tuple[Settings, Batch]:
    """The trainer's settings with the batch size and accumulation for the present number of processes, and the ``Batch`` that the run
    began with (trainers/resume.py).
    """
    losses = [each["loss"] for each in own.values()]
    now, batch = batch_of(trainer, processes(), [run for folders in runs.values() for run in folders], losses, streamed)
    if now != batch:
        how = f"{now.processes} x trainer.batch_size={now.rows} x trainer.accumulate={now.accumulate}"
        say(f"a step has the {batch.size} rows that the run began with: {how}")
    return trainer | {"batch_size": now.rows, "accumulate": now.accumulate}, batch


def _check_arms(own: dict[str, Settings], trainer: Settings, runs: dict[str, list[Path]]) -> None:
    for name, each in own.items():
        if different := [k for k in SHARED if each["trainer"][k] != trainer[k]]:
            raise UserError(f"arm {name}: all arms share trainer.{different[0]}: set it for the whole run")
        check_loss(each["loss"]["terms"], each["loss"]["weighting"], each["loss"].get("constants"))
        check_kernel(each["loss"].get("kernel", "auto"), each["loss"]["terms"])
        check_start(each["trainer"]["start"], each["head"], [run[0] for run in runs.values()])


def needs_layers(data: Settings, own: Mapping[str, Settings], served: Settings | None = None) -> bool:
    """Whether this process must load the target's layers for training: to read the data (unless captured or served), to score the
    drafter's own text, or to train an adapter. (Drafters that share layers with the target need them too; that is not counted here.)
    """
    return runs_target(data, served) or any(each["trainer"]["lora"] is not None or each["loss"]["on_policy"] for each in own.values())


def _check_decode(decoding: Decode) -> None:
    """Raises UserError for a decode setting that a training cannot report with."""
    if decoding.proposer["kind"] != "drafter":
        raise UserError("a training reports what its own drafter guesses: take decode=auto, dynamic, best_first, chain or fixed")
    if decoding.tuned:
        raise UserError("decode=tuned: a drafter that is only trained now has no decode.json yet; train with decode=auto, then run "
                        "python -m inference tune speculator=DIR prompts=FILE.jsonl and report with decode=tuned")  # fmt: skip


def is_served(served: Settings | None) -> TypeGuard[Settings]:
    """Whether a server runs the target."""
    return served is not None and served["url"] is not None


def runs_target(data: Settings, served: Settings | None) -> bool:
    """Whether this process runs the target over the data: its states were not captured before, and no server computes them."""
    return not (is_captured(data) or is_served(served))


def _target(settings: Settings, data: Settings, own: dict[str, Settings], served: Settings | None, stack: ExitStack) -> TargetInfo:
    """The target: run by a server, or its config and ends alone, or with its layers if the run needs them. Raises UserError."""
    if is_served(served):
        return stack.enter_context(closing(_served(settings, data, own, served)))
    if not needs_layers(data, own):
        return read_target(settings)
    target = open_target(settings).read_apart()
    if target.sharded and any(each["loss"]["on_policy"] for each in own.values()):
        raise UserError(f"target.device={settings['device']}: loss.on_policy decodes in each process by itself: take auto or map")
    for each in own.values():
        if (lora := each["trainer"]["lora"]) is not None:
            check_lora(lora, target)
    return target


def _steps(trainer: Settings, own: Mapping[str, Settings], source: Source) -> int:
    """The number of steps: ``trainer.steps``, or what ``trainer.epochs`` amounts to over all processes. Raises UserError if the latter
    are too few for ``trainer.patience`` (for ``trainer.steps``, door/groups.py checks it).
    """
    steps = int(trainer["steps"])
    if (epochs := trainer["epochs"]) is not None:
        rows, step = source.rows, trainer["batch_size"] * trainer["accumulate"] * processes()
        steps = max(1, math.ceil(epochs * rows / step))
        say(f"trainer.epochs={epochs:g}: {steps:,} steps of {step:,} rows, of {rows:,} in an epoch")
        for each in own.values():
            if why := too_much(each["trainer"]["patience"], steps, trainer["decode_every"], trainer["eval_every"]):
                raise UserError(why)
    if trainer["warmup"] >= steps:
        say(f"trainer.warmup={trainer['warmup']} of {steps} steps: the learning rate does not reach its peak")
    return steps


def _served(settings: Settings, data: Settings, own: dict[str, Settings], served: Settings) -> ServedTarget:
    from headstart.data.served import open_served  # imported here, because it brings the HTTP client with it

    if is_captured(data):
        raise UserError(f"served.url: data={data['name']} is read already: take data=text or chat, or no server")
    for each in own.values():
        for key, there in (("trainer.lora", each["trainer"]["lora"]), ("loss.on_policy", each["loss"]["on_policy"])):
            if there is not None:
                raise UserError(f"served.url: {key} passes text of its own through the target's layers, which are not here")
    return open_served(settings, served)


def _vocab_digest(head: Settings, drafter: Drafter) -> Settings:
    """A digest of the trimmed draft vocabulary if it was counted from the data: its tokens give the head's rows their meaning. Else {}."""
    if not isinstance(head.get("draft_vocab"), int):
        return {}
    return {"draft_vocab": hashlib.sha256(json.dumps(drafter.config["draft_vocab"]).encode()).hexdigest()[:16]}


def _check_capture(capture: Settings, data: Settings, own: Mapping[str, Settings], runs: Sequence[Path]) -> None:
    if Path(capture["out"]).resolve() in {run.resolve() for run in runs}:
        raise UserError(f"capture.out={capture['out']} is the run's own folder: give another, for what the target says")
    check_to_capture(data, "capture.out")
    if any(each["trainer"]["lora"] is not None for each in own.values()):
        raise UserError("capture.out: trainer.lora changes what the target says while it is captured: leave one of them out")


def _capturing(job: Job, capture: Settings, stack: ExitStack) -> Source:
    """The source of the job, which also stores the target's states in ``capture.out``. ``stack`` closes it."""
    from headstart.data.capturing import Capturing
    from headstart.data.folder import open_folder

    rank, world, target = job.accelerator.process_index, job.accelerator.num_processes, job.target
    folder = open_folder(capture["out"])
    stack.enter_context(folder.locked(f".lock-{rank}" if rank else ".lock", "capture.out"))
    how = {"out": capture["out"], "storage": capture["storage"], "accumulate": job.settings["trainer"]["accumulate"]}
    made = Capturing(job.source, target, job.taps, **how, rank=rank, world=world)  # type: ignore[arg-type]
    stack.callback(made.close)
    return made.source


def _report_prompts(decoding: Decode, source: Source, target: TargetInfo) -> list[list[int]]:
    """The prompts of the report. Raises UserError if they do not fit. It must be known before the training, not only after it."""
    prompts = source.prompts(decoding.prompts, decoding.new_tokens)
    check_prompts(prompts, decoding.new_tokens, target)
    sizes_of(decoding.sequences, len(prompts))
    return prompts


def _held_out(job: Job) -> list[TargetBatch]:
    if (held_out := job.source.held_out) is None:
        return []
    count, rows = min(HELD_OUT_ROWS, len(held_out)), job.settings["trainer"]["batch_size"]
    seen = (job.source.observe(held_out.batch(slice(i, min(i + rows, count))), job.taps) for i in range(0, count, rows))
    return [batch.to(torch.device("cpu")) for batch in seen]  # evaluation moves them to the GPU one at a time


def held_out_prompts(job: Job) -> list[list[int]]:
    """The first BEGINNING token ids of every held-out row, as prompts for the target to continue."""
    return [row[:BEGINNING].tolist() for batch in job.held_out for row in batch.tokens_BT]


def _open_arm(job: Job, stack: ExitStack, name: str, drafter: Drafter, rng: Mapping[str, Tensor], runs: list[Path], same: Settings) -> Arm:
    """An arm with its tracker, which ``stack`` closes. ``rng``: the random state at the start of its training. ``same``: the settings that
    a checkpoint must have in common with it.
    """
    own, main, trainer, tracking = job.own[name], job.accelerator.is_main_process, job.settings["trainer"], job.settings["tracker"]
    settings, origin = {group: job.settings[group] for group in ("target", "data", "decode", "export", "parallel")} | own, provenance()
    if main:
        _put_settings(runs, settings | {"provenance": origin})
    about = settings | {"provenance": origin, "tracker": tracking, "out": str(runs[0]), "processes": job.accelerator.num_processes}
    epoch = trainer["length"] * job.source.rows
    tracker = Tracker(runs[0], about, main=main, resume=trainer["resume"], arm=name, epoch=epoch, inputs=_inputs(job, same), **tracking)
    stack.callback(tracker.close)
    set_rng_state(rng)
    return Arm(
        name, drafter, runs[0], tracker, same, {"config": settings, "provenance": origin}, loss=own["loss"],
        target=job.target.opened() if own["loss"]["on_policy"] else None, seed=trainer["seed"], spare=next(iter(runs[1:]), None),
        parallel=job.settings["parallel"], **{k: v for k, v in own["trainer"].items() if k not in (*SHARED, "start")},
    )  # fmt: skip


def _inputs(job: Job, same: Settings) -> list[Input]:
    """The target and the data, which trackers record as the drafter's inputs. ``same``: as in ``_open_arm``."""
    target, data = job.settings["target"], job.settings["data"]
    places = [str(each["path"]) for each in (data, *data.get("sources", ())) if each.get("path")]
    name = "-".join([data["name"], *(Path(place).stem for place in places[:1])])
    return [
        Input("model", target["name"], [str(target["path"])], same["target"]),
        Input("dataset", name, places, {"settings": data, "rows": same["rows"], "length": job.settings["trainer"]["length"]}),
    ]


def _put_settings(runs: Sequence[Path], settings: Settings) -> None:
    """Write config.json into the run folder, or if that fails into the one in ``out_fallback``. Raises UserError if both fail."""
    text = json.dumps(settings, indent=2) + "\n"
    for folder in runs:
        place = folder / "config.json"
        try:
            return put_text(place, text)
        except OSError as e:
            if folder == runs[-1]:
                raise UserError(f"the run folder out={runs[0]} cannot be written: {e}") from e
            print(f"{place} cannot be written ({e}): the settings go to {runs[-1]} (out_fallback)")
