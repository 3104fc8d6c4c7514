"""The config.json keys that every Llama-shaped speculator shares."""

from __future__ import annotations

from typing import Any

from heads.base import TargetShape


def llama_config(shape: TargetShape, intermediate_size: int, layers: int) -> dict[str, Any]:
    """RoPE is written in all three spellings: engines of 2025 read theta and scaling, transformers 5 the parameters."""
    rope = dict(shape.rope)
    scaling = None if rope.get("rope_type", "default") == "default" else {k: v for k, v in rope.items() if k != "rope_theta"}
    return {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": shape.hidden_size,
        "intermediate_size": intermediate_size,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
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
