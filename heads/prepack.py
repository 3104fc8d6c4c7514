"""Frozen matrices on a CPU: products that read the same input are joined, and each matrix is stored in the order that multiplies fastest
(heads/orders.py).

Shape suffixes: V rows of a matrix, H its columns (the width of an input).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import inf
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from headstart.heads import orders
from headstart.heads.orders import dense_on_cpu, is_packed, prepackable

JOINT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # layers that read the same input, under the names that most models use
TWINS: Any = WeakTensorKeyDictionary()  # matrix -> (its prepacked copy, rows from which that is faster, the matrix's _state when packed)


def product(x: Tensor, weight_VH: Tensor, bias_V: Tensor | None = None) -> Tensor:
    """``x`` [.., H] times the matrix plus the bias: [.., V]. Uses the prepacked copy where it is faster and no gradient is needed."""
    twin, since = None, inf
    if weight_VH.device.type == "cpu" and not is_packed(weight_VH) and (found := TWINS.get(weight_VH)) is not None:
        packed, faster, state = found
        if state == _state(weight_VH):  # else the matrix has changed since it was packed
            twin, since = packed, faster
    return _multiply(x, weight_VH, bias_V, twin, since)


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None, twin: Tensor | None, since: float) -> Tensor:
    """``x`` times the matrix, by ``twin`` from ``since`` rows on. Raises RuntimeError where a prepacked matrix would need a gradient."""
    learns, whole = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad), is_packed(weight)
    if whole and learns:
        raise RuntimeError("a model that was prepacked for decoding cannot be trained: load it again, or decode under torch.no_grad()")
    if whole or (twin is not None and not learns and x.numel() >= since * x.shape[-1]):
        return orders.packed_product(x, weight if twin is None else twin, bias)
    # Flattened to one matrix: for a slice of a batch, torch would copy the whole frozen matrix.
    return F.linear(x.reshape(-1, x.shape[-1]), weight, bias).view(*x.shape[:-1], weight.shape[0])


def _state(weight: Tensor) -> tuple[int, int]:
    """A value that changes whenever the matrix does. (Except by in-place changes of ``weight.data``, which torch does not count.)"""
    return weight.data_ptr(), 0 if weight.is_inference() else weight._version


class Prepacked(nn.Linear):
    """A linear layer after prepacking. Its weight is either prepacked, or dense with a prepacked ``twin`` that is faster from ``since``
    rows on. Only products may read a prepacked weight.
    """

    twin: Tensor | None
    since: float

    def forward(self, x: Tensor) -> Tensor:
        """Multiply by the copy that is faster for the number of rows in ``x``."""
        return _multiply(x, self.weight, self.bias, self.twin, self.since)

    def hold(self, weight: Tensor) -> None:
        """Store ``weight`` in the order, or in both orders, that multiply fastest."""
        packed, since = orders.in_order(weight)
        both = since != 1 and packed is not None
        self.weight = nn.Parameter(weight.detach() if packed is None or both else packed, requires_grad=False)
        self.twin, self.since = (packed, since) if both else (None, inf)


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


class Joined(nn.Linear):
    """Takes the place of a layer whose joined matrix stayed dense: its weight is a view of that matrix, and it multiplies on its own."""

    whole: Prepacked


# Replacing layers ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def prepack_beside(weight: Tensor) -> None:
    """Add a prepacked copy to a matrix that must stay dense because it is also read in other ways: a tied embedding, an output head."""
    if prepackable(weight) and weight not in TWINS:
        packed, since = orders.in_order(weight)
        if packed is not None:
            TWINS[weight] = (packed, since, _state(weight))


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
            module.__class__ = Prepacked
            module.hold(module.weight)  # type: ignore[operator]
        else:
            prepack_beside(module.weight)
            module.__class__ = Shared


def _join(owner: nn.Module, names: Sequence[str]) -> None:
    """Replace these linear layers of ``owner`` by one joined product. Does nothing where their input widths or dtypes differ, where only
    some have a bias, or where the joined matrix cannot be prepacked. (A single matrix may be too small for that: few key-value heads do
    not fill a panel.)
    """
    layers: list[Any] = [getattr(owner, name) for name in names]
    if len({(layer.in_features, layer.weight.dtype, layer.bias is None) for layer in layers}) > 1:
        return
    dense = torch.cat([layer.weight for layer in layers])
    if not prepackable(dense):
        return
    whole = Prepacked(1, 1, bias=False, device="meta").requires_grad_(False)
    whole.in_features, whole.out_features = layers[0].in_features, sum(layer.out_features for layer in layers)
    if layers[0].bias is not None:
        whole.bias = nn.Parameter(torch.cat([layer.bias for layer in layers]), requires_grad=False)
    whole.hold(dense)
    start = 0
    for name, layer in zip(names, layers, strict=True):
        rows = slice(start, start + layer.out_features)
        start = rows.stop
        if is_packed(whole.weight):
            setattr(owner, name, Part(whole, rows, last=name == names[-1]))
        else:
            layer.weight = nn.Parameter(dense[rows], requires_grad=layer.weight.requires_grad)
            layer.__class__ = Joined
            vars(layer)["whole"] = whole  # set past nn.Module, so that it is not registered as a submodule


def joint(owner: nn.Module, names: Sequence[str]) -> Prepacked | None:
    """The joined product of these layers of ``owner``; None where they have none."""
    layers = [getattr(owner, name, None) for name in names]
    return layers[0].whole if all(isinstance(layer, Part | Joined) for layer in layers) else None  # type: ignore[union-attr]


def _linear(layer: Any) -> bool:
    return type(layer) is nn.Linear and "forward" not in vars(layer) and dense_on_cpu(layer.weight)


def _plain(layer: Any) -> bool:
    return _linear(layer) and prepackable(layer.weight)


class Shared(nn.Linear):
    """A linear layer whose matrix other modules read too: it stays dense and has a prepacked copy in ``TWINS``."""

    def forward(self, x: Tensor) -> Tensor:
        return product(x, self.weight, self.bias)
