"""A frozen decoder layer for decoding on a CPU: it computes the same numbers as ``heads.layers`` in fewer and cheaper calls.

One row through a small layer takes some microseconds of arithmetic. The overhead of Python and ``nn.Module`` at every call is larger.
So products that read the same input are joined. Where heads/native.py supports a layer, the whole layer is one call into C++; elsewhere it
is about twenty of torch's operations, called from plain classes.

Shape suffixes: B batch, N rows of any kind, h heads, H width of an input, W width of all heads side by side, d head size.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headstart.heads import native, native_layers
from headstart.heads.memory import Memory
from headstart.heads.prepack import JOINT, joint, product
from headstart.heads.visibility import KEPT, Sees

CosSin = tuple[Tensor, Tensor]
Normed = Callable[[Tensor], Tensor]

FEW = 8192  # numbers in an input: with more, ``Norm`` loses more by doubling it than it saves (measured for sizes from 160 to 4,096)
ATTENTION, FEED = JOINT


class Layer:
    """A Llama-shaped decoder layer, ours or of transformers, with or without norms of each head's queries and keys, as a function.
    ``norms``: one for each of the inputs, which are read side by side. ``sizes``: heads, key-value heads, head size.
    """

    def __init__(self, norms: Sequence[Any], attention: Any, sizes: tuple[int, int, int], norm_after: Any, feed: Any) -> None:
        self._before, self._behind = _Before(norms, attention, *sizes), _Behind(attention.o_proj, norm_after, feed)
        self.native = _native(self._before, self._behind, sizes)

    def __call__(self, inputs: list[Tensor], cos_sin: CosSin, memory: Memory, place: int, sees: Sees, residual: Tensor) -> Tensor:
        """The layer's output for ``inputs``, one for each norm, and ``residual``, [B, N, D] each."""
        rows = residual.shape[1]
        if self.native is None or rows > KEPT or (room := memory.room(place, rows)) is None:
            q, k, v = self._before(inputs, *cos_sin)
            out: Tensor = self._behind(sees.attend(q, memory.write(place, k, v)), residual)
            return out
        bias = sees.bias(rows, room.stop - room.first, 1, room.keys.dtype, room.keys.device)
        return self.native(inputs, cos_sin, [room], bias, residual)[0]


class Norm:
    """An RMSNorm over the last dimension. On a CPU, torch has a fused kernel for the layer norm, but none for the RMSNorm. The layer norm
    of [x, -x], whose mean is 0, equals the RMSNorm of x. For small inputs this takes two thirds of the time.
    """

    def __init__(self, module: Any) -> None:
        self.weight = module.weight.detach()
        self.eps = float(module.eps if hasattr(module, "eps") else module.variance_epsilon)
        self.size = self.weight.numel()
        self.signs = torch.tensor([[1.0], [-1.0]], dtype=self.weight.dtype)
        self.twice = torch.stack([self.weight, self.weight])

    def __call__(self, x: Tensor) -> Tensor:
        if x.numel() > FEW:
            return torch.rms_norm(x, [self.size], self.weight, self.eps)
        return torch.native_layer_norm(x.unsqueeze(-2) * self.signs, [2, self.size], self.twice, None, self.eps)[0].select(-2, 0)


def normed(module: Any) -> Normed:
    """The norm as a function of [.., H]."""
    many = Norm(module)
    weight, eps = many.weight, many.eps
    if weight.dtype not in native.DTYPES or native.library() is None:
        return many
    return lambda x: native.norm(x, weight, eps) if x.numel() <= FEW and x.dtype == weight.dtype else many(x)


def norm(module: Any) -> Norm | nn.Identity:
    """The norm in frozen form; the identity where there is none."""
    return nn.Identity() if module is None or isinstance(module, nn.Identity) else Norm(module)


class Product:
    """``x`` [B, N, H] times a linear layer's matrix."""

    def __init__(self, layer: Any) -> None:
        self.weight, self.bias = layer.weight.detach(), None if layer.bias is None else layer.bias.detach()

    def __call__(self, x: Tensor) -> Tensor:
        return product(x, self.weight, self.bias)


def _products(owner: Any, names: Sequence[str]) -> list[Product]:
    """The products of these layers: a single one where they are joined."""
    whole = joint(owner, names)
    return [Product(x) for x in ([getattr(owner, name) for name in names] if whole is None else [whole])]


class _Before:
    """Queries [B, h, N, d], keys and values [B, kv_heads, N, d]; queries and keys are rotated by RoPE."""

    def __init__(self, norms: Sequence[Any], attention: Any, heads: int, kv_heads: int, head_dim: int) -> None:
        self.norms = [*map(norm, norms)]
        self.parts = _products(attention, ATTENTION)
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        q_norm, k_norm = (norm(getattr(attention, name, None)) for name in ("q_norm", "k_norm"))
        self.q_norm, self.k_norm, self.normed = q_norm, k_norm, isinstance(q_norm, Norm)

    def __call__(self, inputs: list[Tensor], cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        read = [norm(each) for norm, each in zip(self.norms, inputs, strict=True)]
        x = read[0] if len(read) == 1 else torch.cat(read, dim=-1)
        parts = [part(x) for part in self.parts]
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


class _Behind:
    """The residual plus the output projection of the attention [B, h, N, d], and then plus the SwiGLU MLP."""

    def __init__(self, out: Any, norm_after: Any, feed: Any) -> None:
        self.out, self.norm, self.down = Product(out), norm(norm_after), Product(feed.down_proj)
        self.parts, self.width = _products(feed, FEED), feed.down_proj.in_features

    def __call__(self, found: Tensor, residual: Tensor) -> Tensor:
        x = residual + self.out(found.transpose(1, 2).reshape(found.size(0), found.size(2), -1))
        y = self.norm(x)
        parts = [part(y) for part in self.parts]
        gate, up = parts[0].narrow(-1, 0, self.width), parts[-1].narrow(-1, parts[-1].size(-1) - self.width, self.width)
        return x + self.down(F.silu(gate).mul_(up))


def _native(before: _Before, behind: _Behind, sizes: tuple[int, int, int]) -> native_layers.Layers | None:
    """The same layer in C++; None where it cannot be."""
    if len(before.parts) != 1 or len(behind.parts) != 1:
        return None
    products = [before.parts[0], behind.out, behind.parts[0], behind.down]
    return native_layers.layer(before.norms, products, (before.q_norm, before.k_norm), behind.norm, sizes)
