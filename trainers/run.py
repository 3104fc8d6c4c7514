"""One run: prepare, train, export, load the exported drafter, decode with it, report. Takes plain keyword arguments only."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from headstart.data.live import look
from headstart.heads import hub
from headstart.heads.base import Drafter
from headstart.heads.errors import UserError, counted
from headstart.heads.override import typed
from headstart.heads.serving import words_of
from headstart.heads.stored import read_json
from headstart.inference.decoding.placement import say
from headstart.inference.decoding.policy import fit_depth
from headstart.inference.decoding.target import Target
from headstart.inference.decoding.used import idle
from headstart.inference.reports import prior
from headstart.inference.reports.card import kept_card, serving_keys, write_card
from headstart.inference.reports.compare import compare, costs_of
from headstart.inference.reports.measure import Contender, make_reports
from headstart.inference.reports.render import show, show_serving, write_report
from headstart.inference.reports.report import Report
from headstart.inference.settings import Settings, open_target
from headstart.inference.speculator import open_speculator
from headstart.trainers.arm import Arm
from headstart.trainers.began import Began
from headstart.trainers.diagnosis import FILE as DIAGNOSIS
from headstart.trainers.gate import Gate, take_best
from headstart.trainers.job import Exported, Job
from headstart.trainers.joint import Joint, how_changed
from headstart.trainers.learner import Learner, evaluate
from headstart.trainers.memory import advice, asked_for
from headstart.trainers.metrics import read_metrics
from headstart.trainers.prepare import prepare
from headstart.trainers.processes import leave, together
from headstart.trainers.trace import Trace
from headstart.trainers.trainer import fit as train

LOOP = (  # settings of the trainer that go to the loop (trainers/trainer.py)
    "steps", "accumulate", "save_every", "keep", "eval_every", "resume", "timeout", "decode_every", "log_every",
)  # fmt: skip


def run(**settings: Any) -> dict[str, Report]:
    """Train one or several drafters and report what they gain: ``prepare``, ``fit``, ``export``, ``measure``. Returns arm name -> report
    (in processes other than the first: nothing). ``settings``: those of ``prepare``. Raises UserError; SystemExit when interrupted.

    The run folder ``out`` gets config.json, checkpoints/, speculator/, report.json, rounds.jsonl, report.md, report.png, report.html
    and metrics.jsonl (with ``report="none"`` no report). The same call again resumes, or reports again if training was complete.
    """
    with together(), prepare(**settings) as job:
        if fit(job):  # exit 0 elsewhere: a launcher kills all processes when one fails, and the first may still wait for disk space
            raise SystemExit(130 if job.accelerator.is_main_process else 0)
        if not job.accelerator.is_main_process:
            return {}
        exported = export(job)
        if job.reported:
            try:
                return measure(job, exported)
            except KeyboardInterrupt:
                print(f"the training is complete and exported in {job.places[0]}; the same command makes the report", flush=True)
                raise
        hand_over(job, exported)
        return {}


def fit(job: Job) -> bool:
    """Train the arms. Returns whether the training was interrupted. In either case checkpoints hold the state.

    Only the first process has work left afterwards. Raises UserError if trainer.keep or trainer.patience lack the figures they need.
    """
    trainer, accelerator = job.settings["trainer"], job.accelerator
    best = trainer["keep"] == "best"

    def stream(start: int, rank: int, world: int) -> Any:
        return job.source.stream(job.taps, trainer["batch_size"], trainer["seed"], start, rank, world)

    gate = _open_gate(job) if trainer["decode_every"] and accelerator.is_main_process else None
    if gate is None and not job.held_out and accelerator.is_main_process and any(arm.patience.evaluations for arm in job.arms):
        raise UserError("trainer.patience: there is no held-out text to judge by, and nothing is decoded: take trainer.patience=0")
    loop: Settings = {k: trainer[k] for k in LOOP} | ({"keep": 2} if best else {})
    loop |= {
        "decode_last": best,
        "decoded": gate,
        "trace": Trace(job.places[0], trainer["profile"], accelerator.process_index),
    }
    interrupted = _with_advice(job, lambda: train(job.arms, stream, job.source.observe, job.held_out, accelerator, **loop))
    leave(accelerator, job.arms)
    for arm in job.arms:
        if accelerator.is_main_process and arm.saver.unsaved and not arm.failed:
            with suppress(*() if interrupted else (UserError,)):  # the export takes less space than a checkpoint and may still fit
                arm.saver.secure(job.room, patient=interrupted)
    if interrupted:
        newest = job.arms[0].saver.newest()
        where = job.places[0] if job.several or newest is None else newest.parent
        say(f"stopped after step {max(a.fitted.steps for a in job.arms)}; the same command resumes from {where}")
    return interrupted


def _open_gate(job: Job) -> Gate | None:
    """The gate; None, with a message, where the run cannot decode while it trains. Raises UserError if trainer.keep=best needs it."""
    gate = Gate(job)
    if not gate.why_not:
        return gate
    if job.settings["trainer"]["keep"] == "best":
        raise UserError(f"trainer.keep=best needs decoding while it trains, but {gate.why_not}: take trainer.keep=2")
    print(f"nothing is decoded while it trains (trainer.decode_every): {gate.why_not}")
    return None


def _with_advice(job: Job, work: Callable[[], bool]) -> bool:
    """Run ``work``. If it runs out of memory, raise UserError that says which setting to lower."""
    try:
        return work()
    except (RuntimeError, MemoryError) as e:
        if (wanted := asked_for(e)) is None:
            raise
        why = " ".join(str(e).split())[:200]
    trainer, loss = job.settings["trainer"], next(iter(job.own.values()))["loss"]
    divided = {key: trainer[key] for key in ("batch_size", "accumulate")}  # as for the present number of processes
    arms = {name: own | {"trainer": own["trainer"] | divided} for name, own in job.own.items()}
    settings = job.settings | {"loss": loss, "arms": arms, "nodes": 1, "gpus": job.accelerator.num_processes, "gpu": "h100"}
    settings |= {"trainer": trainer | {"epochs": None}, "out": str(job.places[0])}  # trainer.steps expresses them already
    raise UserError(f"memory has ended ({why}): {advice(settings, wanted)}")


def export(job: Job) -> dict[str, Exported]:
    """Write every trained drafter as a folder that serving engines load; with ``trainer.lora`` the changed target too. Returns arm name ->
    where it is.

    Of several arms, one that cannot be written counts as failed (``Arm.failed`` says why). A single arm raises UserError.
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
    target, changed = job.target, None
    size = sum(x.numel() for x in arm.drafter.state_dict().values()) * job.dtype.itemsize

    def keep(what: str, size: int, write: Any) -> Path:
        return job.room.keep(f"{arm.label}{what}", size, arm.places, write, arm.saver.make_room, advice=arm.saver.advice(arm.fitted.steps))

    if isinstance(learner := arm.learner, Joint):  # the trained target, loaded again from the folder that engines serve it from
        original = job.target.opened()
        whole = sum(x.numel() * x.element_size() for x in original.model.state_dict().values())
        place = keep("the changed target", whole, lambda place: learner.save(place, original.tokenizer))
        changed = str(place / "target")
        target = open_target(job.settings["target"] | {"path": changed, "config": None}, to_decode=True)
        target.name = f"{original.name}+lora"

    step = take_best(arm) if job.settings["trainer"]["keep"] == "best" else arm.fitted.steps

    def write(place: Path) -> None:
        with kept_card(place / "speculator"):
            hub.save(arm.drafter, place / "speculator", target.card, job.dtype, target.tokenizer, base=target.name)

    place = keep("the speculator", size, write)
    if arm.saver.unsaved:
        try:
            arm.saver.secure(job.room, patient=False)
        except UserError:
            print(f"{arm.label}there was no space for a checkpoint: the weights are in {place / 'speculator'} alone")
    return Exported(place, target, changed, step)


def hand_over(job: Job, exported: dict[str, Exported]) -> None:
    """For runs without a report: print the commands that report on the exported folders. Raises UserError if an arm has failed."""
    dtype = job.settings["target"]["dtype"]
    for name, there in exported.items():
        words = words_of(there.changed or there.target.name, str(there.speculator), job.settings["target"]["attention"], dtype)
        words += words_of_decode(job.settings["decode"], job.changed.get(name, {}))
        words.append(f"prompts={job.settings['data'].get('prompts_file') or 'FILE.jsonl'}")
        print(f"{f'{name}: ' * bool(name)}speculator: {there.speculator}   not reported (report=none); where its target fits:")
        print(shlex.join(["headstart", "infer", *words]))
    _raise_failures(job)


def words_of_decode(decode: Settings, changed: Settings) -> list[str]:
    """The words of a command line that decodes as the settings ``decode`` say. ``changed``: key -> value and default, where they differ."""
    words = [f"decode={decode['kind']}"] * (decode["kind"] != "auto")
    for key, change in changed.items():
        group, _, name = key.partition(".")
        if group == "decode" and name.partition(".")[0] not in ("kind", "proposer", *idle(decode)):
            value = change["value"]
            words.append(f"{key}={typed(value) if isinstance(value, str) else json.dumps(value, separators=(',', ':'))}")
    return words


def measure(job: Job, exported: dict[str, Exported]) -> dict[str, Report]:
    """Load the exported folders, decode with each one and the target it was trained for, and write the reports. Returns arm name -> report.

    Raises UserError if an arm has failed, after the others are reported.
    """
    original = job.target.opened()
    arms = {arm.name: arm for arm in job.arms if arm.name in exported}
    targets = {name: there.target.opened() for name, there in exported.items()}
    drafters = {name: open_speculator(exported[name].speculator, targets[name]) for name in arms}  # as engines load them
    began = Began(job.own, targets)
    original.prepack()  # only now: drafters no longer copy weights from it
    many = counted(len(job.prompts), "prompt")
    print(f"report: {many}, {job.decoding.new_tokens} new tokens each, with the drafter and without", flush=True)
    contenders = {name: _contender(job, arm, exported[name], targets[name], drafters[name]) for name, arm in arms.items()}
    reports, before = dict[str, Report](), dict[str, Report]()
    for target in dict.fromkeys([original, *targets.values()]):
        own = {name: contender for name, contender in contenders.items() if targets[name] is target}
        if own:
            settings: Settings = dict(new_tokens=job.decoding.new_tokens, sequences=job.decoding.sequences)
            first = began.of(target, job.decoding.policy, _other_prompts(job))
            made = make_reports(target, [*own.values(), *first.values()], job.prompts, job.decoding.sampling, **settings)
            reports |= {name: report | began.beside(name, own[name]) for name, report in zip(own, made, strict=False)}
            before |= dict(zip(first, made[len(own) :], strict=True))
    for name, report in reports.items():
        arm, there = arms[name], exported[name]
        if job.several:
            reports[name] = report = report | costs_of(targets[name], contenders[name], job.prompts, job.decoding.new_tokens)
        write = partial(write_report, report, curves=read_metrics(arm.run))
        place = job.room.keep(f"{arm.label}the report", 1 << 22, arm.places, write)
        where_card = write_card(there.speculator, report, targets[name], job.own[name] | {"data": job.settings["data"]})
        arm.tracker.report(report, place, there.speculator)
        if not job.several:
            show(report)
            show_serving(report)
            print(f"speculator: {there.speculator}   report: {place / 'report.md'}, report.html, report.png   {where_card}")
        elif not where_card.startswith("card: "):
            print(where_card)
    if job.several:
        curves = {name: read_metrics(arms[name].run) for name in reports}
        about: Settings = dict(settings={name: job.own[name] for name in reports}, curves=curves)
        write = partial(compare, original.name, reports | before, _failures(job), **about)
        job.room.keep("the comparison", 1 << 20, job.places, lambda place: write(folder=place))
    _raise_failures(job)
    return reports


def _failures(job: Job) -> dict[str, str]:
    return {arm.name: arm.failed for arm in job.arms if arm.failed}


def _raise_failures(job: Job) -> None:
    if failed := _failures(job):
        name, why = next(iter(failed.items()))
        raise UserError(f"{len(failed)} of {len(job.arms)} arms failed; {name}: {why}")


def _other_prompts(job: Job) -> list[list[int]]:
    """Held-out prompts other than the report's: the acceptance measured on them helps to decode the report's prompts. If there are no
    others, the report's own.
    """
    more: list[list[int]] = []
    with suppress(UserError, OSError):  # a further prompt may be too long, which must not end the run
        more = job.source.prompts(len(job.prompts) + prior.PROMPTS, job.decoding.new_tokens)
    return [prompt for prompt in more if prompt not in job.prompts] or job.prompts


def _contender(job: Job, arm: Arm, there: Exported, target: Target, drafter: Drafter) -> Contender:
    settings, fitted, rows = job.own[arm.name], arm.fitted, job.held_out
    drafter.acceptance = prior.measure(target, drafter, _other_prompts(job))
    with suppress(OSError):  # the acceptance can be measured again
        prior.write(there.speculator, drafter.acceptance)
    extra: dict[str, Any] = {"train_seconds": round(fitted.seconds, 3), "train_tokens": fitted.tokens, "train_steps": fitted.steps}
    if there.step != fitted.steps:  # trainer.keep=best; all steps read equally many tokens
        extra |= {"exported_step": there.step, "exported_tokens": fitted.tokens * there.step // fitted.steps}
    if arm.stopped:
        extra["stopped_early"] = arm.patience.state()
    data = job.settings["data"]["name"]
    extra |= {"data": data, "loss": settings["loss"], "prompts_from": f"held-out text of {data}"}
    if job.changed.get(arm.name):
        extra["changed_settings"] = job.changed[arm.name]
    if (path := arm.run / DIAGNOSIS).is_file():  # expected and decoded length differed during training
        extra["diagnosis"] = {key: value for key, value in read_json(path).items() if key in ("step", "apart", "findings")}
    extra |= serving_keys(drafter, target, there.speculator, job.decoding.policy, there.changed)
    if there.changed is not None:
        rows = [look(batch, target, arm.drafter.taps) for batch in rows]
        how = how_changed(job.target.opened(), target, job.held_out, job.prompts, settings["loss"]["chunk"])
        extra["target_changed"] = settings["trainer"]["lora"] | how
    if rows:
        depth = fit_depth(job.decoding.policy, drafter).depth  # the chain's depth, so that both estimates differ in the text alone
        figures = evaluate(Learner(drafter, **(settings["loss"] | {"depth": depth})), rows, depth)
        extra["off_policy_expected_length"] = figures["heldout_expected_length"]
    return Contender(drafter, job.decoding.policy, extra=extra)
