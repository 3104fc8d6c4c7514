"""The EAGLE-1 folder: a Llama config and one layer without its first norm; vLLM loads it with ``method: eagle``.

No final norm and no head (both engines use the target's). SGLang's fc has a bias and leaves it random when the file
has none, so zeros are written; vLLM drops them. SGLang also wants another architecture name, LlamaForCausalLMEagle.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from heads.base import TargetShape
from heads.formats.keys import architecture, need
from heads.formats.llama import llama_arguments, llama_config
from heads.formats.llama import read as read
from heads.formats.native import names as names

ARCHITECTURES = ("LlamaForCausalLM", "LlamaForCausalLMEagle")  # vLLM's, which is written, and SGLang's, which a user may put in its place


def extras(drafter: Any) -> dict[str, Tensor]:
    return {"fc.bias": torch.zeros(drafter.shape.hidden_size, dtype=drafter.fc.weight.dtype)}


def config(drafter: Any) -> dict[str, Any]:
    return {**llama_config(drafter.shape, drafter.layers[0], layers=1), "architectures": [ARCHITECTURES[0]]}


def recognises(config: dict[str, Any]) -> bool:
    return architecture(config) == ARCHITECTURES[1]


def arguments(config: dict[str, Any], tensors: dict[str, Tensor], shape: TargetShape) -> tuple[str, dict[str, Any]]:
    found = llama_arguments(config, shape)
    whole, width = (shape.vocab_size, None), (shape.hidden_size, None)
    need(config, {"num_hidden_layers": (1,), "draft_vocab_size": whole, "hot_vocab_size": whole, "target_hidden_size": width})
    return "eagle1", found
