"""DFlash (2602.06036, section 3): one pass guesses all depths, by filling a block of mask tokens at once.

Root t belongs to the anchor a = t + 1: x[a] is the last known token. A block has S slots, [x[a], MASK x (S-1)], at positions
a..a+S-1. In every layer the queries of the block see two kinds of keys and values: those of z = norm(fc(tapped states)) of the roots
up to t, and those of the block itself. Roots pass through no layer, so memory holds only their keys and values; blocks are forgotten.
Slot k guesses x[a+k]; slot 0 guesses nothing. Layers are Qwen3's; embedding and head are the target's, frozen. With a trimmed vocabulary
(``draft_vocab``) the drafter trains a head of its own, which starts as a copy of the target's rows.

Some layers may have a sliding window of ``window`` positions. There, a slot sees only the nearest roots and, unless ``window_causal`` is
false, only its own slot and the earlier ones of its block. Engines and SpecForge count the window from the slot: slot k sees the roots at
positions above a+k-window. The speculators library counts from the anchor (``window_slides=false``): every slot sees the roots from
position a-window on.

``begin`` does all the work, and ``step`` only reads the slot of its depth. The mask is a learned vector or, as in published folders,
the embedding of a target token that no text contains (``mask_token``). Engines load only folders of the second kind.

Shape suffixes: B batch, T roots, A asked roots, S slots, N nodes, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from headstart.heads.base import Draft, Drafter, Roots, TargetEnds, TargetShape, ascending_taps, layer_sizes
from headstart.heads.errors import UserError
from headstart.heads.layers import CosSin, DecoderLayer, RMSNorm, Rope
from headstart.heads.memory import Beside, Memory, Segment
from headstart.heads.visibility import BlockSees, Sees, blocks_of
from headstart.heads.vocab import OutputHead, check_ids


def spread_taps(target_layers: int, count: int) -> list[int]:
    """``count`` taps spread evenly over the outputs of layers 1..N-3 (layers from 0), as in the published drafters; fewer for small
    targets.
    """
    first, last = min(2, target_layers), max(target_layers - 2, min(2, target_layers))
    if count == 1:
        return [target_layers // 2 + 1]
    return sorted({round(first + i * (last - first) / (count - 1)) for i in range(count)})


def asked(ask: Tensor | None, roots: Roots) -> Tensor:
    """The asked roots [B, A]; all roots when ``ask`` is None."""
    B, T = roots.read_BT.shape
    return torch.arange(T, device=roots.read_BT.device).expand(B, T) if ask is None else ask


def read_row(drafter: Drafter, depth: int, tokens_BN: Tensor, parent: Draft, positions_BN: Tensor, memory: Memory, sees: Sees) -> Draft:
    """``step`` where ``begin`` made the rows of all depths: the drafted tokens change nothing. Raises UserError beyond the last depth."""
    drafter.check_depth(depth, "guesses {} tokens", f"with head.depth={depth}")
    D = parent.hidden_BNH.shape[-1]
    return Draft(parent.state[..., (depth - 1) * D : depth * D], parent.state)


def windowed_layers(window: int | None, some: list[int] | None, layers: int, block: int) -> tuple[int, ...]:
    """The layers with a sliding window, counted from 0: those in ``some`` (None: all), or () where ``window`` is None. Raises UserError
    for layers that do not exist or are not ascending, for ``some`` without ``window``, and for a window smaller than a block.
    """
    if window is None:
        if some is not None:
            raise UserError(f"head.window_layers={some} needs head.window, the positions that these layers see")
        return ()
    if window < block:
        raise UserError(f"head.window={window} must be at least head.block={block}: a block lies within it")
    if some is not None and (not some or list(some) != sorted({*some}) or some[0] < 0 or some[-1] >= layers):
        raise UserError(f"head.window_layers={some} must ascend within 0..{layers - 1}; without a window: head.window=null")
    return tuple(range(layers) if some is None else some)


def check_mask_token(mask_token: int, shape: TargetShape) -> None:
    """Raises UserError for a token that is not in the target's vocabulary."""
    if type(mask_token) is not int or not 0 <= mask_token < shape.vocab_size:
        raise UserError(f"head.mask_token must be a token of the target (0..{shape.vocab_size - 1}), found {mask_token!r}")


def mask_of(drafter: Any, embed: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """The mask's embedding [D], which stands for a token that is not known yet. ``embed``: tokens to vectors; None: the target's."""
    if drafter.mask_embedding is not None:
        return drafter.mask_embedding
    return (embed or drafter.ends.embed)(torch.full((1,), drafter.mask_token, device=drafter.norm.weight.device))[0]


class Dflash(Drafter):
    """``block``: number of slots, including the anchor's. ``taps``: the target layers that are read; None: as many as ``layers``, spread
    evenly. ``mask_token``: the token whose embedding is the mask; None: a learned vector. ``draft_vocab``: target ids that a head of its
    own can guess; None: the target's head. ``window``: positions that the layers in ``window_layers`` (None: all) see; None: no window;
    ``window_causal``, ``window_slides``: see the module's docstring. ``anchors``: roots that a training step draws from each batch row.
    Raises UserError for settings that do not fit the target or, with ``mask_token``, the engines.
    """

    only_trained = ("anchors",)
    causal = False  # attention inside a block
    first_slot = 1  # slot that guesses depth 1

    def __init__(
        self,
        shape: TargetShape,
        *,
        layers: int = 5,
        block: int = 16,
        heads: int | None = None,
        kv_heads: int | None = None,
        intermediate_size: int | None = None,
        taps: list[int] | None = None,
        mask_token: int | None = None,
        draft_vocab: list[int] | None = None,
        window: int | None = None,
        window_layers: list[int] | None = None,
        window_causal: bool = True,
        window_slides: bool = True,
        anchors: int = 64,
    ) -> None:
        super().__init__(shape)
        N, D, eps = shape.layers, shape.hidden_size, shape.norm_eps
        self.taps = ascending_taps(spread_taps(N, layers) if taps is None else taps, shape)
        if mask_token is not None:
            self.format = "dflash"
            check_mask_token(mask_token, shape)
            if self.taps[0] < 1 or self.taps[-1] >= N:
                raise UserError(
                    f"head.taps {self.taps}: engines read outputs of layers, so with head.mask_token they lie within 1..{N - 1}"
                )
        if block <= self.first_slot:
            raise UserError(f"head.block must be at least {self.first_slot + 1}, found {block}: slot {self.first_slot} guesses first")
        self.block, self.mask_token, self.anchors, self.max_depth = block, mask_token, anchors, block - self.first_slot
        self.windowed = windowed_layers(window, window_layers, layers, block)
        self.window, self.window_causal, self.window_slides = window, window_causal, window_slides
        heads, kv_heads, width = layer_sizes(shape, heads, kv_heads, intermediate_size)
        self._add_fusion(layers)
        self.hidden_norm = RMSNorm(D, eps)
        self.mask_embedding = nn.Parameter(torch.randn(D) * 0.02) if mask_token is None else None
        self.layers = nn.ModuleList(self._layer(heads, kv_heads, width) for _ in range(layers))
        self.norm = RMSNorm(D, eps)
        trimmed = check_ids(draft_vocab, shape.vocab_size) is not None
        self.lm_head = OutputHead(D, shape.vocab_size, draft_vocab) if trimmed else None
        self.rope = Rope(shape.rope, shape.head_dim, shape.max_positions)

    @property
    def draft_ids(self) -> Tensor | None:
        """The target ids [V] of the draft vocabulary, ascending; None: all."""
        return None if self.lm_head is None else self.lm_head.ids

    def _add_fusion(self, layers: int) -> None:
        """What joins the tapped states. Subclasses may join them in another way."""
        self.fc = nn.Linear(len(self.taps) * self.shape.hidden_size, self.shape.hidden_size, bias=False)

    def _layer(self, heads: int, kv_heads: int, width: int) -> nn.Module:
        """A decoder layer. Subclasses may have layers of their own. ``width``: of its MLP."""
        return DecoderLayer(self.shape, heads, kv_heads, width, head_norm=True)

    def attach(self, ends: TargetEnds) -> None:
        """Also raises UserError where engines would compute other drafts for this target."""
        super().attach(ends)
        corrects = self.unembedding(1).corrects
        if ends.scaled and self.mask_token is not None and corrects:
            raise UserError("head.mask_token: engines leave out the scale of this target's logits, so that what corrects the drafts would "
                            "weigh otherwise there: leave it out, or take head=dflash")  # fmt: skip

    def begin(self, roots: Roots, memory: Memory, sees: Sees, ask: Tensor | None = None) -> Draft:
        """Read the roots into memory, and fill the blocks of the roots in ``ask``, some blocks at a time. A draft's state is its block."""
        rows = Beside(memory)
        for i, (k, v) in enumerate(self._context([roots.states[tap] for tap in self.taps], self.rope(roots.positions_BT))):
            rows.write(i, k, v)
        ask_BA = asked(ask, roots)
        tokens_BA = roots.chosen_BT.gather(1, ask_BA)
        first_BA = roots.positions_BT.gather(1, ask_BA) + 1
        anchor_BAD = self.ends.embed(tokens_BA).to(v.dtype)  # under autocast it differs from that of the states
        state = []
        for ask_Ba, anchor_BaD, first_Ba in zip(*map(blocks_of, (ask_BA, anchor_BAD, first_BA)), strict=True):
            state.append(self._fill(anchor_BaD, first_Ba, rows, self._rules(sees, ask_Ba)))
        return self._first(torch.cat(state, dim=1), tokens_BA)

    def _context(self, states: list[Tensor], cos_sin: CosSin) -> Iterator[Segment]:
        """The keys and values of the roots, layer by layer, from their tapped states."""
        z_BTD = self._joined(states)
        return (layer.self_attn.keys_values(z_BTD, cos_sin) for layer in self.layers)  # type: ignore[operator, union-attr]

    def _joined(self, states: list[Tensor]) -> Tensor:
        """z of the module's docstring, from the tapped states."""
        return self.hidden_norm(self.fc(torch.cat(states, dim=-1)))

    def _rules(self, roots: Sees, ask_BA: Tensor) -> list[Sees]:
        """What the blocks on these roots see in each layer."""
        full = BlockSees(roots, ask_BA, self.block, self.causal)
        near = BlockSees(roots, ask_BA, self.block, self.causal or self.window_causal, self.window, self.window_slides)
        return [near if i in self.windowed else full for i in range(len(self.layers))]

    def _fill(self, anchor_BAD: Tensor, first_BA: Tensor, memory: Memory, sees: list[Sees]) -> Tensor:
        """Run blocks through the layers, each with its own rule. Returns the state of their drafts."""
        B, A, D = anchor_BAD.shape
        masks = mask_of(self).to(anchor_BAD.dtype).expand(B, A, self.block - 1, D)
        x = torch.cat([anchor_BAD[:, :, None], masks], dim=2).flatten(1, 2)
        cos_sin = self.rope((first_BA[..., None] + torch.arange(self.block, device=first_BA.device)).flatten(1))
        for i, layer in enumerate(self.layers):
            x = layer(x, cos_sin, memory, i, sees[i])
        return self._state(self.norm(x).unflatten(1, (A, self.block)))

    def _state(self, slots_BASD: Tensor) -> Tensor:
        """The state of a draft: the slots that guess, side by side, [B, A, max_depth * D]. Subclasses may add to it."""
        return slots_BASD[:, :, self.first_slot :].flatten(2)

    def slot(self, depth: int, state: Tensor) -> Tensor:
        """The slot of this depth, [B, N, D]. Raises UserError for a depth beyond the block."""
        self.check_depth(depth, "guesses {} tokens", "a larger head.block")
        D = self.shape.hidden_size
        return state[..., (depth - 1) * D : depth * D]

    def _first(self, state: Tensor, tokens_BA: Tensor) -> Draft:
        """The draft of depth 1. ``tokens_BA``: the last known tokens."""
        return self._after(1, tokens_BA, state)

    def step(self, depth: int, tokens_BN: Tensor, parent: Draft, positions_BN: Tensor, memory: Memory, sees: Sees) -> Draft:
        """Read the slot of this depth. The drafted tokens change nothing here, but they do in subclasses."""
        return self._after(depth, tokens_BN, parent.state)

    def _after(self, depth: int, tokens_BN: Tensor, state: Tensor) -> Draft:
        """The draft of a depth. ``tokens_BN``: the tokens before it."""
        return Draft(self.slot(depth, state), state)
