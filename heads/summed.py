"""Gradients of weights that several depths read: added up within the matrix products that make them, by the fastest library
(heads/products.py).

Autograd makes one gradient for each use of a weight and then adds them. An unroll of seven depths takes six additions per matrix, each of
which reads two matrices and writes one: 4.9 of the 69 ms of kernels in an EAGLE-3 step on an H100 (EXPERIMENTS.md). A matrix product that
adds to an existing sum is cheaper.

Shape suffixes: R rows, I input width, O output width.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from headstart.heads import products
from headstart.heads.layers import autocasts

LARGE = 1 << 18  # numbers in a weight: for smaller weights, the additions take less time than the calls here
SMALL = 1 << 12  # where the products are also faster here


def summed(model: nn.Module) -> AbstractContextManager[None]:
    """A context. For all that is computed inside, the large linear layers of ``model`` sum their gradients this way. The backward pass
    may come later, but must be a whole one: a pass to some inputs only would leave its sums to the next pass. Layers of other classes,
    with a replaced ``forward`` or hooks, with sharded weights, or without gradients stay as they are.
    """
    return products.with_forward([m for m in model.modules() if _pays(m)], _Linear)


def _pays(layer: nn.Module) -> TypeGuard[nn.Linear]:
    if not products.plain(layer) or not layer.weight.requires_grad:
        return False
    faster = products.by_onednn(layer.weight) and not autocasts(layer.weight)
    return layer.weight.numel() >= (min(SMALL, LARGE) if faster else LARGE)


class _Linear:
    """A linear layer's forward."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.weights = dict[torch.dtype, tuple[Tensor, _Gradient]]()  # dtype of products -> the weight in it, its sum of gradients

    def __call__(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return nn.Linear.forward(self.layer, x)
        dtype = torch.get_autocast_dtype(x.device.type) if autocasts(x) else self.layer.weight.dtype
        if dtype not in self.weights:
            gradient = _Gradient()
            self.weights[dtype] = _Weight.apply(self.layer.weight, dtype, gradient), gradient
        out: Tensor = _Product.apply(x.to(dtype), *self.weights[dtype])
        return out if self.layer.bias is None else out + self.layer.bias.to(dtype)


class _Gradient:
    """The sum of a weight's gradients so far."""

    sum_OI: Tensor | None = None

    def add(self, grad_RO: Tensor, x_RI: Tensor) -> None:
        if self.sum_OI is None:
            self.sum_OI = products.times(grad_RO.T, x_RI.T)
        else:
            products.add(self.sum_OI, grad_RO.T, x_RI.T)


class _Weight(torch.autograd.Function):
    """A weight in the dtype of the products. Its backward pass comes after those of all products, which add to ``gradient``."""

    @staticmethod
    def forward(ctx: Any, weight_OI: Tensor, dtype: torch.dtype, gradient: _Gradient) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.gradient = gradient
        return weight_OI.to(dtype) if weight_OI.dtype != dtype else weight_OI.view_as(weight_OI)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, nothing: Tensor | None) -> tuple[Tensor | None, None, None]:
        found, ctx.gradient.sum_OI = ctx.gradient.sum_OI, None
        return found, None, None  # autograd casts it to the weight's dtype


class _Product(torch.autograd.Function):
    """x [.., I] times the weight: [.., O]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, gradient: _Gradient) -> Tensor:
        ctx.save_for_backward(x, weight_OI)
        ctx.gradient = gradient
        return products.times(x, weight_OI)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        x, weight_OI = ctx.saved_tensors
        ctx.gradient.add(grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1]))
        return products.times(grad, weight_OI.T) if ctx.needs_input_grad[0] else None, None, None
