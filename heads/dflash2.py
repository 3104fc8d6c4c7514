"""DFlash 2 (Z Lab, 2026, as vLLM and speculators read its folders): DFlash with local convolutions in its layers and a final selector.

A convolution stands before and after the attention and the MLP of every layer. It mixes a slot with the slots just before it in its
block, y_s = sum_t x_{s-t} (base_t + delta_{s,t}) for the convolution's taps t = 0, 1, ..: base is one number for each tap and channel,
delta is linear in the normed input of the sublayer and shared by a group of channels. At the start the convolution is the identity.

The selector reranks the ``candidates`` likeliest tokens of a slot by the token before the slot: candidate c gets the logit
logit[c] + <U[prev] * (P slot), S[c]>, a low-rank bias that also depends on the slot. All other tokens are never guessed. prev is x[a] at
depth 1 and the previous guess afterwards. The divergences of the loss train the backbone, the loss term ``selector`` trains the selector.

Shape suffixes: B batch, A asked roots, S slots, N nodes or rows, D hidden, G groups of channels, K taps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headstart.heads.base import Draft, TargetShape
from headstart.heads.dflash import Dflash
from headstart.heads.errors import UserError
from headstart.heads.layers import DecoderLayer
from headstart.heads.memory import Memory
from headstart.heads.unembedding import Unembedding
from headstart.heads.visibility import Sees


def check_conv(hidden_size: int, block: int, taps: int, group: int) -> tuple[int, int, int]:
    """(block, taps, group) of ``LocalConv``. Raises UserError unless they fit together."""
    if not 1 <= taps <= block:
        raise UserError(f"head.conv_taps must be from 1 to head.block={block}, found {taps}")
    if group < 1 or hidden_size % group:
        raise UserError(f"head.conv_group must divide the target's hidden size {hidden_size}, found {group}")
    return block, taps, group


class LocalConv(nn.Module):
    """The two convolutions around a sublayer: ``base_kernel`` [2, K, D] (before it, after it), and both deltas from one product."""

    scales = ("base_kernel",)  # the optimizer treats it as vectors, not as matrices

    def __init__(self, hidden_size: int, block: int, taps: int, group: int) -> None:
        super().__init__()
        self.block, self.taps, self.group = block, taps, group
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, hidden_size))
        nn.init.ones_(self.base_kernel[:, 0])
        self.kernel_projection = nn.Linear(hidden_size, 2 * taps * (hidden_size // group), bias=False)
        nn.init.zeros_(self.kernel_projection.weight)

    def around(self, sublayer: Callable[[Tensor], Tensor], x_BND: Tensor) -> Tensor:
        """The sublayer between both convolutions. ``x_BND``: its normed input, whole blocks side by side."""
        before, after = self.kernel_projection(x_BND).unflatten(-1, (2, self.taps, -1)).unbind(2)
        return self._convolve(sublayer(self._convolve(x_BND, 0, before)), 1, after)

    def _convolve(self, x_BND: Tensor, which: int, delta_BNKG: Tensor) -> Tensor:
        x_BASD = x_BND.unflatten(1, (-1, self.block))
        kernel_BNKD = self.base_kernel[which].to(x_BND.dtype) + delta_BNKG.repeat_interleave(self.group, -1)
        back = [F.pad(x_BASD, (0, 0, t, 0))[:, :, : self.block].flatten(1, 2) for t in range(self.taps)]  # t slots back, or zeros
        return torch.stack([x * kernel_BNKD[:, :, t] for t, x in enumerate(back)]).sum(0)


class ConvLayer(DecoderLayer):
    """A Qwen3 decoder layer with ``LocalConv`` around its attention and its MLP."""

    reads = None

    def __init__(self, shape: TargetShape, heads: int, kv_heads: int, width: int, conv: tuple[int, int, int]) -> None:
        super().__init__(shape, heads, kv_heads, width, head_norm=True)
        self.attention_conv, self.mlp_conv = (LocalConv(shape.hidden_size, *conv) for _ in range(2))

    def forward(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], memory: Memory, layer: int, sees: Sees) -> Tensor:
        """``x`` [B, N, D] plus its attention over memory, plus the MLP of that sum: [B, N, D]."""
        alone = x.new_zeros(())  # the residual that sublayers add: here the real one is added after the second convolution
        x = x + self.attention_conv.around(lambda y: self.self_attn(y, cos_sin, memory, layer, sees, alone), self.input_layernorm(x))
        return x + self.mlp_conv.around(lambda y: self.mlp(y, alone), self.post_attention_layernorm(x))


class Dflash2(Dflash, without=("draft_vocab",)):
    """``rank``, ``candidates``: of the selector. ``conv_taps``: slots that a convolution reads, including the current one. ``conv_group``:
    channels that share a delta. Raises UserError for more candidates than tokens, and for a convolution that does not fit.
    """

    def __init__(
        self,
        shape: TargetShape,
        *,
        block: int = 16,
        rank: int = 256,
        candidates: int = 16,
        conv_taps: int = 2,
        conv_group: int = 16,
        **more: Any,
    ) -> None:
        D = shape.hidden_size
        if not 1 <= candidates <= shape.vocab_size:
            raise UserError(f"head.candidates must be from 1 to the target's {shape.vocab_size} tokens, found {candidates}")
        self._conv = check_conv(D, block, conv_taps, conv_group)  # read by ``_layer``, which the base class calls
        super().__init__(shape, block=block, **more)
        self.candidates = candidates
        self.predecessor = nn.Embedding(shape.vocab_size, rank)
        nn.init.normal_(self.predecessor.weight, std=0.02)
        self.successor = nn.Parameter(torch.zeros(shape.vocab_size, rank))  # zero: DFlash's own order at the start
        self.slot_projection = nn.Linear(D, rank, bias=False)

    def _layer(self, heads: int, kv_heads: int, width: int) -> nn.Module:
        return ConvLayer(self.shape, heads, kv_heads, width, self._conv)

    def _after(self, depth: int, tokens_BN: Tensor, state: Tensor) -> Draft:
        slot = self.slot(depth, state)
        context = self.predecessor(tokens_BN).to(slot.dtype) * self.slot_projection(slot)
        return Draft(torch.cat([slot, context], dim=-1), state)

    def unembedding(self, depth: int) -> Unembedding:
        """The target's own head, and the selector's matrix S for the candidates."""
        return Unembedding(self.ends.head_VD, correction_VR=self.successor, candidates=self.candidates)
