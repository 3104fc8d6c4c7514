"""One run: target, drafter, data; fit, export, load the export, decode with it, report. Plain keyword arguments only."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import set_seed

from data.batch import TargetBatch
from data.live import fingerprint, look
from data.prompts import check_prompts
from data.source import open_source
from heads import hub
from heads.errors import UserError
from heads.files import put_text
from inference.card import kept_card, served, write_card
from inference.compare import compare, costs_of
from inference.provenance import provenance
from inference.render import show, show_serving, write_report
from inference.report import Contender, Report, fit_depth, make_reports
from inference.settings import Decode, Settings, open_decode, open_speculator, open_target
from inference.target import DTYPES, Target
from trainers.checkpoint import rng_state, set_rng_state
from trainers.joint import Joint, check_lora, how_changed
from trainers.learner import Learner, evaluate
from trainers.start import check_start, open_drafter, open_start
from trainers.tracker import Tracker
from trainers.trainer import Arm, fit, resumable

SHARED = ("steps", "rows", "length", "accumulate", "precision", "seed", "save_every", "keep", "eval_every", "resume")  # by all arms
HELD_OUT_ROWS = 16  # of held-out text, for the curve while training
WHOLE = ("steps", "rows", "length", "accumulate", "save_every", "keep", "eval_every")
LEAST = dict.fromkeys((*(f"trainer.{key}" for key in WHOLE), "loss.depth", "loss.chunk"), 1)
LEAST |= dict.fromkeys(("trainer.lr", "trainer.warmup", "trainer.clip", "trainer.weight_decay", "trainer.seed"), 0)
LEAST |= dict.fromkeys(("loss.decay", "loss.base_until"), 0)


def run(
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
    arms: dict[str, Settings] | None = None,
) -> dict[str, Report]:
    """Train a drafter and report what it gains. Returns the report under its name (nothing in processes other than the first).

    The run folder ``out`` gets config.json, checkpoints/, speculator/, report.json, report.md, report.png and
    metrics.jsonl. The same call again resumes, or reports again when training was complete.

    ``arms``: name -> its own ``head``, ``loss`` and ``trainer``: several drafters, trained side by side from one pass of the target.
    Each gets its run folder out/NAME, and ``out`` the comparison (comparison.json, .md, .png). What they share must be equal.
    """
    shared = dict(target=target, data=data, decode=decode, export=export)
    loops = {name: dict(each["trainer"]) for name, each in (arms or {"": {"trainer": trainer}}).items()}
    starts = {name: loop.pop("start") for name, loop in loops.items()}
    common = {k: trainer[k] for k in SHARED}
    for name, loop in loops.items():
        different = [k for k in SHARED if loop.pop(k) != trainer[k]]
        if different:
            raise UserError(f"arm {name}: all arms share trainer.{different[0]}: set it for the whole run")
    seed, rows, length, precision = (common.pop(k) for k in ("seed", "rows", "length", "precision"))
    decoding = open_decode(decode)
    if decoding.proposer["kind"] != "drafter":
        raise UserError("a training reports what its own drafter guesses: take decode=dynamic, best_first, chain or fixed")
    if export["dtype"] not in ("auto", *DTYPES):
        raise UserError(f"export.dtype must be one of auto, {', '.join(DTYPES)}, found {export['dtype']!r}")
    own = {name: dict(each) for name, each in (arms or {"": {"head": head, "loss": loss, "trainer": trainer}}).items()}
    folder = Path(out)
    places = {name: folder / name for name in own}
    for name, each in own.items():
        check_numbers(trainer=each["trainer"], loss=each["loss"])
        check_start(starts[name], each["head"], places.values())
    frozen = open_target(target)
    for each in own.values():
        if each["trainer"]["lora"] is not None:
            check_lora(each["trainer"]["lora"], frozen)
    source = open_source(data, frozen, length=length, seed=seed)
    drafters = {}
    for name, each in own.items():
        set_seed(seed)  # each starts as it would alone
        try:
            if starts[name] is None:
                drafter = open_drafter(each["head"], frozen, source)
            else:
                drafter, each["head"] = open_start(starts[name], each["head"], frozen, source, places[name], trainer["resume"])
            drafters[name] = (drafter, rng_state())
        except UserError as e:
            raise UserError(f"arm {name}: {e}" if name else str(e)) from e
    taps = sorted({tap for drafter, _ in drafters.values() for tap in drafter.taps})
    accelerator = open_accelerator(precision, frozen.device)
    held_out = []
    if source.held_out is not None:
        share = range(min(HELD_OUT_ROWS, len(source.held_out)))
        held_out = [source.observe(source.held_out.batch(slice(i, i + rows)), taps) for i in share[::rows]]
    prompts = source.prompts(decoding.prompts, decoding.new_tokens)  # before the training: they may not be what is wanted
    check_prompts(prompts, decoding.new_tokens, frozen)
    record = {"provenance": provenance()}
    whose, trained = fingerprint(frozen), []
    sames = {}
    for name, each in own.items():
        # what may change between a run and its continuation is left out
        fixed = {k: v for k, v in each["trainer"].items() if k not in ("save_every", "keep", "eval_every", "resume", "precision")}
        same = dict(target=whose, head=each["head"], data=data, loss=each["loss"], launcher={"processes": accelerator.num_processes})
        sames[name] = json.loads(json.dumps(same | {"trainer": fixed}))  # as it is compared with what a checkpoint holds
        if trainer["resume"]:
            resumable(places[name], sames[name])  # refused before anything in the folder changes
    try:
        for name, each in own.items():
            settings = shared | {k: each[k] for k in ("head", "loss", "trainer")}
            place, (drafter, rng) = places[name], drafters[name]
            _begin_folder(place, settings | record, accelerator)
            known = settings | record | {"tracker": tracker, "out": str(place), "processes": accelerator.num_processes}
            epoch, main = length * (len(source.packed) if source.packed else source.rows), accelerator.is_main_process
            log = Tracker(place, known, main=main, resume=trainer["resume"], arm=name, epoch=epoch, **tracker)
            set_rng_state(rng)
            about = {"config": settings, **record}
            arm = Arm(name, drafter, place, log, sames[name], about, loss=each["loss"], target=frozen, seed=seed, **loops[name])
            trained.append(arm)
        interrupted = fit(
            trained,
            lambda start, rank, world: source.stream(taps, rows, seed, start, rank, world),
            source.observe,
            held_out,
            accelerator,
            **common,
        )
        if interrupted:
            where = places[""] / "checkpoints" if arms is None else folder
            accelerator.print(f"stopped after step {max(a.fitted.steps for a in trained)}; the same command resumes from {where}")
            raise SystemExit(130)
        accelerator.end_training()  # what follows is done by one process
        if not accelerator.is_main_process:
            return {}
        finished = [arm for arm in trained if not arm.failed]
        reports = _report(frozen, finished, own, target, data, held_out, prompts, decoding, DTYPES.get(export["dtype"], frozen.dtype))
        for arm in (arm for arm in finished if arm.name in reports):
            arm.tracker.report(reports[arm.name], arm.run / "report.png")
        if arms is not None:
            try:
                compare(frozen, reports, {a.name: a.failed for a in trained if a.failed}, folder)
            except OSError as e:
                why = f"the comparison cannot be written into {folder} ({e})"
                raise UserError(f"{why}: free some space and run the same command again") from e
        if failed := [arm for arm in trained if arm.failed]:
            raise UserError(f"{len(failed)} of {len(trained)} arms failed; {failed[0].name}: {failed[0].failed}")
        return reports
    finally:
        for arm in trained:
            arm.tracker.close()


def _begin_folder(folder: Path, settings: dict[str, Any], accelerator: Accelerator) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if accelerator.is_main_process:
            put_text(folder / "config.json", json.dumps(settings, indent=2) + "\n")
    except OSError as e:
        raise UserError(f"the run folder out={folder} cannot be written: {e}") from e


def _report(
    original: Target,
    arms: list[Arm],
    settings: dict[str, Settings],
    target_settings: Settings,
    data: Settings,
    held_out: list[TargetBatch],
    prompts: list[list[int]],
    decoding: Decode,
    dtype: torch.dtype,
) -> dict[str, Report]:
    """Export every drafter, load the exported folders, decode with all of them in turn; each with the target it was trained for."""
    contenders: dict[str, Contender] = {}
    changed: dict[str, Target] = {}
    for arm in arms:
        speculator, target, rows, path = arm.run / "speculator", original, held_out, None
        try:
            if isinstance(arm.learner, Joint):  # what the training made of the target, from the folder it is served from
                path = str(arm.learner.save(arm.run, original.tokenizer))
                target = changed[arm.name] = open_target(target_settings | {"path": path, "config": None}, to_decode=True)
                target.name = f"{original.name}+lora"
                rows = [look(batch, target, arm.drafter.taps) for batch in held_out]
            with kept_card(speculator):
                hub.save(arm.drafter, speculator, target.card, dtype, target.tokenizer, base=target.name)
        except UserError as e:
            if not arm.name:
                raise
            arm.failed = str(e)
            continue
        exported = open_speculator(speculator, target)  # what is served is what is measured
        fitted = arm.fitted
        extra = {
            "train_seconds": round(fitted.seconds, 3),
            "train_tokens": fitted.tokens,
            "train_steps": fitted.steps,
            "data": data["name"],
        }
        extra |= {"loss": settings[arm.name]["loss"], "prompts_from": f"held-out text of {data['name']}"}
        extra |= served(exported, target, speculator, decoding.policy.depth, path)
        if target is not original:
            how = how_changed(original, target, held_out, prompts, settings[arm.name]["loss"]["chunk"])
            extra["target_changed"] = settings[arm.name]["trainer"]["lora"] | how
        if rows:
            depth = fit_depth(decoding.policy, exported).depth  # the chain's, so that the two estimates differ in the text alone
            figures = evaluate(Learner(exported, **(settings[arm.name]["loss"] | {"depth": depth})), rows, depth)
            extra["off_policy_expected_length"] = figures["heldout_expected_length"]
        contenders[arm.name] = Contender(exported, decoding.policy, extra=extra)
    reports: dict[str, Report] = {}
    original.prepack()  # nothing is copied from it any more
    for target in (original, *changed.values()):
        own = {name: contender for name, contender in contenders.items() if changed.get(name, original) is target}
        if own:
            made = make_reports(target, list(own.values()), prompts, decoding.sampling, new_tokens=decoding.new_tokens)
            reports |= dict(zip(own, made, strict=True))
    for arm in (arm for arm in arms if arm.name in reports):
        report = reports[arm.name]
        if arm.name:
            report |= costs_of(changed.get(arm.name, original), contenders[arm.name], prompts, decoding.new_tokens)
        try:
            write_report(report, arm.run)
        except OSError as e:
            raise UserError(f"the report cannot be written into {arm.run} ({e}): free some space and run the same command again") from e
        said = write_card(arm.run / "speculator", report, changed.get(arm.name, original), settings[arm.name] | {"data": data})
        if not arm.name:
            show(report)
            show_serving(report)
            print(f"speculator: {arm.run / 'speculator'}   report: {arm.run / 'report.md'}, report.png   {said}")
        elif not said.startswith("card: "):
            print(said)
    return reports


def open_accelerator(precision: str, device: torch.device) -> Accelerator:
    """The processes of this run. Raises UserError where they do not find each other."""
    AcceleratorState._reset_state(reset_partial_state=True)  # an earlier run of this process (--multirun) has left its own
    accelerator = Accelerator(mixed_precision=_precision(precision, device), cpu=device.type == "cpu")
    if accelerator.num_processes != int(os.environ.get("WORLD_SIZE", 1)):
        raise UserError(
            f"{os.environ['WORLD_SIZE']} processes were started, accelerate sees {accelerator.num_processes}: start them with torchrun"
        )
    return accelerator


def _precision(name: str, device: torch.device) -> str:
    if name == "auto":  # on a CPU only where it multiplies bf16 itself: five times the speed of fp32 there, slower elsewhere
        fast = torch.cuda.is_bf16_supported() if device.type == "cuda" else torch.cpu._is_avx512_bf16_supported()
        return "bf16" if fast else "no"
    if name not in ("bf16", "fp32"):
        raise UserError(f"trainer.precision must be auto, bf16 or fp32, found {name!r}")
    return "bf16" if name == "bf16" else "no"


def check_numbers(**settings: Settings) -> None:
    """Raises UserError naming a number of conf/trainer or conf/loss with which there would be nothing to do."""
    for key, least in LEAST.items():
        group, _, name = key.partition(".")
        value = settings[group][name]
        if value is None or not value >= least:  # NaN is not
            raise UserError(f"{key} must be at least {least}, found {value!r}")
    if settings["trainer"]["seed"] >= 1 << 32:
        raise UserError(f"trainer.seed must be below {1 << 32}, found {settings['trainer']['seed']}")
    terms = settings["loss"]["terms"]
    if not isinstance(terms, dict):
        raise UserError(f"loss.terms must be a dictionary like {{kl: 1.0}}, found {terms!r}")
    for name, weight in terms.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
            raise UserError(f"loss.terms.{name} must be a number, found {weight!r}")
    betas = settings["trainer"]["betas"]
    if not isinstance(betas, list) or len(betas) != 2 or not all(isinstance(b, int | float) and 0 <= b < 1 for b in betas):
        raise UserError(f"trainer.betas must be two numbers from 0 to below 1, found {betas!r}")
