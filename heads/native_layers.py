"""Decoder layers of few rows on a CPU, in C++ (heads/native.py): one layer, or several in a row, as one call.

Shape suffixes: B batch, N rows of any kind, D hidden size, d head size.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headstart.heads.native import DOUBLE, LONG, PANEL, POINTER, library, name_of

if TYPE_CHECKING:
    from headstart.heads.memory import Room

MANY = 2  # most inputs of a layer, which are read side by side


class _Layer(ctypes.Structure):
    """``Layer`` of heads/native.cpp."""

    _fields_ = [
        ("norms", POINTER * MANY),
        *((name, POINTER) for name in ("qkv", "qkv_bias", "q_norm", "k_norm", "out", "out_bias")),
        *((name, POINTER) for name in ("norm", "feed", "feed_bias", "down", "down_bias")),
        *(("eps", DOUBLE * MANY), ("head_eps", DOUBLE), ("eps_after", DOUBLE)),
        *((name, LONG) for name in ("inputs", "hidden", "heads", "kv_heads", "head_dim", "mlp")),
    ]


class _Call(ctypes.Structure):
    """``Call`` of heads/native.cpp."""

    _fields_ = [
        ("inputs", POINTER * MANY),
        *((name, POINTER) for name in ("residual", "cos", "sin", "bias", "keys", "values", "to", "starts")),
        *((name, LONG) for name in ("layers", "batch", "rows", "start", "first", "seen", "slots", "bias_row", "bias_batch")),
        *((name, LONG) for name in ("cos_wide", "threads")),
    ]


class Layers:
    """Decoder layers in a row, each of which reads the output of the one before, as one call."""

    def __init__(self, abouts: list[_Layer], kept: list[Tensor], name: str) -> None:
        """``kept``: the tensors that ``abouts`` points to. ``name``: see ``native.name_of``."""
        self.abouts, self.kept, self.name, self.count = abouts, kept, name, len(abouts)
        self.dtype, self.width = kept[0].dtype, abouts[0].hidden
        self._reads = getattr(library(), f"stack_{name}")
        self._layers = (POINTER * self.count)(*map(ctypes.addressof, abouts))

    @staticmethod
    def joined(layers: Sequence[Layers | None]) -> Layers | None:
        """All these layers as one call. None where one of them is None or has several inputs, or where they differ in kind."""
        known = [each for each in layers if each is not None]
        kinds = {(each.name, each.abouts[0].hidden, each.abouts[0].inputs) for each in known}
        if len(known) < len(layers) or len(kinds) != 1 or known[0].abouts[0].inputs != 1:
            return None
        return Layers([about for each in known for about in each.abouts], [x for each in known for x in each.kept], known[0].name)

    def __call__(
        self, inputs: Sequence[Tensor], cos_sin: tuple[Tensor, Tensor], rooms: Sequence[Room], bias: Tensor | None, residual: Tensor,
        wanted: Collection[int] = (),
    ) -> dict[int, Tensor]:  # fmt: skip
        """Read ``inputs`` and ``residual``, [B, N, D] each. Returns the outputs of the layers ``wanted`` (the first is 0) and of the last
        one. ``rooms``: for each layer, where the keys and values of the rows are written: the same slots in all layers. ``bias``: the
        additive mask, [B or 1, 1, N, slots seen], or None. ``cos_sin``: [B or 1, 1, N, d]. Raises RuntimeError for inputs of another width,
        and for rooms of another dtype than the layers'.
        """
        if any(x.shape != residual.shape or x.shape[2] != self.width for x in (*inputs, residual)):
            raise RuntimeError(f"inputs of {[tuple(x.shape) for x in inputs]} for layers that are {self.width} wide")
        (cos, sin), (keys, _, start, first, stop), B = cos_sin, rooms[0], residual.shape[0]
        if keys.dtype != self.dtype:
            raise RuntimeError(f"a memory of {keys.dtype} for layers of {self.dtype}")
        cos, sin = (x if x.shape[0] == B and x.is_contiguous() else x.expand(B, -1, -1, -1).contiguous() for x in (cos, sin))
        inputs, residual = [x.to(self.dtype).contiguous() for x in inputs], residual.to(self.dtype).contiguous()
        found = {i: torch.empty_like(residual) for i in {*wanted, self.count - 1}}
        unwanted = torch.empty_like(residual)
        lists = [room.keys for room in rooms], [room.values for room in rooms], [found.get(i, unwanted) for i in range(self.count)]
        places = [_pointers(some, self.count) for some in lists]
        all_keys, all_values, outputs = map(ctypes.addressof, places)
        starts, start = (None, start) if isinstance(start, int) else (start.data_ptr(), 0)
        call = _Call(
            inputs=_pointers(inputs), residual=_pointer(residual), cos=_pointer(cos), sin=_pointer(sin), bias=_pointer(bias),
            keys=all_keys, values=all_values, to=outputs, starts=starts, start=start,
            layers=self.count, batch=B, rows=residual.shape[1], first=first, seen=stop - first, slots=keys.shape[2],
            bias_row=0 if bias is None else bias.stride(2), bias_batch=0 if bias is None or len(bias) == 1 else bias.stride(0),
            cos_wide=cos.dtype == torch.float32, threads=torch.get_num_threads(),
        )  # fmt: skip
        self._reads(self._layers, ctypes.byref(call))
        return found


def layer(
    norms: Sequence[Any], products: Sequence[Any], head_norms: Sequence[Any], norm_after: Any, sizes: tuple[int, int, int]
) -> Layers | None:
    """A decoder layer in C++; None where it is not of the supported kind. ``norms``: those of the inputs; ``norm_after``: the one before
    the MLP; like ``head_norms``, each is a ``frozen.Norm`` or an identity. ``products``: four ``frozen.Product``: for queries, keys and
    values; for the output; for gate and up; for down. ``sizes``: heads, key-value heads, head size.
    """
    weights = [each.weight for each in products]
    if any(w.dim() != 3 for w in weights):
        return None
    (heads, kv_heads, head_dim), mlp, hidden = sizes, weights[3].shape[1], weights[3].shape[0] * PANEL
    before, others = ([getattr(norm, "weight", None) for norm in some] for some in (norms, (*head_norms, norm_after)))
    biases = [each.bias for each in products]
    kept = [x for x in (*weights, *before, *others, *biases) if x is not None]
    alike = len({x.dtype for x in kept}) == 1 and len({w.shape[2] for w in weights}) == 1 and all(x.is_contiguous() for x in kept)
    shaped = [tuple(w.shape[:2]) for w in weights] == [
        ((heads + 2 * kv_heads) * head_dim // PANEL, len(norms) * hidden), (hidden // PANEL, heads * head_dim),
        (2 * mlp // PANEL, hidden), (hidden // PANEL, mlp),
    ]  # fmt: skip
    if not alike or not shaped or len(norms) > MANY or mlp % PANEL or head_dim % 2 or heads % kv_heads:
        return None
    about = _Layer(
        norms=_pointers(before), eps=(DOUBLE * MANY)(*[getattr(norm, "eps", 0.0) for norm in norms]), inputs=len(norms),
        head_eps=getattr(head_norms[0], "eps", 0.0), eps_after=getattr(norm_after, "eps", 0.0),
        hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=head_dim, mlp=mlp,
        **dict(zip(("qkv", "out", "feed", "down"), map(_pointer, weights), strict=True)),
        **dict(zip(("qkv_bias", "out_bias", "feed_bias", "down_bias"), map(_pointer, biases), strict=True)),
        **dict(zip(("q_norm", "k_norm", "norm"), map(_pointer, others), strict=True)),
    )  # fmt: skip
    return Layers([about], kept, name_of(weights[0]))


def _pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _pointers(some: Sequence[Tensor | None], count: int = MANY) -> Any:
    """A C array of ``count`` pointers; those without a tensor are null."""
    return (POINTER * count)(*map(_pointer, some))
