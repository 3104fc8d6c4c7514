"""A target whose layers are gathered as a pass reaches them (FSDP2): when they are gathered."""

from __future__ import annotations

import itertools

from torch import nn
from torch.distributed.fsdp import FSDPModule

AT_ONCE = 3  # layers that a process holds whole at the same time: two copies of one that computes (torch's buffer too), and the next


def gather_ahead(layers: nn.ModuleList) -> None:
    """Gather each layer while the one before it computes. torch does so by itself only if the whole model is called, but a pass calls the
    decoder alone, without the output head. Layers that are not gathered stay as they are.
    """
    for layer, following in itertools.pairwise(layers):
        if isinstance(layer, FSDPModule) and isinstance(following, FSDPModule):
            layer.set_modules_to_forward_prefetch([following])
