"""Where a run goes on: the newest checkpoint of the same settings, or of a run that was to be longer or shorter."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from headstart.data.source import of_rows
from headstart.heads.errors import UserError
from headstart.trainers import checkpoint
from headstart.trainers.optimizer import learning_rate

FREE = ("save_every", "keep", "eval_every", "resume", "precision")  # settings of a trainer that a continuation may change


def lasting(own: dict[str, Any], data: dict[str, Any], processes: int, **known: Any) -> dict[str, Any]:
    """What a run and its continuation have in common, as it is compared with what a checkpoint holds. ``own``: an arm's head, loss and
    trainer; ``known``: what is known once the target is loaded, ``target`` and ``rows`` (the digest of the training rows).
    """
    loop = {k: v for k, v in own["trainer"].items() if k not in FREE}
    same = {"data": of_rows(data), "loss": own["loss"], "launcher": {"processes": processes}, "trainer": loop, **known}
    if known or own["trainer"]["start"] is None:  # else the folder that it starts from says what the head is
        same["head"] = own["head"]
    return dict(json.loads(json.dumps(same)))


def check_earlier(runs: Sequence[Path], same: dict[str, Any], resume: bool) -> None:
    """Raises UserError for what an earlier run has left there and this one cannot go on with, or not even remove."""
    if resume:
        resumable(runs, same)
    for run in runs:
        checkpoint.folders(run)


def resumable(runs: Iterable[Path], settings: dict[str, Any]) -> tuple[Path, dict[str, Any]] | None:
    """The checkpoint that a run of these ``settings`` goes on from, and its state, whole to the last bit; None where there is none.

    ``runs``: the run's folder, and where it writes when that is full. Only what ``settings`` hold is compared: not all of them are
    known before the target is loaded. Raises UserError where a checkpoint is damaged, of a run with other settings, or of another number
    of steps that cannot become this one.
    """
    there = sorted((folder for run in runs for folder in checkpoint.folders(run)), key=checkpoint.step_of)
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
    """Whether a run of ``settings`` would have had these weights at this step, whatever number of steps it was to have then."""
    saved, now = state["settings"].get("trainer", {}), settings.get("trainer", {})
    step, then, steps = state["step"], saved.get("steps"), now.get("steps")
    if then == steps:
        return True
    if step > steps or counts_in_shares(now["lora"], settings["loss"]):
        return False
    rate = (now["warmup"], now["schedule"])
    return all(learning_rate(t, then, *rate) == learning_rate(t, steps, *rate) for t in range(step))


def counts_in_shares(lora: Any, loss: dict[str, Any]) -> bool:
    """Whether something begins or ends at a share of the steps: then every step hangs on how many there are."""
    return lora is not None or bool(loss["base_until"])


def _no_way(newest: Path, state: dict[str, Any], settings: dict[str, Any]) -> str:
    run, step, then = newest.parent.parent, state["step"], state["settings"]["trainer"]["steps"]
    now, trained = settings["trainer"]["steps"], run / "speculator"
    why = f"trainer.schedule={settings['trainer']['schedule']} has fallen on its way to {then}"
    if step > now:
        why = "it is beyond them"
    elif counts_in_shares(settings["trainer"]["lora"], settings["loss"]):
        why = "loss.base_until and trainer.lora.start are shares of the steps"
    further = f"go on from its weights in a folder of its own (trainer.start={trained} out=DIR)"
    if not trained.is_dir():
        further = f"finish it (trainer.steps={then}) and go on from its weights in a folder of its own (trainer.start={trained} out=DIR)"
    return f"{run} holds a run of trainer.steps={then} at step {step}, which cannot become one of {now}: {why}. " \
           f"Either {further}, or start over with trainer.resume=false"  # fmt: skip


def _same_settings(saved: dict[str, Any], now: dict[str, Any], folder: Path) -> None:
    """Continuing with other settings would be a different run under the same name. Raises UserError naming the key."""

    def flat(x: Any, prefix: str = "") -> dict[str, Any]:
        if not isinstance(x, dict):
            return {prefix[:-1]: x}
        return {k: v for key, value in x.items() for k, v in flat(value, f"{prefix}{key}.").items()}

    a, b = flat({key: saved.get(key) for key in now}), flat(now)
    changed = sorted(k for k in a.keys() | b.keys() if a.get(k) != b.get(k) and k != "trainer.steps")
    if not changed:
        return
    run, key = folder.parent.parent, changed[0]
    advice = "give the new run its own folder (out=DIR), or start over with trainer.resume=false"
    if changed == ["rows"]:
        raise UserError(f"{run} holds a run that was trained on other rows: the data have changed since, or what makes tokens of them "
                        f"(SHA-256 {str(saved.get('rows'))[:12]}, now {now['rows'][:12]}): {advice}")  # fmt: skip
    key = next(k for k in changed if k != "rows")  # which follow from the rest
    raise UserError(f"{run} holds a run with {key}={_short(a.get(key))}, now it is {_short(b.get(key))}: {advice}")


def _short(value: Any) -> str:
    """A trimmed vocabulary has thousands of ids."""
    return value if isinstance(value, str) else reprlib.repr(value)
