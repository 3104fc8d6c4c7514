"""P-EAGLE as vLLM loads it: EAGLE-3's folder with ``mask_hidden`` and ``mask_token_id``. vLLM needs parallel_drafting for it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from headstart.heads.base import TargetShape
from headstart.heads.errors import UserError
from headstart.heads.formats import eagle3
from headstart.heads.formats.keys import need
from headstart.heads.formats.windows import FROM_ANCHOR
from headstart.heads.serving import Command, vllm

names, canonical, extras, read = eagle3.names, eagle3.canonical, eagle3.extras, eagle3.read


def config(drafter: Any) -> dict[str, Any]:
    """EAGLE-3's keys and the mask token."""
    return eagle3.config(drafter) | {"mask_token_id": drafter.mask_token}


def recognises(config: dict[str, Any]) -> bool:
    """EAGLE-3 with a mask token."""
    return eagle3.is_eagle3(config) and config.get("mask_token_id") is not None


def arguments(config: dict[str, Any], tensors: dict[str, Tensor], shape: TargetShape) -> tuple[str, dict[str, Any]]:
    """EAGLE-3's arguments and the mask token. The folder does not state the trained depth: the default is 8, the paper's. An embedding in
    it is the drafter's own, which the speculators library trains; whether it is only a copy of the target's is not known here. Raises
    UserError for keys that do not fit.
    """
    mask = config["mask_token_id"]
    need(config, dict.fromkeys(("dspark_noise_token_id", "pard_token", "ptd_token_id"), (mask, None)))
    _, found = eagle3.arguments(config, tensors, shape)
    if not found.pop("window_slides", True):
        raise UserError(f"the folder has {FROM_ANCHOR}=True: this drafter counts its window from each row")
    del found["norm_output"]  # a block feeds nothing back
    own = any(canonical(name) == "embed_tokens.weight" for name in tensors)
    return "peagle", found | {"mask_token": mask, "own_embedding": own}


def serving(drafter: Any, target: str, folder: str, guesses: int) -> list[Command]:
    """vLLM, with parallel drafting."""
    newer = drafter.qk_norm or drafter.window is not None or drafter.embed_tokens is not None
    needs = "0.32" if newer else "0.16" if drafter.fc_norm is None and drafter.input_norm is None else "0.26"
    return [vllm(target, folder, "eagle3", guesses, f"{needs} or newer", parallel_drafting=True)]
