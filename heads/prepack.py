"""Frozen matrices on a CPU: products that read the same input are joined, and each is kept in the order that is multiplied fastest.

torch multiplies by a matrix as it lies in memory: in half precision oneDNN reorders it at every call, and in fp32 MKL takes its
slow kernels on some processors. A decoding step does little but read matrices, so their order is worth a factor of its speed. But
which order is faster hangs on the processor, on shape, dtype and the number of rows (benchmarks/prepack.py), so nothing is assumed:
every shape is multiplied both ways for some milliseconds when a model is prepacked.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

LEAST = 1 << 12  # numbers in a matrix; below, nothing can be gained
ROWS = (1, 2, 4, 8, 16)  # of an input, for which is measured: a step, and the trees of a CPU
SMALL = 1 << 22  # bytes of a matrix that may be kept in both orders
JOINT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # layers that read the same, as most models call them
TRIES, BUDGET = 3, 2e-3  # calls of one measurement, and seconds: at least
RING, LAYERS = 1 << 23, 12  # bytes of the matrices of one measurement, and matrices: at most
TWINS: Any = WeakTensorKeyDictionary()  # matrix -> (the same, prepacked, rows from which it is faster, its state then)


def product(x: Tensor, weight_VH: Tensor, bias_V: Tensor | None = None) -> Tensor:
    """x [.., H] times the matrix: [.., V]. By its prepacked twin where that is faster and nothing is to be trained through it."""
    twin, since = None, inf
    if weight_VH.device.type == "cpu" and not weight_VH.is_mkldnn and (found := TWINS.get(weight_VH)) is not None:
        packed, faster, state = found
        if state == _state(weight_VH):  # else it was changed since
            twin, since = packed, faster
    return _multiply(x, weight_VH, bias_V, twin, since)


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None, twin: Tensor | None, since: float) -> Tensor:
    learns = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    if weight.is_mkldnn and learns:
        raise RuntimeError("a model that was prepacked for decoding cannot be trained: load it anew, or decode under torch.no_grad()")
    if weight.is_mkldnn or (twin is not None and not learns and x.numel() >= since * x.shape[-1]):
        return _packed_product(x, weight if twin is None else twin, bias)
    # as one matrix: of a slice of a batch, torch would multiply by a copy of the whole of a frozen one
    return F.linear(x.reshape(-1, x.shape[-1]), weight, bias).view(*x.shape[:-1], weight.shape[0])


def _state(weight: Tensor) -> tuple[int, int]:
    """What changes with a matrix. (Not where ``weight.data`` is changed in place: torch does not count that.)"""
    return weight.data_ptr(), 0 if weight.is_inference() else weight._version


@torch.compiler.disable  # torch's compiler accepts this call from itself only
def _packed_product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    if torch.is_autocast_enabled("cpu"):  # which does not know it
        x = x.to(packed.dtype)
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


class Prepacked(nn.Linear):
    """What a linear layer becomes: its weight is dense, with a prepacked twin where many rows want one, or prepacked itself. It is
    then read by products only.
    """

    twin: Tensor | None
    since: float

    def forward(self, x: Tensor) -> Tensor:
        """By the copy that is faster for so many rows."""
        return _multiply(x, self.weight, self.bias, self.twin, self.since)

    def hold(self, weight: Tensor) -> None:
        """``weight`` in the order, or the orders, that are fastest."""
        packed, since = _orders(weight)
        both = since != 1 and packed is not None
        self.weight = nn.Parameter(weight.detach() if packed is None or both else packed, requires_grad=False)
        self.twin, self.since = (packed, since) if both else (None, inf)


class Part(nn.Module):
    """Some rows of a joined product, in the place of the layer they were. Layers that read one and the same tensor one after the other
    share the product.
    """

    def __init__(self, whole: Prepacked, rows: slice, last: bool) -> None:
        super().__init__()
        self.whole, self.last = whole, last
        self.start, self.stop = rows.start, rows.stop

    def forward(self, x: Tensor) -> Tensor:
        known: list[Tensor] = self.whole.__dict__.setdefault("known", [])
        if not known or known[0] is not x:
            known[:] = [x, self.whole(x)]
        found = known[1][..., self.start : self.stop]
        if self.last:
            known.clear()
        return found


class Joined(nn.Linear):
    """The same where the joined product is dense: its weight is a part of it, and it multiplies alone."""

    whole: Prepacked


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


# Which order is faster -----------------------------------------------------------------------------------------------


def _orders(weight: Tensor) -> tuple[Tensor | None, float]:
    """The matrix prepacked, where that is faster, and the rows from which it is (1: always). A large one is kept in one order only:
    the one that is faster on the whole.
    """
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
    key = (*weight.shape, weight.dtype, torch.get_num_threads())
    if key not in RATIOS:
        RATIOS[key] = measured(weight.detach())
    ratios = RATIOS[key]
    since = inf
    for rows in reversed(ROWS):
        if ratios[rows] <= 1:
            break
        since = rows
    if since > 1 and weight.numel() * weight.element_size() > SMALL:
        overall = torch.tensor(list(ratios.values())).log().mean()
        since = 1 if overall > 0 else inf
    return (None, inf) if since == inf else (packed, since)


RATIOS: dict[tuple[Any, ...], dict[int, float]] = {}  # shape, dtype and threads -> what ``measured`` has found


@torch.no_grad()
def measured(weight: Tensor) -> dict[int, float]:
    """Seconds of the dense product over those of the prepacked one, for each number of ROWS: over 1, prepacked is faster. Both in turn,
    as a machine's speed changes within milliseconds, and by as many matrices as no cache near the processor holds: a step reads each once.
    """
    dense = [weight.clone() for _ in range(max(1, min(RING // (weight.numel() * weight.element_size()), LAYERS)))]
    packed = [torch.ops.mkldnn._reorder_linear_weight(each) for each in dense]
    found = {}
    for rows in ROWS:
        x = torch.ones(rows, weight.shape[1], dtype=weight.dtype)
        best = _seconds(lambda: [F.linear(x, each) for each in dense], lambda: [_packed_product(x, each, None) for each in packed])  # noqa: B023
        found[rows] = best[0] / best[1]
    return found


def _seconds(*calls: Callable[[], Any]) -> list[float]:
    """Of each the fastest of several, taken in turn: seconds that this thread ran, whatever others run beside it."""
    best, began, tries = [inf] * len(calls), time.thread_time(), 0
    while tries < TRIES or time.thread_time() - began < BUDGET * len(calls):
        for i, call in enumerate(calls):
            start = time.thread_time()
            call()
            best[i] = min(best[i], time.thread_time() - start)
        tries += 1
    return best


@functools.cache
def memory_dtype(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> torch.dtype | None:
    """In which dtype keys and values are best kept on a CPU, None: their own. torch's attention over half precision takes several
    times as long for a few rows as over fp32, where a processor has no better kernels for it.
    """
    if dtype == torch.float32:
        return None

    def attend(kept: torch.dtype, rows: int) -> Tensor:
        q = torch.ones(1, kv_heads, rows * heads // kv_heads, head_dim, dtype=dtype)
        k = torch.ones(1, kv_heads, 512, head_dim, dtype=kept)
        return F.scaled_dot_product_attention(q.to(kept), k, k).to(dtype)

    with torch.no_grad():
        wide, own = _seconds(*(lambda kept=kept: [attend(kept, rows) for rows in (1, 8)] for kept in (torch.float32, dtype)))
    return torch.float32 if wide < own else None


# What is put in their place ------------------------------------------------------------------------------------------


@torch.no_grad()
def prepack_beside(weight: Tensor) -> None:
    """A matrix that is read in other ways too keeps its dense form: a tied embedding, an output head."""
    if prepackable(weight) and weight not in TWINS:
        packed, since = _orders(weight)
        if packed is not None:
            TWINS[weight] = (packed, since, _state(weight))


@torch.no_grad()
def prepack(model: nn.Module) -> None:
    """The linear layers of a frozen model, in place, for decoding: their weights can then neither be read, saved, moved nor trained.

    Those that several modules share, or that went through ``prepack_beside`` before, keep their dense form. On other devices, and for
    layers of other classes or with a ``forward`` of their own (quantised, sharded, offloaded), and below adapters, nothing changes.
    """
    users = Counter(id(weight) for module in model.modules() for weight in module.parameters(recurse=False))

    def own(layer: Any) -> bool:
        return _plain(layer) and users[id(layer.weight)] == 1 and layer.weight not in TWINS

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
    """These linear layers of ``owner`` as one product, which they share from then on."""
    layers: list[Any] = [getattr(owner, name) for name in names]
    if len({(layer.in_features, layer.weight.dtype, layer.bias is None) for layer in layers}) > 1:
        return
    whole = Prepacked(1, 1, bias=False, device="meta").requires_grad_(False)
    whole.in_features, whole.out_features = layers[0].in_features, sum(layer.out_features for layer in layers)
    if layers[0].bias is not None:
        whole.bias = nn.Parameter(torch.cat([layer.bias for layer in layers]), requires_grad=False)
    dense = torch.cat([layer.weight for layer in layers])
    whole.hold(dense)
    start = 0
    for name, layer in zip(names, layers, strict=True):
        rows = slice(start, start + layer.out_features)
        start = rows.stop
        if whole.weight.is_mkldnn:
            setattr(owner, name, Part(whole, rows, last=name == names[-1]))
        else:
            layer.weight = nn.Parameter(dense[rows], requires_grad=layer.weight.requires_grad)
            layer.__class__ = Joined
            vars(layer)["whole"] = whole  # not as a module of it


def joint(owner: nn.Module, names: Sequence[str]) -> Prepacked | None:
    """The product that these layers of ``owner`` share, if they do."""
    layers = [getattr(owner, name, None) for name in names]
    return layers[0].whole if all(isinstance(layer, Part | Joined) for layer in layers) else None  # type: ignore[union-attr]


def _plain(layer: Any) -> bool:
    return type(layer) is nn.Linear and "forward" not in vars(layer) and prepackable(layer.weight)


class Shared(nn.Linear):
    """A linear layer whose matrix others read too: multiplied by its prepacked twin."""

    def forward(self, x: Tensor) -> Tensor:
        return product(x, self.weight, self.bias)
