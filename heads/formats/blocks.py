"""Which engines compute a block drafter, and from which releases on. The commands are in ``dflash.py``."""

from __future__ import annotations

from typing import Any


def releases(drafter: Any) -> tuple[str, str]:
    """The releases of vLLM and SGLang that load it. (Releases older than jetspec's ignore is_causal without a warning.)"""
    head, windowed = drafter.config["head"], len(drafter.windowed)
    known = {"dflash": ("0.20.2", "0.5.11"), "jetspec": ("0.32", "0.5.17"), "dspark": ("0.32", "0.5.18")}
    known |= {"dflash2": ("0.29", "0.5.23"), "domino": ("0.29", "0.5.23"), "xpress": ("0.33", "0.5.23")}
    known["lilicorr"] = ("0.32", "0.5.23")
    in_vllm, in_sglang = known[head]
    if windowed or drafter.draft_ids is not None:
        in_vllm = "0.33"
    # vLLM's older runner, which CPUs have, cannot mix layers with and without a window
    on_gpu = head in ("dflash2", "dspark", "xpress", "lilicorr") or 0 < windowed < len(drafter.layers)
    for_sglang = f"{'0.5.23' if windowed else in_sglang} or newer"
    if windowed and not (drafter.causal or drafter.window_causal):
        for_sglang += " with --attention-backend fa3 (Triton has no window in layers that look both ways)"
    for_vllm = f"{in_vllm} or newer" + ", on a GPU" * on_gpu
    return for_vllm + "; it drafts greedily at every temperature" * (head == "xpress"), for_sglang


def in_llama_cpp(drafter: Any) -> bool:
    """Whether llama.cpp (b11434) computes the same. Without a word it leaves out Llama 3's rope, and lets all layers look both ways where
    only those with a window are causal. Of trimmed vocabularies it knows DSpark's alone. It packs the scores of DFlash 2's candidates into
    a hidden state, which must be long enough.
    """
    head = drafter.config["head"]
    mixed = drafter.windowed and (not drafter.window_slides or (drafter.window_causal and not drafter.causal))
    if mixed or drafter.shape.rope.get("rope_type") == "llama3":
        return False
    if head == "dflash2":
        candidates = drafter.config["candidates"]
        return bool(drafter.shape.hidden_size >= candidates * (candidates + 1))
    return head == "dspark" or (head in ("dflash", "jetspec") and drafter.draft_ids is None)
