"""The order in which a frozen matrix is stored on a CPU: all orders are timed when a model is prepacked, and the fastest is kept.

torch multiplies by a matrix as it lies in memory (``dense``). In half precision oneDNN then reorders it at every call; in fp32 MKL uses
slow kernels on some processors. A decoding step does little but read matrices, so their order can make it several times faster.
There are two others: oneDNN's own (``onednn``), and the panels of heads/native.cpp (``panels``). Which is faster depends on the
processor, the shape, the dtype and the number of rows. So nothing is assumed: when a model is prepacked, a product of each shape is
timed in all orders for some milliseconds.

Shape suffixes: V rows of a matrix, H its columns (the width of an input).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from math import exp, inf
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headstart.heads import native

LEAST = 1 << 12  # numbers in a matrix; prepacking smaller ones gains nothing
ROWS = (1, 2, 4, 8, 16)  # of the inputs that are timed: a single step, and the trees that a CPU decodes with
TRIES, BUDGET = 3, 2e-3  # minimum of one measurement: calls, and seconds
RING, LAYERS = 1 << 23, 12  # maximum of one measurement: bytes of its matrices, and their number
WORTH, LOOKS = 1.25, 3  # see ``in_order``
DENSE, PANELS = "dense", "panels"
Times = dict[str, dict[int, float]]  # order -> rows -> seconds of a product
TIMES: dict[tuple[Any, ...], Times] = {}  # shape, dtype and threads -> result of ``measured``


def is_packed(weight: Tensor) -> bool:
    """Whether the matrix is stored in another order than its own, so that only products can read it."""
    return weight.is_mkldnn or weight.dim() == 3


def packed_product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    if torch.compiler.is_compiling():  # torch.compile cannot trace these calls
        return _uncompiled(x, packed, bias)
    if not packed.is_mkldnn:
        return native.linear(x, packed, bias)
    if torch.is_autocast_enabled("cpu"):  # autocast does not know this operation
        x = x.to(packed.dtype)
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


_uncompiled = torch.compiler.disable(packed_product)


def prepackable(weight: Tensor) -> bool:
    """Whether it is a dense matrix on a CPU, large enough, which can be stored in another order on this processor."""
    return dense_on_cpu(weight) and weight.numel() >= LEAST and bool(packers(weight))


def dense_on_cpu(weight: Tensor) -> bool:
    if type(weight.data) is not torch.Tensor or weight.device.type != "cpu":
        return False
    return weight.layout == torch.strided and weight.dim() == 2  # a packed one has another layout, or three dimensions


def packers(weight: Tensor) -> dict[str, Callable[[Tensor], Tensor]]:
    """Order -> the function that stores the matrix in it, for each order other than ``dense`` that is possible on this processor."""
    found: dict[str, Callable[[Tensor], Tensor]] = {}
    if torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        half: bool = weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        if weight.dtype == torch.float32 or half:
            found["onednn"] = torch.ops.mkldnn._reorder_linear_weight
    if native.packable(weight):
        found[PANELS] = native.pack
    return found


def in_order(weight: Tensor) -> Tensor | None:
    """The matrix in the order that multiplies fastest on average over ``ROWS``; None: that is its own. Panels are taken where they are less
    than ``WORTH`` times as slow as the best other order: a layer with all matrices in panels is a single call.
    """
    key = (*weight.shape, weight.dtype, torch.get_num_threads())
    if key not in TIMES:
        TIMES[key] = measured(weight.detach())
        for _ in range(LOOKS - 1):  # panels that are found slow by mistake would cost a layer its single call
            if PANELS in TIMES[key] and not _panels_pay(TIMES[key]):
                TIMES[key] = _shorter(TIMES[key], measured(weight.detach()))
    times = TIMES[key]
    best = PANELS if _panels_pay(times) else min(times, key=lambda order: _mean(times[order]))
    return None if best == DENSE else packers(weight)[best](weight.detach())


def _mean(seconds: dict[int, float]) -> float:
    """The logarithm of the geometric mean over ``ROWS``."""
    return float(torch.tensor([seconds[rows] for rows in ROWS]).log().mean())


def _panels_pay(times: Times) -> bool:
    return PANELS in times and panels_over_others(times) < WORTH


def panels_over_others(times: Times) -> float:
    """The time of products in panels over that of the fastest other order, averaged over ``ROWS``."""
    return exp(_mean(times[PANELS]) - min(_mean(seconds) for order, seconds in times.items() if order != PANELS))


def _shorter(a: Times, b: Times) -> Times:
    return {order: {rows: min(a[order][rows], b[order][rows]) for rows in ROWS} for order in a}


@torch.no_grad()
def measured(weight: Tensor) -> Times:
    """How long products by this matrix take, for each of ``ROWS``. All orders are timed in turn, because a machine's speed changes within
    milliseconds. They cycle through more matrices than the near caches hold, because a decoding step reads each matrix once. For panels,
    the overhead of the call is subtracted, because a layer in panels is a single call.
    """
    dense = [weight.clone() for _ in range(max(1, min(RING // (weight.numel() * weight.element_size()), LAYERS)))]
    ways: dict[str, tuple[Callable[..., Tensor], list[Tensor]]] = {DENSE: (lambda x, each, _: F.linear(x, each), dense)}
    ways |= {order: (packed_product, [pack(each) for each in dense]) for order, pack in packers(weight).items()}
    found: Times = {order: {} for order in ways}
    for rows in ROWS:
        x = torch.ones(rows, weight.shape[1], dtype=weight.dtype)
        calls = [functools.partial(_products, multiply, x, some) for multiply, some in ways.values()]
        if PANELS in ways:
            few, nothing = x[:, : native.PAIRS].contiguous(), native.pack(weight.new_zeros(native.PANEL, native.PAIRS))
            calls.append(functools.partial(_products, packed_product, few, [nothing] * len(dense)))
        seconds = _seconds(*calls)
        for order, taken in zip(ways, seconds, strict=False):
            found[order][rows] = taken if order != PANELS else max(taken - seconds[-1], taken / 10)
    return found


def _products(multiply: Callable[..., Tensor], x: Tensor, matrices: list[Tensor]) -> None:
    for each in matrices:
        multiply(x, each, None)


def _seconds(*calls: Callable[[], Any]) -> list[float]:
    """The shortest time of each call in seconds. Calls are timed in turn, in CPU time of this thread, so that other load does not count."""
    best, began, tries = [inf] * len(calls), time.thread_time(), 0
    while tries < TRIES or time.thread_time() - began < BUDGET * len(calls):
        for i, call in enumerate(calls):
            start = time.thread_time()
            call()
            best[i] = min(best[i], time.thread_time() - start)
        tries += 1
    return best
