"""A language model of transformers that reads rows by our visibility rules: the target, and drafters that are a language model.

Shape suffixes: B batch, N rows of any kind, M rows in memory, D hidden.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection
from contextlib import nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from headstart.heads.driven import alone, by_rule, can_follow
from headstart.heads.errors import UserError
from headstart.heads.kinds import INDEXED, RECURRENT, WINDOWED, as_given, depth_of, kinds_of, masks, rules, seen_of
from headstart.heads.lean import Lean, lean, stand_in
from headstart.heads.memory import AsCache, Memory, Passing, Segment, Slots, joined
from headstart.heads.prepack import prepack
from headstart.heads.recurrent import mixers_of, reading
from headstart.heads.visibility import CausalSees, ChainSees, MaskSees, Sees

if TYPE_CHECKING:
    from headstart.heads.kernels.fused import Fused

log = logging.getLogger(__name__)

POSITIONS = -1  # memory layer that stores the positions of its rows (as keys) where windows or recurrent layers need them


class Backbone:
    """A language model of transformers without its output head. It reads rows by our visibility rules into our memory."""

    def __init__(self, module: Any) -> None:
        self.module, self.config = module, module.config.get_text_config()
        self.lean: Lean | Fused | None = None
        rotates = getattr(self.config, "rope_parameters", None)
        self.table = None if rotates else getattr(self.config, "max_position_embeddings", None)  # number of learned positions; None: none
        self.windows, self.indexed = (bool(kinds_of(self.config) & kinds) for kinds in (WINDOWED, INDEXED))
        self.mixers = mixers_of(module) if kinds_of(self.config) & RECURRENT else []
        self._follows: bool | None = None

    @property
    def passes(self) -> str:
        """What computes a pass of few rows. Reports say it, because the choice depends on what is installed and on measurements."""
        return "the model's own modules" if self.lean is None else self.lean.passes

    @torch.no_grad()
    def quicken(self, own: bool = True) -> None:
        """Speed it up for decoding; its weights are frozen from now on. Our own layers replace its layers where both compute the same. With
        ``own``, its matrices are prepacked or joined too; ``own=False`` leaves them alone, because they belong to another model.
        """
        self.lean = None  # an earlier one would keep alive the matrices that are joined now, and would be compared with itself
        if own:
            prepack(self.module)
        found = lean(self.module, own)
        if found is not None and self._same(found) and self._same_in_float64():
            self.lean = found

    def _same(self, found: Lean | Fused) -> bool:
        """Whether both compute the same states: of a short text, then of a small tree after it, whose last node is at the last position."""
        far = max(getattr(self.config, "max_position_embeddings", 0) or 0, 8) - 1
        tokens, device = self._sample()
        positions = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 6, far]], device=device)
        own = torch.tensor([[[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]], dtype=torch.bool, device=device)
        said = []
        for read in (self.read, found.read):
            memory = Slots(16)  # as in decoding
            try:
                first = read(tokens[:, :5], positions[:, :5], memory, CausalSees(5, 5))[1]
                tree = read(tokens[:, 5:], positions[:, 5:], memory, MaskSees(torch.cat([own.new_ones(1, 4, 5), own], dim=2)))[1]
            except Exception as e:
                if read == self.read or device.type == "cpu":
                    raise
                log.warning("%s is read by its own modules, which are slower than our kernels: %s", type(self.module).__name__, e)
                return False
            said.append(torch.cat([first, tree], dim=1).float())
        return agree(said[0], said[1], self.module.dtype)

    def _same_in_float64(self) -> bool:
        """``_same`` for a small decoder of this class in float64, where rounding hides nothing."""
        if self.module.dtype == torch.float32:
            return True  # in fp32, comparing the decoder itself is exact enough
        small = Backbone(stand_in(self.module))
        found = lean(small.module)
        return found is not None and small._same(found)

    def _sample(self) -> tuple[Tensor, torch.device]:
        """Any nine rows as ``read`` takes them, and their device."""
        like, dice = next(self.module.parameters()), torch.Generator().manual_seed(0)
        table = self.module.get_input_embeddings()
        if isinstance(table, nn.Identity):
            return torch.randn(1, 9, self.config.hidden_size, generator=dice).to(like), like.device
        return torch.randint(self.config.vocab_size, (1, 9), generator=dice).to(table.weight.device), table.weight.device

    @property
    def follows(self) -> bool:
        """Whether its attention can follow a rule that is passed beside the call, without a mask. Tried once, on the module itself."""
        if self._follows is None:
            unknown = isinstance(next(self.module.parameters()).data, FakeTensor)  # a plan: there are no numbers to compare
            self._follows = can_follow(self.module, self.config) and not self.indexed and (unknown or self._obeys())
        return self._follows

    @torch.no_grad()
    def _obeys(self) -> bool:
        """Whether rows that the modules read by a rule equal those read by masks: two packed documents first, then rows with branches."""
        tokens, device = self._sample()
        documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1]], device=device)
        positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 4]], device=device)
        seen = ChainSees(documents, closed_form=False).dense(9, 9, device)[0, :, 6:]
        seen[0, 2, 7] = False  # the last two are branches
        said, modules = [], copy.copy(self)
        modules.lean = None
        quiet = torch.random.fork_rng([device] if device.type == "cuda" else []), torch.autocast(device.type, enabled=False)
        with quiet[0], quiet[1]:
            for modules._follows in (False, True):
                memory = Memory()
                try:
                    first = modules.read(tokens[:, :6], positions[:, :6], memory, ChainSees(documents[:, :6]))[1]
                    later = modules.read(tokens[:, 6:], positions[:, 6:], memory, MaskSees(seen))[1]
                    said.append(torch.cat([first, later], dim=1).float())
                except Exception:  # any error of a foreign module that was given no mask
                    return False
        return agree(said[0], said[1], self.module.dtype)

    def read(
        self, tokens_BN: Tensor, positions_BN: Tensor, memory: Memory, sees: Sees, taps: Collection[int] = ()
    ) -> tuple[dict[int, Tensor], Tensor]:
        """Read rows [B, N] that follow those in ``memory``, and append their keys and values to it. Returns (tap k -> the state after k
        layers, the final state), [B, N, D] each. The tap of the last layer is the final state. ``tokens_BN``: tokens, or [B, N, D], what a
        decoder without an embedding reads instead.
        """
        if self.lean is not None:
            return self.lean.read(tokens_BN, positions_BN, memory, sees, taps)
        given = "input_ids" if tokens_BN.ndim == 2 else "inputs_embeds"
        inputs: dict[str, Any] = {given: tokens_BN, "position_ids": positions_BN}
        if self.table is not None:  # guesses beyond the end of the context, and padding rows, have no learned position
            inputs["position_ids"] = positions_BN.clamp(0, self.table - 1)
        if isinstance(sees, CausalSees) and sees.rows == sees.memory and memory.rows() == 0 and not (self.mixers or self.indexed):
            return self._text(inputs, positions_BN, memory, taps)
        keys_BM = None
        if self.windows or self.mixers:
            keys_BM = joined(memory.write(POSITIONS, *self._as_rows(positions_BN)))[0][:, 0, :, 0]
        return self.run_by(sees, memory.rows(), keys_BM, taps, **inputs, past_key_values=AsCache(memory), use_cache=True)

    def run_by(
        self, sees: Sees, before: int, keys_BM: Tensor | None, taps: Collection[int], **inputs: Any
    ) -> tuple[dict[int, Tensor], Tensor]:
        """Call the module by a rule, with ``before`` rows in memory. ``keys_BM``: positions of all rows in memory, which windows and
        recurrent layers need.
        """
        _ = self.follows  # found out now: it reads rows too
        memory = inputs["past_key_values"].memory if "past_key_values" in inputs else Passing()
        with alone(self.config), reading(self.mixers, sees, before, inputs["position_ids"], keys_BM, memory):
            return self._attend_by(sees, before, keys_BM, taps, **inputs)

    def _attend_by(
        self, sees: Sees, before: int, keys_BM: Tensor | None, taps: Collection[int], **inputs: Any
    ) -> tuple[dict[int, Tensor], Tensor]:
        """``run_by`` for the layers with attention."""
        positions_BN, follows, seen = inputs["position_ids"], self.follows, None
        if follows and not before and (by_kind := rules(self.config, sees, positions_BN)) is not None:
            with by_rule(self.config, sees, by_kind) as marks:
                return self.run(taps, attention_mask=as_given(self.config, marks), **inputs)
        if self.windows or not follows:
            seen = seen_of(sees, positions_BN, before)
        mask = masks(self.config, self.module.dtype, seen, positions_BN, keys_BM, follows)
        with by_rule(self.config, sees) if follows else nullcontext():
            return self.run(taps, attention_mask=mask, **inputs)

    def _text(
        self, inputs: dict[str, Any], positions_BN: Tensor, memory: Memory, taps: Collection[int]
    ) -> tuple[dict[int, Tensor], Tensor]:
        """Read a prompt into an empty memory. Each row sees all earlier ones, which transformers does without a mask."""
        from transformers import DynamicCache

        _ = self.follows  # computed now: a decoding round must not wait for it
        cache = DynamicCache()  # without a config, because a sliding layer's cache would drop rows
        found = self.run(taps, **inputs, past_key_values=cache, use_cache=True)
        for i, layer in enumerate(cache.layers):
            memory.write(i, layer.keys, layer.values)
        if self.windows:
            memory.write(POSITIONS, *self._as_rows(positions_BN))
        return found

    def run(self, taps: Collection[int], **inputs: Any) -> tuple[dict[int, Tensor], Tensor]:
        """Call the module itself. Returns (tap -> state, final state), [B, N, D] each."""
        device, count, states = inputs["position_ids"].device, depth_of(self.config), dict[int, Tensor]()

        def keep(k: int) -> Any:
            def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                states[k] = (args[0] if args else kwargs["hidden_states"]).to(device)
                if states[k].ndim != 3:
                    raise UserError(f"the layers of {type(self.module).__name__} hand on several states for each token, which no drafter "
                                    f"reads: take head.taps=[{count}], the final state, or a drafter without taps")  # fmt: skip

            return hook

        hooks = [self.layers[k].register_forward_pre_hook(keep(k), with_kwargs=True) for k in taps if k < count]
        try:
            with alone(self.config):
                final_BND = self.module(**inputs).last_hidden_state.to(device)
        finally:
            for hook in hooks:
                hook.remove()
        return states | ({count: final_BND} if count in taps else {}), final_BND

    @cached_property
    def layers(self) -> nn.ModuleList:
        """Its list of layers, whatever its name. Raises UserError where there is none to read states from."""
        return stack_of(self.module, depth_of(self.config))[2]

    @staticmethod
    def _as_rows(positions_BN: Tensor) -> Segment:
        here = positions_BN[:, None, :, None]
        return here, here


def agree(a: Tensor, b: Tensor, dtype: torch.dtype) -> bool:
    """Whether two computations of states [.., D] in ``dtype`` differ only by rounding: each difference is small beside the state's norm."""
    return bool(((a - b).norm(dim=-1) <= max(1e-4, 16 * torch.finfo(dtype).eps) * a.norm(dim=-1).clamp(min=1e-6)).all())


def stack_of(decoder: nn.Module, count: int) -> tuple[nn.Module, str, nn.ModuleList]:
    """(module that holds the list of ``count`` layers, the list's name there, the list). Raises UserError where there is none."""
    for module in decoder.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == count:
                return module, name, child
    raise UserError(f"{type(decoder).__name__} has no list of {count} layers to read states from")


def first_layers(model: Any, layers: int) -> tuple[nn.Module, nn.Module]:
    """(the decoder of ``model`` with only its first ``layers`` layers and without its final norm, that norm).

    The modules are the model's own, not copies. Raises UserError where the decoder does not have exactly one norm beside its layers.
    """
    decoder = model.get_decoder()
    body, stack, modules = stack_of(decoder, depth_of(model.config.get_text_config()))
    name, norm = norm_of(body)
    part = copy.copy(body)  # shares everything with the original except the table of its modules
    part._modules = {**body._modules, stack: modules[:layers], name: nn.Identity()}
    part.__dict__.pop("forward", None)  # accelerate's wrapper, which would run the whole model
    return part, norm


def norm_of(body: nn.Module) -> tuple[str, nn.Module]:
    """The norm after a decoder's last layer, with its name. Raises UserError where there is not exactly one norm beside the layers."""
    norms = [(key, c) for key, c in body.named_children() if "norm" in type(c).__name__.lower()]
    if len(norms) != 1:
        raise UserError(
            f"{type(body).__name__} has {len(norms)} norms outside its layers, but a drafter of its own layers needs exactly one, after "
            "the last layer: train another drafter"
        )
    return norms[0]


@torch.no_grad()
def scale_of(norm: Any) -> Tensor:
    """The factor [D] that an RMSNorm multiplies by: its weight, or weight + 1 in families that store the factor minus 1. Raises UserError
    for other norms.
    """
    weight = getattr(norm, "weight", None)
    if weight is not None:
        found = norm(torch.ones_like(weight)).float()
        for stored_less in (0.0, 1.0):
            scale = weight.float() + stored_less
            if torch.allclose(found, scale, rtol=1e-2, atol=1e-2):
                return scale
    raise UserError(f"the target's final norm ({type(norm).__name__}) is no RMSNorm, no drafter can start as a copy of it")
