"""The MLP speculator folder of IBM's accelerators: vLLM up to 0.9 and TGI 3.3.7 load it.

TGI wants the prefix ``speculator.``, which vLLM drops. It computes the scales from its own ``--speculate``, which must therefore equal
``n_predict``, and it does not know ``scale_input``.
"""

from __future__ import annotations

import shlex
from typing import Any

from torch import Tensor

from headstart.heads.base import TargetShape
from headstart.heads.errors import UserError
from headstart.heads.formats.keys import flag, need, shown
from headstart.heads.serving import Command, vllm

PREFIX = "speculator."
names_target = True  # TGI is started with the drafter's folder and finds the target through its config


def names(drafter: Any) -> dict[str, str]:
    """Our names with TGI's prefix."""
    return {name: PREFIX + name for name in drafter.state_dict()}


def canonical(name: str) -> str:
    """The name with the prefix, whether the file has it or not."""
    return PREFIX + name.removeprefix(PREFIX)


def config(drafter: Any) -> dict[str, Any]:
    """The keys of IBM's models."""
    D, heads, given = drafter.shape.hidden_size, drafter.max_depth, drafter.config
    return {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "hidden_size": D,  # another name for emb_dim
        "emb_dim": D,
        "inner_dim": given["inner_dim"] or D,
        "vocab_size": drafter.shape.vocab_size,
        "n_predict": heads,
        "top_k_tokens_per_head": [1] * heads,
        "n_candidates": 1,
        "tie_weights": given["tie_weights"],
        "scale_input": given["scale_input"],
    }


def recognises(config: dict[str, Any]) -> bool:
    """A folder with this model_type."""
    return config.get("model_type") == "mlp_speculator"


def arguments(config: dict[str, Any], tensors: dict[str, Tensor], shape: TargetShape) -> tuple[str, dict[str, Any]]:
    """Sizes and switches. Raises UserError where they contradict each other or do not fit."""
    width, heads = shape.hidden_size, config["n_predict"]
    need({"emb_dim": None} | config, {"emb_dim": (width,), "hidden_size": (width, None), "method": ("sum_rnn", None)})
    need(config, {"quantization_config": (None,)})
    if (ranks := config.get("top_k_tokens_per_head")) is not None and len(ranks) != heads:
        raise UserError(f"the folder has n_predict={shown(heads)}, but {len(ranks)} numbers in top_k_tokens_per_head")
    return "mlp_speculator", {
        "guesses": heads,
        "inner_dim": config.get("inner_dim") or None,
        **{key: flag(config, key) for key in ("tie_weights", "scale_input")},
    }


def serving(drafter: Any, target: str, folder: str, guesses: int) -> list[Command]:
    """vLLM and TGI. Both compute the scales from the number of heads, so all heads must guess."""
    heads = drafter.max_depth
    tgi = Command("TGI", shlex.join(["text-generation-launcher", "--model-id", folder, "--speculate", str(heads)]), "3.3.7")
    old = vllm(target, folder, "mlp_speculator", heads, "0.8.5 to 0.9; later ones have no MLP speculator", draft_tensor_parallel_size=1)
    return [old] if drafter.scale_input else [old, tgi]
