"""The kinds of attention layers in a transformers config, and the visibility rule of each kind: as a mask, or in closed form.

Shape suffixes: B batch, h attention heads, N rows of any kind, M rows in memory or within reach, d head size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from headstart.heads.errors import UserError
from headstart.heads.visibility import ChainSees, Sees, zeros
from headstart.heads.windows import WindowSees

WINDOWED = {"sliding_attention", "chunked_attention"}  # kinds of attention for which distance matters
INDEXED = {"indexed_attention"}  # of the keys that the rule shows, an indexer chooses ``index_topk`` (DeepSeek V3.2): it needs a mask
KINDS = {"full_attention"} | WINDOWED | INDEXED  # kinds of attention
RECURRENT = {"linear_attention", "conv"}  # kinds of layers with a state, which heads/recurrent.py drives
ALONE = {"mlp", "moe"}  # kinds of layers that read each row alone
DRIVEN = KINDS | RECURRENT | ALONE
# Kinds of models whose recurrent layers, in transformers 5.19, do not continue a text by several rows. The probe would find it out too,
# but only after the weights were fetched.
STUCK = {"jamba", "minimax"}
# Kinds of models whose indexers were tried. The probe's text is shorter than what an indexer chooses: it would not notice a wrong choice.
TRIED = {"axk2", "deepseek_v32", "glm_moe_dsa", "hy_v4"}
Masks = Tensor | dict[str, Tensor | None] | None  # as decoders of transformers take them


def masks(
    config: Any, dtype: torch.dtype, seen_BNM: Tensor | None, positions_BN: Tensor, keys_BM: Tensor | None, follows: bool = False
) -> Masks:
    """The masks of a rule, [B, 1, N, M], as a decoder of transformers takes them: one for each kind of layer where its config has kinds.

    They are additive, because eager attention would add a boolean mask as 0 and 1. ``seen_BNM``: row n sees row m of memory. ``keys_BM``:
    positions of the rows in memory, which all kinds but full attention need. ``follows``: full attention follows the rule itself
    (``by_rule``) and gets no mask.
    """

    def mask(kind: str) -> Tensor | None:
        if kind not in KINDS or (follows and kind == "full_attention"):
            return None
        assert seen_BNM is not None
        rule = seen_BNM
        if kind in WINDOWED:
            assert keys_BM is not None
            rows_BN1, keys_B1M = positions_BN[:, :, None], keys_BM[:, None, :]
            if kind == "sliding_attention":
                rule = rule & (rows_BN1 - keys_B1M < config.sliding_window)
            if kind == "chunked_attention":
                rule = rule & (rows_BN1 // config.attention_chunk_size == keys_B1M // config.attention_chunk_size)
        return zeros(rule.shape, dtype, rule.device).masked_fill_(~rule, torch.finfo(dtype).min)[:, None]

    return as_given(config, {kind: mask(kind) for kind in kinds_of(config)})


def seen_of(sees: Sees, positions_BN: Tensor, before: int) -> Tensor:
    """The rule as a boolean mask [B, N, M], for rows at these positions after ``before`` rows in memory."""
    (B, n), device = positions_BN.shape, positions_BN.device
    seen = sees.dense(n, before + n, device)
    seen = torch.ones(1, 1, n, before + n, dtype=torch.bool, device=device) if seen is None else seen
    return seen.expand(B, -1, -1, -1)[:, 0]


def as_given(config: Any, by_kind: Mapping[str, Tensor | None]) -> Masks:
    """The dictionary itself where the config has kinds of layers, else its only value."""
    return dict(by_kind) if getattr(config, "layer_types", None) is not None else next(iter(by_kind.values()))


def rules(config: Any, sees: Sees, positions_BN: Tensor) -> dict[str, Sees] | None:
    """The rule of each kind of layer, for packed documents in an empty memory. None where some kind has no closed form."""
    if not isinstance(sees, ChainSees) or sees.depth > 1 or not sees.closed_form or not kinds_of(config) <= DRIVEN:
        return None
    found: dict[str, Sees] = {}
    for kind in kinds_of(config):
        found[kind] = sees
        if kind == "sliding_attention" and sees.longest(positions_BN.shape[1]) > config.sliding_window:
            found[kind] = WindowSees(sees, config.sliding_window)
        elif kind == "chunked_attention":  # each chunk is a document of its own
            pieces_BN = positions_BN // config.attention_chunk_size
            documents_BN = pieces_BN * 0 if sees.documents_BT is None else sees.documents_BT
            found[kind] = ChainSees(documents_BN * (positions_BN.shape[1] + 1) + pieces_BN)
    return found


def kinds_of(config: Any) -> set[str]:
    """The kinds of layers in a config. A layer that has attention and a state side by side (Falcon-H1: "hybrid") is of two kinds."""
    found = set(layers_of(config))
    return found - {"hybrid"} | {"full_attention", "linear_attention"} if "hybrid" in found else found


def layers_of(config: Any) -> Sequence[str]:
    """The kind of each layer (``layer_types``). Without that key one kind, which holds for all layers: sliding if there is a window."""
    windowed = getattr(config, "use_sliding_window", True) and getattr(config, "sliding_window", None)
    return getattr(config, "layer_types", None) or ["sliding_attention" if windowed else "full_attention"]


def depth_of(config: Any) -> int:
    """The number of decoder layers. (LongCat-Flash has two layers of attention in each, and counts these as its hidden layers.)"""
    count: int = getattr(config, "num_layers", None) or config.num_hidden_layers
    return count


def reads_images(config: Any) -> bool:
    """Whether it is the config of a multimodal model for which transformers has no causal LM."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    return type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING


def model_class(config: Any) -> Any:
    """The class of transformers that loads a target with this config: its causal LM, or where it has none the multimodal model, of which
    only the language model is run. None where it has neither.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

    if reads_images(config):
        return AutoModelForImageTextToText
    return AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else None


def check_kinds(config: Any, what: str, drafts: bool = False) -> None:
    """Raises UserError naming a kind of layer that cannot forget rejected rows. ``what``: the model's name in the error. ``drafts``: it
    reads guesses one after another, so that recurrent layers would have to save their state at every guess.
    """
    kinds = kinds_of(config)
    if config.model_type in STUCK:
        raise UserError(
            f"{what}: models of kind {config.model_type} cannot continue a text by several tokens at once, as verification does"
        )
    if (chosen := getattr(config, "keep_window_size", None)) and chosen < config.max_position_embeddings:
        raise UserError(f"{what}: of more than {chosen} keys its layers choose {chosen}, of equal ones by where they are stored, so trees "
                        "cannot be verified")  # fmt: skip
    if drafts and (states := kinds & RECURRENT):
        raise UserError(f"{what}: layers of kind {min(states)} keep a state, which guesses would change: draft with something else")
    if drafts and depth_of(config) != config.num_hidden_layers:
        raise UserError(
            f"{what}: its layers have several layers of attention each, no drafter can be made of them: draft with something else"
        )
    foreign = kinds | set(getattr(config, "layers_block_type", None) or ()) - {"attention", "mamba", "hybrid"}
    if foreign := foreign - (DRIVEN if config.model_type in TRIED else DRIVEN - INDEXED):
        raise UserError(f"{what}: layers of kind {min(foreign)} cannot drop rejected positions, trees cannot be verified")
