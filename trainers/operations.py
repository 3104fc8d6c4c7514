"""How many floating-point operations something takes: those of its matrix products and of its attention, as torch counts them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import addmm_flop, flop_registry, sdpa_backward_flop, sdpa_flop

_OWN: dict[Any, Callable[..., int]] = {  # that torch has no formula for
    torch.ops.aten.addmm_: addmm_flop,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flop,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: sdpa_backward_flop,
}


class Operations(TorchDispatchMode):
    """``with Operations() as found: ...``, then ``found.count``, in forward and backward. Attention counts as if it were not causal.

    None where an operation is met that its formula cannot count (heads that share keys, in older versions of torch).
    """

    def __init__(self) -> None:
        super().__init__()
        self.count: float | None = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        formula = _OWN.get(func._overloadpacket) or flop_registry.get(func._overloadpacket)
        if formula is not None and self.count is not None:
            try:
                self.count += formula(*args, **kwargs, out_val=out)
            except AssertionError:
                self.count = None
        return out
