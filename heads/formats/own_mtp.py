"""The folder of an MTP module in the target's own kind of layer: vLLM loads it with ``method: mtp``, beside a target of that kind.

vLLM (0.32: config/speculative.py) takes its class from the folder's ``model_type``, and the module from tensors called ``mtp.*``, as the
targets' own files have them. Embedding and head are the target's: the folder has neither. Everything else the class reads in the target's
config, the number of modules too. The classes of ``SERVED`` read the token at position 0 as it is. (Most other MTP classes of vLLM read
zeros there.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from headstart.heads.formats import causal_lm
from headstart.heads.formats.causal_lm import read as read
from headstart.heads.mtp_weights import INSIDE
from headstart.heads.serving import Command, vllm

# Kind of target -> (the name of vLLM's class, the key in config.json that counts the modules)
SERVED = {
    "qwen3_5_text": ("Qwen3_5MTP", "mtp_num_hidden_layers"),
    "qwen3_5_moe_text": ("Qwen3_5MoeMTP", "mtp_num_hidden_layers"),
    "qwen3_next": ("Qwen3NextMTP", "num_nextn_predict_layers"),
}
PLACE, LAYER = "mtp.", "mtp.layers.0."


def unserved(kind: str, keys: Mapping[str, Any]) -> str:
    """Why no engine loads the module of a target of this kind, whose config has these keys; "" where vLLM does."""
    if kind not in SERVED:
        return f"none takes the MTP module of a {kind} target from a folder of its own"
    found = keys.get(SERVED[kind][1], 1)
    return "" if found == 1 else f"vLLM would make {found} modules, as many as the target's config says"


def names(drafter: Any) -> dict[str, str]:
    """Those of Qwen's files."""
    if not hasattr(drafter, "decoder"):  # which ``attach`` builds
        return {}
    places = {f"decoder.{drafter.stack}.0.": LAYER, f"decoder.{drafter.last}.": f"{PLACE}{INSIDE['norm']}."}
    places |= {f"{part}.": f"{PLACE}{INSIDE[part]}." for part in ("enorm", "hnorm", "eh_proj")}
    return {
        name: place + name.removeprefix(ours) for name in drafter.state_dict() for ours, place in places.items() if name.startswith(ours)
    }


def in_file(drafter: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as published folders hold them, where transformers holds all experts of a layer in one tensor."""
    return _converted(drafter, tensors, lambda layer: causal_lm.parted(drafter.kind, drafter.decoder.config, layer))


def in_memory(drafter: Any, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The tensors as the layer in memory holds them."""
    own = {name: theirs for name, theirs in names(drafter).items() if theirs.startswith(LAYER)}
    if set(own.values()) <= tensors.keys():
        return tensors
    together = {f"{drafter.inside}.{name.removeprefix('decoder.')}" for name in own}
    return _converted(drafter, tensors, lambda layer: causal_lm.united(drafter.kind, drafter.decoder.config, layer, together))


def _converted(drafter: Any, tensors: Mapping[str, Tensor], convert: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors after ``convert``, which gets those of the layer under the names that they have in a whole model."""
    layer = {name.removeprefix(LAYER): x for name, x in tensors.items() if name.startswith(LAYER)}
    if not layer:  # before ``attach``
        return dict(tensors)
    place = f"{drafter.inside}.{drafter.stack}.0."
    made = convert({place + name: x for name, x in layer.items()})
    rest = {name: x for name, x in tensors.items() if not name.startswith(LAYER)}
    return rest | {LAYER + name.removeprefix(place): x for name, x in made.items()}


def config(drafter: Any) -> dict[str, Any]:
    """The keys of the layer's config, with the number of modules and vLLM's name of the class."""
    keys = drafter.arguments["config"]
    name, count = SERVED.get(drafter.shape.model_type, (type(drafter).__name__, ""))
    return read(keys | ({count: 1} if count else {}) | {"architectures": [name]})


def serving(drafter: Any, target: str, folder: str, guesses: int) -> list[Command]:
    """vLLM."""
    return [vllm(target, folder, "mtp", guesses, "0.32 or newer, and a target that is not quantized")]
