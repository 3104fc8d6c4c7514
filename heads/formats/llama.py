"""The config.json keys that every Llama-shaped speculator shares."""

from __future__ import annotations

from typing import Any

from heads.base import TargetShape
from heads.errors import UserError


def llama_config(shape: TargetShape, layer: Any, layers: int) -> dict[str, Any]:
    """From the first of ``layers`` decoder layers.

    RoPE is written in all three spellings: engines of 2025 read theta and scaling, transformers 5 the parameters.
    """
    rope = {k: v for k, v in shape.rope.items() if k != "partial_rotary_factor"}  # a drafter rotates whole heads, whatever the target does
    scaling = None if rope.get("rope_type", "default") == "default" else {k: v for k, v in rope.items() if k != "rope_theta"}
    return {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": shape.hidden_size,
        "intermediate_size": layer.mlp.gate_proj.out_features,
        "num_attention_heads": layer.self_attn.heads,
        "num_key_value_heads": layer.self_attn.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm_eps,
        "max_position_embeddings": shape.max_positions,
        "rope_theta": rope.get("rope_theta", 10000.0),
        "rope_scaling": scaling,
        "rope_parameters": rope,
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
    }


def llama_arguments(config: dict[str, Any], shape: TargetShape) -> dict[str, Any]:
    """The shape of the layers. Head size, norms and RoPE must be the target's, which our drafters take over. Raises UserError."""
    heads = config.get("num_attention_heads", shape.heads)
    rope = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta", 10000.0), **(config.get("rope_scaling") or {})}
    here: dict[str, Any] = {"rope_theta": 10000.0, "rope_type": "default", "factor": 1.0} | shape.rope
    found = {
        "head_dim": (config.get("head_dim") or shape.hidden_size // heads, shape.head_dim),
        "rms_norm_eps": (config.get("rms_norm_eps", 1e-6), shape.norm_eps),
        "rope_theta": (rope.get("rope_theta", config.get("rope_theta", 10000.0)), here["rope_theta"]),
        "rope_type": (rope.get("rope_type") or rope.get("type", "default"), here["rope_type"]),
        "rope factor": (rope.get("factor", 1.0), here["factor"]),
        "partial_rotary_factor": (rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)), 1.0),  # here: see above
    }
    for key, (theirs, ours) in found.items():
        if theirs != ours:
            raise UserError(f"it has {key} {theirs}, expected {ours}: such a drafter cannot be loaded")
    kv_heads = config.get("num_key_value_heads", heads)
    return {"heads": heads, "kv_heads": kv_heads, "intermediate_size": config["intermediate_size"]}
