"""transformers' own ``generate``, plain or assisted, which our decoding is compared with."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headstart.heads.errors import UserError
from headstart.inference.decoding.decode import Generation
from headstart.inference.decoding.sampling import SamplingParams
from headstart.inference.decoding.target import Target

LOOKUP = {"prompt_lookup_num_tokens": 10}  # transformers' assisted generation without an assistant, as its documentation has it


class Passes:
    """A streamer for ``generate`` that counts the tokens of every pass. Its first call gets the prompt's tokens."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, tokens: Tensor) -> None:
        """Count the tokens of a pass."""
        self.tokens.append(tokens.numel())

    def end(self) -> None:
        """Part of a streamer's interface; nothing is left to be counted."""


def hf_generate(
    target: Target, prompt: Sequence[int], new_tokens: int, sampling: SamplingParams, assisted: dict[str, Any] | None = None
) -> Generation:
    """Continue one prompt. ``assisted``: ``assistant_model`` or ``prompt_lookup_num_tokens``; then every pass of the target is a round, as
    the pass over the prompt verifies guesses too.
    """
    ids, passes = torch.tensor([list(prompt)], device=target.device), Passes()
    stop = list(target.stop_ids) or None
    how: dict[str, Any] = {"do_sample": False, "repetition_penalty": sampling.repetition_penalty, "eos_token_id": stop, "pad_token_id": 0}
    if sampling.temperature > 0:
        filters = {"top_k": sampling.top_k, "top_p": sampling.top_p, "min_p": sampling.min_p or None}
        how |= {"do_sample": True, "temperature": sampling.temperature, **filters}
    if assisted is not None:
        how |= {"streamer": passes, **assisted}
    with torch.random.fork_rng([target.device] if target.device.type == "cuda" else []):  # transformers draws from torch's own generator
        torch.manual_seed(sampling.seed)
        start = time.perf_counter()
        out = target.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, **how)
        tokens = out[0, len(prompt) :].tolist()  # this waits for the GPU
        seconds = time.perf_counter() - start
    return Generation(tokens, emitted=passes.tokens[1:], seconds=seconds)


def assistant_of(folder: str | None, target: Target) -> dict[str, Any]:
    """What ``hf_generate`` takes as ``assisted``: the small language model in a folder, or prompt lookup where ``folder`` is None. Raises
    UserError for a folder without a causal language model, and for another vocabulary than the target's.
    """
    if folder is None:
        return LOOKUP
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=target.dtype, use_safetensors=True, local_files_only=True)
    except (OSError, ValueError, KeyError) as e:
        raise UserError(f"assistant={folder} is not the folder of a causal language model: {' '.join(str(e).split())[:300]}") from e
    if model.config.get_text_config().vocab_size != target.shape.vocab_size:
        raise UserError(f"assistant={folder} has another vocabulary than {target.name}: give a model of the same tokenizer")
    return {"assistant_model": model.to(target.device).eval()}
