"""The parts of a decoder layer. After ``freeze``, faster functions do their work for decoding: those of heads/frozen.py on a CPU, those of
heads/kernels/fused.py on a GPU.

Shape suffixes: B batch, N rows of any kind, D hidden size, d head size.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headstart.heads import frozen
from headstart.heads.errors import UserError
from headstart.heads.frozen import CosSin
from headstart.heads.kernels.launch import DTYPES, TILE, takes
from headstart.heads.memory import Memory, Segment
from headstart.heads.prepack import Prepacked
from headstart.heads.visibility import Sees

if TYPE_CHECKING:
    from headstart.heads.base import TargetShape


class Rope(nn.Module):
    """Rotary position embedding with the target's settings (default, linear, llama3, yarn), computed by transformers. Raises UserError for
    a rope_type that depends on the length.
    """

    frequencies: Tensor
    signs: Tensor

    def __init__(self, rope: dict[str, Any], head_dim: int, max_positions: int) -> None:
        super().__init__()
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        kind = rope.get("rope_type", "default")
        if kind in ("dynamic", "longrope"):
            raise UserError(f"rope_type {kind!r} changes with the length: a drafter's rotation must not (default, linear, llama3, yarn)")
        if head_dim % 2:
            raise UserError(f"the target's heads have an odd size ({head_dim}), which RoPE cannot turn: take a drafter without (medusa)")
        config = LlamaConfig(
            hidden_size=head_dim,
            num_attention_heads=1,
            head_dim=head_dim,
            max_position_embeddings=max_positions,
            rope_parameters={k: v for k, v in rope.items() if k != "partial_rotary_factor"},
        )
        table = LlamaRotaryEmbedding(config)
        self.scaling = float(table.attention_scaling)
        self.register_buffer("frequencies", table.inv_freq.float(), persistent=False)  # [d / 2]
        self.register_buffer("signs", torch.ones(head_dim).index_fill(0, torch.arange(head_dim // 2), -1), persistent=False)

    def forward(self, positions_BN: Tensor) -> CosSin:
        """cos and sin, [B, 1, N, d] each, in fp32. The first half of the sines is negated, as ``rotate`` needs it."""
        angles = positions_BN[:, None, :, None] * torch.cat([self.frequencies, self.frequencies])
        cos, sin = angles.cos(), angles.sin() * self.signs
        return (cos, sin) if self.scaling == 1 else (cos * self.scaling, sin * self.scaling)


def rotate(x: Tensor, cos_sin: CosSin) -> Tensor:
    """Apply RoPE to ``x`` [B, h, N, d] in Llama's rotate-half convention; the result has the dtype of ``x``."""
    cos, sin = cos_sin
    if x.requires_grad and takes(x) and rotatable(x, cos, sin):
        from headstart.heads.kernels.rotation import Rotation

        turned: Tensor = Rotation.apply(x, cos, sin)
        return turned
    return (x * cos + x.roll(x.shape[-1] // 2, -1) * sin).to(x.dtype)


def rotatable(x: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Whether the kernel (heads/kernels/rotation.py) supports ``x`` [B, h, N, d] with these tables."""
    (B, _, N, d), wide = x.shape, torch.float32
    tables = all(y.dtype == wide and y.shape[0] in (1, B) and y.shape[1:] == (1, N, d) and y.stride(3) == 1 for y in (cos, sin))
    return tables and x.dtype in DTYPES and d % 2 == 0 and d <= 2 * TILE


def autocasts(x: Tensor) -> bool:
    """Whether autocast applies to operations on ``x`` here. (The ``meta`` device has no autocast.)"""
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


class RMSNorm(nn.RMSNorm):
    """torch's RMSNorm, computed in the input's dtype. fp32 weights would bypass the fused kernel. CUDA's autocast would return fp32, which
    would then be the dtype of the drafts and of what is kept for the backward pass.
    """

    frozen: frozen.Normed | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Normalize over the last dimension."""
        if self.frozen is not None:
            return self.frozen(x)
        with torch.autocast(x.device.type, enabled=False) if autocasts(x) else nullcontext():
            return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Llama's attention with an input width of its own (EAGLE-3 reads token and feature side by side).

    ``head_eps``: epsilon of Qwen3's norms of each head's queries and keys; None: no such norms.
    """

    def __init__(self, input_size: int, hidden_size: int, heads: int, kv_heads: int, head_dim: int, head_eps: float | None = None) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.q_proj = nn.Linear(input_size, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(input_size, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(input_size, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, hidden_size, bias=False)
        self.q_norm, self.k_norm = (nn.Identity() if head_eps is None else RMSNorm(head_dim, head_eps) for _ in range(2))

    def keys_values(self, x: Tensor, cos_sin: CosSin, of: str = "") -> Segment:
        """Keys, rotated by RoPE, and values of the rows: [B, kv_heads, N, d] each. ``of``: suffix in the names of the matrices, for layers
        that have a second pair of them.
        """
        k, v = (self._split(getattr(self, f"{kind}_proj{of}")(x)) for kind in "kv")
        return rotate(self.k_norm(k), cos_sin), v

    def forward(self, x: Tensor, cos_sin: CosSin, memory: Memory, layer: int, sees: Sees, residual: Tensor) -> Tensor:
        """``residual`` [B, N, D] plus the attention of the rows over memory. Their own keys and values are first added to its ``layer``."""
        q, (k, v) = rotate(self.q_norm(self._split(self.q_proj(x))), cos_sin), self.keys_values(x, cos_sin)
        return residual + self.o_proj(sees.attend(q, memory.write(layer, k, v)).transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class MLP(nn.Module):
    """Llama's MLP with SwiGLU."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """``residual`` plus the MLP of ``x``, [B, N, D] each."""
        return residual + self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up. In training on a GPU it is one kernel, which keeps only ``gate`` and ``up`` for the backward pass."""
    if (gate.requires_grad or up.requires_grad) and gate.dtype in DTYPES and takes(gate):
        from headstart.heads.kernels.operations import Gated

        out: Tensor = Gated.apply(gate, up)
        return out
    return F.silu(gate) * up


class DecoderLayer(nn.Module):
    """A Llama decoder layer. ``input_norm=False`` omits the first norm (EAGLE-1's first layer); ``head_norm`` adds Qwen3's head norms."""

    reads: tuple[str, ...] | None = ("input_layernorm",)  # names of its input norms, one for each input; None: it has no faster form
    frozen: Any = None  # its faster form: see ``freeze``

    def __init__(
        self, shape: TargetShape, heads: int, kv_heads: int, intermediate_size: int, *, input_norm: bool = True, head_norm: bool = False
    ) -> None:
        super().__init__()
        D, eps = shape.hidden_size, shape.norm_eps
        self.input_layernorm = RMSNorm(D, eps) if input_norm else nn.Identity()
        self.self_attn = Attention(D, D, heads, kv_heads, shape.head_dim, eps if head_norm else None)
        self.post_attention_layernorm = RMSNorm(D, eps)
        self.mlp = MLP(D, intermediate_size)

    def forward(self, x: Tensor, cos_sin: CosSin, memory: Memory, layer: int, sees: Sees) -> Tensor:
        """``x`` [B, N, D] plus its attention over memory, plus the MLP of that sum: [B, N, D]."""
        if self.frozen is not None:
            return self.frozen([x], cos_sin, memory, layer, sees, x)
        x = self.self_attn(self.input_layernorm(x), cos_sin, memory, layer, sees, x)
        return self.mlp(self.post_attention_layernorm(x), x)


def freeze(model: nn.Module) -> None:
    """Freeze all decoder layers and norms of a model, in place: on a CPU after ``heads.prepack.prepack``, on a GPU where our kernels can be
    launched. It can then only decode.
    """
    for each in model.modules():
        module: Any = each
        if isinstance(module, RMSNorm) and (forms := _forms(module)) is not None:
            module.frozen = forms.normed(module)
        attention: Any = getattr(module, "self_attn", None)
        forms = _forms(module) if getattr(module, "reads", None) and isinstance(attention, Attention) else None
        if forms is not None and (forms is not frozen or type(attention.o_proj) is Prepacked):
            sizes = attention.heads, attention.kv_heads, attention.head_dim
            norms = [None if name is None else getattr(module, name) for name in module.reads]
            module.frozen = forms.Layer(norms, attention, sizes, module.post_attention_layernorm, module.mlp)


def _forms(module: nn.Module) -> Any:
    """The file with the frozen forms of a module: heads/frozen.py on a CPU, heads/kernels/fused.py on a GPU. None where there are none."""
    weights = [x.data for x in module.parameters()]
    if all(x.device.type == "cpu" for x in weights):
        return frozen
    if any(x.dtype != weights[0].dtype or x.dtype not in DTYPES or not takes(x) for x in weights):
        return None
    from headstart.heads.kernels import fused

    return fused
