"""The Medusa folder that vLLM 0.10 to 0.32 load with ``method: medusa`` (0.33 has dropped it).

vLLM drops the biases of a file unless its config has ``medusa_fc_bias``; the authors' code, whose config has no such key, reads them,
and so do we. The names of the authors' checkpoints (``h.l.linear``, ``h.L`` for the output head),
with or without ``medusa_heads.`` before them, are read too. A single output head for all depths, which vLLM needs for a trimmed
vocabulary, is refused.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from headstart.heads.base import TargetShape
from headstart.heads.errors import UserError
from headstart.heads.formats.keys import agree, flag, need
from headstart.heads.serving import Command, vllm

names_target = True  # as published folders do (base_model_name_or_path)


def names(drafter: Any) -> dict[str, str]:
    """``blocks.d.layers.l.linear`` and ``lm_heads.d``."""
    return {name: canonical(name) for name in drafter.state_dict()}


def canonical(name: str) -> str:
    """The engines' name for a name in either of the authors' spellings."""
    name = re.sub(r"^(blocks\.)?(\d+)\.(\d+)\.linear\.", r"blocks.\2.layers.\3.", name.removeprefix("medusa_heads."))
    return re.sub(r"^(\d+)\.\d+\.weight$", r"lm_heads.\1.weight", name)


def config(drafter: Any) -> dict[str, Any]:
    """vLLM's keys, with biases and an output head for each depth."""
    V = drafter.shape.vocab_size
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": drafter.shape.hidden_size,
        "vocab_size": V,
        "truncated_vocab_size": V,
        "num_heads": len(drafter.blocks),
        "num_hidden_layers": len(drafter.blocks[0]),
        "medusa_fc_bias": True,
        "original_lm_head": False,
    }


def recognises(config: dict[str, Any]) -> bool:
    """A folder with this model_type."""
    return config.get("model_type") == "medusa"


def arguments(config: dict[str, Any], tensors: dict[str, Tensor], shape: TargetShape) -> tuple[str, dict[str, Any]]:
    """The numbers of heads and layers. To a file without biases, zeros are added. Raises UserError for keys that do not fit."""
    need(config, {"original_lm_head": (False, None), "truncated_vocab_size": (shape.vocab_size, None), "logit_scale": (1.0, None)})
    need(config, {"quantization_config": (None,)})
    said, biases = flag(config, "medusa_fc_bias"), any(name.endswith(".bias") for name in tensors)
    if biases and config.get("medusa_fc_bias") is False:
        raise UserError("the folder has medusa_fc_bias=False, but biases in its file: vLLM drops them, others read them; "
                        "set it to true, or take the biases out")  # fmt: skip
    if not said and not biases:
        for name in [n for n in map(canonical, tensors) if n.startswith("blocks.") and n.endswith(".weight")]:
            tensors[name.removesuffix("weight") + "bias"] = torch.zeros(shape.hidden_size, dtype=next(iter(tensors.values())).dtype)
    return "medusa", {"guesses": _count(config, "num_heads", 5), "layers": _count(config, "num_layers", 1, "num_hidden_layers")}


def _count(config: dict[str, Any], key: str, default: int, also: str | None = None) -> Any:
    """A number under either of its two names, or the default. Raises UserError where both are present and differ."""
    names = [f"medusa_{key}", also or key]
    found = [(name, config[name]) for name in names if config.get(name) is not None]
    if len(found) == 2:
        agree(*found[0], *found[1])
    return found[0][1] if found else default


def serving(drafter: Any, target: str, folder: str, guesses: int) -> list[Command]:
    """vLLM. All heads guess in every round, whatever number of tokens is requested."""
    return [vllm(target, folder, "medusa", drafter.max_depth, "0.10 to 0.32; later ones have no Medusa")]
