"""An ordinary Hugging Face causal LM folder: every engine and transformers load it as an independent draft model."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from heads.base import TargetShape

with_tokenizer = True  # engines load the draft model's own tokenizer


def names(drafter: Any) -> dict[str, str]:
    stored = set(drafter.state_dict())
    tied = getattr(drafter.lm, "all_tied_weights_keys", None) or {}
    return {name: name.removeprefix("lm.") for name in stored if name.removeprefix("lm.") not in tied}


def extras(drafter: Any) -> dict[str, Tensor]:
    return {}


def config(drafter: Any) -> dict[str, Any]:
    return {**drafter.lm.config.to_dict(), "architectures": [type(drafter.lm).__name__]}


def recognises(config: dict[str, Any]) -> bool:
    return False  # any causal LM is one: say so with head=draft_lm head.folder=DIR


def arguments(config: dict[str, Any], tensors: dict[str, Tensor], shape: TargetShape) -> tuple[str, dict[str, Any]]:
    raise RuntimeError("not recognised without our own block")
