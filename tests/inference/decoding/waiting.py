"""Finds, on a CPU, the operations that would wait for a device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

OPERATIONS = {"_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2"}
METHODS = {"item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "__contains__"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}


class Calls(TorchFunctionMode):
    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if getattr(func, "__name__", "") in METHODS:
            self.found.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Kernels(TorchDispatchMode):
    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        indices = [x for x in args[1] if x is not None] if name in INDEXING else []
        moved = name == "_to_copy" and kwargs.get("device") not in (None, args[0].device)
        moved |= name == "lift_fresh" and args[0].dim() > 0  # torch.tensor of a list; a number is an argument of the kernel
        if name in OPERATIONS or moved or any(i.dtype in (torch.bool, torch.uint8) for i in indices):
            self.found.append(name)
        return func(*args, **kwargs)


@contextmanager
def waits() -> Iterator[list[str]]:
    """Inside, collects the names of operations that would wait for a device."""
    found: list[str] = []
    with Calls(found), Kernels(found):
        yield found
