"""A second device made of Python, where there is no GPU: tensors on ``other:0`` are computed by the CPU, and refuse to meet
tensors of another device as a GPU's would (CPU indices too, which a GPU takes after waiting for them).

``make`` changes torch for the whole process: run it in one of its own (tests/inference/decoding/two_devices.py).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

# torch's dispatch below Python does not reach these tensors in inference mode: import this module before any of ours.
torch.inference_mode = lambda mode=True: torch.no_grad() if mode else nullcontext()  # type: ignore[assignment, misc]

DEVICE = "other:0"
FACTORIES = ("empty.memory_format", "empty_strided", "eye", "eye.m", "arange", "arange.start", "arange.start_step")


class Other(Tensor):
    raw: Tensor

    @staticmethod
    def __new__(cls, raw: Tensor) -> Other:
        layout = {"strides": raw.stride(), "storage_offset": raw.storage_offset()}
        made = Tensor._make_wrapper_subclass(cls, raw.shape, dtype=raw.dtype, device=DEVICE, **layout)
        made.raw = raw
        return made

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = op._schema.name, dict(kwargs or {})
        if name == "aten::copy_":  # across devices
            op(*tree_map(_raw, args), **kwargs)
            return args[0]
        goes_to = torch.device(kwargs.get("device") or DEVICE)
        if name != "aten::_to_copy":
            devices = {x.device for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.ndim}
            if len(devices) > 1:
                raise RuntimeError(f"{name}: expected all tensors to be on the same device, found {sorted(map(str, devices))}")
        if "device" in kwargs:
            kwargs["device"] = "cpu"
        out = op(*tree_map(_raw, args), **tree_map(_raw, kwargs))
        if op._schema.is_mutable:
            assert "out" not in kwargs
            return args[0]
        return out if goes_to.type == "cpu" else tree_map(lambda x: Other(x) if isinstance(x, Tensor) else x, out)


def _raw(x: Any) -> Any:
    return x.raw if isinstance(x, Other) else x


def make() -> torch.library.Library:
    """Register the device; it is there as long as what this returns."""
    _setup_privateuseone_for_python_backend("other")
    library = torch.library.Library("aten", "IMPL")

    def factory(name: str) -> Callable[..., Tensor]:
        op, _, overload = name.partition(".")
        made = getattr(getattr(torch.ops.aten, op), overload or "default")
        return lambda *args, **kwargs: Other(made(*args, **{**kwargs, "device": "cpu"}))

    for name in FACTORIES:
        library.impl(name, factory(name), "PrivateUse1")

    def copy_from(source: Tensor, goal: Tensor, non_blocking: bool = False) -> Tensor:
        _raw(goal).copy_(_raw(source))
        return goal

    library.impl("_copy_from", copy_from, "PrivateUse1")
    return library
