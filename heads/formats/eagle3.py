"""The flat EAGLE-3 folder that vLLM, SGLang and TensorRT-LLM load (the layout of the authors' checkpoints).

It avoids these pitfalls. Names have no ``model.`` prefix. ``draft_vocab_size`` is always written, and the head is always our own. ``d2t``
holds offsets. There are no biases. Layer ids are omitted where they are every engine's default. Otherwise they are written twice, as
vLLM counts them (residual stream after k layers) and as SGLang does (output of layer k-1). The first norm of a second layer is stored
under both names that engines use.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from headstart.heads.base import TargetShape
from headstart.heads.eagle import default_taps
from headstart.heads.errors import UserError
from headstart.heads.formats import llama
from headstart.heads.formats.keys import alike, architecture, flag, layers, need, part, shown
from headstart.heads.formats.llama import llama_arguments, llama_config
from headstart.heads.formats.windows import FROM_ANCHOR, KEYS, window_keys, windows, without_windows
from headstart.heads.serving import Command, llama_cpp, sglang_chain, tensorrt_llm, vllm
from headstart.heads.vocab import ids_of, maps_of

EAGLE3, QWEN3_EAGLE3 = "LlamaForCausalLMEagle3", "Eagle3Qwen3ForCausalLM"  # with Llama's layers; with Qwen3's, which only vLLM knows
IDS = "eagle_aux_hidden_state_layer_ids"
# Keys of eagle_config, which NVIDIA's folders have.
NESTED: dict[str, tuple[Any, ...]] = {
    "use_aux_hidden_state": (True, None),
    "norm_before_fc": (True, False, None),
    "use_input_layernorm_in_first_layer": (True, None),
    "use_last_layernorm": (True, None),
    "use_mtp_layernorm": (False, None),
    "next_layer_regular": (True, None),
    "parallel_draft_step": (1, None),
    "eh_proj_before_attn": (False, None),
    "eh_proj_bias": (False, None),
}
# Other keys in which an engine would look for the layers.
OTHER_TAPS = dict.fromkeys(("target_layer_ids", "dspark_target_layer_ids", "layer_ids", "dflash_config"), (None,))


# Families of targets for which SGLang 0.5.23 reads these layers one too low, unless the first of them is 1.
OFF_BY_ONE = ("deepseek", "glm4_moe_lite", "glm_moe_dsa", "kimi")  # prefixes of the model_type


def names(drafter: Any) -> dict[str, str]:
    """Engines count the first layer, ``midlayer``, as layer 0, so our ``layers.i`` is their ``layers.i+1``."""
    return {name: _foreign(name) for name in drafter.state_dict()}


def _foreign(name: str) -> str:
    if not name.startswith("layers."):
        return name  # fc, fc_norm.i, midlayer.*, norm, lm_head
    _, i, rest = name.split(".", 2)
    return f"layers.{int(i) + 1}.{rest}"


def canonical(name: str) -> str:
    """The name without the prefix of a whole model, and ``midlayer`` for the first layer, which files spell in two ways."""
    return name.removeprefix("model.").replace("layers.0.", "midlayer.", 1)


def extras(drafter: Any) -> dict[str, Tensor]:
    """The second name of each deeper layer's first norm, and the maps of a trimmed vocabulary."""
    tensors = {}
    for name, tensor in drafter.state_dict().items():
        if name.startswith("layers.") and name.endswith("input_layernorm.weight"):
            tensors[_foreign(name).replace("input_layernorm", "hidden_norm")] = tensor.clone()
    return tensors | maps_of(drafter.lm_head.ids, drafter.shape.vocab_size)


def config(drafter: Any) -> dict[str, Any]:
    """Llama's keys and EAGLE-3's own. The tapped layers are included, in both ways of counting, unless they are every engine's default."""
    shape, taps = drafter.shape, list(drafter.taps)
    keys = llama_config(shape, drafter.midlayer, layers=1 + len(drafter.layers))
    keys |= {
        "architectures": [QWEN3_EAGLE3 if drafter.qk_norm else EAGLE3],
        "draft_vocab_size": drafter.lm_head.out_features,
        "num_aux_hidden_states": len(taps),
        "fc_norm": drafter.fc_norm is not None,
        "norm_output": drafter.norm_output,
        "norm_before_residual": drafter.midlayer.norm_before_residual,
    }
    if drafter.qk_norm:
        keys["model_type"] = "qwen3"
    if drafter.window is not None:
        count = keys["num_hidden_layers"]
        keys |= window_keys(range(count), count, drafter.window, drafter.window_slides)
    if drafter.input_norm is not None:
        keys["norm_before_fc"] = True
    if not _usual(drafter):
        keys[IDS] = taps
    if not _usual(drafter) and taps[0] > 0:  # SGLang and TensorRT-LLM have no number for the embedding
        keys["eagle_config"] = {"use_aux_hidden_state": True, IDS: [k - 1 for k in taps]}
    return keys


def read(config: Mapping[str, Any]) -> dict[str, Any]:
    """As ``heads.formats.llama.read``. The keys of a window are absent where there is none, which must agree as well."""
    return dict.fromkeys((*KEYS, FROM_ANCHOR)) | llama.read(config)


def _usual(drafter: Any) -> bool:
    """Whether it taps the layers that every engine uses by default."""
    return list(drafter.taps) == [2, drafter.shape.layers // 2, drafter.shape.layers - 3]


def recognises(config: dict[str, Any]) -> bool:
    """EAGLE-3 without a mask token."""
    return is_eagle3(config) and config.get("mask_token_id") is None  # with one it is a P-EAGLE


def is_eagle3(config: dict[str, Any]) -> bool:
    """Whether it is an EAGLE-3 of any kind for engines. Its authors' folders have the name of any Llama, but state the draft vocabulary."""
    name = architecture(config)
    named = name.endswith("Eagle3") or name.startswith("Eagle3")
    return config.get("draft_vocab_size") is not None if name == "LlamaForCausalLM" else named and "draft_vocab_size" in config


def arguments(config: dict[str, Any], tensors: dict[str, Tensor], shape: TargetShape) -> tuple[str, dict[str, Any]]:
    """The arguments of the drafter. In SpecForge's training, norm_output means normed states for the head, which we always have. Engines
    take it to mean that normed states are fed back. A folder does not state who trained it, so it is read as engines serve it. Raises
    UserError for keys that do not fit.
    """
    qk_norm, window = architecture(config) == QWEN3_EAGLE3, windows(config)
    if len(window.pop("window_layers", [])) not in (0, config.get("num_hidden_layers", 1)):
        raise UserError("the folder has a sliding window in some of its layers, this drafter needs it in all of them or in none")
    arguments = llama_arguments(without_windows(config), shape, "qwen3" if qk_norm else "llama") | window | {"qk_norm": qk_norm}
    draft_vocab = _vocabulary(config, tensors, shape)
    taps = _taps(config, shape)
    nested = part(config, "eagle_config")
    norms = {key: flag(config, key) for key in ("fc_norm", "norm_output", "norm_before_residual")}
    norms["norm_before_fc"] = flag(nested if "norm_before_fc" in nested else config, "norm_before_fc")  # as engines look it up
    need(config, {**OTHER_TAPS, "target_hidden_size": (shape.hidden_size, None), "use_aux_norm": (norms["fc_norm"], None)})
    if "norm_before_fc" in nested:
        need(config, {"norm_before_fc": (norms["norm_before_fc"], None)})
    need(nested, NESTED | {"return_hidden_post_norm": (norms["norm_output"], None)}, "eagle_config.")
    if unknown := sorted(nested.keys() - NESTED.keys() - {IDS, "return_hidden_post_norm", "parallel_draft_heads_num_layers"}):
        raise UserError(f"the folder has eagle_config.{unknown[0]}={shown(nested[unknown[0]])}, which is not known here")
    return "eagle", arguments | {"layers": config.get("num_hidden_layers", 1), "taps": taps, "draft_vocab": draft_vocab} | norms


def _vocabulary(config: dict[str, Any], tensors: dict[str, Tensor], shape: TargetShape) -> list[int] | None:
    """The draft vocabulary's target ids, as ``heads.vocab.ids_of``. Raises UserError if the config states another size."""
    draft_vocab = ids_of(tensors, shape.vocab_size)
    size = shape.vocab_size if draft_vocab is None else len(draft_vocab)
    if not alike(config.get("draft_vocab_size"), size):  # with null, one engine takes the target's head, another the file's
        raise UserError(f"the folder has draft_vocab_size={shown(config.get('draft_vocab_size'))}, its tensors a vocabulary of {size}")
    return draft_vocab


def _taps(config: dict[str, Any], shape: TargetShape) -> list[int] | None:
    """The tapped layers as we count them; None: every engine's default. Raises UserError where two keys contradict each other."""
    taps, outputs = config.get(IDS), part(config, "eagle_config").get(IDS)
    taps = None if taps is None else layers(taps, IDS)
    shifted = None if outputs is None else [k + 1 for k in layers(outputs, f"eagle_config.{IDS}")]
    if taps is not None and shifted is not None and taps != shifted:
        raise UserError(f"the folder has {IDS}={shown(taps)}, but eagle_config.{IDS}={shown(outputs)}, which are layers {shown(shifted)}: "
                        "engines read one or the other")  # fmt: skip
    found = shifted if taps is None else taps
    if found and shape.layers in found:
        raise UserError("the folder reads the last layer before the final norm, which this drafter does not have")
    count = len(default_taps(shape.layers) if found is None else found)
    need(config, {"num_aux_hidden_states": (count, None)})
    return found


def serving(drafter: Any, target: str, folder: str, guesses: int) -> list[Command]:
    """The engines that support the drafter's switches and its number of layers, which came later than the format itself."""
    later, deep = drafter.fc_norm is not None or drafter.norm_output, bool(len(drafter.layers))
    joint = drafter.input_norm is not None
    own_layers = drafter.qk_norm or drafter.window is not None
    since = "0.32" if own_layers else "0.26" if later else "0.20.2" if joint else "0.15.1" if deep else "0.8.5"
    found = [vllm(target, folder, "eagle3", guesses, f"{since} or newer")]
    if len(drafter.taps) == 3 and not (deep or own_layers):  # llama.cpp knows no others. It refuses fc_norm, and ignores norm_output
        on = {"fc_norm": drafter.fc_norm is not None, "norm_output": drafter.norm_output}
        lacks = " ".join(f"head.{key}=false" for key, value in on.items() if value)
        found.append(llama_cpp(target, folder, "draft-eagle3", guesses, lacks))
    if drafter.midlayer.norm_before_residual or own_layers:  # other engines ignore them silently
        return found
    if drafter.taps[0] == 0 or len(drafter.taps) == 1:  # SGLang has no number for the embedding, and omits fc where only one state is read
        return found
    own = not _usual(drafter)
    if not own or drafter.taps[0] == 2 or not drafter.shape.model_type.startswith(OFF_BY_ONE):
        needs = "0.5.18 or newer" if joint else "0.5.14 or newer" if later or deep else "0.4.6 or newer"
        found.append(sglang_chain(target, folder, "EAGLE3", guesses, needs))
    if not deep and not joint:  # TensorRT-LLM names the first of several layers differently, and looks for norm_before_fc elsewhere
        layers: dict[str, Any] = {"eagle3_layers_to_capture": [k - 1 for k in drafter.taps]} if own else {}
        newer = ", 1.3.0rc21 or newer: older ones leave out fc_norm and norm_output without a word" if later else ""
        found.append(tensorrt_llm(target, folder, guesses, f"PyTorch backend{newer}", **layers))
    return found
