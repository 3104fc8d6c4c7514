"""Which targets an engine can serve with which kind of drafting. With any other target it fails at start, or drafts from wrong inputs.

Drafters read inner layers of the target (SGLang's EAGLE and EAGLE3 also its embedding and head). The engine's class for the target must
offer an interface for that. A kind of targets is their ``model_type``; of a multimodal model for which transformers has no causal LM it is
the whole model's, by which engines choose their class. The kinds come from the sources of vLLM 0.33.0 (``SupportsEagle3``; granitemoe and
its kin: 0.32.0) and SGLang 0.5.23 (``set_eagle3_layers_to_capture``, ``set_dflash_layers_to_capture``, ``get_embed_and_head``), and from
TensorRT-LLM's feature matrix of 2026. With llama.cpp (b11434), those that were run are listed. For vLLM, the kinds without the interface
are listed: it runs every kind that it has no class for through transformers, where the interface exists. vLLM also shares the embedding's
module, which must be called ``embed_tokens``, and for EAGLE-1 and MTP the output head's, ``lm_head`` (0.32.0: Cohere, Gemma 2 and Gemma 3n
have none).

Kinds are also left out where the drafter would read something else than in training. SGLang's Gemma 3 hands out the output of a layer's
MLP instead of the residual stream. The embedding modules of some kinds multiply by a scale: where an engine shares such a module instead
of its table, the drafter gets scaled embeddings. That happens with VaultGemma in vLLM, and with Gemma 4 in SGLang for block drafters.
"""

from __future__ import annotations

SGLANG_BRANCHES = "speculative_eagle_topk"  # SGLang's setting: children of a node of its trees; 1: it drafts chains


def _kinds(names: str) -> set[str]:
    return set(names.split())


_NOT_VLLM = _kinds("""
    axk1 bloom cohere cohere2 dbrx ernie4_5_moe exaone4 exaone_moe falcon falcon_h1 gemma gemma2 gemma3_text gemma3n_text glm4 glm4_moe
    glm4_moe_lite gpt2 gpt_bigcode gpt_neox gptj granitemoe granitemoe_swa granitemoehybrid granitemoeshared hrm_text hy_v3 hy_v4
    hyperclovax inkling_text jamba lfm2 lfm2_moe longcat_flash mixtral nemotron olmo_hybrid olmoe opt qwen2_moe qwen4_exp_text stablelm
    vaultgemma zamba2
""")
_NOT_VLLM_EAGLE = _kinds("""
    bloom cohere cohere2 cohere2_moe dbrx falcon gemma2 gemma3n_text gpt2 gpt_bigcode gpt_neox opt vaultgemma
""")
# multimodal models, by the kind of the whole
_NOT_VLLM_IMAGES = _kinds("""
    aria blip-2 cohere2_vision cosmos3_edge ernie4_5_vl_moe glm4v glm4v_moe glm_ocr granite4_vision idefics3 internvl lfm2_vl llava_next
    llava_next_video llava_onevision paddleocr_vl paligemma qianfan_ocr qwen2_vl smolvlm step3p7
""")
_SGLANG = _kinds("""
    deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa gpt_oss kimi_k2 llama mellum ministral3 mistral phi3 qwen3
    qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next
""")
_EAGLE3 = _SGLANG | _kinds("""
    apertus bailing_moe exaone_moe gemma4_text glm4_moe llama4_text longcat_flash minimax_m2 qwen2
""")
_EAGLE = _EAGLE3 | _kinds("deepseek_v4 ernie4_5_moe exaone4 falcon_h1 gemma3_text glm4 hy_v3 hy_v4 laguna mimo_v2_flash nemotron_h opt")
_BLOCKS = _SGLANG | _kinds("deepseek_v4 kimi_linear laguna lfm2 lfm2_moe mimo_v2_flash nemotron_h")
_SGLANG_IMAGES = _kinds("kimi_k25 qwen3_vl qwen3_vl_moe")
_LLAMA_CPP_BLOCKS = _kinds("llama mistral qwen3")
_LLAMA_CPP = _LLAMA_CPP_BLOCKS | {"qwen3_moe"}
_TENSORRT = _kinds("gpt_oss llama llama4_text mistral qwen3 qwen3_moe")

# By engine and kind of drafting: vLLM's method, SGLang's algorithm, "" for TensorRT-LLM.
WITHOUT = {("vLLM", method): _NOT_VLLM | _NOT_VLLM_IMAGES for method in ("eagle3", "dflash", "dspark")} | {
    ("vLLM", "eagle"): _NOT_VLLM_EAGLE | _NOT_VLLM_IMAGES
}
WITH = {
    ("SGLang", "EAGLE3"): _EAGLE3 | _SGLANG_IMAGES | {"qwen2_5_vl"},
    ("SGLang", "EAGLE"): _EAGLE | _SGLANG_IMAGES | {"glm4v", "glm4v_moe", "llava", "mistral3", "qwen2_5_vl"},
    ("SGLang", "DFLASH"): _BLOCKS | _SGLANG_IMAGES | {"lfm2_vl"},
    ("SGLang", "DSPARK"): _BLOCKS | _SGLANG_IMAGES | {"lfm2_vl"},
    ("TensorRT-LLM", ""): _TENSORRT,
    ("llama.cpp", "draft-eagle3"): _LLAMA_CPP,
    ("llama.cpp", "draft-simple"): _LLAMA_CPP,
    ("llama.cpp", "draft-dflash"): _LLAMA_CPP_BLOCKS,
    ("llama.cpp", "draft-dspark"): _LLAMA_CPP_BLOCKS,
}


def serves(engine: str, drafting: str, kind: str) -> bool:
    """Whether the engine can serve a target of this ``model_type``. Kinds of drafting that need nothing of the target are in no table."""
    return kind not in WITHOUT.get((engine, drafting), ()) and kind in WITH.get((engine, drafting), (kind,))
