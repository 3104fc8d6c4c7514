"""What drafters are made of: memory, the one visibility rule, attention, and the parts of a decoder layer.

A node sees the roots up to its own root, and its own ancestors, nothing else. Training grows a chain from
every root at once, so the rule has a closed form (``ChainSees``): a causal block over the roots plus one diagonal
per earlier depth. Decoding grows a small tree from the last root, so the rule is a dense boolean (``MaskSees``).

Shape suffixes: B batch, h attention heads, T roots, N rows of any kind, M rows in memory, d head size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heads.errors import UserError

Segment = tuple[Tensor, Tensor]  # keys and values of the rows written by one call, [B, h, N, d] each


class Memory:
    """What a drafter remembers: per layer the keys and values of roots, then of nodes, in the order written."""

    def __init__(self) -> None:
        self.layers: dict[int, list[Segment]] = {}

    def write(self, layer: int, k: Tensor, v: Tensor) -> list[Segment]:
        """Append rows; returns all segments of the layer, oldest first."""
        self.layers.setdefault(layer, []).append((k, v))
        return self.layers[layer]

    def rows(self, layer: int = 0) -> int:
        return sum(k.shape[2] for k, _ in self.layers.get(layer, []))

    def rewind(self, rows: int) -> None:
        """Forget all but the first ``rows`` rows: the nodes of a finished round."""
        for layer, segments in self.layers.items():
            k, v = (torch.cat(x, dim=2)[:, :, :rows] for x in zip(*segments, strict=True))
            self.layers[layer] = [(k, v)]

    def sees_nodes(self, own_BEX: Tensor, chain: bool) -> MaskSees:
        """Decoding: the rule of E nodes that are read next. They see all roots in memory, and of the X nodes of this round (their
        own E last) those that ``own_BEX`` says; ``chain``: it says all.
        """
        if chain:
            return MaskSees()
        B, E, X = own_BEX.shape  # a drafter without attention has written nothing
        return MaskSees(torch.cat([own_BEX.new_ones(B, E, max(self.rows() + E - X, 0)), own_BEX], dim=2))


class Slots(Memory):
    """The same in preallocated buffers: for decoding, where concatenation would copy the prefix at every step."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.used: dict[int, int] = {}

    def write(self, layer: int, k: Tensor, v: Tensor) -> list[Segment]:
        if layer not in self.layers:
            shape = (k.shape[0], k.shape[1], self.capacity, k.shape[3])
            self.layers[layer], self.used[layer] = [(k.new_empty(shape), v.new_empty(shape))], 0
        keys, values = self.layers[layer][0]
        start, stop = self.used[layer], self.used[layer] + k.shape[2]
        if stop > self.capacity:
            raise ValueError(f"drafter memory holds {self.capacity} rows, {stop} are needed: allocate it larger")
        keys[:, :, start:stop], values[:, :, start:stop] = k, v
        self.used[layer] = stop
        return [(keys[:, :, :stop], values[:, :, :stop])]

    def rows(self, layer: int = 0) -> int:
        return self.used.get(layer, 0)

    def rewind(self, rows: int) -> None:
        self.used = {layer: min(used, rows) for layer, used in self.used.items()}


@dataclass
class AsCache:
    """A memory, seen by a model of transformers as its cache."""

    memory: Memory
    is_compileable = False

    def update(self, k: Tensor, v: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Segment:
        segments = self.memory.write(layer_idx, k, v)
        if len(segments) == 1:
            return segments[0]
        keys, values = zip(*segments, strict=True)
        return torch.cat(keys, dim=2), torch.cat(values, dim=2)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.memory.rows(layer_idx)


class Sees(ABC):
    """The visibility rule of one call of a drafter."""

    def attend(self, q: Tensor, segments: list[Segment]) -> Tensor:
        """[B, h, N, d] queries over all rows in memory, the call's own rows last."""
        k, v = (x[0] if len(segments) == 1 else torch.cat(x, dim=2) for x in zip(*segments, strict=True))
        group = q.shape[1] // k.shape[1]
        if group > 1:
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.dense(q.shape[2], k.shape[2]))

    @abstractmethod
    def dense(self, rows: int, memory: int) -> Tensor | None:
        """The rule as a boolean mask [B or 1, 1, rows, memory]; None when everything is visible."""


@dataclass
class MaskSees(Sees):
    """Decoding: the rule written out. ``mask_BNM[b, i, j]`` (B may be 1): row i of this call sees row j of memory."""

    mask_BNM: Tensor | None = None

    def dense(self, rows: int, memory: int) -> Tensor | None:
        return None if self.mask_BNM is None else self.mask_BNM[:, None]


def causal(rows: int, memory: int, device: torch.device | str = "cpu") -> MaskSees:
    """New roots at the end of memory: each sees all earlier ones and itself."""
    if rows == 1:
        return MaskSees()
    return MaskSees(torch.ones(1, rows, memory, dtype=torch.bool, device=device).tril(memory - rows))


@dataclass
class ChainSees(Sees):
    """Training: a chain from each of T roots. At depth d, memory holds d segments of T rows.

    Row t sees the roots up to t of its own document (segment 0), and row t of every later segment.
    """

    documents_BT: Tensor | None = None  # same number: same document; documents are contiguous
    depth: int = 1
    closed_form: bool = True  # False: the dense mask, as the reference in tests
    spans: list[tuple[slice, slice]] | None = None  # (batch rows, positions) of each document

    def __post_init__(self) -> None:
        if self.spans is None:
            self.spans = _spans(self.documents_BT)

    def deeper(self) -> ChainSees:
        return replace(self, depth=self.depth + 1)

    def attend(self, q: Tensor, segments: list[Segment]) -> Tensor:
        if len(segments) != self.depth:
            raise RuntimeError(f"depth {self.depth} needs {self.depth} segments in memory, found {len(segments)}")
        if not self.closed_form or not _has_flash(q):
            return super().attend(q, segments)
        group = q.shape[1] // segments[0][0].shape[1]
        flat = [x.repeat_interleave(group, 1) if group > 1 else x for pair in segments for x in pair]
        assert self.spans is not None
        return _ChainAttention.apply(q, self.spans, *flat)

    def dense(self, rows: int, memory: int) -> Tensor:
        device = None if self.documents_BT is None else self.documents_BT.device
        roots = torch.ones(rows, rows, dtype=torch.bool, device=device).tril()[None]
        if self.documents_BT is not None:
            roots = roots & (self.documents_BT[:, :, None] == self.documents_BT[:, None, :])
        own = torch.eye(rows, dtype=torch.bool, device=device)[None].expand_as(roots)
        return torch.cat([roots] + [own] * (self.depth - 1), dim=-1)[:, None]


def _spans(documents_BT: Tensor | None) -> list[tuple[slice, slice]]:
    if documents_BT is None:
        return [(slice(None), slice(None))]
    borders = documents_BT[:, 1:] != documents_BT[:, :-1]
    if not borders.any():
        return [(slice(None), slice(None))]
    spans = []
    for b, row in enumerate(borders.tolist()):
        cuts = [0, *(i + 1 for i, border in enumerate(row) if border), documents_BT.shape[1]]
        spans += [(slice(b, b + 1), slice(i, j)) for i, j in zip(cuts, cuts[1:], strict=False)]
    return spans


class _ChainAttention(torch.autograd.Function):
    """Causal flash attention over the roots, merged by log-sum-exp with one dot product per earlier depth.

    Forward: with l0 the log-sum-exp of the causal block and s_j the score of the own row at depth j, the
    softmax over all of them is exp(l0 - l) times the block's output plus exp(s_j - l) v_j, l = log(e^l0 + sum e^s_j).
    Backward: the flash kernel's backward takes the output and log-sum-exp only to rebuild the probabilities and
    their row sum, so it is given the merged ones; the diagonals are three lines. (As in ring attention, 2310.01889.)
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, spans: list[tuple[slice, slice]], *kv: Tensor) -> Tensor:
        k0, v0, scale = kv[0], kv[1], q.shape[-1] ** -0.5
        exact = torch.promote_types(q.dtype, torch.float32)
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=exact)
        for b, t in spans:
            out[b, :, t], lse[b, :, t] = _flash(q[b, :, t], k0[b, :, t], v0[b, :, t])
        if len(kv) > 2:
            scores = [(q * k).sum(-1, dtype=exact) * scale for k in kv[2::2]]
            total = torch.logsumexp(torch.stack([lse, *scores]), 0)
            merged = out * (lse - total).exp()[..., None]
            for s, v in zip(scores, kv[3::2], strict=True):
                merged = merged + v * (s - total).exp()[..., None]
            out, lse = merged.to(q.dtype), total
        ctx.spans = spans
        ctx.save_for_backward(q, out, lse, *kv)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, out, lse, *kv = ctx.saved_tensors
        scale, grad = q.shape[-1] ** -0.5, grad.contiguous()
        dq, dk0, dv0 = torch.empty_like(q), torch.empty_like(kv[0]), torch.empty_like(kv[1])
        for b, t in ctx.spans:
            rows = [x[b, :, t] for x in (grad, q, kv[0], kv[1], out, lse)]
            dq[b, :, t], dk0[b, :, t], dv0[b, :, t] = _flash_backward(*rows)
        grads: list[Tensor] = [dk0, dv0]
        if len(kv) > 2:
            delta = (grad * out).sum(-1, dtype=lse.dtype)
            for k, v in zip(kv[2::2], kv[3::2], strict=True):
                p = ((q * k).sum(-1, dtype=lse.dtype) * scale - lse).exp()
                ds = (p * ((grad * v).sum(-1, dtype=lse.dtype) - delta) * scale)[..., None].to(q.dtype)
                dq = dq + ds * k
                grads += [ds * q, p[..., None].to(q.dtype) * grad]
        return dq, None, *grads


def _has_flash(q: Tensor) -> bool:
    # On CUDA the flash kernel takes half precision only; fp32 there uses the dense mask (tests, not training).
    return q.device.type == "cpu" or (q.device.type == "cuda" and q.dtype in (torch.bfloat16, torch.float16))


def _flash(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Causal attention and its log-sum-exp [B, h, N] (natural logarithm, at least fp32), by torch's own kernels."""
    if q.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
        return out, lse
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
    return out, lse


def _flash_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, 0.0, True)
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # unused: no dropout
    n = q.shape[2]
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse.contiguous(), None, None, n, n, 0.0, True, seed, seed[:0]
    )


class Rope(nn.Module):
    """Rotary position embedding with the target's own settings (default, linear, llama3, yarn), by transformers."""

    frequencies: Tensor

    def __init__(self, rope: dict[str, Any], head_dim: int, max_positions: int) -> None:
        super().__init__()
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        kind = rope.get("rope_type", "default")
        if kind in ("dynamic", "longrope"):
            raise UserError(f"rope_type {kind!r} changes with the length: a drafter's rotation must not (default, linear, llama3, yarn)")
        config = LlamaConfig(
            hidden_size=head_dim,
            num_attention_heads=1,
            head_dim=head_dim,
            max_position_embeddings=max_positions,
            rope_parameters={k: v for k, v in rope.items() if k != "partial_rotary_factor"},
        )
        table = LlamaRotaryEmbedding(config)
        self.scaling = float(table.attention_scaling)
        self.register_buffer("frequencies", table.inv_freq.float(), persistent=False)

    def forward(self, positions_BN: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, [B, 1, N, d] each, in fp32."""
        angles = positions_BN[:, None, :, None].float() * self.frequencies
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos() * self.scaling, angles.sin() * self.scaling


def rotate(x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    """Llama's rotate-half convention."""
    cos, sin = cos_sin
    a, b = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-b, a], dim=-1) * sin).to(x.dtype)


class RMSNorm(nn.RMSNorm):
    """torch's, for any dtype of the input (fp32 weights under bf16 autocast would leave the fused kernel)."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Llama's attention, with an input width of its own (EAGLE-3 reads token and feature side by side)."""

    def __init__(self, input_size: int, hidden_size: int, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.q_proj = nn.Linear(input_size, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(input_size, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(input_size, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, hidden_size, bias=False)

    def forward(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], memory: Memory, layer: int, sees: Sees) -> Tensor:
        B, N, _ = x.shape
        q, k, v = (p(x).view(B, N, -1, self.head_dim).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        segments = memory.write(layer, rotate(k, cos_sin), v)
        out = sees.attend(rotate(q, cos_sin), segments)
        return self.o_proj(out.transpose(1, 2).reshape(B, N, -1))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """An ordinary Llama decoder layer. ``input_norm=False`` leaves the first norm out (EAGLE-1's first layer)."""

    def __init__(
        self, hidden_size: int, heads: int, kv_heads: int, head_dim: int, intermediate_size: int, eps: float, input_norm: bool = True
    ) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(hidden_size, eps) if input_norm else nn.Identity()
        self.self_attn = Attention(hidden_size, hidden_size, heads, kv_heads, head_dim)
        self.post_attention_layernorm = RMSNorm(hidden_size, eps)
        self.mlp = MLP(hidden_size, intermediate_size)

    def forward(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], memory: Memory, layer: int, sees: Sees) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos_sin, memory, layer, sees)
        return x + self.mlp(self.post_attention_layernorm(x))
