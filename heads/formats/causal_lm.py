"""An ordinary Hugging Face causal LM folder: every engine and transformers load it as an independent draft model.

LoRA's matrices are merged into those that they adapt, so the file holds no trace of them.
"""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from headstart.heads.bars import no_bars
from headstart.heads.formats.keys import need
from headstart.heads.formats.llama import rope_keys, rope_of
from headstart.heads.serving import Command, llama_cpp, sglang_chain, transformers, vllm

with_tokenizer = True  # engines load the draft model's own tokenizer
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")  # special tokens, which are the target's
# Kinds of models with MTP modules: from any drafter of such a kind, vLLM (0.33) and SGLang (0.5.23) use only these modules, whatever method
# is requested.
_MTP = "deepseek_v[34]|glm4_moe|glm_moe_dsa|ernie4_5_moe|exaone_moe|longcat|mimo|hy_v[34]|qwen3_next|qwen3_5|nemotron_h|bailing"
TAKEN_FOR_MTP = {"vLLM": re.compile(_MTP + "|exaone4_5|kimi_k3"), "SGLang": re.compile(_MTP + "|qwen3_moe")}
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # names that configs use for the number of experts
LOCAL = ("_name_or_path", "dtype")  # keys that describe the model in memory, not the folder


def names(drafter: Any) -> dict[str, str]:
    """The model's own names, without LoRA's matrices and without tied weights."""
    tied = getattr(drafter.lm, "all_tied_weights_keys", None) or {}
    found = {name: name.removeprefix("lm.").replace(".base_layer.", ".") for name in drafter.state_dict() if ".lora_" not in name}
    return {ours: theirs for ours, theirs in found.items() if theirs not in tied}


def extras(drafter: Any) -> dict[str, Tensor]:
    """The merged matrices. They replace the base matrices, which LoRA does not change."""
    adapted = [] if drafter.lora is None else [(name, m) for name, m in drafter.lm.named_modules() if hasattr(m, "lora_A")]
    return {f"{name}.weight": m.get_base_layer().weight + m.get_delta_weight("default") for name, m in adapted}


def in_file(drafter: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as published folders hold them and engines expect them."""
    if drafter.lm is None:  # a copy of the target's first layers that is not made yet
        return dict(tensors)
    return parted(type(drafter.lm), drafter.lm.config, tensors)


def parted(kind: Any, config: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a model of the class ``kind`` as published folders hold them. transformers 5 holds all experts of a layer in one."""
    from transformers.core_model_loading import revert_weight_conversion

    with torch.device("meta"):
        model = kind(config)  # a fresh model: the draft model may depend on the folder that it came from
    return dict(revert_weight_conversion(model, dict(tensors)))


def in_memory(drafter: Any, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The tensors as the model in memory holds them."""
    together = set(names(drafter).values())
    if tensors.keys() == together:  # already joined, or a folder that an earlier version saved
        return tensors
    return united(type(drafter.lm), drafter.lm.config, tensors, together)


def united(kind: Any, config: Any, tensors: Mapping[str, Tensor], together: set[str]) -> dict[str, Tensor]:
    """The opposite of ``parted``. ``together``: the names that the model in memory has for these tensors."""
    dtype = functools.reduce(torch.promote_types, {tensor.dtype for tensor in tensors.values()})
    with quiet():
        model = kind.from_pretrained(None, config=config, state_dict=dict(tensors), dtype=dtype)
    own = model.state_dict()
    return {name: own[name].to(dtype) for name in together}


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' progress bars and its reports of missing, unexpected and mismatched tensors, which are errors here."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with no_bars():
            yield
    finally:
        logging.set_verbosity(before)


def config(drafter: Any) -> dict[str, Any]:
    """The keys that transformers writes for the model, with RoPE in every spelling."""
    return _keys(drafter.lm.config) | {"architectures": [type(drafter.lm).__name__]}


def beside(drafter: Any) -> dict[str, str]:
    """generation_config.json with the target's special tokens."""
    said = {key: value for key in TOKENS if (value := getattr(drafter.lm.config, key, None)) is not None}
    return {"generation_config.json": json.dumps(said, indent=2) + "\n"}


def read(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys as transformers reads them, whatever version wrote them, and the RoPE spellings of older engines. Raises UserError."""
    from transformers import AutoConfig

    check_rope(config)
    own = {"architectures": config.get("architectures")}
    keys = copy.deepcopy({k: v for k, v in config.items() if k not in (*LOCAL, "torch_dtype", "headstart")})  # for_model alters its input
    return _keys(AutoConfig.for_model(keys.pop("model_type"), **keys)) | own


def check_rope(config: Mapping[str, Any]) -> None:
    """Raises UserError where two spellings of RoPE contradict each other. (RoPE per kind of layer has only one spelling.)"""
    rope = config.get("rope_parameters")
    if not (isinstance(rope, dict) and any(isinstance(part, dict) for part in rope.values())):
        rope_of(config)


def _keys(hf: Any) -> dict[str, Any]:
    keys = {key: value for key, value in hf.to_dict().items() if key not in LOCAL}
    rope = keys.get("rope_parameters")
    return keys | (rope_keys(rope) if rope and "rope_theta" in rope else {})


def is_plain(config: dict[str, Any]) -> bool:
    """Whether a config.json is that of a language model saved by transformers, and not of a drafter with a similar name."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name, known = config.get("architectures"), MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    name = name[0] if isinstance(name, list) and name else None
    kind = config.get("model_type")
    return isinstance(kind, str) and known.get(kind) == name and str(name).endswith(("ForCausalLM", "LMHeadModel"))


def head_of(config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The head of a plain language model's folder, and its settings: PARD if the config names the mask token. (It does not say how many
    guesses the drafter was trained for.) Raises UserError where engines would take another mask.
    """
    mask = config.get("pard_token")
    if mask is None:
        return "draft_lm", {}
    need(config, dict.fromkeys(("mask_token_id", "dspark_noise_token_id", "ptd_token_id"), (mask, None)))
    return "pard", {"mask_token": mask}


def serving(drafter: Any, target: str, folder: str, guesses: int) -> list[Command]:
    """vLLM and SGLang, with it as an independent draft model, unless they would use it only for MTP modules; llama.cpp, if it
    was run with such a model; and transformers.
    """
    assistant = f"model.generate(**inputs, max_new_tokens=64, assistant_model=AutoModelForCausalLM.from_pretrained({folder!r}))"
    found = [in_vllm(drafter, target, folder, guesses)]
    found.append(_within(sglang_chain(target, folder, "STANDALONE", guesses, "0.5.3 or newer"), drafter, "--context-length"))
    found = loading(drafter, found)
    if drafter.lm.config.model_type in ("llama", "qwen3"):
        found.append(_within(llama_cpp(target, folder, "draft-simple", guesses), drafter, "-c"))
    return [*found, transformers(target, assistant, "its own assisted generation, one sequence at a time")]


def in_vllm(drafter: Any, target: str, folder: str, guesses: int, **more: Any) -> Command:
    """The command for vLLM. ``more``: further keys of its speculative config."""
    experts = any(getattr(drafter.lm.config, key, None) for key in EXPERTS)
    needs = "0.32 or newer" + ", for a target that has experts too" * experts
    return _within(vllm(target, folder, "draft_model", guesses, needs, **more), drafter, "--max-model-len")


def loading(drafter: Any, commands: list[Command]) -> list[Command]:
    """The commands of engines that would not use a model of this kind only for MTP modules."""
    kind, never = drafter.lm.config.model_type, re.compile(r"(?!)")
    return [command for command in commands if not TAKEN_FOR_MTP.get(command.engine, never).match(kind)]


def _within(command: Command, drafter: Any, flag: str) -> Command:
    """The command with the flag that limits the served context to the draft model's positions, where the target has more: SGLang does not
    start without it.
    """
    positions = getattr(drafter.lm.config, "max_position_embeddings", None)
    if positions is None or positions >= drafter.shape.max_positions:
        return command
    needs = f"{command.needs}; contexts of {positions} tokens at most, as many as the draft model has positions"
    return replace(command, text=f"{command.text} {flag} {positions}", needs=needs)
