"""The storage formats of states: bf16, or fp8 (e4m3) or int8 with a scale for each token; and their size in bytes.

A number is its stored value times the scale of its token, so a token with large states does not make other tokens less precise. Within a
token, int8 has steps of one size, and is more precise than fp8 where numbers have similar magnitudes. fp8 keeps 4 significant bits of
both small and large numbers. It is safe if a few numbers of a token are a thousand times the others, as in many models.

Shape suffixes: N tokens (any number of dimensions), D target hidden.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

SCALE = torch.bfloat16
OF_A_TOKEN = 4 + 4 + 4 + 1  # bytes of a token besides its states: id, position, document number, loss mask


class Storage(NamedTuple):
    """A storage format. ``largest``: the value that stores the largest number of a token. 0: states are cast to ``dtype``, unscaled."""

    dtype: torch.dtype
    largest: float
    code: str  # of the dtype in safetensors

    @property
    def name(self) -> str:
        """The name of the dtype in an index, for example ``bfloat16``."""
        return str(self.dtype).removeprefix("torch.")


STORAGES = {
    "bf16": Storage(torch.bfloat16, 0.0, "BF16"),
    "fp8": Storage(torch.float8_e4m3fn, 448.0, "F8_E4M3"),
    "int8": Storage(torch.int8, 127.0, "I8"),
}


def encode(states_ND: Tensor, storage: Storage) -> tuple[Tensor, Tensor | None]:
    """The stored numbers [N, D] in the storage's dtype, and the scales [N] in bf16 (None for an unscaled storage)."""
    if not storage.largest:
        return states_ND.to(storage.dtype), None
    wide_ND = states_ND.float()
    scale_N1 = (wide_ND.abs().amax(-1, keepdim=True) / storage.largest).clamp(min=torch.finfo(SCALE).smallest_normal).to(SCALE)
    scaled_ND = (wide_ND / scale_N1.float()).clamp(-storage.largest, storage.largest)  # the scale is rounded; beyond 448, e4m3 may give NaN
    return (scaled_ND if storage.dtype.is_floating_point else scaled_ND.round()).to(storage.dtype), scale_N1[..., 0]


def decode(stored_ND: Tensor, scale_N: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The states [N, D] in ``dtype``, from the two results of ``encode``."""
    if scale_N is None:
        return stored_ND.to(dtype)
    return (stored_ND.float() * scale_N[..., None].float()).to(dtype)


def errors(states_ND: Tensor, stored_ND: Tensor, scale_N: Tensor | None) -> Tensor:
    """[N] the relative error of each token's stored state: the norm of the difference, divided by the norm of the state."""
    wide_ND = states_ND.float()
    size_N = wide_ND.norm(dim=-1).clamp(min=torch.finfo(torch.float32).smallest_normal)
    return (decode(stored_ND, scale_N, torch.float32) - wide_ND).norm(dim=-1) / size_N


def own_taps(taps: Collection[int], layers: int) -> list[int]:
    """The taps with a tensor of their own. Tap ``layers`` is the final state, which is stored anyway."""
    return sorted({*taps} - {layers})


def bytes_of(storage: Storage, hidden: int, taps: int, tokens: int, final: int) -> int:
    """The size in bytes of ``tokens`` tokens with ``taps`` states each, and final states at ``final`` of them. (Without a file's header,
    which has some hundreds of bytes.)
    """
    state = hidden * storage.dtype.itemsize + (SCALE.itemsize if storage.largest else 0)
    return tokens * (OF_A_TOKEN + taps * state) + final * state
