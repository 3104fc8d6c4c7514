"""The folder of DFlash and what is built on it, as vLLM and SGLang load it (Domino: SGLang alone).

Qwen3's names without a prefix; embedding and head are the target's and not in the file, the mask is a token of the target.
``target_layer_ids`` count outputs of layers from 0: one less than our taps. ``is_causal`` stands at the top, where both engines
read it, and is always written: what its absence means differs.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from heads.base import TargetShape
from heads.errors import UserError
from heads.formats.llama import llama_arguments, llama_config
from heads.serving import Command, sglang, vllm

DFLASH, DSPARK = "DFlashDraftModel", "Qwen3DSparkModel"
THEIRS = {
    "markov_w1.weight": "markov_head.markov_w1.weight",
    "markov_w2": "markov_head.markov_w2.weight",
    "confidence.weight": "confidence_head.proj.weight",
    "confidence.bias": "confidence_head.proj.bias",
    "gru_input.weight": "prefix_gru.weight_ih_l0",
    "gru_state.weight": "prefix_gru.weight_hh_l0",
    "narrow.weight": "embed_proj.0.weight",
    "widen": "embed_proj.2.weight",
}


def names(drafter: Any) -> dict[str, str]:
    return {name: THEIRS.get(name, name) for name in drafter.state_dict()}


def canonical(name: str) -> str:
    return name.removeprefix("model.")


def extras(drafter: Any) -> dict[str, Tensor]:
    return {}


def config(drafter: Any) -> dict[str, Any]:
    head, layers = drafter.config["head"], len(drafter.layers)
    keys = llama_config(drafter.shape, drafter.layers[0], layers) | {
        "architectures": [DSPARK if head == "dspark" else DFLASH],
        "model_type": "qwen3",
        "layer_types": ["full_attention"] * layers,
        "use_sliding_window": False,
        "is_causal": drafter.causal,
        "block_size": drafter.block,
        "num_target_layers": drafter.shape.layers,
    }
    block = {"mask_token_id": drafter.mask_token, "target_layer_ids": [k - 1 for k in drafter.taps]}
    if head == "dspark":
        markov = {"markov_rank": drafter.markov_w2.shape[1], "markov_head_type": "vanilla", "sample_from_anchor": True}
        return keys | block | markov | {"enable_confidence_head": True, "confidence_head_with_markov": True}
    if head == "domino":
        block |= {"projector_type": "domino", "shift_label": True, "pure_draft_prefix_len": 1}
        block |= {"gru_hidden_dim": drafter.gru, "emb_dim": drafter.widen.shape[1]}
    return keys | {"dflash_config": block}


def recognises(config: dict[str, Any]) -> bool:
    return (config.get("architectures") or [""])[0] in (DFLASH, DSPARK)


def arguments(config: dict[str, Any], tensors: dict[str, Tensor], shape: TargetShape) -> tuple[str, dict[str, Any]]:
    said = config | config.get("dflash_config", {})
    head = "jetspec" if config.get("is_causal", said.get("causal", False)) else "dflash"
    wanted: dict[str, Any] = {"attention_bias": False, "use_swa": False, "attention_sink_bias": False, "is_neox_style": True}
    wanted["attention_value_scale"] = None
    if config["architectures"][0] == DSPARK:
        head = "dspark"
        wanted |= {"sample_from_anchor": True, "markov_head_type": "vanilla", "enable_confidence_head": True, "is_causal": False}
        wanted |= {"confidence_head_with_markov": True}
    elif said.get("projector_type") == "domino":
        head = "domino"
        wanted |= {"shift_label": True, "pure_draft_prefix_len": 1, "is_causal": False}
    for key, value in wanted.items():
        if said.get(key, value) != value:
            raise UserError(f"the folder has {key}={said[key]!r}, which this drafter does not have")
    if set(said.get("layer_types") or ["full_attention"]) != {"full_attention"}:
        raise UserError("the folder has layers with a sliding window, which this drafter does not have")
    found = llama_arguments(config, shape) | {
        "layers": config["num_hidden_layers"],
        "block": said.get("block_size", 16),
        "taps": [k + 1 for k in said["target_layer_ids"]],
        "mask_token": said["mask_token_id"],
    }
    if head == "dspark":
        found["rank"] = said["markov_rank"]
    if head == "domino":
        found |= {"gru": said["gru_hidden_dim"], "rank": said["emb_dim"]}
    return head, found


def serving(drafter: Any, target: str, folder: str, guesses: int) -> list[Command]:
    """A block is filled in one pass and as trained: its whole length, whatever depth was asked for."""
    whole, head = drafter.max_depth, drafter.config["head"]
    if head == "domino":
        return [sglang(target, folder, "DFLASH", "0.5.23 or newer, CUDA, bf16")]
    if head == "dspark":
        return [vllm(target, folder, "dspark", whole, "0.33 or newer, on a GPU"), sglang(target, folder, "DSPARK", "0.5.18 or newer")]
    causal = "0.32 or newer" if drafter.causal else "0.20.2 or newer"
    window = sglang(target, folder, "DFLASH", "0.5.11 or newer", num_draft_tokens=drafter.block)  # with the last known token
    return [vllm(target, folder, "dflash", whole, causal), window]
