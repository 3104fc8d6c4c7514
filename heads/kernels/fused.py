"""Llama-shaped layers on a GPU, the target's and the drafters': between two matrix products there is one kernel (Triton), where
transformers launches up to ten.

A pass of few rows takes the time to read its weights, plus the time of every small kernel: 36 per layer in transformers, ten here. In a
pass of many rows, each small kernel reads and writes all states again. The results are the same, rounded at the same places (drafters
round a norm and RoPE once, transformers' modules after each operation).

This module is imported only where it is used: it needs triton, and a GPU or TRITON_INTERPRET=1.

Shape suffixes: B batch, N rows of any kind, R = B * N, D hidden, H width of all inputs, W width of a product, h heads, g key-value heads,
d head size.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headstart.heads.kernels import split_attention
from headstart.heads.kernels.operations import Norm, add_and_norm, flat, gated, here, normed, turn
from headstart.heads.layers import Rope
from headstart.heads.memory import Memory
from headstart.heads.prepack import JOINT
from headstart.heads.visibility import KEPT, Sees

__all__ = ["Fused", "Layer", "normed"]


class Layer:
    """A Llama-shaped decoder layer, ours or of transformers, with or without norms of each head's queries and keys: on a GPU what
    ``heads.frozen.Layer`` is on a CPU, called alike.
    """

    def __init__(
        self, norms: Sequence[Any], attention: Any, sizes: tuple[int, int, int], norm_after: Any, mlp: Any, own: bool = True
    ) -> None:
        """``norms``: one for each of the inputs, which are read side by side; an input without one is read as it is. ``sizes``: heads,
        key-value heads, head size. ``own``: matrices that read the same input may be stored as one.
        """
        self.sizes, (heads, kv_heads, head_dim) = sizes, sizes
        self.before = [Norm(x) if hasattr(x, "weight") else None for x in norms]
        self.after = Norm(norm_after)
        self.head_norms = [Norm(x) for name in ("q_norm", "k_norm") if hasattr(x := getattr(attention, name, None), "weight")]
        self.qkv = _products([getattr(attention, name) for name in JOINT[0]], own)
        self.feed = _products([getattr(mlp, name) for name in JOINT[1]], own)
        self.out, self.down = _products([attention.o_proj], False), _products([mlp.down_proj], False)
        self.widths = [count * head_dim for count in (heads, kv_heads, kv_heads)]
        self.mlp = mlp.down_proj.in_features

    def __call__(
        self, inputs: Sequence[Tensor], cos_sin: Sequence[Tensor], memory: Memory, place: int, sees: Sees, residual: Tensor
    ) -> Tensor:
        """The layer's output for ``inputs``, one for each norm, and ``residual``, [B, N, D] each."""
        shape, rows = residual.shape, [flat(x) for x in inputs]
        y_RH = rows[0].new_empty(len(rows[0]), sum(x.shape[1] for x in rows))
        with here(residual):
            for x, norm, part in zip(rows, self.before, y_RH.split([x.shape[1] for x in rows], dim=1), strict=True):
                if norm is None:
                    part.copy_(x)
                else:
                    add_and_norm(x, None, norm, part)
            found = self.attend(y_RH, shape, _of_rows(cos_sin, shape), memory, place, sees)
            x, y = add_and_norm(flat(residual), found, self.after)
            return (x + self.fed(y)).view(shape)

    def attend(self, y_RH: Tensor, shape: torch.Size, cos_sin: Sequence[Tensor], memory: Memory, place: int, sees: Sees) -> Tensor:
        """The attention's output [R, D] for normed inputs ``y_RH``. ``shape``: [B, N, ..]. ``cos_sin``: [R, d] each."""
        (B, N), (h, g, d), room = shape[:2], self.sizes, memory.room(place, shape[1])
        q_RW, k_RW, v_RW = _apart([F.linear(y_RH, *each) for each in self.qkv], self.widths)
        keys, values = (y_RH.new_empty(B, g, N, d) for _ in range(2)) if room is None else (room.keys, room.values)
        start = 0 if room is None else room.start
        q_BNhd = turn(q_RW, k_RW, v_RW, cos_sin, self.head_norms, self.sizes, (B, N), keys, values, start)
        if room is None:
            segments = memory.write(place, keys, values)
        else:
            segments = [(keys[:B, :, room.first : room.stop], values[:B, :, room.first : room.stop])]
        if room is not None and N <= KEPT and split_attention.supports(q_BNhd, keys):
            bias = sees.bias(N, room.stop - room.first, 1, keys.dtype, keys.device)  # a mask of bytes takes twice as long to read
            found_BNhd = split_attention.attend(q_BNhd, *segments[0], bias)
        else:
            found_BNhd = sees.attend(q_BNhd.transpose(1, 2), segments).transpose(1, 2)
        return F.linear(found_BNhd.reshape(B * N, h * d), *self.out[0])

    def fed(self, y_RD: Tensor) -> Tensor:
        """The MLP's output [R, D] for normed rows."""
        gate_RW, up_RW = _apart([F.linear(y_RD, *each) for each in self.feed], [self.mlp, self.mlp])
        return F.linear(gated(gate_RW, up_RW), *self.down[0])


class Fused:
    """``decoder`` (a language model without its head) of a structure that heads/lean.py knows, with the same weights."""

    native, passes = None, "fused kernels between the matrix products"

    def __init__(self, decoder: Any, rope: Rope, sizes: tuple[int, int, int], own: bool) -> None:
        self.embedding, self.rope = decoder.embed_tokens, rope.to(decoder.embed_tokens.weight.device)
        self.layers = [Layer([x.input_layernorm], x.self_attn, sizes, x.post_attention_layernorm, x.mlp, own) for x in decoder.layers]
        self.norm = None if isinstance(decoder.norm, nn.Identity) else Norm(decoder.norm)
        if own and torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # the blocks of the single matrices are too small for later allocations

    def read(
        self, tokens_BN: Tensor, positions_BN: Tensor, memory: Memory, sees: Sees, taps: Collection[int] = ()
    ) -> tuple[dict[int, Tensor], Tensor]:
        """(tap -> state, final state), [B, N, D] each. Keys and values of the rows are appended to ``memory``."""
        x = F.embedding(tokens_BN, self.embedding.weight)
        shape, states = x.shape, dict[int, Tensor]()
        x, more = x.flatten(0, 1), None
        cos_sin = _of_rows([y.to(x.dtype) for y in self.rope(positions_BN)], shape)
        with here(x):
            for i, layer in enumerate(self.layers):
                assert layer.before[0] is not None
                x, y = add_and_norm(x, more, layer.before[0])
                if i in taps:
                    states[i] = x.view(shape)
                x, y = add_and_norm(x, layer.attend(y, shape, cos_sin, memory, i, sees), layer.after)
                more = layer.fed(y)
            assert more is not None
            final = x + more if self.norm is None else add_and_norm(x, more, self.norm)[1]
        if len(self.layers) in taps:
            states[len(self.layers)] = final.view(shape)
        return states, final.view(shape)


def _of_rows(cos_sin: Sequence[Tensor], shape: torch.Size) -> list[Tensor]:
    """The result of ``Rope``, [B or 1, 1, N, d], for rows of ``shape`` [B, N, ..]: [R, d] each."""
    return [x.expand(shape[0], -1, -1, -1).reshape(-1, x.shape[-1]) for x in cos_sin]


def _products(modules: Sequence[Any], own: bool) -> list[tuple[Tensor, Tensor | None]]:
    """(matrix, bias) of each module; one pair for all of them where ``own`` allows it. The modules then read views of the one matrix, so
    that nothing is stored twice.
    """
    if len(modules) == 1 or not own or len({m.bias is None for m in modules}) > 1:
        return [(m.weight.detach(), None if m.bias is None else m.bias.detach()) for m in modules]
    weight = torch.cat([m.weight.detach() for m in modules])
    for module, part in zip(modules, weight.split([m.out_features for m in modules]), strict=True):
        module.weight.data = part
    return [(weight, None if modules[0].bias is None else torch.cat([m.bias.detach() for m in modules]))]


def _apart(found: Sequence[Tensor], widths: Sequence[int]) -> Sequence[Tensor]:
    """The results of ``_products``, one for each module."""
    return found if len(found) > 1 else found[0].split(list(widths), dim=-1)
