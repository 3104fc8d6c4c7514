"""Frozen matrices on a CPU: products that read the same input are joined, and each matrix is stored in the order that multiplies fastest
(heads/orders.py).

Shape suffixes: V rows of a matrix, H its columns (the width of an input).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from headstart.heads import orders
from headstart.heads.orders import dense_on_cpu, is_packed, prepackable

JOINT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # layers that read the same input, under the names that most models use
TWINS: Any = WeakTensorKeyDictionary()  # matrix that stays dense -> (its prepacked copy, the matrix's _state when packed)


def product(x: Tensor, weight_VH: Tensor, bias_V: Tensor | None = None) -> Tensor:
    """``x`` [.., H] times the matrix plus the bias: [.., V]. Uses the matrix's prepacked copy, if it has one and no gradient is needed.
    Raises RuntimeError where a prepacked matrix would need a gradient.
    """
    learns = torch.is_grad_enabled() and (x.requires_grad or weight_VH.requires_grad)
    if is_packed(weight_VH):
        if learns:
            raise RuntimeError("a model that was prepacked for decoding cannot be trained: load it again, or decode under torch.no_grad()")
        return orders.packed_product(x, weight_VH, bias_V)
    if not learns and weight_VH.device.type == "cpu" and (found := TWINS.get(weight_VH)) is not None:
        packed, state = found
        if state == _state(weight_VH):  # else the matrix has changed since it was packed
            return orders.packed_product(x, packed, bias_V)
    # Flattened to one matrix: for a slice of a batch, torch would copy the whole frozen matrix.
    return F.linear(x.reshape(-1, x.shape[-1]), weight_VH, bias_V).view(*x.shape[:-1], weight_VH.shape[0])


def _state(weight: Tensor) -> tuple[int, int]:
    """A value that changes whenever the matrix does. (Except by in-place changes of ``weight.data``, which torch does not count.)"""
    return weight.data_ptr(), 0 if weight.is_inference() else weight._version


class Prepacked(nn.Linear):
    """A linear layer after prepacking. Its weight is stored in the order that multiplies fastest. Only products may read it, unless that is
    its own order.
    """

    def forward(self, x: Tensor) -> Tensor:
        return product(x, self.weight, self.bias)


class Part(nn.Module):
    """Takes the place of a layer whose matrix is now some rows of a joined one. The layers of a joined matrix share one product, because
    they read the same tensor one after the other.
    """

    def __init__(self, whole: Prepacked, rows: slice, last: bool) -> None:
        super().__init__()
        self.whole, self.last = whole, last
        self.start, self.stop = rows.start, rows.stop

    def forward(self, x: Tensor) -> Tensor:
        """These rows of the joined product of ``x``, which the first of the layers computes and the last one drops."""
        known: list[Tensor] = self.whole.__dict__.setdefault("known", [])
        if not known or known[0] is not x:
            known[:] = [x, self.whole(x)]
        found = known[1][..., self.start : self.stop]
        if self.last:
            known.clear()
        return found


# Replacing layers ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def prepack_beside(weight: Tensor) -> None:
    """Add a prepacked copy to a matrix that must stay dense because it is also read in other ways: a tied embedding, an output head."""
    if prepackable(weight) and weight not in TWINS:
        packed = orders.in_order(weight)
        if packed is not None:
            TWINS[weight] = (packed, _state(weight))


@torch.no_grad()
def prepack(model: nn.Module) -> None:
    """Prepack the linear layers of a frozen model in place, for decoding. Their weights can then not be read, saved, moved or trained.

    Weights that several modules share, or that ``prepack_beside`` has seen before, keep their dense form. Nothing changes on other devices,
    below adapters, and for layers of other classes or with a ``forward`` of their own (quantized, sharded, offloaded).
    """
    users = Counter(id(weight) for module in model.modules() for weight in module.parameters(recurse=False))

    def own(layer: Any) -> bool:
        return _linear(layer) and users[id(layer.weight)] == 1 and layer.weight not in TWINS

    for module in [*model.modules()]:
        for names in JOINT:
            layers: list[Any] = [getattr(module, name, None) for name in names]
            if all(own(layer) and not layer._forward_hooks for layer in layers):
                _join(module, names)
    for name, module in model.named_modules():
        if not _plain(module) or name.endswith("base_layer"):
            continue
        assert isinstance(module, nn.Linear)
        if own(module):
            packed = orders.in_order(module.weight)
            module.weight = nn.Parameter(module.weight if packed is None else packed, requires_grad=False)
        else:
            prepack_beside(module.weight)
        module.__class__ = Prepacked


def _join(owner: nn.Module, names: Sequence[str]) -> None:
    """Replace these linear layers of ``owner`` by one joined product. Does nothing where their input widths or dtypes differ, where only
    some have a bias, or where the joined matrix cannot be prepacked or stays dense. (A single matrix may be too small for that: few
    key-value heads do not fill a panel.)
    """
    layers: list[Any] = [getattr(owner, name) for name in names]
    if len({(layer.in_features, layer.weight.dtype, layer.bias is None) for layer in layers}) > 1:
        return
    dense = torch.cat([layer.weight for layer in layers])
    packed = orders.in_order(dense) if prepackable(dense) else None
    if packed is None:
        return
    whole = Prepacked(1, 1, bias=False, device="meta").requires_grad_(False)
    whole.in_features, whole.out_features = layers[0].in_features, sum(layer.out_features for layer in layers)
    if layers[0].bias is not None:
        whole.bias = nn.Parameter(torch.cat([layer.bias for layer in layers]), requires_grad=False)
    whole.weight = nn.Parameter(packed, requires_grad=False)
    start = 0
    for name, layer in zip(names, layers, strict=True):
        rows = slice(start, start + layer.out_features)
        start = rows.stop
        setattr(owner, name, Part(whole, rows, last=name == names[-1]))


def joint(owner: nn.Module, names: Sequence[str]) -> Prepacked | None:
    """The joined product of these layers of ``owner``; None where they have none."""
    layers = [getattr(owner, name, None) for name in names]
    return layers[0].whole if all(isinstance(layer, Part) for layer in layers) else None  # type: ignore[union-attr]


def _linear(layer: Any) -> bool:
    return type(layer) is nn.Linear and "forward" not in vars(layer) and dense_on_cpu(layer.weight)


def _plain(layer: Any) -> bool:
    return _linear(layer) and prepackable(layer.weight)
