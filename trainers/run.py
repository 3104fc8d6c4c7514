"""One run: target, drafter, data; fit, export, load the export, decode with it, report. Plain keyword arguments only."""

from __future__ import annotations

import json
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from headstart.data.live import look
from headstart.data.lock import locked
from headstart.data.prompts import check_prompts
from headstart.data.source import open_source
from headstart.heads import hub
from headstart.heads.errors import UserError
from headstart.heads.files import put_text
from headstart.inference.decoding.policy import fit_depth
from headstart.inference.decoding.target import DTYPES
from headstart.inference.provenance import provenance
from headstart.inference.reports import prior
from headstart.inference.reports.card import kept_card, served, write_card
from headstart.inference.reports.compare import compare, costs_of
from headstart.inference.reports.measure import Contender, make_reports
from headstart.inference.reports.render import show, show_serving, write_report
from headstart.inference.reports.report import Report
from headstart.inference.settings import Settings, open_decode, open_target
from headstart.inference.speculator import open_speculator
from headstart.trainers.arm import Arm
from headstart.trainers.checkpoint import set_rng_state
from headstart.trainers.job import Exported, Job
from headstart.trainers.joint import Joint, check_lora, how_changed
from headstart.trainers.learner import Learner, evaluate
from headstart.trainers.processes import is_main, leave, open_accelerator, processes, together
from headstart.trainers.resume import check_earlier, lasting
from headstart.trainers.space import Room, places_of
from headstart.trainers.start import check_start, first_drafter
from headstart.trainers.tracker import Tracker
from headstart.trainers.trainer import fit as train

SHARED = ("steps", "rows", "length", "accumulate", "precision", "seed", "save_every", "keep", "eval_every", "resume")  # by all arms
LOOP = ("steps", "accumulate", "save_every", "keep", "eval_every", "resume")  # what the loop itself is told of them
HELD_OUT_ROWS = 16  # of held-out text, for the curve while training
BEGINNING = 32  # tokens of a held-out text that the target continues, to see how often guesses are right


def run(**settings: Any) -> dict[str, Report]:
    """Train a drafter and report what it gains: ``prepare``, ``fit``, ``export``, ``measure``. Returns the report under its name (nothing
    in processes other than the first). ``settings``: those of ``prepare``.

    The run folder ``out`` gets config.json, checkpoints/, speculator/, report.json, rounds.jsonl, report.md, report.png and
    metrics.jsonl. The same call again resumes, or reports again when training was complete.
    """
    with together(), prepare(**settings) as job:
        if fit(job):  # a launcher ends all when one has failed: the first may still wait for its disk
            raise SystemExit(130 if job.accelerator.is_main_process else 0)
        if not job.accelerator.is_main_process:
            return {}
        return measure(job, export(job))


def prepare(
    *,
    target: Settings,
    head: Settings,
    data: Settings,
    loss: Settings,
    trainer: Settings,
    decode: Settings,
    export: Settings,
    tracker: Settings,
    out: str,
    out_fallback: str | None = None,
    out_wait: float = 0.0,
    arms: dict[str, Settings] | None = None,
) -> Job:
    """Check everything, from what costs nothing to what takes loading; then the drafters, where they begin or go on.

    ``arms``: name -> its own ``head``, ``loss`` and ``trainer``: several drafters, trained side by side from one pass of the target.
    Each gets its run folder out/NAME, and ``out`` the comparison (comparison.json, .md, .png). What they share must be equal.
    ``out_fallback``: a folder on another disk, for what ``out`` has no space for once it is trained; after that, ``out_wait`` seconds
    are waited for space. Raises UserError naming the key or the file; numbers and words have been looked at before (door/schema.py).
    """
    own = {name: dict(each) for name, each in (arms or {"": {"head": head, "loss": loss, "trainer": trainer}}).items()}
    decoding = open_decode(decode)
    if decoding.proposer["kind"] != "drafter":
        raise UserError("a training reports what its own drafter guesses: take decode=dynamic, best_first, chain or fixed")
    places = places_of(out, out_fallback)
    runs = {name: [place / name for place in places] for name in own}
    for name, each in own.items():
        if different := [k for k in SHARED if each["trainer"][k] != trainer[k]]:
            raise UserError(f"arm {name}: all arms share trainer.{different[0]}: set it for the whole run")
        check_start(each["trainer"]["start"], each["head"], [run[0] for run in runs.values()])
    with ExitStack() as stack:
        for key, place in zip(("out", "out_fallback"), places, strict=False):
            for folder in dict.fromkeys([place, *(place / name for name in own)]) if is_main() else ():
                stack.enter_context(locked(folder, key))
        for name, each in own.items():  # what can be known before the target is loaded
            check_earlier(runs[name], lasting(each, data, processes()), trainer["resume"])
        frozen = open_target(target)
        for each in own.values():
            if each["trainer"]["lora"] is not None:
                check_lora(each["trainer"]["lora"], frozen)
        source = open_source(data, frozen, length=trainer["length"], seed=trainer["seed"])
        drafters = {name: first_drafter(name, each, frozen, source, runs[name][0]) for name, each in own.items()}
        accelerator = open_accelerator(trainer["precision"], frozen.device)
        taps = sorted({tap for drafter, _ in drafters.values() for tap in drafter.taps})
        held_out, rows = [], trainer["rows"]
        if source.held_out is not None:
            share = range(min(HELD_OUT_ROWS, len(source.held_out)))
            held_out = [source.observe(source.held_out.batch(slice(i, i + rows)), taps) for i in share[::rows]]
        prompts = source.prompts(decoding.prompts, decoding.new_tokens)  # before the training: they may not be what is wanted
        check_prompts(prompts, decoding.new_tokens, frozen)
        known = dict(target=frozen.fingerprint, rows=source.digest())
        same = {name: lasting(each, data, processes(), **known) for name, each in own.items()}
        for name in own:
            check_earlier(runs[name], same[name], trainer["resume"])  # refused before anything in the folder changes
        record, opened = {"provenance": provenance()}, []
        for name, each in own.items():
            settings = dict(target=target, data=data, decode=decode, export=export, **each)
            if accelerator.is_main_process:
                _put_settings(runs[name][0], settings | record)
            about = settings | record | {"tracker": tracker, "out": str(runs[name][0]), "processes": accelerator.num_processes}
            epoch = trainer["length"] * (len(source.packed) if source.packed else source.rows)
            named = dict(main=accelerator.is_main_process, resume=trainer["resume"], arm=name, epoch=epoch)
            log = Tracker(runs[name][0], about, **named, **tracker)
            stack.callback(log.close)
            drafter, rng = drafters[name]
            set_rng_state(rng)
            about, loop = {"config": settings, **record}, {k: v for k, v in each["trainer"].items() if k not in (*SHARED, "start")}
            more = dict(target=frozen, seed=trainer["seed"], spare=next(iter(runs[name][1:]), None))
            opened.append(Arm(name, drafter, runs[name][0], log, same[name], about, loss=each["loss"], **more, **loop))
        return Job(
            places=places,
            target=frozen,
            source=source,
            accelerator=accelerator,
            arms=opened,
            several=arms is not None,
            settings={"target": target, "data": data, "trainer": trainer},
            own=own,
            taps=taps,
            held_out=held_out,
            prompts=prompts,
            decoding=decoding,
            dtype=frozen.dtype if export["dtype"] == "auto" else DTYPES[export["dtype"]],
            room=Room(out_wait),
            held=stack.pop_all(),
        )


def _put_settings(folder: Path, settings: Settings) -> None:
    try:
        put_text(folder / "config.json", json.dumps(settings, indent=2) + "\n")
    except OSError as e:
        raise UserError(f"the run folder out={folder} cannot be written: {e}") from e


def fit(job: Job) -> bool:
    """Train the arms. Returns whether that was interrupted; what was trained until then is in checkpoints in either case.

    All processes but the first have done their part after that.
    """
    trainer, accelerator = job.settings["trainer"], job.accelerator

    def stream(start: int, rank: int, world: int) -> Any:
        return job.source.stream(job.taps, trainer["rows"], trainer["seed"], start, rank, world)

    interrupted = train(job.arms, stream, job.source.observe, job.held_out, accelerator, **{k: trainer[k] for k in LOOP})
    leave(accelerator, job.arms)
    for arm in job.arms:
        if accelerator.is_main_process and arm.unsaved and not arm.failed:
            with suppress(*() if interrupted else (UserError,)):  # what is exported takes less space
                arm.secure(job.room, patient=interrupted)
    if interrupted:
        newest = job.arms[0].newest()
        where = job.places[0] if job.several or newest is None else newest.parent
        accelerator.print(f"stopped after step {max(a.fitted.steps for a in job.arms)}; the same command resumes from {where}")
    return interrupted


def export(job: Job) -> dict[str, Exported]:
    """Every trained drafter as a folder that serving engines load; with ``trainer.lora`` its changed target beside it.

    An arm of several that cannot be written has failed, and says why; a single one raises UserError.
    """
    exported = {}
    for arm in (arm for arm in job.arms if not arm.failed):
        try:
            exported[arm.name] = _export(job, arm)
        except UserError as e:
            if not job.several:
                raise
            arm.failed = str(e)
    return exported


def _export(job: Job, arm: Arm) -> Exported:
    original, target, changed = job.target, job.target, None
    size = sum(x.numel() for x in arm.drafter.state_dict().values()) * job.dtype.itemsize

    def keep(what: str, size: int, write: Any) -> Path:
        return job.room.keep(f"{arm.label}{what}", size, arm.places, write, arm.make_room, advice=arm.advice())

    if isinstance(learner := arm.learner, Joint):  # what the training made of the target, from the folder it is served from
        whole = sum(x.numel() * x.element_size() for x in original.model.state_dict().values())
        place = keep("the changed target", whole, lambda place: learner.save(place, original.tokenizer))
        changed = str(place / "target")
        target = open_target(job.settings["target"] | {"path": changed, "config": None}, to_decode=True)
        target.name = f"{original.name}+lora"

    def write(place: Path) -> None:
        with kept_card(place / "speculator"):
            hub.save(arm.drafter, place / "speculator", target.card, job.dtype, target.tokenizer, base=target.name)

    place = keep("the speculator", size, write)
    if arm.unsaved:
        try:
            arm.secure(job.room, patient=False)
        except UserError:
            print(f"{arm.label}there was no space for a checkpoint: the weights are in {place / 'speculator'} alone")
    return Exported(place, target, changed)


def measure(job: Job, exported: dict[str, Exported]) -> dict[str, Report]:
    """Load the exported folders, decode with all of them in turn, each with the target it was trained for, and report.

    Raises UserError where an arm has failed, when the others are reported.
    """
    contenders: dict[str, Contender] = {}
    arms = {arm.name: arm for arm in job.arms if arm.name in exported}
    for name, arm in arms.items():
        contenders[name] = _contender(job, arm, exported[name])  # what is served is what is measured
    reports: dict[str, Report] = {}
    job.target.prepack()  # nothing is copied from it any more
    for target in dict.fromkeys([job.target, *(x.target for x in exported.values())]):
        own = {name: contender for name, contender in contenders.items() if exported[name].target is target}
        if own:
            settings = dict(new_tokens=job.decoding.new_tokens)
            made = make_reports(target, list(own.values()), job.prompts, job.decoding.sampling, **settings)
            reports |= dict(zip(own, made, strict=True))
    for name, report in reports.items():
        arm, there = arms[name], exported[name]
        if job.several:
            reports[name] = report = report | costs_of(there.target, contenders[name], job.prompts, job.decoding.new_tokens)
        place = job.room.keep(f"{arm.label}the report", 1 << 22, arm.places, partial(write_report, report))
        said = write_card(there.speculator, report, there.target, job.own[name] | {"data": job.settings["data"]})
        arm.tracker.report(report, place / "report.png", there.speculator)
        if not job.several:
            show(report)
            show_serving(report)
            print(f"speculator: {there.speculator}   report: {place / 'report.md'}, report.png   {said}")
        elif not said.startswith("card: "):
            print(said)
    failed = {arm.name: arm.failed for arm in job.arms if arm.failed}
    if job.several:
        job.room.keep("the comparison", 1 << 20, job.places, lambda place: compare(job.target, reports, failed, place))
    for name, why in failed.items():
        raise UserError(f"{len(failed)} of {len(job.arms)} arms failed; {name}: {why}")
    return reports


def _contender(job: Job, arm: Arm, there: Exported) -> Contender:
    settings, fitted = job.own[arm.name], arm.fitted
    drafter, rows = open_speculator(there.speculator, there.target), job.held_out
    beginnings = [row[:BEGINNING].tolist() for batch in rows for row in batch.tokens_BT] or job.prompts
    drafter.acceptance = prior.measure(there.target, drafter, beginnings)
    with suppress(OSError):  # it can be measured again
        prior.write(there.speculator, drafter.acceptance)
    extra: dict[str, Any] = {"train_seconds": round(fitted.seconds, 3), "train_tokens": fitted.tokens, "train_steps": fitted.steps}
    extra |= {"data": (data := job.settings["data"]["name"]), "loss": settings["loss"], "prompts_from": f"held-out text of {data}"}
    extra |= served(drafter, there.target, there.speculator, job.decoding.policy, there.changed)
    if there.target is not job.target:
        rows = [look(batch, there.target, arm.drafter.taps) for batch in rows]
        how = how_changed(job.target, there.target, job.held_out, job.prompts, settings["loss"]["chunk"])
        extra["target_changed"] = settings["trainer"]["lora"] | how
    if rows:
        depth = fit_depth(job.decoding.policy, drafter).depth  # the chain's, so that the two estimates differ in the text alone
        figures = evaluate(Learner(drafter, **(settings["loss"] | {"depth": depth})), rows, depth)
        extra["off_policy_expected_length"] = figures["heldout_expected_length"]
    return Contender(drafter, job.decoding.policy, extra=extra)
