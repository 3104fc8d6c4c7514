"""What drafters are made of: memory, the one visibility rule, attention, and the parts of a decoder layer.

A node sees the roots up to its own root, and its own ancestors, nothing else. Training grows a chain from
every root at once, so the rule has a closed form (``ChainSees``): a causal block over the roots plus one diagonal
per earlier depth. Decoding grows a small tree from the last root, so the rule is a dense boolean (``MaskSees``).
A drafter that guesses all depths at once hangs a block of rows on a root: it sees what the root sees, and itself (``BlockSees``).

Shape suffixes: B batch, h attention heads, T roots, N rows of any kind, M rows in memory, d head size, A asked roots.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heads.chain_attention import ChainAttention, has_flash
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
            buffers = [x.new_empty((*x.shape[:2], self.capacity, x.shape[3])) for x in (k, v)]  # latent attention: of unequal sizes
            self.layers[layer], self.used[layer] = [(buffers[0], buffers[1])], 0
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


class Beside(Memory):
    """A memory for one call that reads twice: roots, which are kept, and then rows beside them that are forgotten with this object."""

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self.memory = memory

    def write(self, layer: int, k: Tensor, v: Tensor) -> list[Segment]:
        """The first rows of a layer go to the memory, the later ones nowhere: they are returned behind it."""
        if layer not in self.layers:
            self.layers[layer] = list(self.memory.write(layer, k, v))
            return self.layers[layer]
        return [*self.layers[layer], (k, v)]


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

    @abstractmethod
    def seen_by(self, ask_BA: Tensor, memory: int) -> Tensor | None:
        """The rows of ``dense`` at ``ask_BA``, [B, A, memory], of a call that reads roots; None when everything is visible."""


@dataclass
class MaskSees(Sees):
    """Decoding: the rule written out. ``mask_BNM[b, i, j]`` (B may be 1): row i of this call sees row j of memory."""

    mask_BNM: Tensor | None = None

    def dense(self, rows: int, memory: int) -> Tensor | None:
        return None if self.mask_BNM is None else self.mask_BNM[:, None]

    def seen_by(self, ask_BA: Tensor, memory: int) -> Tensor | None:
        if self.mask_BNM is None:
            return None
        mask_BNM = self.mask_BNM.expand(ask_BA.shape[0], -1, -1)
        return mask_BNM.gather(1, ask_BA[..., None].expand(-1, -1, memory))


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
        if not self.closed_form or not has_flash(q):
            return super().attend(q, segments)
        group = q.shape[1] // segments[0][0].shape[1]
        flat = [x.repeat_interleave(group, 1) if group > 1 else x for pair in segments for x in pair]
        assert self.spans is not None
        return ChainAttention.apply(q, self.spans, *flat)

    def dense(self, rows: int, memory: int) -> Tensor:
        device = None if self.documents_BT is None else self.documents_BT.device
        roots = torch.ones(rows, rows, dtype=torch.bool, device=device).tril()[None]
        if self.documents_BT is not None:
            roots = roots & (self.documents_BT[:, :, None] == self.documents_BT[:, None, :])
        own = torch.eye(rows, dtype=torch.bool, device=device)[None].expand_as(roots)
        return torch.cat([roots] + [own] * (self.depth - 1), dim=-1)[:, None]

    def seen_by(self, ask_BA: Tensor, memory: int) -> Tensor:
        seen_BAM = torch.arange(memory, device=ask_BA.device) <= ask_BA[..., None]
        if self.documents_BT is not None:
            seen_BAM = seen_BAM & (self.documents_BT.gather(1, ask_BA)[..., None] == self.documents_BT[:, None])
        return seen_BAM


@dataclass
class BlockSees(Sees):
    """A block of ``slots`` rows hung on each of the roots ``ask_BA``, rows of a block side by side.

    A row sees what its root sees (by the rule ``roots`` of the roots that were read before) and its own block: up to itself
    (``causal``) or all of it. Blocks do not see each other. The block's rows stand last in memory.
    """

    roots: Sees
    ask_BA: Tensor
    slots: int
    causal: bool = False
    mask: Tensor | None = None  # the same in every layer

    def dense(self, rows: int, memory: int) -> Tensor | None:
        B, A = self.ask_BA.shape
        if self.mask is None:
            device = self.ask_BA.device
            seen_BAM = self.roots.seen_by(self.ask_BA, memory - rows)
            if seen_BAM is None:
                if A == 1 and not self.causal:
                    return None
                seen_BAM = torch.ones(B, A, memory - rows, dtype=torch.bool, device=device)
            block = torch.arange(rows, device=device) // self.slots
            own = block[:, None] == block
            if self.causal:
                own = own.tril()
            self.mask = torch.cat([seen_BAM.repeat_interleave(self.slots, 1), own.expand(B, -1, -1)], dim=2)[:, None]
        return self.mask

    def seen_by(self, ask_BA: Tensor, memory: int) -> Tensor:
        raise TypeError("rows of a block are no roots: nothing hangs on them")


def blocks_of(ask_BA: Tensor) -> tuple[Tensor, ...]:
    """The asked roots, so many blocks at a time: blocks do not see each other, but are multiplied with each other all the same."""
    return ask_BA.split(32, dim=1)


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
    """Llama's attention, with an input width of its own (EAGLE-3 reads token and feature side by side).

    ``head_eps``: that of Qwen3's norms of each head's queries and keys, where there are such norms.
    """

    def __init__(self, input_size: int, hidden_size: int, heads: int, kv_heads: int, head_dim: int, head_eps: float | None = None) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.q_proj = nn.Linear(input_size, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(input_size, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(input_size, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, hidden_size, bias=False)
        self.q_norm, self.k_norm = (nn.Identity() if head_eps is None else RMSNorm(head_dim, head_eps) for _ in range(2))

    def keys_values(self, x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Segment:
        k, v = (self._split(p(x)) for p in (self.k_proj, self.v_proj))
        return rotate(self.k_norm(k), cos_sin), v

    def forward(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], memory: Memory, layer: int, sees: Sees) -> Tensor:
        q = rotate(self.q_norm(self._split(self.q_proj(x))), cos_sin)
        out = sees.attend(q, memory.write(layer, *self.keys_values(x, cos_sin)))
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


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
    """An ordinary Llama decoder layer. ``input_norm=False`` leaves the first norm out (EAGLE-1's first layer); ``head_norm``: Qwen3's."""

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        intermediate_size: int,
        eps: float,
        input_norm: bool = True,
        head_norm: bool = False,
    ) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(hidden_size, eps) if input_norm else nn.Identity()
        self.self_attn = Attention(hidden_size, hidden_size, heads, kv_heads, head_dim, eps if head_norm else None)
        self.post_attention_layernorm = RMSNorm(hidden_size, eps)
        self.mlp = MLP(hidden_size, intermediate_size)

    def forward(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], memory: Memory, layer: int, sees: Sees) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos_sin, memory, layer, sees)
        return x + self.mlp(self.post_attention_layernorm(x))
