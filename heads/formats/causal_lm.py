"""An ordinary Hugging Face causal LM folder: every engine and transformers load it as an independent draft model.

What LoRA has learnt is merged into the matrices it stands beside; the file knows nothing of it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from heads.base import TargetShape
from heads.serving import Command, sglang_chain, transformers, vllm

with_tokenizer = True  # engines load the draft model's own tokenizer


def names(drafter: Any) -> dict[str, str]:
    tied = getattr(drafter.lm, "all_tied_weights_keys", None) or {}
    found = {name: name.removeprefix("lm.").replace(".base_layer.", ".") for name in drafter.state_dict() if ".lora_" not in name}
    return {ours: theirs for ours, theirs in found.items() if theirs not in tied}


def extras(drafter: Any) -> dict[str, Tensor]:
    """The merged matrices, in the place of those that LoRA left as they were."""
    adapted = [] if drafter.lora is None else [(name, m) for name, m in drafter.lm.named_modules() if hasattr(m, "lora_A")]
    return {f"{name}.weight": m.get_base_layer().weight + m.get_delta_weight("default") for name, m in adapted}


def config(drafter: Any) -> dict[str, Any]:
    return {**drafter.lm.config.to_dict(), "architectures": [type(drafter.lm).__name__]}


def recognises(config: dict[str, Any]) -> bool:
    return False  # it stands for itself, sharded or not: see is_plain


def is_plain(config: dict[str, Any]) -> bool:
    """Whether a config.json is that of a language model as transformers saves it, not of a drafter that goes by a similar name."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name, known = config.get("architectures"), MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    name = name[0] if isinstance(name, list) and name else None
    kind = config.get("model_type")
    return isinstance(kind, str) and known.get(kind) == name and str(name).endswith(("ForCausalLM", "LMHeadModel"))


def arguments(config: dict[str, Any], tensors: dict[str, Tensor], shape: TargetShape) -> tuple[str, dict[str, Any]]:
    raise RuntimeError("not recognised without our own block")


def serving(drafter: Any, target: str, folder: str, guesses: int) -> list[Command]:
    assistant = f"model.generate(**inputs, max_new_tokens=64, assistant_model=AutoModelForCausalLM.from_pretrained({folder!r}))"
    return [
        vllm(target, folder, "draft_model", guesses, "0.32 or newer"),
        sglang_chain(target, folder, "STANDALONE", guesses, "0.5.3 or newer"),
        transformers(target, assistant, "its own assisted generation, one sequence at a time"),
    ]
