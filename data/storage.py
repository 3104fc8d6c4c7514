"""How states are stored: as bf16, or as fp8 (e4m3) or int8 with a scale for each token; and how many bytes that takes.

A number is its stored one times the scale of its token, so that a token of large states costs no other token anything. Within a token,
int8 has steps of one size: of states that are much alike it keeps more than fp8. fp8 keeps 4 significant bits of small and large numbers
alike: it is safe where a few numbers of a token are a thousand times the others, as they are in many models.

Shape suffixes: N tokens, D target hidden.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

SCALE = torch.bfloat16
OF_A_TOKEN = 4 + 4 + 4 + 1  # bytes: its number, its position, its document, whether it is supervised


class Storage(NamedTuple):
    """``largest``: what the largest number of a token is stored as; 0: states are stored as they are, in this dtype."""

    dtype: torch.dtype
    largest: float
    called: str  # by safetensors


STORAGES = {
    "bf16": Storage(torch.bfloat16, 0.0, "BF16"),
    "fp8": Storage(torch.float8_e4m3fn, 448.0, "F8_E4M3"),
    "int8": Storage(torch.int8, 127.0, "I8"),
}


def encode(states_ND: Tensor, storage: Storage) -> tuple[Tensor, Tensor | None]:
    """The stored numbers [N, D], and the scales [N] where there are any."""
    if not storage.largest:
        return states_ND.to(storage.dtype), None
    wide_ND = states_ND.float()
    scale_N1 = (wide_ND.abs().amax(-1, keepdim=True) / storage.largest).clamp(min=torch.finfo(SCALE).smallest_normal).to(SCALE)
    scaled_ND = (wide_ND / scale_N1.float()).clamp(-storage.largest, storage.largest)  # the scale is rounded; e4m3 may have NaN beyond 448
    return (scaled_ND if storage.dtype.is_floating_point else scaled_ND.round()).to(storage.dtype), scale_N1[..., 0]


def decode(stored_ND: Tensor, scale_N: Tensor | None, dtype: torch.dtype) -> Tensor:
    """What ``encode`` made, as numbers of ``dtype`` again."""
    if scale_N is None:
        return stored_ND.to(dtype)
    return (stored_ND.float() * scale_N[..., None].float()).to(dtype)


def errors(states_ND: Tensor, stored_ND: Tensor, scale_N: Tensor | None) -> Tensor:
    """[N] the relative error of each token's stored state: the norm of the difference over the norm of the state."""
    wide_ND = states_ND.float()
    size_N = wide_ND.norm(dim=-1).clamp(min=torch.finfo(torch.float32).smallest_normal)
    return (decode(stored_ND, scale_N, torch.float32) - wide_ND).norm(dim=-1) / size_N


def own_taps(taps: Collection[int], layers: int) -> list[int]:
    """Taps with a tensor of their own: tap N is the final state, which is stored anyway."""
    return sorted({*taps} - {layers})


def bytes_of(storage: Storage, hidden: int, taps: int, tokens: int, final: int) -> int:
    """The bytes that ``tokens`` tokens take, with ``taps`` states each and the final state at ``final`` of them. (Without the header of a
    file, some hundreds of bytes.)
    """
    state = hidden * storage.dtype.itemsize + (SCALE.itemsize if storage.largest else 0)
    return tokens * (OF_A_TOKEN + taps * state) + final * state
