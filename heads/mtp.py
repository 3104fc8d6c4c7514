"""Multi-token prediction: DeepSeek's module (2412.19437, section 2.2), either one for all depths (FastMTP, 2509.18362) or one per depth.

A module is proj([norm(embedding of x[t+1]); norm(h_t)]), one full decoder layer and a final norm. The target's frozen head reads its
output, which is also the state for the next depth.

With one module per depth, the module of depth d keeps its own keys and values of the roots and of a node's ancestors. It computes all of
them itself, from the inputs of those rows: this follows Headstart's rule of what a node sees. DeepSeek's training differs in the earlier
rows of the deeper modules: there, the row of t' in module k holds the token x[t'+k] and the state of module k-1. In decoding, these rows
would have to be recomputed after every verified token.

Shape suffixes: B batch, N rows, D hidden, V rows of the head (the draft vocabulary where it is trimmed).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from headstart.heads.base import Draft, Drafter, Roots, TargetEnds, TargetShape, layer_sizes
from headstart.heads.errors import UserError
from headstart.heads.formats.mtp import fills
from headstart.heads.layers import DecoderLayer, RMSNorm, Rope
from headstart.heads.memory import Memory
from headstart.heads.mtp_weights import own_modules
from headstart.heads.unembedding import Unembedding
from headstart.heads.visibility import Sees
from headstart.heads.vocab import check_ids

MOST = 64  # maximum number of modules


class Module(nn.Module):
    """DeepSeek's module: embedding and state are normed, joined and projected; a decoder layer and a final norm follow."""

    def __init__(self, shape: TargetShape, heads: int, kv_heads: int, intermediate_size: int) -> None:
        super().__init__()
        D, eps = shape.hidden_size, shape.norm_eps
        self.enorm = RMSNorm(D, eps)
        self.hnorm = RMSNorm(D, eps)
        self.eh_proj = nn.Linear(2 * D, D, bias=False)
        self.layer = DecoderLayer(shape, heads, kv_heads, intermediate_size)
        self.norm = RMSNorm(D, eps)

    def forward(
        self, token_BND: Tensor, state_BND: Tensor, cos_sin: tuple[Tensor, Tensor], memory: Memory, place: int, sees: Sees
    ) -> Tensor:
        """The state after the final norm, [B, N, D]. The layer's keys and values go to memory at layer ``place``."""
        return self.norm(self.layer(self.join(token_BND, state_BND), cos_sin, memory, place, sees))

    def remember(self, token_BND: Tensor, state_BND: Tensor, cos_sin: tuple[Tensor, Tensor], memory: Memory, place: int) -> None:
        """Write only the keys and values of rows that later rows of this module will see."""
        x_BND = self.layer.input_layernorm(self.join(token_BND, state_BND))
        memory.write(place, *self.layer.self_attn.keys_values(x_BND, cos_sin))

    def join(self, token_BND: Tensor, state_BND: Tensor) -> Tensor:
        """The layer's input, [B, N, D]."""
        return self.eh_proj(torch.cat([self.enorm(token_BND), self.hnorm(state_BND)], dim=-1))


def _unlike_engines(shape: TargetShape, modules: int, heads: int, kv_heads: int, draft_vocab: list[int] | None) -> str:
    """What keeps engines from loading such a drafter, and the settings with which they would; "" where nothing does."""
    settings = ["head.modules=1"] * (modules > 1) + ["head.draft_vocab=null"] * (draft_vocab is not None)
    if not fills(shape, heads):
        fitting, rest = divmod(shape.hidden_size, shape.head_dim)
        if rest:
            return f"no number of heads of {shape.head_dim} is as wide as the target, {shape.hidden_size}"
        settings += [f"head.heads={fitting}"] + [f"head.kv_heads={fitting}"] * (fitting % kv_heads > 0)
    return f"trained with {' '.join(settings)}, vLLM loads it" if settings else ""


class Mtp(Drafter):
    """``modules``: 1 serves every depth; more are one per depth, and their number is the maximum depth.

    ``draft_vocab`` (target ids): the rows of the target's head that are used (FastMTP's vocabulary cut). ``from_target``: start from
    the target's own MTP weights; ``start_from`` raises UserError where it has none, or others than this layer can hold.
    """

    draft_ids: Tensor | None

    def __init__(
        self,
        shape: TargetShape,
        *,
        modules: int = 1,
        heads: int | None = None,
        kv_heads: int | None = None,
        intermediate_size: int | None = None,
        draft_vocab: list[int] | None = None,
        from_target: bool = False,
    ) -> None:
        super().__init__(shape)
        if modules > MOST:
            raise UserError(f"head.modules={modules} must be within 1..{MOST}: one per depth, or 1 for all depths")
        heads, kv_heads, width = layer_sizes(shape, heads, kv_heads, intermediate_size)
        self.taps = (shape.layers,)
        self.max_depth = modules if modules > 1 else None
        self.from_target = from_target
        if differs := _unlike_engines(shape, modules, heads, kv_heads, draft_vocab):
            self.unserved = f"engines have no such module; {differs}"
        else:
            self.format = "mtp"
        self.stages = nn.ModuleList(Module(shape, heads, kv_heads, width) for _ in range(modules))
        self.rope = Rope(shape.rope, shape.head_dim, shape.max_positions)
        self.register_buffer("draft_ids", check_ids(draft_vocab, shape.vocab_size), persistent=False)
        self._head: list[Tensor] = []  # a list, so that torch does not register it as our weight

    def attach(self, ends: TargetEnds) -> None:
        """Also selects the rows of the target's head that are used."""
        super().attach(ends)
        head_VD = ends.head_VD
        self._head = [head_VD if self.draft_ids is None else head_VD[self.draft_ids.to(head_VD.device)]]

    def start_from(self, ends: TargetEnds) -> None:
        """Load the target's own MTP weights if ``from_target`` is set. Raises UserError where it has none, or others than these modules
        hold.
        """
        if not self.from_target:
            return
        own = own_modules(ends.model, self.stages[0].state_dict(), len(self.stages))
        for stage, weights in zip(self.stages, own, strict=True):
            stage.load_state_dict(weights)

    def begin(self, roots: Roots, memory: Memory, sees: Sees, ask: Tensor | None = None) -> Draft:
        """Read the chosen token beside the target's final state."""
        return self._read(1, roots.chosen_BT, roots.states[self.taps[0]], roots.positions_BT, memory, sees).at(ask)

    def step(self, depth: int, tokens_BN: Tensor, parent: Draft, positions_BN: Tensor, memory: Memory, sees: Sees) -> Draft:
        """Read the drafted token beside its parent's state, through the module of this depth."""
        return self._read(depth, tokens_BN, parent.state, positions_BN, memory, sees)

    def _read(self, depth: int, tokens_BN: Tensor, state: Tensor, positions_BN: Tensor, memory: Memory, sees: Sees) -> Draft:
        """Run the module of this depth. The deeper modules only remember the same rows. Raises UserError beyond the last module."""
        stages: list[Any] = list(self.stages)
        last = len(stages) - 1
        self.check_depth(depth, "has {} modules", f"with head.modules={depth}")
        token, cos_sin = self.ends.embed(tokens_BN).to(state.dtype), self.rope(positions_BN)
        own = min(depth - 1, last)
        for i in range(own + 1, last + 1):
            stages[i].remember(token, state, cos_sin, memory, last - i)
        # The last module is at layer 0 of memory: it alone is written at every depth, and memory counts its rows there.
        hidden = stages[own](token, state, cos_sin, memory, last - own, sees)
        return Draft(hidden, hidden)

    def unembedding(self, depth: int) -> Unembedding:
        """The target's own head, or its rows for ``draft_vocab``."""
        _ = self.ends  # raises a clear error where no target is attached
        return Unembedding(self._head[0], self.draft_ids)
