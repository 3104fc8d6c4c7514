"""The folder of one MTP module, in the form of an EAGLE-1 for DeepSeek: vLLM loads it with ``method: eagle``, for targets of any kind.

vLLM has one class that computes what our module does and takes its sizes from the drafter's own config: ``EagleDeepSeekMTPModel`` (0.32:
deepseek_eagle.py). It is [norm of embedding; norm of state], ``fc``, decoder layers and a final norm, whose output is also the next depth's
state; embedding and head are the target's. Its layer is Llama's only where config.json asks for neither DeepSeek's latent attention nor its
experts: the keys of the one are absent, and ``PLAIN`` rules out the other. vLLM's MTP classes, among them HY-V3's, read the target's config
instead, so they serve targets of their own kind alone; and most of them read zeros for the embedding at position 0.

Two things differ from Llama's folders. The class does not join the matrices of queries, keys and values when it loads a file, so the file
holds them as one. And it takes the size of a head from hidden_size and the number of heads, so ``fills`` must hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from headstart.heads.base import TargetShape
from headstart.heads.errors import UserError
from headstart.heads.formats.keys import architecture, need
from headstart.heads.formats.llama import llama_arguments, llama_config
from headstart.heads.formats.llama import read as read
from headstart.heads.serving import Command, vllm

ARCHITECTURE = "EagleDeepSeekMTPModel"
PARTS = {"eh_proj": "fc", "layer": "layers.0"}  # our name of a part -> vLLM's, where they differ
SEPARATE = [f"layers.0.self_attn.{x}_proj.weight" for x in "qkv"]
JOINED = "layers.0.self_attn.qkv_proj.weight"


def fills(shape: TargetShape, heads: int) -> bool:
    """Whether the heads together are as wide as the target's states: vLLM's class has no other size of a head."""
    return heads * shape.head_dim == shape.hidden_size


def _plain(shape: TargetShape) -> dict[str, int]:
    """The keys by which the layer, which vLLM counts as the one behind the target's last, is dense."""
    return {"n_routed_experts": 0, "first_k_dense_replace": shape.layers + 1}


def names(drafter: Any) -> dict[str, str]:
    """The module's own names, but for the projection and the layer."""
    return {name: _foreign(*name.removeprefix("stages.0.").split(".", 1)) for name in drafter.state_dict()}


def _foreign(part: str, rest: str) -> str:
    return f"{PARTS.get(part, part)}.{rest}"


def in_file(drafter: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Queries, keys and values joined in one matrix."""
    rest = {name: tensor for name, tensor in tensors.items() if name not in SEPARATE}
    return rest | {JOINED: torch.cat([tensors[name] for name in SEPARATE])}


def in_memory(drafter: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Queries, keys and values apart."""
    own = drafter.stages[0].layer.self_attn
    sizes = [getattr(own, f"{x}_proj").out_features for x in "qkv"]
    rest = {name: tensor for name, tensor in tensors.items() if name != JOINED}
    return rest | dict(zip(SEPARATE, tensors[JOINED].split(sizes), strict=True))


def config(drafter: Any) -> dict[str, Any]:
    """Llama's keys with vLLM's architecture name."""
    keys = llama_config(drafter.shape, drafter.stages[0].layer, layers=1)
    return {**keys, "architectures": [ARCHITECTURE], **_plain(drafter.shape)}


def recognises(config: dict[str, Any]) -> bool:
    """A folder with the architecture's name, which drafters with DeepSeek's own layers have too: ``arguments`` refuses those."""
    return architecture(config) == ARCHITECTURE


def arguments(config: dict[str, Any], tensors: dict[str, Tensor], shape: TargetShape) -> tuple[str, dict[str, Any]]:
    """The shape of its one layer. Raises UserError for keys and values, other than ours, that change what vLLM computes."""
    plain = _plain(shape)
    if absent := [key for key in plain if key not in config]:
        raise UserError(f"the folder has no {absent[0]}, which must be {plain[absent[0]]}: its layer may have experts")
    need(config, {key: (value,) for key, value in plain.items()})
    need(config, dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim"), (0, None)))  # of latent attention
    need(config, {"num_hidden_layers": (1,), "draft_vocab_size": (shape.vocab_size, None), "routed_scaling_factor": (1.0, None)})
    found = llama_arguments(config, shape)
    if not fills(shape, found["heads"]):
        raise UserError(f"the folder has num_attention_heads={found['heads']}: vLLM would make them wider than {shape.head_dim}")
    return "mtp", found


def serving(drafter: Any, target: str, folder: str, guesses: int) -> list[Command]:
    """vLLM."""
    return [vllm(target, folder, "eagle", guesses, "0.32 or newer, and a target that is not quantized")]
