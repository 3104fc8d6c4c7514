"""Loading a drafter from a speculator folder, to decode with a target."""

from __future__ import annotations

from pathlib import Path

from headstart.heads import hub
from headstart.heads.base import Drafter
from headstart.heads.errors import UserError
from headstart.heads.files import check_exported
from headstart.heads.transplant import check_same, tokenizer_of
from headstart.inference.decoding.info import TargetInfo
from headstart.inference.decoding.placement import say
from headstart.inference.decoding.target import Target
from headstart.inference.reports import prior


def open_speculator(folder: str | Path, target: Target) -> Drafter:
    """Open a saved drafter, or any causal LM with the target's tokenizer, attached to the target and prepacked for decoding. (To train a
    saved drafter further, use ``hub.load``.) Raises UserError where it does not fit the target.
    """
    drafter = load_attached(folder, target)
    drafter.acceptance = prior.read(folder)
    return drafter.prepack()


def load_attached(folder: str | Path, target: TargetInfo) -> Drafter:
    """``open_speculator`` without prepacking. It needs no layers of the target, and the drafter's weights can still be read and trained."""
    drafter = load_speculator(folder, target)
    drafter.attach(target.ends)
    return drafter.to(device=target.device, dtype=target.dtype).eval()


def load_speculator(folder: str | Path, target: TargetInfo) -> Drafter:
    """``load_attached`` without attaching the drafter to the target. The drafter stays in the folder's dtype."""
    check_exported(folder)
    if Path(folder).resolve() == Path(target.name).resolve():
        say(f"speculator={folder} is the target itself: a guess costs as much as a plain pass, so nothing can be gained")
    if not hub.is_language_model(folder):
        return hub.load(folder, target.shape, target.card)
    try:
        own = tokenizer_of(str(folder)) if target.tokenizer is not None else None  # else only the sizes of the vocabularies are compared
        if own is not None:
            check_same(
                "its tokenizer", own, target.tokenizer, "take a model of the target's family, or train this one with head.transplant=true"
            )
        return hub.open_language_model(folder, target.shape, transplant=own is not None)  # models of a family may have unused tokens
    except UserError as e:
        raise UserError(f"{folder} cannot be the draft model of {target.name}: {e}") from e
