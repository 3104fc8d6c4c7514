"""Reading a text with a target whose weights stay in their files: only one layer is in memory at a time.

Every weight is loaded once from the files onto the device, and freed after use. This is slow, but works for a target of any size. It is
used to check whether hidden states from another source are this target's.

Shape suffixes: T tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from headstart.heads.kinds import model_class
from headstart.heads.lm import Backbone, first_layers, stack_of
from headstart.inference.decoding.stored import NotStored, StoredTarget


def final_norm(target: StoredTarget) -> nn.Module:
    """The target's final norm (between its last layer and its output head) with its weights. Raises NotStored where the files lack them."""
    model = _hollow(target)
    _, norm = first_layers(model, 0)
    _fill(target, model, _within(model, norm))
    return norm.requires_grad_(False)


@torch.no_grad()
def every_state(target: StoredTarget, tokens_T: Tensor) -> dict[int, Tensor]:
    """The target's states of one text: k -> the state after k layers [T, D]. 0 is the embedding; the last is after the final norm. Raises
    NotStored where the files lack a weight.
    """
    model = _hollow(target)
    body, _, layers = stack_of(model.get_decoder(), target.shape.layers)
    reader = Backbone(body)
    later = _within(model, *layers, model.get_output_embeddings())
    _fill(
        target, model, [name for name, _ in model.named_parameters() if name.startswith(target.files.names) and not name.startswith(later)]
    )

    def let_go(module: nn.Module, *_: Any) -> None:
        module.to("meta")

    for layer in layers:
        layer.register_forward_pre_hook(lambda module, _: _fill(target, model, _within(model, module)))
        layer.register_forward_hook(let_go)
    tokens_1T = tokens_T[None].to(target.device)
    here_1T = torch.arange(len(tokens_T), device=target.device)[None]
    taps = range(target.shape.layers + 1)
    states, _ = reader.run(taps, input_ids=tokens_1T, position_ids=here_1T, use_cache=False)
    return {k: states[k][0] for k in taps}


def _hollow(target: StoredTarget) -> Any:
    """The model with its weights on the meta device. Buffers computed from its config alone (rotations) are real."""
    from accelerate import init_empty_weights

    like = target.files.model
    with init_empty_weights(include_buffers=False):
        how = {"dtype": like.dtype, "attn_implementation": like.config._attn_implementation, "trust_remote_code": False}
        model: Any = model_class(like.config).from_config(like.config, **how)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(target.device)
    return model.eval().requires_grad_(False)


def _within(model: nn.Module, *modules: nn.Module) -> tuple[str, ...]:
    """The prefixes of the parameter names of these modules."""
    return tuple(f"{name}." for name, module in model.named_modules() if any(module is each for each in modules))


def _fill(target: StoredTarget, model: nn.Module, beginnings: Collection[str]) -> None:
    """Load the weights of the parameters whose names begin with one of ``beginnings``. Raises NotStored where the files lack some."""
    from accelerate.utils import set_module_tensor_to_device

    wanted = tuple(beginnings)
    for first in [name for name in target.files.sources if name.startswith(wanted)]:
        for name, value in target.files.read(first).items():
            set_module_tensor_to_device(model, name, target.device, value=value)
    if absent := [name for name, p in model.named_parameters() if name.startswith(wanted) and p.is_meta]:
        raise NotStored(f"its files lack {absent[0]}")
