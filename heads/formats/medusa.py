"""The Medusa folder that vLLM 0.10 to 0.32 load with ``method: medusa`` (0.33 has dropped it).

Without ``medusa_fc_bias`` vLLM drops the biases. Names of the authors' checkpoints (``h.l.linear``, ``h.L`` for the output head), with or
without ``medusa_heads.`` before them, are read too. One output head for all depths, which a trimmed vocabulary needs there, is refused.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from heads.base import TargetShape
from heads.errors import UserError
from heads.serving import Command, vllm

names_target = True  # TGI is started with the drafter's folder and finds the target by its config


def names(drafter: Any) -> dict[str, str]:
    return {name: canonical(name) for name in drafter.state_dict()}


def canonical(name: str) -> str:
    name = re.sub(r"^(blocks\.)?(\d+)\.(\d+)\.linear\.", r"blocks.\2.layers.\3.", name.removeprefix("medusa_heads."))
    return re.sub(r"^(\d+)\.\d+\.weight$", r"lm_heads.\1.weight", name)


def extras(drafter: Any) -> dict[str, Tensor]:
    return {}


def config(drafter: Any) -> dict[str, Any]:
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
    return config.get("model_type") == "medusa"


def arguments(config: dict[str, Any], tensors: dict[str, Tensor], shape: TargetShape) -> tuple[str, dict[str, Any]]:
    expected = {"original_lm_head": False, "truncated_vocab_size": shape.vocab_size, "logit_scale": 1.0}
    for key, value in expected.items():
        if (found := config.get(key)) not in (None, value):
            raise UserError(f"the folder has {key}={found}, this drafter needs {value}")
    if not config.get("medusa_fc_bias", False):
        for name in [n for n in map(canonical, tensors) if n.startswith("blocks.") and n.endswith(".weight")]:
            tensors[name.removesuffix("weight") + "bias"] = torch.zeros(shape.hidden_size)
    heads, layers = (config.get(f"medusa_{a}", config.get(b)) for a, b in (("num_heads", "num_heads"), ("num_layers", "num_hidden_layers")))
    return "medusa", {"heads": 5 if heads is None else heads, "layers": 1 if layers is None else layers}


def serving(drafter: Any, target: str, folder: str, guesses: int) -> list[Command]:
    """All heads guess in every round, however many tokens are asked for."""
    return [vllm(target, folder, "medusa", drafter.max_depth, "0.10 to 0.32; later ones have no Medusa")]
