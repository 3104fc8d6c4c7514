"""Our own format, for drafters that no serving engine loads as they are. The bundled inference module loads them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from headstart.heads.base import Drafter, TargetShape
from headstart.heads.errors import UserError
from headstart.heads.formats.keys import alike, shown
from headstart.heads.serving import Command


def names(drafter: Drafter) -> dict[str, str]:
    """Our own names, unchanged."""
    return {name: name for name in drafter.state_dict()}


def config(drafter: Drafter) -> dict[str, Any]:
    """Only the keys that every folder needs."""
    sizes = {"hidden_size": drafter.shape.hidden_size, "vocab_size": drafter.shape.vocab_size}
    return {"architectures": [type(drafter).__name__], **sizes, **_unseen(drafter.shape)}


def _unseen(shape: TargetShape) -> dict[str, Any]:
    """What a drafter takes from its target and no tensor reveals, under Llama's names."""
    return {"rms_norm_eps": shape.norm_eps, "rope_parameters": dict(shape.rope)}


def arguments(config: dict[str, Any], tensors: dict[str, Tensor], shape: TargetShape) -> None:
    """Raises UserError where the target at hand has another RoPE or norm epsilon than the one that the drafter was trained for. (Folders
    of earlier versions lack these keys.)
    """
    for key, here in _unseen(shape).items():
        if key in config and not alike(config[key], here):
            raise UserError(f"the drafter was trained with {key} {shown(config[key])}, the target has {shown(here)}")


def serving(drafter: Drafter, target: str, folder: str, guesses: int) -> list[Command]:
    """No commands: no engine loads it."""
    return []


def unserved(drafter: Drafter) -> str:
    """Why no engine loads the folder and, if other settings would change that, which ones."""
    given = drafter.config
    if "mask_token" in given and given["mask_token"] is None:
        return "its mask is a vector of its own; trained with head.mask_token=ID, a token that no text has, engines load it"
    if type(drafter).format != "native" and given.get("draft_vocab") is not None and drafter.max_depth is not None:
        return "engines have no trimmed vocabulary for this kind; trained with head.draft_vocab=null they load it"
    if type(drafter).format != "native":
        return "it reads the target's last layer behind the final norm, engines before it; trained with other head.taps they load it"
    return "none has this kind of drafter"
