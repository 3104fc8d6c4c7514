"""What a drafter is.

Tokens are ``x[0..T-1]``. A **root** t is a position that the target has verified: the target's hidden states after
reading ``x[t]`` are known there, and so is the token ``x[t+1]`` that the target chose.

    Depth d of root t guesses x[t+1+d],  d >= 1.     (The target itself gives x[t+1].)

Every offset in the code follows from that sentence. A **node** is a guessed token. It sees the roots up to its own
root and its own ancestors, nothing else. Training grows a chain from every root at once and feeds it true tokens.
Decoding grows a tree from the last root and feeds it drafted tokens. Both call the same two methods of the same
drafter, ``begin`` and ``step``, so what is trained is what is decoded.

Shape suffixes: B batch, T roots, N nodes (or rows of any kind), D target hidden, H drafter hidden, V vocabulary (also a trimmed one).
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from headstart.heads.errors import UserError
from headstart.heads.kinds import depth_of
from headstart.heads.layers import freeze
from headstart.heads.memory import Memory
from headstart.heads.prepack import prepack, prepack_beside, product
from headstart.heads.unembedding import Unembedding
from headstart.heads.visibility import Sees
from headstart.heads.vocab import OutputHead

WIDTHS = ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner")  # width of the MLP: the names that configs use for it


@dataclass(frozen=True)
class TargetShape:
    """The sizes of the target that a drafter needs. They are read from the Hugging Face config, without weights."""

    model_type: str
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    rope: dict[str, Any]  # for drafters: transformers' `rope_parameters` of the full-attention layers
    dtype: str

    @classmethod
    def of(cls, config: Any) -> TargetShape:
        """Read a transformers config: its text part if it has several parts."""
        text, full = config.get_text_config(), "full_attention"
        if getattr(text, "is_heterogeneous", False):  # layers differ in size (gemma4): take a full-attention layer, as for the rope below
            text = text.per_layer_config[(getattr(text, "layer_types", None) or [full]).index(full)]
        rope = dict(getattr(text, "rope_parameters", None) or {"rope_type": "default", "rope_theta": 10000.0})
        rope = dict(rope.get(full, rope))  # where there is one entry per kind of layer (gemma3)
        # In text the sections of Qwen-VL's rotation have equal positions. Engines would ask a drafter that has them for three positions.
        rope = {key: value for key, value in rope.items() if not key.startswith("mrope_") and (key, value) != ("type", "mrope")}
        # These types change with the length, or rotate a part of a head only. A drafter uses default RoPE with the same base.
        if rope.get("rope_type") in ("dynamic", "longrope", "proportional"):
            rope = {"rope_type": "default", "rope_theta": rope.get("rope_theta", 10000.0)}
        heads, width = text.num_attention_heads, next((n for k in WIDTHS if (n := getattr(text, k, None))), 4 * text.hidden_size)
        return cls(
            model_type=text.model_type,
            hidden_size=text.hidden_size,
            layers=depth_of(text),
            heads=heads,
            kv_heads=getattr(text, "num_key_value_heads", None) or heads,
            head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
            intermediate_size=max(width) if isinstance(width, list | tuple) else width,
            vocab_size=text.vocab_size,
            max_positions=text.max_position_embeddings,
            norm_eps=getattr(text, "rms_norm_eps", 1e-6),
            rope=rope,
            dtype=str(getattr(text, "dtype", None) or torch.float32).removeprefix("torch."),
        )


def layer_sizes(shape: TargetShape, heads: int | None, kv_heads: int | None, width: int | None) -> tuple[int, int, int]:
    """(query heads, key-value heads, MLP width) of a drafter's layers. None means the target's number; ``kv_heads=None`` means ``heads``
    where that is given. Raises UserError unless the query heads are a multiple of the key-value heads.
    """
    heads, kv_heads = heads or shape.heads, kv_heads or heads or shape.kv_heads
    if heads % kv_heads:
        raise UserError(f"head.heads={heads} must be a multiple of head.kv_heads={kv_heads}")
    return heads, kv_heads, width or shape.intermediate_size


def ascending_taps(taps: Sequence[int], shape: TargetShape) -> tuple[int, ...]:
    """The taps as a tuple. Raises UserError unless they ascend strictly within 0..layers of the target."""
    if not taps or list(taps) != sorted(set(taps)) or taps[0] < 0 or taps[-1] > shape.layers:
        wrong = f"head.taps {tuple(taps)} must ascend within 0..{shape.layers}"
        raise UserError(f"{wrong} (the target has {shape.layers} layers): set head.taps")
    return tuple(taps)


@dataclass
class TargetEnds:
    """The target's frozen token embedding and output head, shared with the drafter and never saved with it."""

    embed: nn.Module  # tokens -> [.., D], without the scale that some targets multiply it by: engines share it without, too
    head_VD: Tensor
    softcap: float | None = None  # gemma: softcap * tanh(logits / softcap)
    whole: Any = None  # the transformers model, or a function that returns it; None where neither is at hand
    scaled: bool = False  # head_VD already contains the target's logit scale (granite, cohere)
    times: Callable[[Tensor, Tensor], Tensor] = product  # multiplies states by the head
    config: Any = None  # the target's transformers config, for drafters that build a layer of its kind; None where it is not at hand
    tokenizer: Any = None  # the target's, for drafters that have another one at first; None where it is not at hand

    @property
    def model(self) -> Any:
        """The whole target, for drafters that copy or share a part of it. None where it is not at hand."""
        return self.whole if self.whole is None or isinstance(self.whole, nn.Module) else self.whole()

    def logits(self, final_ND: Tensor) -> Tensor:
        """Target logits [.., V] from the states [.., D] after the final norm."""
        logits_NV = self.times(final_ND, self.head_VD.to(final_ND.dtype))
        return logits_NV if self.softcap is None else torch.tanh(logits_NV / self.softcap) * self.softcap


@dataclass
class Roots:
    """Verified positions, oldest first."""

    read_BT: Tensor  # x[t], which the target has read
    chosen_BT: Tensor  # x[t+1], which the target chose there
    states: dict[int, Tensor]  # tap -> [B, T, D]: the target's states after reading x[t]
    positions_BT: Tensor  # position of x[t] in its document, from 0

    def __getitem__(self, rows: slice) -> Roots:
        states = {tap: s[:, rows] for tap, s in self.states.items()}
        return Roots(self.read_BT[:, rows], self.chosen_BT[:, rows], states, self.positions_BT[:, rows])

    def to(self, dtype: torch.dtype, device: torch.device | None = None) -> Roots:
        """The same roots with states in the drafter's dtype, which may differ from the target's, and on ``device`` if one is given."""
        states = {tap: state.to(device, dtype) for tap, state in self.states.items()}
        return Roots(self.read_BT.to(device), self.chosen_BT.to(device), states, self.positions_BT.to(device))


def rows_of(x: Tensor, rows_BN: Tensor | None) -> Tensor:
    """``x`` [B, M] or [B, M, H] at the given rows [B, N] of each batch row: [B, N] or [B, N, H]. All of ``x`` when None."""
    if rows_BN is None:
        return x
    return x.gather(1, rows_BN if x.dim() == 2 else rows_BN[..., None].expand(-1, -1, x.shape[-1]))


@dataclass
class Draft:
    """A drafter's output at N rows: vectors instead of logits, because logits are linear in them."""

    hidden_BNH: Tensor  # what the unembedding turns into logits
    state_BNH: Tensor | None = None  # what the next depth reads beside the token; of any width
    confidence_BN: Tensor | None = None  # logit of the probability that the guess is accepted, from drafters that predict it
    first_BTH: Tensor | None = None  # hidden_BNH of depth 1 at every root, not only at the asked ones (``Drafter.first_everywhere``)

    @property
    def state(self) -> Tensor:
        """``state_BNH``, from a drafter that sets it."""
        assert self.state_BNH is not None
        return self.state_BNH

    def at(self, rows_BN: Tensor | None) -> Draft:
        """The drafts at the given rows [B, N] of each batch row. To continue a tree, these are the rows of the nodes' parents."""
        state, confidence = (None if x is None else rows_of(x, rows_BN) for x in (self.state_BNH, self.confidence_BN))
        return Draft(rows_of(self.hidden_BNH, rows_BN), state, confidence)


class Drafter(nn.Module, ABC):
    """The contract of every drafter: one constructor, two methods (``begin`` and ``step``), and two more where their defaults do not fit
    (``start_from`` and ``unembedding``).

    The constructor takes the target's shape and plain keyword arguments (those of ``conf/head/NAME.yaml``).
    ``heads.hub.build`` calls it and records the arguments in ``config``, so that a saved folder can be rebuilt.
    """

    __signature__: ClassVar[inspect.Signature]  # of the constructor, with the settings that it passes on to its base class
    taps: tuple[int, ...] = ()  # aux hidden state layers: k: the target's residual stream after k layers, N: its state after the final norm
    config: dict[str, Any]  # {"head": NAME, **arguments}, set by heads.hub.build
    format: str = "native"  # heads/formats/FORMAT.py writes and reads the folder
    unserved: str = ""  # why no engine loads its folders, whatever their format
    max_depth: int | None = None  # deepest guess it can make; None: no limit
    unrolls: bool = True  # False: with true tokens, depth d of root t equals depth 1 of root t+d-1, so only depth 1 is trained
    acceptance: Mapping[bool, Sequence[float]] = {}  # temperature > 0 -> share of right guesses by depth (inference/reports/prior.py)
    only_trained: tuple[str, ...] = ()  # settings that only training uses: a resumed run may change them
    anchors: int | None = None  # if all depths are made in ``begin``: roots that a training step draws from each batch row; None: all
    first_everywhere: bool = False  # with anchors: ``begin`` computes depth 1 at every root, so it is trained there (``Draft.first_BTH``)

    def __init__(self, shape: TargetShape) -> None:
        super().__init__()
        self.shape = shape
        self._ends: list[TargetEnds] = []  # a list, so that torch does not register them as our parameters or buffers
        self._size = 0
        self.claimed_VD: Tensor | None = None  # the target's embedding as a foreign folder stores it, until ``attach`` compares the two

    def __init_subclass__(cls, without: Collection[str] = ()) -> None:
        """Set ``__signature__``. A constructor that ends in ``**more``, or an inherited one, also takes the base class's settings, except
        those in ``without``.
        """
        own = vars(cls).get("__init__")
        taken = dict(list(inspect.signature(own).parameters.items())[1:]) if own else {}
        if taken.pop("more", None) or own is None:
            theirs = inspect.signature(cls.__base__).parameters if cls.__base__ else {}
            taken = {name: setting for name, setting in theirs.items() if name not in without} | taken
        cls.__signature__ = inspect.Signature(list(taken.values()))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Drafter:
        """Keep non-persistent tables in their dtype: RoPE frequencies rounded to bf16 would give wrong angles at far positions."""
        tables = [(m, k, m._buffers[k]) for m in self.modules() for k in m._non_persistent_buffers_set]
        super()._apply(fn, recurse)
        for module, name, table in tables:
            if table is not None and table.is_floating_point():
                module._buffers[name] = table.to(module._buffers[name].device)  # type: ignore[union-attr]
        return self

    @property
    def ends(self) -> TargetEnds:
        """The target's embedding and head. Raises RuntimeError before ``attach``."""
        if not self._ends:
            raise RuntimeError("the drafter has no target: call drafter.attach(target.ends) first")
        return self._ends[0]

    @property
    def target_config(self) -> Any:
        """The target's transformers config; None where it is not at hand."""
        return self._ends[0].config if self._ends else None

    def attach(self, ends: TargetEnds) -> None:
        """Share the target's embedding and head. Call it once, before ``begin``. Raises UserError if the folder holds another embedding."""
        self._ends = [ends]
        if self.claimed_VD is not None:
            own_VD = ends.embed(torch.arange(self.shape.vocab_size, device=ends.head_VD.device)).float().cpu()
            differs = self.claimed_VD.shape != own_VD.shape or (self.claimed_VD.float() - own_VD).norm() > 0.01 * own_VD.norm()
            if differs:  # by more than the rounding of bf16 or fp16
                raise UserError("the folder has an embedding of its own, another than the target's: such a drafter cannot be loaded")
            self.claimed_VD = None

    def start_from(self, ends: TargetEnds) -> None:
        """Initialize the parts of a fresh drafter that start as a copy of the target's: here, every output head."""
        for module in self.modules():
            if isinstance(module, OutputHead):
                module.start_from(ends.head_VD)

    def check_depth(self, depth: int, what: str, how: str) -> None:
        """Raises UserError for a depth beyond ``max_depth``. For the message: ``what`` sets that limit ({} is the number), and ``how`` says
        how to train a deeper drafter.
        """
        if self.max_depth is not None and depth > self.max_depth:
            raise UserError(f"this drafter {what.format(self.max_depth)}, depth {depth} was asked: lower it or train {how}")

    @property
    def size(self) -> int:
        """Number of trained parameters."""
        return self._size or sum(p.numel() for p in self.parameters() if p.requires_grad)

    def prepack(self) -> Drafter:
        """Prepare it, in place, for faster decoding on a CPU, or on a GPU that runs our kernels. Afterwards it cannot be trained, saved,
        copied or moved.
        """
        self._size = self.size
        for depth in range(1, (self.max_depth or 1) + 1):
            unembedding = self.unembedding(depth)
            # With candidates, single rows of the correction are read: it is not multiplied as a whole.
            for block in unembedding.blocks if unembedding.candidates is None else [unembedding.weight_VH]:
                if block is not self.ends.head_VD:  # which the target prepacks itself
                    prepack_beside(block)
        prepack(self)
        freeze(self)
        return self

    @abstractmethod
    def begin(self, roots: Roots, memory: Memory, sees: Sees, ask: Tensor | None = None) -> Draft:
        """Read verified positions into memory. Returns depth-1 drafts at the rows ``ask`` [B, N]; at all roots when None."""

    @abstractmethod
    def step(self, depth: int, tokens_BN: Tensor, parent: Draft, positions_BN: Tensor, memory: Memory, sees: Sees) -> Draft:
        """Drafts of one depth > 1, one per drafted token. ``tokens_BN``: guesses of depth - 1. ``parent``: the drafts that they were drawn
        from, in the same rows. ``positions_BN``: the position of their root plus depth - 1.
        """

    def unembedding(self, depth: int) -> Unembedding:
        """The matrix that turns drafts of this depth into logits: the drafter's own ``lm_head`` if it has one, else the target's."""
        own: OutputHead | None = getattr(self, "lm_head", None)
        return Unembedding(self.ends.head_VD) if own is None else own.unembedding()
