"""P-EAGLE as vLLM loads it: EAGLE-3's folder with ``mask_hidden`` and ``mask_token_id``. vLLM needs parallel_drafting for it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from headstart.heads.base import TargetShape
from headstart.heads.errors import UserError
from headstart.heads.formats import eagle3
from headstart.heads.formats.keys import need
from headstart.heads.serving import Command, vllm

names, canonical, extras, read = eagle3.names, eagle3.canonical, eagle3.extras, eagle3.read


def config(drafter: Any) -> dict[str, Any]:
    """EAGLE-3's keys and the mask token."""
    return eagle3.config(drafter) | {"mask_token_id": drafter.mask_token}


def recognises(config: dict[str, Any]) -> bool:
    """EAGLE-3 with a mask token."""
    return eagle3.is_eagle3(config) and config.get("mask_token_id") is not None


def arguments(config: dict[str, Any], tensors: dict[str, Tensor], shape: TargetShape) -> tuple[str, dict[str, Any]]:
    """EAGLE-3's arguments and the mask token. The folder does not state the trained depth: the default is 8, the paper's.
    Raises UserError for keys that do not fit.
    """
    mask = config["mask_token_id"]
    need(config, dict.fromkeys(("dspark_noise_token_id", "pard_token", "ptd_token_id"), (mask, None)))
    _, found = eagle3.arguments(config, tensors, shape)
    for key in ("norm_before_fc", "norm_before_residual"):
        if found.pop(key):
            raise UserError(f"the folder has {key}=True, which this drafter does not have")
    del found["norm_output"]  # a block feeds nothing back
    return "peagle", found | {"mask_token": mask}


def serving(drafter: Any, target: str, folder: str, guesses: int) -> list[Command]:
    """vLLM, with parallel drafting."""
    needs = "0.16 or newer" if drafter.fc_norm is None else "0.26 or newer"
    return [vllm(target, folder, "eagle3", guesses, needs, parallel_drafting=True)]
