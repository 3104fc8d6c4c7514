"""A target and drafter whose acceptance can be set: a random Llama, and its own first layers as the drafter.

The later layers write little into the residual stream (their output projections are scaled down), so the first layers
mostly agree with the whole. Nothing is trained, and both sides of a comparison decode with the very same two modules.
"""

from __future__ import annotations

from typing import Any

import torch

from headstart.heads import hub
from headstart.heads.base import Drafter
from headstart.inference.decoding.target import Target


def first_layers(target: Target, layers: int) -> Drafter:
    """A language model made of copies of the target's embedding, first layers, final norm and head."""
    config = target.config.to_diff_dict() | {"model_type": target.config.model_type, "num_hidden_layers": layers}
    drafter: Any = hub.build("draft_lm", target.shape, config={k: v for k, v in config.items() if k not in ("dtype", "layer_types")})
    weights = target.model.state_dict()
    drafter.lm.load_state_dict({name: weights[name] for name in drafter.lm.state_dict()})
    drafter.attach(target.ends)
    drafter.lm.generation_config.eos_token_id = target.model.generation_config.eos_token_id
    return drafter.to(device=target.device, dtype=target.dtype).eval()


def plant(model: Any, first: int, dial: float, confidence: float = 1.0) -> None:
    """Multiply the output of layers after the ``first`` by ``dial``, and the logits by ``confidence``. In place."""
    with torch.no_grad():
        for layer in model.model.layers[first:]:
            layer.self_attn.o_proj.weight.mul_(dial)
            layer.mlp.down_proj.weight.mul_(dial)
        model.get_output_embeddings().weight.mul_(confidence)


def planted_pair(config: Any, *, first: int, dial: float, confidence: float, seed: int) -> tuple[Target, Drafter]:
    """``config``: of a Llama whose output head is not tied (a tied one would repeat its input). In bf16 on the CPU.

    Its weights have unit gain, so that its output depends on the whole context and does not become periodic.
    """
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    config.initializer_range, config.tie_word_embeddings = config.hidden_size**-0.5, False
    config.eos_token_id = config.bos_token_id = None
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    plant(model, first, dial, confidence)
    # Not frozen, as transformers leaves a model: with a frozen head, torch copies the whole of it for a slice of states.
    target = Target(model.eval(), name="planted", frozen=False)
    return target, first_layers(target, first)
