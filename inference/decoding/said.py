"""The results of a pass of the static path, as the host reads them.

Shape suffixes: B sequences, P rows of an accepted path, K likeliest tokens, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from headstart.inference.decoding.sampling import wide


class Said(NamedTuple):
    """The results of a pass over n sequences. ``tokens`` int64 [n, 1 + P + 2 N]: the number of accepted guesses; P new tokens, of which
    only the accepted ones and the next one are valid; the tree's N tokens and their N parents. After a piece of a prompt: only 0 and the
    next token. ``likely`` fp64 [n, P, 1 + 2 K], or None if not requested: each new token's log-probability, those of the K likeliest
    tokens, and these tokens.
    """

    tokens: Tensor
    likely: Tensor | None


def likeliest(logits_BPV: Tensor, chosen_BP: Tensor, likely: int) -> Tensor:
    """Log-probabilities at temperature 1 without filters, [B, P, 1 + 2 K] with K = ``likely`` - 1: the chosen token's, the K likeliest
    tokens', then those K tokens themselves. In fp64, which holds every token number exactly.
    """
    log_p_BPV = wide(logits_BPV).log_softmax(-1)
    chosen_BP1 = log_p_BPV.gather(2, chosen_BP[..., None])
    top = log_p_BPV.topk(likely - 1)
    return torch.cat([chosen_BP1.double(), top.values.double(), top.indices.double()], -1)
