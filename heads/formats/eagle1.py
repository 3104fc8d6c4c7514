"""The EAGLE-1 folder: a Llama config and one layer without its first norm; vLLM loads it with ``method: eagle``.

It has no final norm and no head, because both engines use the target's. SGLang's ``fc`` has a bias, which stays random when the file has
none; so zeros are written, which vLLM ignores. SGLang also wants another architecture name, LlamaForCausalLMEagle.
"""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from headstart.heads.base import TargetShape
from headstart.heads.formats.keys import architecture, need
from headstart.heads.formats.llama import llama_arguments, llama_config
from headstart.heads.formats.llama import read as read
from headstart.heads.formats.native import names as names
from headstart.heads.serving import Command, sglang_chain, vllm

ARCHITECTURES = ("LlamaForCausalLM", "LlamaForCausalLMEagle")  # vLLM's, which is written; SGLang's, which a user may put in its place


def extras(drafter: Any) -> dict[str, Tensor]:
    """A bias of zeros [D] for ``fc``."""
    return {"fc.bias": torch.zeros(drafter.shape.hidden_size, dtype=drafter.fc.weight.dtype)}


def config(drafter: Any) -> dict[str, Any]:
    """Llama's keys with vLLM's architecture name."""
    return {**llama_config(drafter.shape, drafter.layers[0], layers=1), "architectures": [ARCHITECTURES[0]]}


def recognises(config: dict[str, Any]) -> bool:
    """A folder with SGLang's architecture name. vLLM's is that of any Llama."""
    return architecture(config) == ARCHITECTURES[1]


def arguments(config: dict[str, Any], tensors: dict[str, Tensor], shape: TargetShape) -> tuple[str, dict[str, Any]]:
    """The shape of its one layer. Raises UserError for keys and values, other than ours, that change what engines compute."""
    found = llama_arguments(config, shape)
    whole, width = (shape.vocab_size, None), (shape.hidden_size, None)
    need(config, {"num_hidden_layers": (1,), "draft_vocab_size": whole, "hot_vocab_size": whole, "target_hidden_size": width})
    return "eagle1", found


def serving(drafter: Any, target: str, folder: str, guesses: int) -> list[Command]:
    """vLLM, and SGLang with a copy of the folder, because the two engines need different architecture names."""
    copy = f"{folder.rstrip('/')}-sglang"
    there = sglang_chain(target, copy, "EAGLE", guesses, "0.4.6 or newer; it wants another architecture in config.json")
    rename = shlex.join(["sed", "-i", 's/"LlamaForCausalLM"/"LlamaForCausalLMEagle"/', f"{copy}/config.json"])
    copied = f"{shlex.join(['cp', '-rT', folder, copy])} && {rename} && {there.text}"
    return [vllm(target, folder, "eagle", guesses, "0.8.5 or newer"), replace(there, text=copied)]
