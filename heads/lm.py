"""A language model of transformers, read as a drafter: what drafters share that are one, or the first part of one.

It reads no state of the target: root t feeds it x[t+1]. It alone must also read x[0], which no root chose, so its memory
holds one row more than there are roots. Fed with true tokens, a guess of depth d from root t is its guess of depth 1 from
root t+d-1: training one depth trains them all.

Shape suffixes: B batch, T roots, N rows of any kind, M rows in memory, D hidden.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from heads.base import Draft, Roots
from heads.errors import UserError
from heads.layers import AsCache, ChainSees, Memory, Sees, causal

KINDS = {"full_attention", "sliding_attention", "chunked_attention"}  # of layers that can forget rejected rows
POSITIONS = -1  # the layer of a memory in whose keys the positions of its rows stand, where windows need them


class ReadsTokens:
    """``begin`` and ``step`` of such a drafter, which says by ``states`` how it reads tokens."""

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
            sees = _of_tokens(sees) if isinstance(sees, ChainSees) else causal(n, n, tokens.device)
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
    return ChainSees(documents, sees.depth, closed_form=False, spans=[])


def read(decoder: Any, tokens_BN: Tensor, positions_BN: Tensor, memory: Memory, sees: Sees) -> Tensor:
    """The last states [B, N, D] of a decoder of transformers, whose keys and values go to ``memory``."""
    (B, n), config = tokens_BN.shape, decoder.config.get_text_config()
    seen = sees.dense(n, memory.rows() + n)
    if seen is None:
        seen = torch.ones(1, 1, n, memory.rows() + n, dtype=torch.bool, device=tokens_BN.device)
    keys_BM = None
    if kinds_of(config) != {"full_attention"}:
        here = positions_BN[:, None, :, None]
        keys_BM = torch.cat([k for k, _ in memory.write(POSITIONS, here, here)], dim=2)[:, 0, :, 0]
    table = None if getattr(config, "rope_parameters", None) else getattr(config, "max_position_embeddings", None)  # learned positions
    out = decoder(
        input_ids=tokens_BN,
        position_ids=positions_BN if table is None else positions_BN.clamp(max=table - 1),  # beyond: guesses behind the context's end
        attention_mask=masks(config, decoder.dtype, seen.expand(B, -1, -1, -1)[:, 0], positions_BN, keys_BM),
        past_key_values=AsCache(memory),
        use_cache=True,
    )
    return out.last_hidden_state.to(tokens_BN.device)


def masks(config: Any, dtype: torch.dtype, seen_BNM: Tensor, positions_BN: Tensor, keys_BM: Tensor | None) -> Tensor | dict[str, Tensor]:
    """Who sees whom, as a decoder of transformers takes it: additive (eager attention adds a boolean mask as 0 and 1), and one
    per kind of layer where its config has kinds. ``keys_BM``: positions of the rows in memory, for kinds other than full attention.
    """

    def additive(kind: str) -> Tensor:
        rule = seen_BNM
        if kind != "full_attention":
            assert keys_BM is not None
            rows_BN1, keys_B1M = positions_BN[:, :, None], keys_BM[:, None, :]
            if kind == "sliding_attention":
                rule = rule & (rows_BN1 - keys_B1M < config.sliding_window)
            if kind == "chunked_attention":
                rule = rule & (rows_BN1 // config.attention_chunk_size == keys_B1M // config.attention_chunk_size)
        zeros = torch.zeros(rule.shape, dtype=dtype, device=rule.device)
        return zeros.masked_fill_(~rule, torch.finfo(dtype).min)[:, None]

    found = {kind: additive(kind) for kind in kinds_of(config)}
    return found if getattr(config, "layer_types", None) is not None else next(iter(found.values()))


def kinds_of(config: Any) -> set[str]:
    """The kinds of its layers. Without ``layer_types`` a window holds for every layer."""
    windowed = getattr(config, "use_sliding_window", True) and getattr(config, "sliding_window", None)
    return set(getattr(config, "layer_types", None) or ["sliding_attention" if windowed else "full_attention"])


def check_kinds(config: Any, what: str) -> None:
    """Raises UserError naming a kind of layer that cannot forget rejected rows."""
    foreign = kinds_of(config) | set(getattr(config, "layers_block_type", None) or ())
    if foreign := foreign - KINDS - {"attention"}:
        raise UserError(f"{what} has layers of kind {min(foreign)}, which cannot drop rejected guesses: only attention is supported")


def first_layers(model: Any, layers: int) -> tuple[nn.Module, nn.Module]:
    """(the decoder of ``model`` with its first ``layers`` alone and nothing behind them, the norm that stood there).

    The very modules, not copies of them. Raises UserError where the decoder is built in a way not known here.
    """
    decoder = model.get_decoder()
    total, name = model.config.get_text_config().num_hidden_layers, type(decoder).__name__
    found = ((m, key, c) for m in decoder.modules() for key, c in m.named_children() if isinstance(c, nn.ModuleList))
    body, stack, modules = next(((m, key, c) for m, key, c in found if len(c) == total), (None, "", None))
    if body is None or modules is None:
        raise UserError(f"{name} has no list of {total} layers to take the first {layers} of: train another drafter")
    norms = [key for key, c in body.named_children() if "norm" in type(c).__name__.lower()]
    if len(norms) != 1:
        raise UserError(f"{name} has {len(norms)} norms beside its layers, one was expected behind them: train another drafter")
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
