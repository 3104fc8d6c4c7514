"""PARD as engines load it: an ordinary Hugging Face causal LM folder, whose config.json names the mask token (``pard_token``)."""

from __future__ import annotations

from typing import Any

from headstart.heads.formats import causal_lm
from headstart.heads.formats.causal_lm import beside, extras, in_file, in_memory, names, read, with_tokenizer
from headstart.heads.serving import Command, tensorrt_llm

__all__ = ["beside", "extras", "in_file", "in_memory", "names", "read", "with_tokenizer"]
# kinds of models of the published drafters, which TensorRT-LLM's tests load
PUBLISHED = ("llama", "qwen2", "qwen3")


def config(drafter: Any) -> dict[str, Any]:
    """The model's keys and the mask token."""
    return causal_lm.config(drafter) | {"pard_token": drafter.mask_token}


def serving(drafter: Any, target: str, folder: str, guesses: int) -> list[Command]:
    """vLLM, with parallel drafting, and TensorRT-LLM."""
    found = [causal_lm.in_vllm(drafter, target, folder, guesses, parallel_drafting=True)]
    if drafter.lm.config.model_type in PUBLISHED:
        needs = "a build of its main branch of 2026"
        found.append(tensorrt_llm(target, folder, guesses, needs, kind="PARD", mask_token_id=drafter.mask_token))
    return causal_lm.loading(drafter, found)


def unserved(drafter: Any) -> str:
    """Why no engine loads the folder."""
    return f"they would use a draft model of the kind {drafter.lm.config.model_type} only for modules of its own that guess"
