"""Tiny random targets of several architectures, built in memory, which the shared tests decode with."""

from __future__ import annotations

from typing import Any

import torch

from headstart.inference.decoding.target import Target

COMMON: dict[str, Any] = dict(
    vocab_size=96, hidden_size=32, num_hidden_layers=6, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
    intermediate_size=48, max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gemma3_text": dict(sliding_window=16, query_pre_attn_scalar=16),
    "mixtral": dict(num_local_experts=4, num_experts_per_tok=2),
    "gpt_oss": dict(sliding_window=16, num_local_experts=4, num_experts_per_tok=2),
}
DELTA = dict(linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4)
MAMBA = dict(mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_n_groups=1, mamba_chunk_size=8)
# more architectures, for test_other_targets.py
OTHERS: dict[str, dict[str, Any]] = {
    "qwen3_moe": dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, mlp_only_layers=[0]),
    "deepseek_v3": dict(  # keys and values of different sizes
        head_dim=8, num_key_value_heads=2, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12,
        n_routed_experts=8, num_experts_per_tok=2, n_group=2, topk_group=1, moe_intermediate_size=16, first_k_dense_replace=1,
    ),
    "llama4_text": dict(  # queries are scaled anew every 4 positions (8192 in the published ones)
        intermediate_size_mlp=48, num_local_experts=4, interleave_moe_layer_step=2, attention_chunk_size=16, floor_scale=4, attn_scale=0.5,
    ),
    # an indexer chooses the keys that are attended to; every third layer has one, the others go by its choice
    "glm_moe_dsa": dict(
        head_dim=8, num_key_value_heads=2, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12,
        n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, first_k_dense_replace=1,
        indexer_types=["full", "shared", "shared"] * 2, index_topk=8, index_n_heads=8, index_head_dim=16,
    ),
    # layers of two sizes, values that are the keys, the last layers read the keys of others, an embedding for each layer
    "gemma4_text": dict(
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2, sliding_window=16, global_head_dim=24,
        num_global_key_value_heads=1, attention_k_eq_v=True, num_kv_shared_layers=2, hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=96,
    ),
    # with recurrent layers: Gated DeltaNet, short convolutions, Mamba in layers of its own, Mamba beside attention
    "qwen3_5_text": DELTA,
    "lfm2": dict(layer_types=["conv", "conv", "full_attention"] * 2),
    "nemotron_h": dict(
        MAMBA, mamba_num_heads=4, mamba_head_dim=16, ssm_state_size=8, n_groups=2, chunk_size=8, moe_shared_expert_intermediate_size=16,
        layers_block_type=["linear_attention", "mlp", "full_attention", "linear_attention", "mlp", "full_attention"],
    ),
    "falcon_h1": dict(MAMBA, mamba_d_ssm=64),
}  # fmt: skip


def tiny_target(architecture: str = "llama", seed: int = 0, **changes: Any) -> Target:
    """Weights larger than usual, so that greedy outputs vary and ties do not happen."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(architecture, **{**COMMON, **(ARCHITECTURES | OTHERS).get(architecture, {}), **changes})
    attention = "eager" if architecture in ("gpt_oss", "gemma2", "hy_v4") else "sdpa"
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
    embed, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    for p in model.parameters():
        if p.ndim > 1:
            torch.nn.init.normal_(p, std=1.0 if p is embed else 0.25)
    if head is embed:  # untie output head and embedding, else the target would repeat its last token forever
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(head) * 0.25)
    model.config.eos_token_id = model.generation_config.eos_token_id = None  # random text would stop at once
    return Target(model, name=architecture)
