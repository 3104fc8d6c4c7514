"""A decoder of transformers as plain functions: the same weights and the same results with a third of the operations.

A step of one row does little work in many operations: about sixty per Llama layer in transformers, fewer than twenty here. Whether a
decoder has the known structure (norm, attention with RoPE, norm, SwiGLU, two residuals) is decided from its modules, never from its
name. The lean form is used only where it computes the same states of the same rows as those modules. In half precision this comparison
proves little, because a window that hides some rows may change states less than rounding does. So a small copy is compared in float64.

Shape suffixes: B batch, N rows.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headstart.heads import frozen, native_layers
from headstart.heads.kernels.launch import DTYPES, launches
from headstart.heads.kinds import kinds_of
from headstart.heads.layers import Rope
from headstart.heads.memory import Memory
from headstart.heads.prepack import Part
from headstart.heads.visibility import KEPT, Sees

if TYPE_CHECKING:
    from headstart.heads.kernels.fused import Fused

LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
HEAD_NORMS = {"q_norm", "k_norm"}
FACTORS = ("embedding_multiplier", "residual_multiplier")  # granite multiplies by them; other models have none
KNOWN_ROPES = ("default", "linear", "llama3", "yarn")  # rope types that do not depend on the length


class Lean:
    """``decoder`` (a language model without its head) of a known structure. It shares the decoder's weights and does not copy them."""

    @property
    def passes(self) -> str:
        """What computes a pass of few rows, in words for reports."""
        return "C++, all layers in one call" if self.native is not None else "torch's operations, layer by layer"

    def __init__(self, decoder: Any, layers: list[frozen.Layer], rope: Rope) -> None:
        self.embedding, self.layers, self.rope = decoder.embed_tokens, layers, rope
        self.native = native_layers.Layers.joined([layer.native for layer in layers])
        self.norm: frozen.Normed = nn.Identity() if isinstance(decoder.norm, nn.Identity) else frozen.normed(decoder.norm)

    def read(
        self, tokens_BN: Tensor, positions_BN: Tensor, memory: Memory, sees: Sees, taps: Collection[int] = ()
    ) -> tuple[dict[int, Tensor], Tensor]:
        """(tap -> state, final state), [B, N, D] each. Keys and values of the rows are appended to ``memory``."""
        x, states = F.embedding(tokens_BN, self.embedding.weight), dict[int, Tensor]()
        cos, sin = self.rope(positions_BN)
        cos_sin = cos.to(x.dtype), sin.to(x.dtype)
        count, rows = len(self.layers), x.shape[1]
        if self.native is not None and rows <= KEPT and (rooms := memory.rooms(count, rows)) is not None:
            (keys, _, _, first, stop), *_ = rooms
            bias = sees.bias(rows, stop - first, 1, keys.dtype, keys.device)
            outputs = self.native([x], cos_sin, rooms, bias, x, {i - 1 for i in taps if 0 < i < count})
            states = {i: outputs[i - 1] if i else x for i in taps if i < count}
            x = outputs[count - 1]
        else:
            for i, layer in enumerate(self.layers):
                if i in taps:
                    states[i] = x
                x = layer([x], cos_sin, memory, i, sees, x)
        final = self.norm(x)
        if count in taps:
            states[count] = final
        return states, final


def lean(decoder: Any, own: bool = True) -> Lean | Fused | None:
    """``decoder`` in lean form, on a GPU with fused kernels; None where its structure is not the known one: then call its own modules.
    If the decoder is to be prepacked, call ``heads.prepack.prepack`` first. ``own``: its weights may be stored in another way. The caller
    checks that both compute the same (``heads.lm.Backbone.quicken``).
    """
    known = _known(decoder)
    if known is None:
        return None
    rope, sizes = known
    if decoder.embed_tokens.weight.device.type == "cpu":
        layers = [frozen.Layer([x.input_layernorm], x.self_attn, sizes, x.post_attention_layernorm, x.mlp) for x in decoder.layers]
        return Lean(decoder, layers, rope)
    if decoder.embed_tokens.weight.dtype not in DTYPES or not launches(decoder.embed_tokens.weight.device):
        return None
    from headstart.heads.kernels.fused import Fused

    return Fused(decoder, rope, sizes, own)


def stand_in(decoder: Any) -> Any:
    """A narrow decoder of the same class in float64, with the same settings and number of layers. In half precision the residual stream
    hides differences between two kinds of attention; in float64 a comparison shows them. The weights are random, and large enough for sharp
    attention. float64 also never needs the C++ library, which a machine with a GPU would otherwise compile for this comparison alone.
    """
    config = copy.deepcopy(decoder.config.get_text_config())
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    config.hidden_size, config.intermediate_size, config.vocab_size, config.pad_token_id = 2 * head_dim, 64, 64, None
    alone = getattr(config, "num_key_value_heads", None) in (None, config.num_attention_heads)  # each query head has a key head of its own
    config.num_attention_heads, config.num_key_value_heads = 2, 1 + alone
    with torch.random.fork_rng([]), torch.device("cpu"):
        torch.manual_seed(0)
        made = type(decoder)(config).double().eval().requires_grad_(False)
        for weight in made.parameters():
            if weight.ndim > 1:
                nn.init.normal_(weight, std=1.0 if weight is made.embed_tokens.weight else weight.shape[-1] ** -0.5)
    return made


def _known(decoder: Any) -> tuple[Rope, tuple[int, int, int]] | None:
    """The rotation and (heads, key-value heads, head size) of a decoder of the known structure on a CPU or one GPU, else None."""
    config = decoder.config.get_text_config()
    if getattr(config, "is_heterogeneous", False) or kinds_of(config) != {"full_attention"}:  # layers of several sizes, or with a window
        return None
    rotation: Any
    embedding, layers, norm, rotation = (getattr(decoder, name, None) for name in ("embed_tokens", "layers", "norm", "rotary_emb"))
    if not isinstance(layers, nn.ModuleList) or not len(layers) or not (_is_norm(norm) or isinstance(norm, nn.Identity)):
        return None
    if not isinstance(embedding, nn.Embedding) or getattr(rotation, "rope_type", None) not in KNOWN_ROPES:
        return None
    like = embedding.weight
    if any(p.device != like.device or p.dtype != like.dtype or type(p.data) is not Tensor for p in decoder.parameters()):
        return None  # on several devices, or in tensors of another library's own (sharded, quantized)
    if like.device.type not in ("cpu", "cuda"):
        return None
    if any("forward" in vars(m) or m._forward_hooks or m._forward_pre_hooks for m in decoder.modules()):  # changed by another library
        return None
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    sizes = heads, getattr(config, "num_key_value_heads", None) or heads, head_dim
    if 2 * len(rotation.inv_freq) != head_dim or not all(_is_known(layer, head_dim) for layer in layers):
        return None
    if any(getattr(m, factor, 1) != 1 for m in (decoder, *layers) for factor in FACTORS):
        return None
    rope = Rope({}, head_dim, 1)
    rope.frequencies, rope.scaling = rotation.inv_freq.float(), float(rotation.attention_scaling)
    return rope, sizes


def _is_known(layer: Any, head_dim: int) -> bool:
    """Whether the names and types of the modules in a layer are the expected ones, and its scores are scaled as those of most models."""
    if {name for name, _ in layer.named_children()} != LAYER:
        return False
    if abs(getattr(layer.self_attn, "scaling", head_dim**-0.5) * head_dim**0.5 - 1) > 1e-6:
        return False
    attention, feed = dict(layer.self_attn.named_children()), dict(layer.mlp.named_children())
    norms, activation = attention.keys() & HEAD_NORMS, feed.pop("act_fn", getattr(layer.mlp, "act_fn", None))
    linear = [*frozen.ATTENTION, "o_proj"]
    if attention.keys() - norms != set(linear) or len(norms) == 1 or feed.keys() != {*frozen.FEED, "down_proj"}:
        return False
    if type(activation).__name__ not in ("SiLU", "SiLUActivation"):
        return False
    projections = [*(attention[name] for name in linear), *feed.values()]
    if not all(isinstance(m, nn.Linear | Part) for m in projections):
        return False
    return all(map(_is_norm, (layer.input_layernorm, layer.post_attention_layernorm, *(attention[name] for name in norms))))


def _is_norm(module: Any) -> bool:
    """Whether it looks like an RMSNorm: one vector of weights, and an epsilon."""
    names = [name for name, _ in module.named_parameters()] if isinstance(module, nn.Module) else []
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return names == ["weight"] and module.weight.ndim == 1 and isinstance(eps, float)
