"""One run: target, drafter, data; fit, export, load the export, decode with it, report. Plain keyword arguments only."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import set_seed

from data.live import fingerprint
from data.prompts import check_prompts
from data.source import Source, open_source
from heads import hub
from heads.base import Drafter
from heads.errors import UserError
from heads.files import put_text
from heads.vocab import most_frequent
from inference.provenance import provenance
from inference.report import Report, fit_depth, make_report, show, write_report
from inference.settings import Settings, open_decode, open_speculator, open_target
from inference.target import DTYPES, Target
from trainers.tracker import Tracker
from trainers.trainer import Learner, evaluate, fit, resumable

HELD_OUT_ROWS = 16  # of held-out text, for the curve while training
WHOLE = ("trainer.steps", "trainer.rows", "trainer.accumulate", "trainer.save_every", "trainer.keep", "trainer.eval_every")
LEAST = dict.fromkeys((*WHOLE, "loss.depth", "loss.chunk"), 1)
LEAST |= dict.fromkeys(("trainer.lr", "trainer.warmup", "trainer.clip", "trainer.weight_decay", "trainer.seed", "loss.decay"), 0)


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
) -> Report | None:
    """Train a drafter and report what it gains. Returns the report (None in processes other than the first).

    The run folder ``out`` gets config.json, checkpoints/, speculator/, report.json, report.md, report.png and
    metrics.jsonl. The same call again resumes, or reports again when training was complete.
    """
    folder = Path(out)
    settings = dict(target=target, head=head, data=data, loss=loss, trainer=trainer, decode=decode, export=export)
    loop = dict(trainer)
    seed, rows, length, precision = (loop.pop(k) for k in ("seed", "rows", "length", "precision"))
    decoding = open_decode(decode)
    policy, sampling, new_tokens = decoding.policy, decoding.sampling, decoding.new_tokens
    if decoding.proposer["kind"] != "drafter":
        raise UserError("a training reports what its own drafter guesses: take decode=dynamic, best_first, chain or fixed")
    if export["dtype"] not in DTYPES:
        raise UserError(f"export.dtype must be one of {', '.join(DTYPES)}, found {export['dtype']!r}")
    check_numbers(trainer=trainer, loss=loss)
    frozen = open_target(target)
    set_seed(seed)
    source = open_source(data, frozen, length=length, seed=seed)
    drafter = open_drafter(head, frozen, source)
    accelerator = open_accelerator(precision, frozen.device)
    held_out = []
    if source.held_out is not None:
        share = range(min(HELD_OUT_ROWS, len(source.held_out)))
        held_out = [source.observe(source.held_out.batch(slice(i, i + rows)), drafter.taps) for i in share[::rows]]
    prompts = source.prompts(decoding.prompts, new_tokens)  # before the training: they may not be what is wanted
    check_prompts(prompts, new_tokens, frozen)
    # what may change between a run and its continuation is left out
    fixed = {k: v for k, v in loop.items() if k not in ("save_every", "keep", "eval_every", "resume")}
    same = dict(target=fingerprint(frozen), head=head, data=data, loss=loss, launcher={"processes": accelerator.num_processes})
    same["trainer"] = {"seed": seed, "rows": rows, "length": length, **fixed}
    same = json.loads(json.dumps(same))  # as it is compared with what a checkpoint holds
    if trainer["resume"]:
        resumable(folder, same)  # refused before anything in the folder changes
    record = {"config": settings, "provenance": provenance()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if accelerator.is_main_process:
            put_text(folder / "config.json", json.dumps(settings | {"provenance": record["provenance"]}, indent=2) + "\n")
    except OSError as e:
        raise UserError(f"the run folder out={out} cannot be written: {e}") from e
    log = Tracker(folder, settings, main=accelerator.is_main_process, resume=trainer["resume"], **tracker)
    try:
        fitted = fit(
            drafter,
            lambda start, rank, world: source.stream(drafter.taps, rows, seed, start, rank, world),
            lambda batch: source.observe(batch, drafter.taps),
            held_out,
            folder,
            log,
            accelerator,
            same,
            record,
            loss=loss,
            **loop,
        )
        if fitted.interrupted:
            accelerator.print(f"stopped after step {fitted.steps}; the same command resumes from {folder / 'checkpoints'}")
            raise SystemExit(130)
        accelerator.end_training()  # what follows is done by one process
        if not accelerator.is_main_process:
            return None
        hub.save(drafter, folder / "speculator", frozen.card, DTYPES[export["dtype"]], frozen.tokenizer)
        exported = open_speculator(folder / "speculator", frozen)  # what is served is what is measured
        extra = {
            "train_seconds": round(fitted.seconds, 1),
            "train_tokens": fitted.tokens,
            "train_steps": fitted.steps,
            "data": data["name"],
        }
        if held_out:
            depth = fit_depth(policy, exported).depth  # the chain's, so that the two estimates differ in the text alone
            figures = evaluate(Learner(exported, **(loss | {"depth": depth})), held_out, depth)
            extra["off_policy_expected_length"] = figures["heldout_expected_length"]
        report = make_report(frozen, exported, prompts, policy, sampling, new_tokens=new_tokens, extra=extra)
        try:
            write_report(report, folder)
        except OSError as e:
            raise UserError(f"the report cannot be written into {folder} ({e}): free some space and run the same command again") from e
        show(report)
        print(f"speculator: {folder / 'speculator'}   report: {folder / 'report.md'}, report.png")
        log.report(report, folder / "report.png")
        return report
    finally:
        log.close()


def open_accelerator(precision: str, device: torch.device) -> Accelerator:
    """The processes of this run. Raises UserError where they do not find each other."""
    AcceleratorState._reset_state(reset_partial_state=True)  # an earlier run of this process (--multirun) has left its own
    accelerator = Accelerator(mixed_precision=_precision(precision, device), cpu=device.type == "cpu")
    if accelerator.num_processes != int(os.environ.get("WORLD_SIZE", 1)):
        raise UserError(
            f"{os.environ['WORLD_SIZE']} processes were started, accelerate sees {accelerator.num_processes}: start them with torchrun"
        )
    return accelerator


def open_drafter(head: Settings, target: Target, source: Source) -> Drafter:
    """A fresh drafter. A trimmed vocabulary given as a number is counted from the data."""
    arguments = {k: v for k, v in head.items() if k != "name"}
    if isinstance(arguments.get("draft_vocab"), int):
        arguments["draft_vocab"] = most_frequent(source.counts(), arguments["draft_vocab"])
    drafter = hub.build(head["name"], target.shape, **arguments)
    drafter.attach(target.ends)
    drafter.start_from(target.ends)
    return drafter.to(target.device)


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
    betas = settings["trainer"]["betas"]
    if not isinstance(betas, list) or len(betas) != 2 or not all(isinstance(b, int | float) and 0 <= b < 1 for b in betas):
        raise UserError(f"trainer.betas must be two numbers from 0 to below 1, found {betas!r}")
