"""A target whose layers are gathered as a pass reaches them (FSDP2): when they are gathered, and what stays whole."""

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


def let_go(model: nn.Module) -> None:
    """Hold no weights whole while they are not used. transformers keeps an output head or a tied embedding whole once it was; but the
    caller has copies of both, and runs the decoder alone: the whole model might not run any more.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_reshard_after_forward(True, recurse=False)
            module.reshard()
