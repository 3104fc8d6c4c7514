"""A frozen decoder layer for decoding on a CPU: it computes the same numbers as ``heads.layers`` in fewer and cheaper calls.

One row through a small layer takes some microseconds of arithmetic. The overhead of Python and ``nn.Module`` at every call is larger.
So products that read the same input are joined, and residuals are added within a product. Where heads/native.py has what it needs, the
whole layer is one call of it. Elsewhere, the operations before the attention form one TorchScript function and those after it another,
which torch runs without Python in between.

Shape suffixes: B batch, N rows of any kind, h heads, H width of an input, W width of all heads side by side, d head size.
"""

import sys
import warnings
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headstart.heads import native
from headstart.heads.memory import Memory
from headstart.heads.orders import is_packed
from headstart.heads.prepack import JOINT, joint
from headstart.heads.visibility import KEPT, Sees, grouped

CosSin = tuple[Tensor, Tensor]
Normed = Callable[[Tensor], Tensor]

FEW = 8192  # numbers in an input; above, the doubled input of ``Norm`` costs more than it saves (measured for sizes from 160 to 4,096)
ATTENTION, FEED = JOINT
SCRIPTS = sys.version_info < (3, 14) and hasattr(torch.jit, "script")  # TorchScript is no longer supported on Python 3.14


def scripted(module: nn.Module) -> Any:
    """The module compiled to TorchScript where that is supported, else the module itself."""
    if not SCRIPTS:
        return module
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(module)


class Layer:
    """A Llama-shaped decoder layer, ours or of transformers, with or without norms of each head's queries and keys, as a function.
    ``norms``: one for each of the inputs, which are read side by side. ``sizes``: heads, key-value heads, head size.
    """

    def __init__(self, norms: Sequence[Any], attention: Any, sizes: tuple[int, int, int], norm_after: Any, feed: Any) -> None:
        parts = _Before(norms, attention, *sizes), _Behind(attention.o_proj, norm_after, feed)
        made = scripted(_Whole(*parts))
        self._whole, self._before, self._behind = made.forward, made.before.forward, made.behind.forward
        self._group, self.native = sizes[0] // sizes[1], _native(*parts, sizes)

    def __call__(self, inputs: list[Tensor], cos_sin: CosSin, memory: Memory, place: int, sees: Sees, residual: Tensor) -> Tensor:
        """The layer's output for ``inputs``, one for each norm, and ``residual``, [B, N, D] each."""
        rows, native = residual.shape[1], self.native
        if rows > KEPT or not (native or memory.single) or (room := memory.room(place, rows)) is None:
            q, k, v = self._before(inputs, *cos_sin)
            out: Tensor = self._behind(sees.attend(q, memory.write(place, k, v)), residual)
            return out
        keys, values, start, first, stop = room
        bias = sees.bias(rows, stop - first, 1 if native else self._group, keys.dtype, keys.device)
        if native is not None:
            return native(inputs, cos_sin, [room], bias, residual)[0]
        out = self._whole(inputs, *cos_sin, keys, values, start, bias, residual)
        return out


class Norm(nn.Module):
    """An RMSNorm over the last dimension. On a CPU torch has no fused kernel for it, but one for the layer norm. The layer norm of x beside
    -x, whose mean is 0, equals the RMSNorm of x. For small inputs this takes two thirds of the time.
    """

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.weight = module.weight.detach()
        self.eps = float(module.eps if hasattr(module, "eps") else module.variance_epsilon)
        self.size, self.few = self.weight.numel(), FEW
        self.signs = torch.tensor([[1.0], [-1.0]], dtype=self.weight.dtype)
        self.twice = torch.stack([self.weight, self.weight])

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() > self.few:
            return torch.rms_norm(x, [self.size], self.weight, self.eps)
        return torch.native_layer_norm(x.unsqueeze(-2) * self.signs, [2, self.size], self.twice, None, self.eps)[0].select(-2, 0)


def normed(module: Any) -> Normed:
    """The norm as a function of [.., H]."""
    made = Norm(module)
    weight, eps, few = made.weight, made.eps, made.few
    many: Normed = scripted(made).forward
    if weight.dtype not in native.DTYPES or native.library() is None:
        return many
    return lambda x: native.norm(x, weight, eps) if x.numel() <= few and x.dtype == weight.dtype else many(x)


def norm(module: Any) -> nn.Module:
    """The norm in frozen form; the identity where there is none."""
    return nn.Identity() if module is None or isinstance(module, nn.Identity) else Norm(module)


@torch.jit.ignore  # TorchScript calls it as it is
def _panels(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return native.linear(x, packed, bias)


class Product(nn.Module):
    """``x`` [B, N, H] times a linear layer's matrix, in the storage order that is fastest for so many rows."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        packed = is_packed(layer.weight)
        twin, since = getattr(layer, "twin", None), getattr(layer, "since", inf)
        self.packed = layer.weight.detach() if packed else twin
        self.ours = self.packed is not None and not self.packed.is_mkldnn
        self.turned = torch.empty(0) if packed else layer.weight.detach().t()
        self.bias = None if layer.bias is None else layer.bias.detach()
        self.since = 0 if packed else sys.maxsize if since == inf else int(since)  # rows from which the prepacked matrix is faster

    def forward(self, x: Tensor) -> Tensor:
        packed = self.packed
        if packed is not None and x.size(0) * x.size(1) >= self.since:
            if self.ours:
                return _panels(x, packed, self.bias)
            return torch.ops.mkldnn._linear_pointwise(x, packed, self.bias, "none", [], "")
        flat, bias = x.reshape(-1, x.size(2)), self.bias
        out = torch.mm(flat, self.turned) if bias is None else torch.addmm(bias, flat, self.turned)
        return out.view(x.size(0), x.size(1), -1)


class Sum(Product):
    """The same product added to a residual [B, N, ..]."""

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:  # type: ignore[override]
        packed = self.packed
        if packed is not None and x.size(0) * x.size(1) >= self.since:
            if self.ours:
                return _panels(x, packed, self.bias) + residual
            return torch.ops.mkldnn._linear_pointwise(x, residual, packed, self.bias, "add")
        flat, bias = residual.reshape(-1, residual.size(2)), self.bias
        if bias is not None:
            flat = flat + bias
        return torch.addmm(flat, x.reshape(-1, x.size(2)), self.turned).view(x.size(0), x.size(1), -1)


def _products(owner: Any, names: Sequence[str]) -> nn.ModuleList:
    """The products of these layers: a single one where they are joined."""
    whole = joint(owner, names)
    return nn.ModuleList(Product(x) for x in ([getattr(owner, name) for name in names] if whole is None else [whole]))


class _Before(nn.Module):
    """Queries [B, h, N, d], keys and values [B, kv_heads, N, d]; queries and keys are rotated by RoPE."""

    def __init__(self, norms: Sequence[Any], attention: Any, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(map(norm, norms))
        self.parts = _products(attention, ATTENTION)
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        q_norm, k_norm = (norm(getattr(attention, name, None)) for name in ("q_norm", "k_norm"))
        self.q_norm, self.k_norm, self.normed = q_norm, k_norm, isinstance(q_norm, Norm)

    def forward(self, inputs: list[Tensor], cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        read = []
        for i, norm in enumerate(self.norms):
            read.append(norm(inputs[i]))
        x = read[0] if len(read) == 1 else torch.cat(read, dim=-1)
        parts = []
        for part in self.parts:
            parts.append(part(x))
        all_BNW = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        all_BhNd = all_BNW.view(x.size(0), x.size(1), -1, self.head_dim).transpose(1, 2)
        both = self.heads + self.kv_heads
        turns = all_BhNd.narrow(1, 0, both)
        if self.normed:
            turns = torch.cat([self.q_norm(turns.narrow(1, 0, self.heads)), self.k_norm(turns.narrow(1, self.heads, self.kv_heads))], dim=1)
        turned = torch.addcmul(turns * cos, turns.roll(self.head_dim // 2, -1), sin)
        if turned.dtype != x.dtype:
            turned = turned.to(x.dtype)
        return turned.narrow(1, 0, self.heads), turned.narrow(1, self.heads, self.kv_heads), all_BhNd.narrow(1, both, self.kv_heads)


class _Behind(nn.Module):
    """The residual plus the output projection of the attention [B, h, N, d], and then plus the SwiGLU MLP."""

    def __init__(self, out: Any, norm_after: Any, feed: Any) -> None:
        super().__init__()
        self.out, self.norm, self.down = Sum(out), norm(norm_after), Sum(feed.down_proj)
        self.parts, self.width = _products(feed, FEED), feed.down_proj.in_features

    def forward(self, found: Tensor, residual: Tensor) -> Tensor:
        x = self.out(found.transpose(1, 2).reshape(found.size(0), found.size(2), -1), residual)
        y = self.norm(x)
        parts = []
        for part in self.parts:
            parts.append(part(y))
        gate, up = parts[0].narrow(-1, 0, self.width), parts[-1].narrow(-1, parts[-1].size(-1) - self.width, self.width)
        return self.down(F.silu(gate).mul_(up), x)


class _Whole(nn.Module):
    """The whole layer with its attention, for a memory with preallocated buffers (``heads.memory.Slots``)."""

    def __init__(self, before: _Before, behind: _Behind) -> None:
        super().__init__()
        self.before, self.behind = before, behind

    def forward(
        self,
        inputs: list[Tensor],
        cos: Tensor,
        sin: Tensor,
        keys: Tensor,
        values: Tensor,
        start: int,
        bias: Tensor | None,
        residual: Tensor,
    ) -> Tensor:
        q, k, v = self.before(inputs, cos, sin)
        rows = k.size(2)
        keys.narrow(2, start, rows).copy_(k)
        values.narrow(2, start, rows).copy_(v)
        found = grouped(q.to(keys.dtype), keys.narrow(2, 0, start + rows), values.narrow(2, 0, start + rows), bias)
        return self.behind(found.to(residual.dtype), residual)


def _native(before: _Before, behind: _Behind, sizes: tuple[int, int, int]) -> native.Layers | None:
    """The same layer in C++; None where it cannot be."""
    if len(before.parts) != 1 or len(behind.parts) != 1:
        return None
    products = [before.parts[0], behind.out, behind.parts[0], behind.down]
    return native.layer([*before.norms], products, (before.q_norm, before.k_norm), behind.norm, sizes)
