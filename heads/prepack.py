"""Frozen matrices on a CPU, stored once in the order in which oneDNN multiplies by them.

torch multiplies by a matrix as it lies in memory: in half precision oneDNN reorders it at every call, and in fp32 MKL takes its
slow kernels on some processors. A decoding step does little but read matrices, so their order is worth a factor of its speed
(benchmarks/prepack.py). ``torch.compile`` does the same to what it freezes; here it serves any number of rows, uncompiled.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

LEAST = 1 << 16  # numbers in a matrix; below, the call costs more than it saves
TWINS: Any = WeakTensorKeyDictionary()  # matrix -> (the same, prepacked, its state then): of matrices that others read as they are


def product(x: Tensor, weight_VH: Tensor, bias_V: Tensor | None = None) -> Tensor:
    """x [.., H] times the matrix: [.., V]. By its prepacked twin where there is one and nothing is to be trained through it."""
    learns = torch.is_grad_enabled() and (x.requires_grad or weight_VH.requires_grad)
    if weight_VH.is_mkldnn:
        if learns:
            raise RuntimeError("a model that was prepacked for decoding cannot be trained: load it anew, or decode under torch.no_grad()")
        return _packed_product(x, weight_VH, bias_V)
    if not learns and weight_VH.device.type == "cpu" and (twin := TWINS.get(weight_VH)) is not None:
        packed, state = twin
        if state == _state(weight_VH):  # else it was changed since
            return _packed_product(x, packed, bias_V)
    # as one matrix: of a slice of a batch, torch would multiply by a copy of the whole of a frozen one
    return F.linear(x.flatten(0, -2), weight_VH, bias_V).unflatten(0, x.shape[:-1])


def _state(weight: Tensor) -> tuple[int, int]:
    """What changes with a matrix. (Not where ``weight.data`` is changed in place: torch does not count that.)"""
    return weight.data_ptr(), 0 if weight.is_inference() else weight._version


@torch.compiler.disable  # torch's compiler accepts this call from itself only
def _packed_product(x: Tensor, packed: Tensor, bias_V: Tensor | None) -> Tensor:
    if torch.is_autocast_enabled("cpu"):  # which does not know this call
        x = x.to(packed.dtype)
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias_V, "none", [], "")


class Prepacked(nn.Linear):
    """What a linear layer becomes. Its weight is read by ``product`` only."""

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return product(x, self.weight, self.bias)


def prepackable(weight: Tensor) -> bool:
    """On a CPU, dense, large enough, of a dtype that oneDNN multiplies here."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    if type(weight.data) is not torch.Tensor or weight.device.type != "cpu":
        return False
    if weight.is_mkldnn or weight.layout != torch.strided or weight.dim() != 2 or weight.numel() < LEAST:
        return False
    half: bool = weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32 or half


@torch.no_grad()
def prepack_beside(weight: Tensor) -> None:
    """A matrix that is read in other ways too keeps its dense form: a tied embedding, an output head."""
    if prepackable(weight) and weight not in TWINS:
        TWINS[weight] = (torch.ops.mkldnn._reorder_linear_weight(weight.detach()), _state(weight))


@torch.no_grad()
def prepack(model: nn.Module) -> None:
    """The linear layers of a frozen model, in place, for decoding: their weights can then neither be read, saved, moved nor trained.

    Those that several modules share, or that went through ``prepack_beside`` before, keep their dense form. On other devices, and for
    layers of other classes or with a ``forward`` of their own (quantised, sharded, offloaded), and below adapters, nothing changes.
    """
    users = Counter(id(weight) for module in model.modules() for weight in module.parameters(recurse=False))
    for name, module in model.named_modules():
        own = type(module) is nn.Linear and "forward" not in vars(module) and not name.endswith("base_layer")
        if not own or not prepackable(module.weight):
            continue
        if users[id(module.weight)] > 1:
            prepack_beside(module.weight)
        elif module.weight not in TWINS:
            packed = torch.ops.mkldnn._reorder_linear_weight(module.weight.detach())
            module.weight = nn.Parameter(packed, requires_grad=module.weight.requires_grad)
        module.__class__ = Prepacked
