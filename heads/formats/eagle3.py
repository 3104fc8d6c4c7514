"""The flat EAGLE-3 folder that vLLM, SGLang and TensorRT-LLM load (the layout of the authors' checkpoints).

Traps it avoids: names carry no ``model.`` prefix; ``draft_vocab_size`` is always written and the head is always
our own; ``d2t`` holds offsets; no biases; layer ids are left out when they are every engine's default, otherwise
written twice, as vLLM (residual stream after k layers) and SGLang (output of layer k-1) number them; a second
layer's first norm is stored under both names that engines use.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from heads.base import TargetShape
from heads.errors import UserError
from heads.formats.llama import llama_arguments, llama_config
from heads.serving import Command, sglang_chain, tensorrt_llm, vllm
from heads.vocab import from_d2t, to_maps


def names(drafter: Any) -> dict[str, str]:
    return {name: _foreign(name) for name in drafter.state_dict()}


def _foreign(name: str) -> str:
    if not name.startswith("layers."):
        return name  # fc, fc_norm.i, midlayer.*, norm, lm_head
    _, i, rest = name.split(".", 2)
    return f"layers.{int(i) + 1}.{rest}"  # engines count the first layer, midlayer, as layer 0


def canonical(name: str) -> str:
    """Both spellings of the first layer are in use, and some files carry the prefix of a whole model."""
    return name.removeprefix("model.").replace("layers.0.", "midlayer.", 1)


def extras(drafter: Any) -> dict[str, Tensor]:
    tensors = {}
    for name, tensor in drafter.state_dict().items():
        if name.startswith("layers.") and name.endswith("input_layernorm.weight"):
            tensors[_foreign(name).replace("input_layernorm", "hidden_norm")] = tensor.clone()
    if drafter.draft_ids is not None:
        tensors["d2t"], tensors["t2d"] = to_maps(drafter.draft_ids.cpu(), drafter.shape.vocab_size)
    return tensors


def config(drafter: Any) -> dict[str, Any]:
    shape, taps = drafter.shape, list(drafter.taps)
    keys = llama_config(shape, drafter.midlayer, layers=1 + len(drafter.layers))
    keys |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": drafter.lm_head.out_features,
        "num_aux_hidden_states": len(taps),
        "fc_norm": drafter.fc_norm is not None,
        "norm_output": drafter.norm_output,
        "norm_before_residual": False,
    }
    if taps != [2, shape.layers // 2, shape.layers - 3]:
        keys["eagle_aux_hidden_state_layer_ids"] = taps
    if taps != [2, shape.layers // 2, shape.layers - 3] and taps[0] > 0:  # SGLang and TensorRT-LLM have no number for the embedding
        keys["eagle_config"] = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [k - 1 for k in taps]}
    return keys


def recognises(config: dict[str, Any]) -> bool:
    names = config.get("architectures") or [""]
    return "draft_vocab_size" in config and (names[0].endswith("Eagle3") or names[0].startswith("Eagle3"))


def arguments(config: dict[str, Any], tensors: dict[str, Tensor], shape: TargetShape) -> tuple[str, dict[str, Any]]:
    if config.get("norm_before_residual"):
        raise UserError("the folder has norm_before_residual=true, which this drafter does not have (SGLang and TensorRT-LLM ignore it)")
    arguments = llama_arguments(config, shape)
    draft_vocab = from_d2t(tensors["d2t"]) if "d2t" in tensors else None
    if draft_vocab == list(range(shape.vocab_size)):  # some write maps of zeros for a whole vocabulary
        draft_vocab = None
        tensors.pop("d2t"), tensors.pop("t2d", None)
    taps = config.get("eagle_aux_hidden_state_layer_ids")
    others = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    found = [k + 1 for k in others] if taps is None and others else taps
    if found and shape.layers in found:
        raise UserError("the folder reads the last layer before the final norm, which this drafter does not have")
    return "eagle", arguments | {
        "layers": config.get("num_hidden_layers", 1),
        "taps": found,
        "draft_vocab": draft_vocab,
        "fc_norm": bool(config.get("fc_norm")),
        "norm_output": bool(config.get("norm_output")),
    }


def serving(drafter: Any, target: str, folder: str, guesses: int) -> list[Command]:
    """The switches of EAGLE-3.1 and more than one layer came later than the format."""
    later, deep = drafter.fc_norm is not None or drafter.norm_output, bool(len(drafter.layers))
    found = [vllm(target, folder, "eagle3", guesses, "0.26 or newer" if later else "0.15.1 or newer" if deep else "0.8.5 or newer")]
    if drafter.taps[0] > 0 and len(drafter.taps) > 1:  # SGLang has no number for the embedding, and leaves fc out where it reads one state
        needs = "0.5.14 or newer" if later or deep else "0.4.6 or newer"
        found.append(sglang_chain(target, folder, "EAGLE3", guesses, needs))
        found.append(tensorrt_llm(target, folder, "Eagle3", guesses, "PyTorch backend" + (" that knows fc_norm" if later else "")))
    return found
