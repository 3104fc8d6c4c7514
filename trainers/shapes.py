"""Models without values, for plans: parameters take no memory, operations compute only shapes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headstart.heads import layers
from headstart.heads.base import TargetShape
from headstart.heads.kinds import model_class


def without_weights(hf: Any) -> Any:
    """The model of a transformers config, on the meta device, frozen."""
    with torch.device("meta"):
        return model_class(hf).from_config(hf).requires_grad_(False)


class _FusedNorm(torch.autograd.Function):
    """Saves for the backward pass what CUDA's kernel saves. (On a CPU the norm is several operations, and each saves its own tensors.)"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)


class _FusedGate(torch.autograd.Function):
    """Saves what ``Gated`` of heads/kernels/operations.py saves."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return torch.empty_like(gate)


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Inside, a root-mean-square norm and the SwiGLU of a drafter are single operations."""

    def norm(input: Tensor, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Any:
        return _FusedNorm.apply(input, weight)

    own: Any = (F.rms_norm, layers.swiglu)
    F.rms_norm, layers.swiglu = norm, _FusedGate.apply
    try:
        yield
    finally:
        F.rms_norm, layers.swiglu = own


@contextmanager
def one_expert() -> Iterator[None]:
    """Inside, every row is multiplied by the first expert of a layer: the shapes and the cost are the same. (torch 2.13 knows the shape of
    its grouped product for bf16 only.)
    """
    from transformers.integrations import moe

    own = moe._grouped_mm
    moe._grouped_mm = lambda input, weight, offs: input.to(weight.dtype) @ weight[0]
    try:
        yield
    finally:
        moe._grouped_mm = own


def without_numbers(built: nn.Module) -> None:
    """Replace the parameters and buffers of ``built`` in place by empty tensors of the same shapes on the CPU. Under FakeTensorMode these
    take no memory. (Unlike meta tensors they can pass through code that needs a real device.)
    """
    made: dict[int, Any] = {}
    for module in built.modules():
        for place in (module._parameters, module._buffers):
            for name, x in place.items():
                if x is not None and id(x) not in made:
                    empty = torch.empty(x.shape, dtype=x.dtype)
                    made[id(x)] = nn.Parameter(empty, x.requires_grad) if isinstance(x, nn.Parameter) else empty
                if x is not None:
                    place[name] = made[id(x)]


class Kept:
    """Adds up the memory that is kept for a backward pass: of the tensors that autograd saves within ``saving``, and of those given to
    ``add``. Views of the same memory count once. ``known``: tensors that do not count, because they exist anyway (weights, inputs).
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        self.known = {_memory_id(x) for x in known}
        self.sizes: dict[int, int] = {}  # id of the memory -> bytes

    def add(self, x: Tensor) -> Tensor:
        """Count a tensor, and return it."""
        if _memory_id(x) not in self.known:
            self.sizes[_memory_id(x)] = x.untyped_storage().nbytes()
        return x

    def saving(self) -> AbstractContextManager[object]:
        """A context within which all that autograd saves is counted."""
        return torch.autograd.graph.saved_tensors_hooks(self.add, lambda x: x)

    @property
    def total(self) -> int:
        """The bytes counted so far."""
        return sum(self.sizes.values())


def _memory_id(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def width_of(hf: Any, shape: TargetShape) -> int:
    """Width of the MLP that a token uses; in a mixture of experts, the sum over the experts that it uses."""
    text = hf.get_text_config()
    inner = getattr(text, "moe_intermediate_size", None) or shape.intermediate_size  # Mixtral and gpt-oss have only the latter key
    return inner * (getattr(text, "num_experts_per_tok", None) or 1)
