"""Corrections for models of transformers that use the row number in the cache as a token's position.

The two are equal when a text is read plainly, but not in trees and packed documents.

Shape suffixes: B batch, R rows of one pass.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


def mend_scales(layers: Iterable[nn.Module]) -> None:
    """Make attention temperature tuning (2501.19399; ``attn_temperature_tuning``) use the given positions instead of rows in the cache. It
    sharpens attention in long texts: layers without rotation scale their queries by 1 + s log(1 + floor((position + 1) / f)), with s =
    ``attn_scale`` and f = ``floor_scale``. Other layers stay as they are.
    """
    for layer in layers:
        attention: Any = getattr(layer, "self_attn", None)
        if getattr(attention, "attn_temperature_tuning", False) and not getattr(attention, "use_rope", True):
            attention.attn_temperature_tuning = False
            _scale_queries(layer, attention)


def _scale_queries(layer: nn.Module, attention: Any) -> None:
    positions: list[Tensor] = []  # of the pass under way

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        positions[:] = [kwargs["position_ids"]]

    def scale(module: nn.Module, args: tuple[Any, ...], queries_BRW: Tensor) -> Tensor:
        steps_BR = torch.floor((positions[0].float() + 1.0) / attention.floor_scale)
        factors_BR = torch.log1p(steps_BR) * attention.attn_scale + 1.0
        return (queries_BRW * factors_BR[..., None].to(queries_BRW.device)).to(queries_BRW.dtype)

    layer.register_forward_pre_hook(keep, with_kwargs=True)
    attention.q_proj.register_forward_hook(scale)
