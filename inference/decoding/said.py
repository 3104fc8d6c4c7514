"""What a pass of the static path says, as the host reads it.

Shape suffixes: B sequences, P rows of an accepted path, K likeliest tokens, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from headstart.inference.decoding.sampling import wide


class Said(NamedTuple):
    """What a pass says: how many guesses were accepted, the tokens, then the tree's tokens and its parents [n, 1 + P + 2 N]; and, where
    asked for, each token's log-probability and the likeliest ones beside it [n, P, 1 + 2 K].
    """

    tokens: Tensor
    likely: Tensor | None


def likeliest(logits_BPV: Tensor, chosen_BP: Tensor, likely: int) -> Tensor:
    """Log-probabilities at temperature 1, unfiltered: the chosen token's, the likeliest ones', and which those are. fp64, so that every
    token number fits.
    """
    log_p_BPV = wide(logits_BPV).log_softmax(-1)
    chosen_BP1 = log_p_BPV.gather(2, chosen_BP[..., None])
    top = log_p_BPV.topk(likely - 1)
    return torch.cat([chosen_BP1.double(), top.values.double(), top.indices.double()], -1)
