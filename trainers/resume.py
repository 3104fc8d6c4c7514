"""Finds the checkpoint that a run resumes from: the newest one with the same settings, apart from the number of steps."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from accelerate.utils import gather_object

from headstart.data.source import of_rows
from headstart.heads.errors import UserError
from headstart.inference.reports.compare import flat
from headstart.trainers import checkpoint
from headstart.trainers.optimizer import FLOOR, learning_rate

# Settings of the trainer that a resumed run may change; also epochs, which trainer.steps already expresses.
FREE = (
    "save_every", "keep", "background", "eval_every", "resume", "precision", "skips", "spike", "timeout", "profile",
    "gradient_checkpointing", "epochs", "decode_every", "patience", "log_every",
)  # fmt: skip
# The values of settings that runs of earlier versions did not have yet.
EARLIER = {
    "trainer.momentum": 0.95, "trainer.ns_steps": 5, "trainer.floor": FLOOR, "head.norm_before_fc": False,
    "head.norm_before_residual": False, "head.markov": "vanilla", "loss.detach": False,
}  # fmt: skip


class Batch(NamedTuple):
    """How the rows of a step are divided: each of ``processes`` processes reads ``rows`` rows per micro-batch, ``accumulate`` times."""

    rows: int
    accumulate: int
    processes: int

    @property
    def size(self) -> int:
        """The number of rows in a step, over all processes."""
        return self.rows * self.accumulate * self.processes

    def goes_on_from(self, begun: Batch) -> bool:
        """Whether a run that began with ``begun`` can go on: if a step has as many rows as before, or if only the number of processes
        differs (``shared_out`` then divides the rows anew).
        """
        return self.size == begun.size or self[:2] == begun[:2]


def lasting(own: dict[str, Any], data: dict[str, Any], batch: Batch, **known: Any) -> dict[str, Any]:
    """The settings that a run and its continuation must have in common, in the form in which they are compared with a checkpoint's.
    ``own``: an arm's head, loss and trainer. ``batch``: what the run began with. ``known``: values known only after the target is loaded,
    such as its fingerprint (``target``) and the digest of the training rows (``rows``).
    """
    loop = {k: v for k, v in own["trainer"].items() if k not in FREE} | {"batch_size": batch.rows, "accumulate": batch.accumulate}
    loss = {k: v for k, v in own["loss"].items() if k not in ("kernel", "chunk")}  # these only change rounding, as precision does
    same = {"data": of_rows(data), "loss": loss, "launcher": {"processes": batch.processes}, "trainer": loop, **known}
    if known or own["trainer"]["start"] is None:  # else the head's settings come from the folder it starts from
        same["head"] = own["head"]
    return dict(json.loads(json.dumps(same)))


def batch_of(
    trainer: dict[str, Any], processes: int, runs: Iterable[Path], losses: Iterable[dict[str, Any]], streamed: bool
) -> tuple[Batch, Batch]:
    """How the rows of a step are divided now, and how they were when the run began. Raises UserError if this number of processes cannot
    resume the run.
    """
    asked = Batch(trainer["batch_size"], trainer["accumulate"], processes)
    begun = began_with(runs, asked) if trainer["resume"] else asked
    now = shared_out(asked, begun, losses, streamed)
    if not asked.goes_on_from(begun):  # keep what was asked, so that the comparison of settings refuses it
        begun = asked._replace(processes=begun.processes)
    return now, begun


def began_with(runs: Iterable[Path], now: Batch) -> Batch:
    """The ``Batch`` that the run in these folders began with; ``now`` if there is no checkpoint. Raises UserError if the arms' steps have
    different numbers of rows.
    """
    found: dict[Batch, Path] = {}
    for folder in filter(None, map(checkpoint.newest, runs)):
        settings = checkpoint.read_state(folder)["settings"]
        trainer, launcher = settings.get("trainer", {}), settings.get("launcher", {})
        saved = Batch(trainer.get("batch_size"), trainer.get("accumulate"), launcher.get("processes"))
        if all(type(x) is int and x > 0 for x in saved):
            found[saved] = folder
    if len({batch.size for batch in found}) > 1:
        (a, one), (b, other) = list(found.items())[:2]
        raise UserError(f"the steps of {one} have {a.size} rows, those of {other} {b.size}: they do not go on together")
    return next(iter(found), now)


def shared_out(now: Batch, begun: Batch, losses: Iterable[dict[str, Any]], streamed: bool = False) -> Batch:
    """Divide the rows of a step of ``begun`` among the processes of ``now``: as ``now`` asks, if the number of rows is the same; else
    equally, each share in the fewest equal micro-batches of at most ``now.rows`` rows. Raises UserError if the rows cannot be divided
    equally, or if the loss or the data depend on the division.
    """
    if now == begun or not now.goes_on_from(begun):  # in the latter case the comparison of settings refuses the run later
        return now
    share, rest = divmod(begun.size, now.processes)
    if rest:
        could = ", ".join(str(n) for n in range(1, begun.size + 1) if begun.size % n == 0)
        raise UserError(f"a step of this run has {begun.size} rows, which {now.processes} processes cannot share equally: "
                        f"go on with one of {could}, or start over with trainer.resume=false")  # fmt: skip
    accumulate = now.accumulate
    if now.size != begun.size:
        accumulate = next(n for n in range(1, share + 1) if share % n == 0 and share // n <= now.rows)
    if streamed and now.processes != begun.processes:
        raise UserError(f"data.stream: which rows are read depends on the number of processes: go on with {begun.processes}, as the run "
                        "began")  # fmt: skip
    for loss in losses:
        if loss["on_policy"] and now.processes != begun.processes:
            raise UserError(f"loss.on_policy keeps rows of each process: go on with {begun.processes}, as the run began")
        if (why := read_together(loss)) and share // accumulate != begun.rows:
            also = f" and {begun.processes} processes" if now.processes != begun.processes else ""
            raise UserError(f"{why}: go on with trainer.batch_size={begun.rows}{also}, as the run began")
    return Batch(share // accumulate, accumulate, now.processes)


def read_together(loss: dict[str, Any]) -> str:
    """Why a run with this loss must keep the number of rows in a micro-batch; "" if that may change."""
    if loss["on_policy"]:
        return "loss.on_policy takes as many of the drafter's own rows as a batch has"
    return "loss.weighting=dpace is of the rows that are read together" if loss["weighting"] == "dpace" else ""


def check_earlier(runs: Sequence[Path], same: dict[str, Any], resume: bool) -> None:
    """Raises UserError for checkpoints of an earlier run that this run cannot resume from, or cannot even list in order to remove them."""
    if resume:
        resumable(runs, same)
    else:
        checkpoint.folders(*runs)


def check_alike(run: Path, step: int, settings: dict[str, Any]) -> None:
    """Compare what the processes are about to train; all of them call this. ``step``: where this one resumes. ``settings``: as for
    ``resumable``, so with digests of the target and of the rows. Raises UserError in every process if the processes differ.
    """
    found: list[tuple[int, dict[str, Any]]] = gather_object([(step, flat(settings))])
    steps = {began for began, _ in found}
    if len(steps) > 1:
        raise UserError(f"out must be a folder that all machines share: in {run} one process finds a checkpoint of step "
                        f"{max(steps)}, another stands at {min(steps)}")  # fmt: skip
    first = found[0][1]
    if differ := sorted({k for _, own in found for k in first.keys() | own.keys() if own.get(k) != first.get(k)}):
        raise UserError(f"the processes of this run differ in {', '.join(differ)}: start all of them with the same settings, and with the "
                        "same files of the target and of the data on every machine (rows: the tokens that are read)")  # fmt: skip


def resumable(runs: Iterable[Path], settings: dict[str, Any]) -> tuple[Path, dict[str, Any]] | None:
    """The checkpoint that a run of these ``settings`` resumes from, with its checked state; None if there are no checkpoints.

    ``runs``: the run's folder, and the one it uses when that is full. Only the keys in ``settings`` are compared, because some are not
    known before the target is loaded. Raises UserError if a checkpoint is damaged, has other settings, or belongs to a run of another
    number of steps that this run cannot continue.
    """
    there = checkpoint.folders(*runs)
    for folder in reversed(there):
        state = checkpoint.read_state(folder)
        _same_settings(state["settings"], settings, folder)
        if _leads_to(state, settings):
            checkpoint.check_files(folder, state)
            return folder, state
    if there:
        raise UserError(_no_way(there[-1], checkpoint.read_state(there[-1]), settings))
    return None


def _leads_to(state: dict[str, Any], settings: dict[str, Any]) -> bool:
    """Whether a run of ``settings`` from the start would reach the same weights at this checkpoint's step, even if its number of steps
    differs.
    """
    saved, now = state["settings"].get("trainer", {}), settings.get("trainer", {})
    step, then, steps = state["step"], saved.get("steps"), now.get("steps")
    if then == steps:
        return True
    if step > steps or counts_in_shares(now["warmup"], now["lora"], settings["loss"]["base_until"]):
        return False
    rate = (now["warmup"], now["schedule"], now.get("floor", FLOOR))
    return all(learning_rate(t, then, *rate) == learning_rate(t, steps, *rate) for t in range(step))


def counts_in_shares(warmup: float, lora: Any, base_until: float) -> bool:
    """Whether a setting is a share of the number of steps. Then every step depends on that number."""
    return 0 < warmup < 1 or lora is not None or base_until > 0


def _no_way(newest: Path, state: dict[str, Any], settings: dict[str, Any]) -> str:
    run, step, then, trainer = newest.parent.parent, state["step"], state["settings"]["trainer"]["steps"], settings["trainer"]
    now, trained = trainer["steps"], run / "speculator"
    why = f"trainer.schedule={trainer['schedule']} has fallen on its way to {then}"
    if step > now:
        why = "it is beyond them"
    elif counts_in_shares(trainer["warmup"], trainer["lora"], settings["loss"]["base_until"]):
        why = "trainer.warmup below 1, loss.base_until and trainer.lora.start are shares of the steps"
    further = f"go on from its weights in a folder of its own (trainer.start={trained} out=DIR)"
    if not trained.is_dir():
        further = f"finish it (trainer.steps={then}) and {further}"
    return f"{run} holds a run of trainer.steps={then} at step {step}, which cannot become one of {now}: {why}. " \
           f"Either {further}, or start over with trainer.resume=false"  # fmt: skip


def _same_settings(saved: dict[str, Any], now: dict[str, Any], folder: Path) -> None:
    """Raises UserError naming a key whose value has changed: resuming would make a different run under the same name."""
    old, new = ({k: v for k, v in flat(x).items() if v != {}} for x in ({key: saved.get(key) for key in now}, now))
    old = {k: v for k, v in EARLIER.items() if k in new} | old
    differ = (k for k in old.keys() | new.keys() if old.get(k) != new.get(k) and k != "trainer.steps")
    changed = sorted(differ, key=lambda k: (not k.endswith(".name"), k))  # name first: another drafter also has other settings
    if not changed:
        return
    run = folder.parent.parent
    advice = "give the new run its own folder (out=DIR), or start over with trainer.resume=false"
    if changed == ["rows"]:
        raise UserError(f"{run} holds a run that was trained on other rows: the data have changed since, or what makes tokens of them "
                        f"(SHA-256 {str(saved.get('rows'))[:12]}, now {now['rows'][:12]}): {advice}")  # fmt: skip
    key = next(k for k in changed if k != "rows")  # rows change as a consequence of other keys
    raise UserError(f"{run} holds a run with {key}={_short(old.get(key))}, now it is {_short(new.get(key))}: {advice}")


def _short(value: Any) -> str:
    """The value, abbreviated: a trimmed vocabulary has thousands of ids."""
    return value if isinstance(value, str) else reprlib.repr(value)
