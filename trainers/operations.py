"""Counts floating-point operations: those of matrix products and of attention, by torch's formulas; those of the loss in closed form."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.flop_counter import addmm_flop, flop_registry, sdpa_backward_flop, sdpa_flop

from headstart.heads import native_flash  # noqa: F401 (so that torch knows its operations)
from headstart.heads.unembedding import Unembedding


def _of_documents(formula: Callable[..., int]) -> Callable[..., int]:
    """The formula for our operations (heads/native_flash.py), whose rows see only their own document. Their last two arguments are the
    borders of the documents and the scale.
    """

    def count(x: Tensor, *more: Any, **about: Any) -> int:
        cuts, whole = more[-2], len(x) * x.shape[2] ** 2
        return formula(x, *more, **about) * sum((j - i) ** 2 for i, j in itertools.pairwise(cuts)) // max(whole, 1)

    return count


_OWN: dict[Any, Callable[..., int]] = {  # operations for which torch has no formula
    torch.ops.aten.addmm_: addmm_flop,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flop,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: sdpa_backward_flop,
    torch.ops.headstart.causal_flash: _of_documents(sdpa_flop),
    torch.ops.headstart.causal_flash_backward: _of_documents(sdpa_backward_flop),
}


uncounted = _disable_current_modes  # inside it an outer ``Operations`` counts nothing: decoding replays graphs and times products


class Operations(TorchDispatchMode):
    """Counts the operations inside ``with Operations() as found: ...``, forward and backward, in ``found.count``. Attention counts as if
    it were not causal.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        formula = _OWN.get(func._overloadpacket) or flop_registry.get(func._overloadpacket)
        if formula is not None:
            try:
                self.count += formula(*args, **kwargs, out_val=out)
            except AssertionError:  # torch 2.11's formula refuses heads that share keys
                self.count += formula(*_keys_of_their_own(func, args), **kwargs, out_val=out)
        return out


def of_loss(rows: int, unembedding: Unembedding, learns: bool = True) -> float:
    """Operations of the loss of ``rows`` guesses (trainers/losses.py), without the teacher's logits: of the forward pass and, with
    ``learns``, of the backward pass. A matrix is multiplied once for the logits, once for the gradient of the hidden states and, if it is
    trained, once for its own gradient. If there are candidates, a correction is only multiplied by their rows and that of the target's
    token; the gradient of its matrix is a sum, not a product.
    """
    matrix_VH, *corrections = unembedding.blocks

    def products(x: Tensor) -> int:
        return (3 if x.requires_grad else 2) if learns else 1

    if unembedding.candidates is None:
        return sum(2.0 * rows * x.numel() * products(x) for x in [matrix_VH, *corrections])
    chosen = sum((unembedding.candidates + 1) * x.shape[1] for x in corrections)
    return 2.0 * rows * (matrix_VH.numel() * products(matrix_VH) + (2 if learns else 1) * chosen)


def of_losses(rows: int, unembedding: Unembedding, teacher: float, loss: Mapping[str, Any]) -> float:
    """Operations of a step's loss with the settings ``loss``, averaged over all steps. ``teacher``: operations that compute the teacher's
    logits once. The loss without the correction comes on top, in all steps (the term ``base``) or in a share of them (``base_until``). A
    weighting other than decay computes each loss once before, without gradients.
    """
    losses = [(1.0, unembedding)]
    if again := 1.0 if "base" in loss["terms"] else loss["base_until"]:
        losses.append((again, unembedding.uncorrected()))
    passes = [True] if loss["weighting"] == "decay" else [False, True]
    return sum(share * (of_loss(rows, each, learns) + teacher) for share, each in losses for learns in passes)


def _keys_of_their_own(func: Any, args: Any) -> Any:
    """The arguments of attention, with keys and values repeated for every head. The number of operations is the same; the values do not
    matter.
    """
    first = int("backward" in func._schema.name)  # in a backward operation the gradient precedes the queries
    before, (q, k, v), after = args[:first], args[first : first + 3], args[first + 3 :]
    heads = -3 if q.dim() == 4 else -2  # [B, heads, N, d], or [N, heads, d] of variable length
    wide = (x.new_empty((*x.shape[:heads], q.shape[heads], *x.shape[heads + 1 :]), device="meta") for x in (k, v))
    return (*before, q, *wide, *after)
