"""What a drafter is.

Tokens are ``x[0..T-1]``. A **root** t is a position the target has verified: it has the target's hidden
states after reading ``x[t]``, and the token ``x[t+1]`` that the target chose there.

    Depth d of root t guesses x[t+1+d],  d >= 1.     (The target itself gives x[t+1].)

Every offset in the code follows from that sentence. A **node** is a guessed token; it sees the roots up to
its own root and its own ancestors, nothing else. Training grows a chain from every root at once, fed with
true tokens; decoding grows a tree from the last root, fed with drafted tokens. Both call the same two
methods of the same drafter, so what is trained is what is decoded.

Shape suffixes: B batch, T roots, N nodes (or rows of any kind), D target hidden, H drafter hidden, V vocabulary (the drafter's own too).
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
from headstart.heads.layers import Attention, freeze
from headstart.heads.memory import Memory
from headstart.heads.prepack import memory_dtype, prepack, prepack_beside, product
from headstart.heads.visibility import Sees

WIDTHS = ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner")  # of the MLP, as configs call it


@dataclass(frozen=True)
class TargetShape:
    """What a drafter must know of its target: read from the Hugging Face config, without weights."""

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
        """Read a transformers config (its text part, if it has several)."""
        text = config.get_text_config()
        rope = dict(getattr(text, "rope_parameters", None) or {"rope_type": "default", "rope_theta": 10000.0})
        if "full_attention" in rope:  # one entry per layer kind (gemma3)
            rope = dict(rope["full_attention"])
        if rope.get("rope_type") in ("dynamic", "longrope"):  # they change with the length: a drafter takes their base alone
            rope = {"rope_type": "default", "rope_theta": rope.get("rope_theta", 10000.0)}
        heads = text.num_attention_heads
        return cls(
            model_type=text.model_type,
            hidden_size=text.hidden_size,
            layers=text.num_hidden_layers,
            heads=heads,
            kv_heads=getattr(text, "num_key_value_heads", None) or heads,
            head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
            intermediate_size=next((n for k in WIDTHS if (n := getattr(text, k, None))), 4 * text.hidden_size),
            vocab_size=text.vocab_size,
            max_positions=text.max_position_embeddings,
            norm_eps=getattr(text, "rms_norm_eps", 1e-6),
            rope=rope,
            dtype=str(getattr(text, "dtype", None) or torch.float32).removeprefix("torch."),
        )


def layer_sizes(shape: TargetShape, heads: int | None, kv_heads: int | None, width: int | None) -> tuple[int, int, int]:
    """Query heads, key-value heads and the width of the MLP of a drafter's layers: the target's where not given. Raises UserError."""
    heads, kv_heads = heads or shape.heads, kv_heads or heads or shape.kv_heads
    if heads % kv_heads:
        raise UserError(f"head.heads={heads} must be a multiple of head.kv_heads={kv_heads}")
    return heads, kv_heads, width or shape.intermediate_size


def ascending_taps(taps: Sequence[int], shape: TargetShape) -> tuple[int, ...]:
    """Raises UserError unless they ascend within the layers of the target."""
    if list(taps) != sorted(set(taps)) or taps[0] < 0 or taps[-1] > shape.layers:
        wrong = f"head.taps {tuple(taps)} must ascend within 0..{shape.layers}"
        raise UserError(f"{wrong} (the target has {shape.layers} layers): set head.taps")
    return tuple(taps)


@dataclass
class TargetEnds:
    """The target's frozen token embedding and output head, shared with the drafter and never saved with it."""

    embed: nn.Module  # tokens -> [.., D], without any scale the target multiplies by: so engines share it with drafters
    head_VD: Tensor
    softcap: float | None = None  # gemma's cap * tanh(logits / cap)
    whole: Any = None  # the model (transformers), or the function that loads it, where one is at hand
    scaled: bool = False  # head_VD is the target's output head times a scale (granite, cohere)
    times: Callable[[Tensor, Tensor], Tensor] = product  # how a state is multiplied by the head

    @property
    def model(self) -> Any:
        """The whole target, for drafters that start as a part of it, or share one: then it is loaded. None where it is not at hand."""
        return self.whole if self.whole is None or isinstance(self.whole, nn.Module) else self.whole()

    def logits(self, final_ND: Tensor) -> Tensor:
        """Target logits from the state after the final norm."""
        logits_NV = self.times(final_ND, self.head_VD.to(final_ND.dtype))
        return logits_NV if self.softcap is None else torch.tanh(logits_NV / self.softcap) * self.softcap


@dataclass
class Roots:
    """Verified positions, oldest first."""

    read_BT: Tensor  # x[t], the token the target has read
    chosen_BT: Tensor  # x[t+1], the token it chose there
    states: dict[int, Tensor]  # tap -> [B, T, D], the target's states after reading x[t]
    positions_BT: Tensor  # position of x[t] in its document, from 0

    def __getitem__(self, rows: slice) -> Roots:
        states = {tap: s[:, rows] for tap, s in self.states.items()}
        return Roots(self.read_BT[:, rows], self.chosen_BT[:, rows], states, self.positions_BT[:, rows])

    def to(self, dtype: torch.dtype, device: torch.device | None = None) -> Roots:
        """With the states as a drafter computes: in another dtype than the target (one in bf16, a drafter trained in fp32), elsewhere."""
        states = {tap: state.to(device, dtype) for tap, state in self.states.items()}
        return Roots(self.read_BT.to(device), self.chosen_BT.to(device), states, self.positions_BT.to(device))


def rows_of(x: Tensor, rows_BN: Tensor | None) -> Tensor:
    """x [B, M] or [B, M, H] at the given rows of each batch row: [B, N] or [B, N, H]; all of it when None."""
    if rows_BN is None:
        return x
    return x.gather(1, rows_BN if x.dim() == 2 else rows_BN[..., None].expand(-1, -1, x.shape[-1]))


@dataclass
class Draft:
    """What a drafter says at some rows: a vector, not logits (logits are linear in it)."""

    hidden_BNH: Tensor  # meets the unembedding
    state_BNH: Tensor | None = None  # what the next depth is fed, beside the token; of any width
    confidence_BN: Tensor | None = None  # logit of the probability that the guess is accepted, where the drafter says so

    @property
    def state(self) -> Tensor:
        """What the next depth is fed, where the drafter has said so."""
        assert self.state_BNH is not None
        return self.state_BNH

    def at(self, rows_BN: Tensor | None) -> Draft:
        """The drafts of the given rows of each batch row (to continue a tree: a node's parent is the row it was drawn from)."""
        state, confidence = (None if x is None else rows_of(x, rows_BN) for x in (self.state_BNH, self.confidence_BN))
        return Draft(rows_of(self.hidden_BNH, rows_BN), state, confidence)


@dataclass
class Unembedding:
    """The matrix that turns ``Draft.hidden`` into logits, and the target id of each of its rows.

    ``correction_VR`` is one more block of columns, for the last R numbers of hidden: a bias of low rank that knows the tokens before
    (DSpark's, Domino's). It stands apart from the matrix, which is mostly the target's own and is never copied.
    """

    weight_VH: Tensor
    ids_V: Tensor | None = None  # None: row i is target token i
    correction_VR: Tensor | None = None

    def logits(self, hidden_BNH: Tensor) -> Tensor:
        """Logits [B, N, V] of drafts [B, N, H]."""
        logits_BNV: Tensor | None = None
        for matrix_VW, part_BNW in zip(self.blocks, self.parts(hidden_BNH), strict=True):
            part_BNV = product(part_BNW, matrix_VW.to(hidden_BNH.dtype))
            logits_BNV = part_BNV if logits_BNV is None else logits_BNV + part_BNV
        assert logits_BNV is not None
        return logits_BNV

    @property
    def blocks(self) -> list[Tensor]:
        """The matrix, and the correction's where there is one."""
        return [self.weight_VH] if self.correction_VR is None else [self.weight_VH, self.correction_VR]

    def parts(self, hidden_BNH: Tensor) -> list[Tensor]:
        """What meets each of ``blocks``."""
        return list(hidden_BNH.split([block.shape[1] for block in self.blocks], dim=-1))

    def uncorrected(self) -> Unembedding:
        """The same without the correction: what the drafter says before it knows the tokens before."""
        return Unembedding(self.weight_VH, self.ids_V)

    def to_target(self, logits_BNV: Tensor, vocab_size: int) -> Tensor:
        """Spread logits over the target's vocabulary; tokens the drafter does not have get -inf."""
        if self.ids_V is None:
            return logits_BNV
        full = logits_BNV.new_full((*logits_BNV.shape[:-1], vocab_size), -torch.inf)
        return full.index_copy_(-1, self.ids_V, logits_BNV)


class Drafter(nn.Module, ABC):
    """The contract of every drafter: one constructor, three methods.

    The constructor takes the target's shape and plain keyword arguments (those of ``conf/head/NAME.yaml``).
    ``heads.hub.build`` calls it and records the arguments in ``config``, so that a saved folder can be rebuilt.
    """

    __signature__: ClassVar[inspect.Signature]  # of the constructor, with all settings that it hands on
    taps: tuple[int, ...] = ()  # target layers it reads: k is the residual stream after k layers, N after the final norm
    config: dict[str, Any]  # {"head": NAME, **arguments}, set by heads.hub.build
    format: str = "native"  # heads/formats/FORMAT.py writes and reads the folder
    max_depth: int | None = None  # the deepest guess it can make (None: any)
    unrolls: bool = True  # False: given true tokens, depth d of root t is depth 1 of root t+d-1, so depth 1 alone is trained
    memory_dtype: torch.dtype | None = None  # of its memory, where another one than its own is read faster
    acceptance: Mapping[
        bool, Sequence[float]
    ] = {}  # above temperature 0 -> how often guesses are right, by depth (inference/reports/prior.py)
    only_trained: tuple[str, ...] = ()  # settings that say how it is trained, not what it is: a run that goes on with it may change them
    anchors: int | None = None  # roots of a row that are trained at a time, for a drafter that makes all depths in ``begin`` (None: all)

    def __init__(self, shape: TargetShape) -> None:
        super().__init__()
        self.shape = shape
        self._ends: list[TargetEnds] = []  # in a list, so that they are neither parameters nor buffers of ours
        self._size = 0
        self.claimed_VD: Tensor | None = None  # a foreign folder's copy of the target's embedding, until it is compared

    def __init_subclass__(cls, without: Collection[str] = ()) -> None:
        """A constructor that ends in ``**more`` hands that on to its base class: its settings are the base's too, but for ``without``."""
        taken = dict(list(inspect.signature(cls.__init__).parameters.items())[1:])
        if taken.pop("more", None):
            theirs = inspect.signature(cls.__base__).parameters if cls.__base__ else {}
            taken = {name: setting for name, setting in theirs.items() if name not in without} | taken
        cls.__signature__ = inspect.Signature(list(taken.values()))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Drafter:
        """A cast to half precision casts weights only: tables (RoPE's frequencies) rounded to bf16 would bend far positions."""
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

    def attach(self, ends: TargetEnds) -> None:
        """Share the target's embedding and head. Called once, before ``begin``. Raises UserError where the folder has another embedding."""
        self._ends = [ends]
        if self.claimed_VD is not None:
            own_VD = ends.embed(torch.arange(self.shape.vocab_size, device=ends.head_VD.device)).float().cpu()
            differs = self.claimed_VD.shape != own_VD.shape or (self.claimed_VD.float() - own_VD).norm() > 0.01 * own_VD.norm()
            if differs:  # by more than half precision of either kind
                raise UserError("the folder has an embedding of its own, another than the target's: such a drafter cannot be loaded")
            self.claimed_VD = None

    def start_from(self, ends: TargetEnds) -> None:
        """Copy from the target what a fresh drafter starts as a copy of (its own output head, say)."""

    @property
    def size(self) -> int:
        """Trained numbers."""
        return self._size or sum(p.numel() for p in self.parameters() if p.requires_grad)

    def prepack(self) -> Drafter:
        """For faster decoding on a CPU; elsewhere nothing. It can then not be trained, saved, copied or moved any more."""
        self._size = self.size
        for depth in range(1, (self.max_depth or 1) + 1):
            for block in self.unembedding(depth).blocks:
                if block is not self.ends.head_VD:  # which is not the drafter's to change
                    prepack_beside(block)
        attention = next((m for m in self.modules() if isinstance(m, Attention)), None)
        if attention is not None and (weight := attention.o_proj.weight).device.type == "cpu":
            self.memory_dtype = memory_dtype(weight.dtype, attention.heads, attention.kv_heads, attention.head_dim)
        prepack(self)
        freeze(self)
        return self

    @abstractmethod
    def begin(self, roots: Roots, memory: Memory, sees: Sees, ask: Tensor | None = None) -> Draft:
        """Absorb verified positions into memory; depth-1 drafts at the rows in ``ask`` [B, N] (all when None)."""

    @abstractmethod
    def step(self, depth: int, tokens_BN: Tensor, parent: Draft, positions_BN: Tensor, memory: Memory, sees: Sees) -> Draft:
        """Depth > 1: one draft per drafted token. ``tokens_BN`` are guesses of depth - 1, ``parent`` the drafts they were drawn from
        (same rows), and ``positions_BN`` the position of their root plus depth - 1.
        """

    @abstractmethod
    def unembedding(self, depth: int) -> Unembedding:
        """The matrix for the drafts of this depth."""
