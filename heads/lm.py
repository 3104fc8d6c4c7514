"""A language model of transformers, read as a drafter: what drafters share that are one, or the first part of one.

It reads no state of the target: root t feeds it x[t+1]. It alone must also read x[0], which no root chose, so its memory
holds one row more than there are roots. Fed with true tokens, a guess of depth d from root t is its guess of depth 1 from
root t+d-1: training one depth trains them all.

Shape suffixes: B batch, T roots, N rows of any kind, M rows in memory, D hidden.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Collection
from contextlib import nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from headstart.heads.base import Draft, Roots
from headstart.heads.driven import alone, by_rule, can_follow
from headstart.heads.errors import UserError
from headstart.heads.kinds import as_given, kinds_of, masks, rules
from headstart.heads.lean import Lean, lean
from headstart.heads.memory import AsCache, Memory, Segment, joined
from headstart.heads.prepack import prepack
from headstart.heads.visibility import CausalSees, ChainSees, MaskSees, Sees

POSITIONS = -1  # the layer of a memory in whose keys the positions of its rows stand, where windows need them


class ReadsTokens:
    """``begin`` and ``step`` of a drafter that reads tokens alone, by its method ``states``."""

    unrolls = False

    @abstractmethod
    def states(self, tokens_BN: Tensor, positions_BN: Tensor, memory: Memory, sees: Sees) -> Tensor:
        """What meets the unembedding, [B, N, D]; positions are those of the tokens themselves."""

    def begin(self, roots: Roots, memory: Memory, sees: Sees, ask: Tensor | None = None) -> Draft:
        tokens, positions = roots.chosen_BT, roots.positions_BT + 1
        first = memory.rows() == 0
        if first:  # x[0] in front; positions of the tokens themselves, which restart at document borders
            tokens = torch.cat([roots.read_BT[:, :1], tokens], dim=1)
            positions = torch.cat([roots.positions_BT, positions[:, -1:]], dim=1)
            n = tokens.shape[1]
            sees = _of_tokens(sees) if isinstance(sees, ChainSees) else CausalSees(n, n)
        draft = Draft(self.states(tokens, positions, memory, sees)[:, int(first) :])
        return draft if ask is None else draft.at(ask)

    def step(self, depth: int, tokens_BN: Tensor, parent: Draft, positions_BN: Tensor, memory: Memory, sees: Sees) -> Draft:
        if isinstance(sees, ChainSees):  # a row in front here too, so that row i continues row i
            padded = [torch.cat([x[:, :1], x], dim=1) for x in (tokens_BN, positions_BN + 1)]
            return Draft(self.states(padded[0], padded[1], memory, _of_tokens(sees))[:, 1:])
        return Draft(self.states(tokens_BN, positions_BN + 1, memory, sees))


def _of_tokens(sees: ChainSees) -> ChainSees:
    """The rule over tokens x[0..T] instead of roots: row i is x[i]; the last one belongs to no document."""
    documents = sees.documents_BT
    if documents is not None:
        documents = torch.cat([documents, torch.full_like(documents[:, :1], -1)], dim=1)
    return ChainSees(documents, sees.depth, sees.closed_form)


class Decoder:
    """Everything of a language model of transformers but its output head, read by the visibility rule into a memory of ours."""

    def __init__(self, module: Any) -> None:
        self.module, self.config = module, module.config.get_text_config()
        self.lean: Lean | None = None
        rotates = getattr(self.config, "rope_parameters", None)
        self.table = None if rotates else getattr(self.config, "max_position_embeddings", None)  # learned positions
        self.windows = kinds_of(self.config) != {"full_attention"}
        self._follows: bool | None = None

    @property
    def memory_dtype(self) -> torch.dtype | None:
        """Of a memory that it reads fastest; None: its own."""
        return None if self.lean is None else self.lean.memory_dtype

    @torch.no_grad()
    def quicken(self, own: bool = True) -> None:
        """Make it faster for decoding on a CPU; its weights are frozen from now on. Its layers are replaced by our own where these compute
        the same, and its matrices are put in the order that is multiplied fastest (not with ``own=False``: they belong to somebody else).
        """
        if own:
            prepack(self.module)
        found = lean(self.module)
        if found is not None and self._same(found):
            self.lean = found

    def _same(self, found: Lean) -> bool:
        """Whether both compute the same states: of a text, then of a small tree behind it that ends far away."""
        far = max(getattr(self.config, "max_position_embeddings", 0) or 0, 8) - 1
        tokens, device = self._sample()
        positions = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 6, far]], device=device)
        own = torch.tensor([[[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]], dtype=torch.bool, device=device)
        said = []
        for read in (self.read, found.read):
            memory = Memory()
            first = read(tokens[:, :5], positions[:, :5], memory, CausalSees(5, 5))[1]
            tree = read(tokens[:, 5:], positions[:, 5:], memory, MaskSees(torch.cat([own.new_ones(1, 4, 5), own], dim=2)))[1]
            said.append(torch.cat([first, tree], dim=1).float())
        return agree(said[0], said[1], self.module.dtype)

    def _sample(self) -> tuple[Tensor, torch.device]:
        device = self.module.get_input_embeddings().weight.device
        return torch.randint(self.config.vocab_size, (1, 9), generator=torch.Generator().manual_seed(0)).to(device), device

    @property
    def follows(self) -> bool:
        """Whether its attention follows a rule that is given beside the pass, without a mask. Tried once, on the module itself."""
        if self._follows is None:
            self._follows = can_follow(self.module, self.config) and self._obeys()
        return self._follows

    @torch.no_grad()
    def _obeys(self) -> bool:
        """Whether two documents in a row, and then rows behind them, are read by a rule as they are by masks."""
        tokens, device = self._sample()
        documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1]], device=device)
        positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 4]], device=device)
        seen = ChainSees(documents, closed_form=False).dense(9, 9, device)[0, :, 6:]
        seen[0, 2, 7] = False  # the last two are branches
        said = []
        quiet = torch.random.fork_rng([device] if device.type == "cuda" else []), torch.autocast(device.type, enabled=False)
        with quiet[0], quiet[1]:
            for self._follows in (False, True):
                memory = Memory()
                try:
                    first = self.read(tokens[:, :6], positions[:, :6], memory, ChainSees(documents[:, :6]))[1]
                    later = self.read(tokens[:, 6:], positions[:, 6:], memory, MaskSees(seen))[1]
                    said.append(torch.cat([first, later], dim=1).float())
                except Exception:  # whatever a module of somebody else's raises that was given no mask
                    return False
        return agree(said[0], said[1], self.module.dtype)

    def read(
        self, tokens_BN: Tensor, positions_BN: Tensor, memory: Memory, sees: Sees, taps: Collection[int] = ()
    ) -> tuple[dict[int, Tensor], Tensor]:
        """Read rows behind those in ``memory``, which takes their keys and values. Returns the states after the tapped numbers of layers,
        and the final state, [B, N, D] each.
        """
        if self.lean is not None:
            return self.lean.read(tokens_BN, positions_BN, memory, sees, taps)
        inputs: dict[str, Any] = {"input_ids": tokens_BN, "position_ids": positions_BN}
        if self.table is not None:  # guesses behind the context's end, and rows that nobody uses
            inputs["position_ids"] = positions_BN.clamp(0, self.table - 1)
        if isinstance(sees, CausalSees) and sees.rows == sees.memory and memory.rows() == 0:
            return self._text(inputs, positions_BN, memory, taps)
        keys_BM = None
        if self.windows:
            keys_BM = joined(memory.write(POSITIONS, *self._as_rows(positions_BN)))[0][:, 0, :, 0]
        return self.run_by(sees, memory.rows(), keys_BM, taps, **inputs, past_key_values=AsCache(memory), use_cache=True)

    def run_by(
        self, sees: Sees, before: int, keys_BM: Tensor | None, taps: Collection[int], **inputs: Any
    ) -> tuple[dict[int, Tensor], Tensor]:
        """One call of the module by a rule, with ``before`` rows in memory. ``keys_BM``: the positions of all rows, which windows need."""
        positions_BN, follows, seen = inputs["position_ids"], self.follows, None
        if follows and not before and (by_kind := rules(self.config, sees, positions_BN)) is not None:
            with by_rule(self.config, sees, by_kind) as marks:
                return self.run(taps, attention_mask=as_given(self.config, marks), **inputs)
        if self.windows or not follows:
            (B, n), device = positions_BN.shape, positions_BN.device
            seen = sees.dense(n, before + n, device)
            seen = torch.ones(1, 1, n, before + n, dtype=torch.bool, device=device) if seen is None else seen
            seen = seen.expand(B, -1, -1, -1)[:, 0]
        mask = masks(self.config, self.module.dtype, seen, positions_BN, keys_BM, follows)
        with by_rule(self.config, sees) if follows else nullcontext():
            return self.run(taps, attention_mask=mask, **inputs)

    def _text(
        self, inputs: dict[str, Any], positions_BN: Tensor, memory: Memory, taps: Collection[int]
    ) -> tuple[dict[int, Tensor], Tensor]:
        """Read a prompt at the beginning of memory, where each row sees all earlier ones: as transformers does, without a mask."""
        from transformers import DynamicCache

        _ = self.follows  # asked now: in a round nobody may wait for the answer
        cache = DynamicCache()  # without a config: a sliding layer would forget
        found = self.run(taps, **inputs, past_key_values=cache, use_cache=True)
        memory.take([(layer.keys, layer.values) for layer in cache.layers])
        if self.windows:
            memory.write(POSITIONS, *self._as_rows(positions_BN))
        return found

    def run(self, taps: Collection[int], **inputs: Any) -> tuple[dict[int, Tensor], Tensor]:
        """One call of the module itself: the tapped states, and the final one."""
        device, count, states = inputs["input_ids"].device, self.config.num_hidden_layers, dict[int, Tensor]()

        def keep(k: int) -> Any:
            def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                states[k] = (args[0] if args else kwargs["hidden_states"]).to(device)

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
        """Its list of layers, whatever it is called. Raises UserError where there is none to read states from."""
        return stack_of(self.module, self.config.num_hidden_layers)[2]

    @staticmethod
    def _as_rows(positions_BN: Tensor) -> Segment:
        here = positions_BN[:, None, :, None]
        return here, here


def agree(a: Tensor, b: Tensor, dtype: torch.dtype) -> bool:
    """Whether two computations of the same states in ``dtype`` differ by rounding only."""
    return bool((a - b).abs().max() <= max(1e-4, 16 * torch.finfo(dtype).eps) * max(float(a.abs().max()), 1e-6))


def stack_of(decoder: nn.Module, count: int) -> tuple[nn.Module, str, nn.ModuleList]:
    """What holds the list of ``count`` layers, whatever it is called; its name there; the list. Raises UserError where there is none."""
    for module in decoder.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == count:
                return module, name, child
    raise UserError(f"{type(decoder).__name__} has no list of {count} layers to read states from")


def first_layers(model: Any, layers: int) -> tuple[nn.Module, nn.Module]:
    """(the decoder of ``model`` with only its first ``layers`` layers and no norm behind them, the norm that stood there).

    The modules are the model's own, not copies. Raises UserError where the decoder is built in a way not known here.
    """
    decoder = model.get_decoder()
    body, stack, modules = stack_of(decoder, model.config.get_text_config().num_hidden_layers)
    norms = [key for key, c in body.named_children() if "norm" in type(c).__name__.lower()]
    if len(norms) != 1:
        raise UserError(
            f"{type(decoder).__name__} has {len(norms)} norms beside its layers, one was expected behind them: train another drafter"
        )
    part = copy.copy(body)  # shares everything with the whole, except which modules it has
    part._modules = {**body._modules, stack: modules[:layers], norms[0]: nn.Identity()}
    part.__dict__.pop("forward", None)  # accelerate's, which would run the whole
    return part, body.get_submodule(norms[0])


@torch.no_grad()
def scale_of(norm: Any) -> Tensor:
    """What an RMSNorm multiplies with: its weight, which some store less one. Raises UserError for another kind of norm."""
    weight = getattr(norm, "weight", None)
    if weight is not None:
        found = norm(torch.ones_like(weight)).float()
        for stored_less in (0.0, 1.0):
            scale = weight.float() + stored_less
            if torch.allclose(found, scale, rtol=1e-2, atol=1e-2):
                return scale
    raise UserError(f"the target's final norm ({type(norm).__name__}) is no RMSNorm, no drafter can start as a copy of it")
