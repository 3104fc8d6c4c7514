"""The drafter that a training begins with: a fresh one, or a trained one (trainer.start)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from accelerate.utils import set_seed
from torch import Tensor

from headstart.data.source import Source
from headstart.heads import hub
from headstart.heads.base import Drafter, TargetShape
from headstart.heads.errors import UserError
from headstart.heads.vocab import most_frequent
from headstart.inference.decoding.info import TargetInfo
from headstart.inference.settings import Settings
from headstart.trainers import checkpoint


def check_start(start: str | None, head: Settings, runs: Iterable[Path]) -> None:
    """Raises UserError if ``trainer.start`` is a folder that this run writes, or is used with LoRA. ``runs``: the arms' run folders."""
    if start is None:
        return
    if any(Path(start).resolve() == (run / "speculator").resolve() for run in runs):
        raise UserError(f"trainer.start={start} is what this very run writes: give the new run its own folder (out=DIR)")
    if head.get("lora") is not None:  # a LoRA drafter is saved with merged weights
        raise UserError(f"trainer.start goes on with all weights: for LoRA take head.folder={start} head.config=null instead")


def first_drafter(
    name: str, own: Settings, target: TargetInfo, source: Source, places: Sequence[Path]
) -> tuple[Drafter, dict[str, Tensor]]:
    """An arm's drafter and the random state at the start of its training, both as if the arm trained alone. ``own``: its head, loss and
    trainer. With ``trainer.start``, ``own["head"]`` is replaced by the settings of the loaded drafter. ``places``: the arm's run folder,
    and the one on another disk if there is one. Raises UserError.
    """
    set_seed(own["trainer"]["seed"])
    try:
        if (start := own["trainer"]["start"]) is None:
            drafter = open_drafter(own["head"], target, source)
        else:
            drafter, own["head"] = open_start(start, own["head"], target, source, places, own["trainer"]["resume"])
    except UserError as e:
        raise UserError(f"arm {name}: {e}" if name else str(e)) from e
    return drafter, checkpoint.rng_state()


def open_drafter(head: Settings, target: TargetInfo, source: Source) -> Drafter:
    """A fresh drafter on the target's device. If ``draft_vocab`` is a number, it gets that many of the data's most frequent tokens."""
    arguments = {k: v for k, v in head.items() if k != "name"}
    if isinstance(arguments.get("draft_vocab"), int):
        arguments["draft_vocab"] = most_frequent(source.counts(), arguments["draft_vocab"])
    drafter = hub.build(head["name"], target.shape, **arguments)
    drafter.attach(target.ends)
    drafter.start_from(target.ends)
    return drafter.to(target.device)


def trained_drafter(folder: str, head: str, target: TargetInfo) -> Drafter:
    """A saved drafter to train further, in fp32, with the settings of its folder. Raises UserError if it cannot be loaded or is not of the
    kind ``head``.
    """
    drafter = _saved(folder, head, target.shape, target.card)
    drafter.attach(target.ends)
    return drafter.to(device=target.device, dtype=torch.float32)


def as_started(own: Settings, shape: TargetShape) -> Settings:
    """An arm's settings for a plan: with ``trainer.start``, those of its head are the folder's, as in a run. Raises UserError."""
    if (start := own["trainer"]["start"]) is None:
        return own
    return own | {"head": _settings(_saved(start, own["head"]["name"], shape, None))}


def _saved(folder: str, head: str, shape: TargetShape, card: Settings | None) -> Drafter:
    try:
        drafter = hub.load(folder, shape, card)
    except UserError as e:
        raise UserError(f"trainer.start: {e}") from e
    if (found := drafter.config["head"]) != head:
        raise UserError(f"trainer.start: {folder} holds a drafter of the kind {found}: train it with head={found}")
    return drafter


def _settings(drafter: Drafter) -> Settings:
    return {"name": drafter.config["head"]} | {k: v for k, v in drafter.config.items() if k != "head"}


def open_start(
    start: str, head: Settings, target: TargetInfo, source: Source, places: Sequence[Path], resume: bool
) -> tuple[Drafter, Settings]:
    """The drafter of ``trainer.start`` and its settings. A resumed run that began with it does not need the folder: the checkpoint, which
    is loaded later, holds all weights. ``places``: as in ``first_drafter``. Raises UserError.
    """
    settings = _began(start, head["name"], places) if resume else None
    if settings is None:
        drafter = trained_drafter(start, head["name"], target)
        settings = _settings(drafter)
    else:
        drafter = open_drafter(settings, target, source)
    trained_by = {key: head[key] for key in drafter.only_trained if key in head and key in settings}
    if trained_by:
        with torch.device("meta"):  # built only for its error about a wrong value
            hub.build(head["name"], target.shape, **{k: v for k, v in settings.items() if k != "name"} | trained_by)
    for key, value in trained_by.items():
        setattr(drafter, key, value)
    drafter.config |= trained_by
    return drafter, settings | trained_by


def _began(start: str, name: str, places: Sequence[Path]) -> Settings | None:
    """The head's settings in the run's newest checkpoint, if that run began with the drafter in ``start``; else None."""
    newest = checkpoint.newest(*places)
    if newest is None:
        return None
    saved = checkpoint.read_state(newest)["settings"]
    head, trainer = saved.get("head"), saved.get("trainer")
    same = isinstance(head, dict) and isinstance(trainer, dict) and head.get("name") == name and trainer.get("start") == start
    return dict(head) if same else None
