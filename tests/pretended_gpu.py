"""A GPU that is not there: ``python -m tests.pretended_gpu tests/test_gpu.py`` runs tests for GPUs on tensors that call their device
"gpu", lie in the memory of the CPU, and refuse what a GPU refuses: operations that mix tensors of both.

Code that asks for "cuda" is read as if it asked for "gpu". What it does not show: kernels of CUDA (flash attention, Triton), graphs (a
stand-in replays them), and a model that transformers puts on a GPU while it loads (its rotary frequencies are not set there).
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import backend_registration

aten = torch.ops.aten
OVER_BOTH = {aten.copy_.default, aten._to_copy.default}
INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default, aten._unsafe_index.Tensor}


def tree_map(change: Callable[[Any], Any], x: Any) -> Any:
    """Like torch's own ``tree_map``, which would take most of the time here."""
    if isinstance(x, (tuple, list)):
        each = [tree_map(change, y) for y in x]
        return each if isinstance(x, list) else tuple(each)
    return {k: tree_map(change, y) for k, y in x.items()} if isinstance(x, dict) else change(x)


def tensors_in(x: Any) -> list[Tensor]:
    found: list[Tensor] = []
    tree_map(lambda y: found.append(y) if isinstance(y, Tensor) else None, x)
    return found


class OnGpu(torch.Tensor):
    """A tensor of the pretended GPU. ``here``: its values, on the CPU."""

    here: Tensor

    @staticmethod
    def __new__(cls, here: Tensor, device: torch.device) -> OnGpu:
        place = dict(strides=here.stride(), storage_offset=here.storage_offset(), dtype=here.dtype, device=device)
        made: OnGpu = torch.Tensor._make_wrapper_subclass(cls, here.size(), **place)
        made.here = here
        return made

    def __repr__(self, **_: Any) -> str:
        return f"OnGpu({self.here})"

    def numpy(self, **_: Any) -> Any:
        raise TypeError("a tensor of the GPU is no array of numpy's: copy it first")

    def data_ptr(self) -> int:
        return self.here.data_ptr()

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(op, args, kwargs or {})


def compute(op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation. Raises RuntimeError if it mixes devices; scalars, and indices into a tensor of the GPU, may be on the CPU."""
    tensors = tensors_in((args, kwargs))
    where = next((x.device for x in tensors if isinstance(x, OnGpu)), torch.device("cpu"))
    if where.type == "gpu" and op not in OVER_BOTH:
        free = [x for x in args[1] if x is not None and x.device.type == "cpu"] if op in INDEXED and isinstance(args[0], OnGpu) else []
        if any(x.device != where and x.dim() > 0 and not any(x is y for y in free) for x in tensors):
            raise RuntimeError(f"{op} over tensors of two devices: {[(tuple(x.shape), str(x.device)) for x in tensors]}")
    if op is aten.histc.default:  # only a GPU takes integers
        args = (args[0].float(), *args[1:])
    found = op(*tree_map(_here, args), **tree_map(_here, kwargs))
    if not op._schema.returns:
        return None
    if op._schema.is_mutable and op._opname.endswith("_"):
        return args[0]
    if kwargs.get("out") is not None:
        return kwargs["out"]
    if kwargs.get("device") is not None:
        where = torch.device(kwargs["device"])
        where = torch.device("gpu", where.index or 0) if where.type == "gpu" else where
    return tree_map(lambda x: OnGpu(x, where) if where.type == "gpu" and isinstance(x, Tensor) and not isinstance(x, OnGpu) else x, found)


def _here(x: Any) -> Any:
    return x.here if isinstance(x, OnGpu) else torch.device("cpu") if isinstance(x, torch.device) else x


class Nothing:
    """A stream or an event. All work is done at once, so there is nothing to wait for."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def wait_stream(self, other: Any) -> None: ...
    def record(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True


class Gpu(backend_registration._DummyBackendModule):
    """Replaces ``torch.cuda``, with two devices."""

    __name__ = "torch.gpu"
    Stream = Event = current_stream = Nothing
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16])
    is_available = is_initialized = is_bf16_supported = staticmethod(lambda *_, **__: True)
    is_in_bad_fork = _is_in_bad_fork = staticmethod(lambda: False)
    device_count = staticmethod(lambda: 2)
    current_device = max_memory_allocated = staticmethod(lambda *_: 0)
    get_device_name = staticmethod(lambda *_: "a pretended GPU")
    get_rng_state, set_rng_state = (
        staticmethod(lambda *_: torch.get_rng_state()),
        staticmethod(lambda state, *_: torch.set_rng_state(state)),
    )
    synchronize = set_device = empty_cache = manual_seed_all = staticmethod(lambda *_: None)


class Renamed(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        source = self.get_data(self.path).decode().replace('"cuda"', '"gpu"').replace('"cuda:', '"gpu:').replace("torch.cuda", "torch.gpu")
        return compile(source, self.path, "exec")


class Finder:
    """Finds our modules by the other finders, and lets ``Renamed`` read them."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if not name.startswith("headstart."):
            return None
        found = (f.find_spec(name, path, target) for f in sys.meta_path if f is not self)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and (spec.origin or "").endswith(".py"):
            spec.loader = Renamed(name, spec.origin)
        return spec


def pretend() -> None:
    """Pretend from now on, in the whole process. Call it once."""
    backend_registration._setup_privateuseone_for_python_backend("gpu", Gpu())
    keep.append(torch.library.Library("_", "IMPL"))
    keep[0].fallback(lambda op, *args, **kwargs: compute(op, args, kwargs), "PrivateUse1")
    _autocast()
    _copied_later()
    torch.inference_mode = lambda mode=True: torch.no_grad() if mode else torch.enable_grad()  # type: ignore[assignment, misc]
    sys.meta_path.insert(0, Finder())  # type: ignore[arg-type]


keep: list[Any] = []

# Operations under a GPU's autocast: those computed in half precision, sums with a result in fp32, those computed in their widest input
# dtype. All other operations that autocast knows are computed in fp32.
HALF = (
    "linear matmul mm bmm mv addmm addmv addbmm baddbmm addr einsum chain_matmul linalg_multi_dot prelu scaled_dot_product_attention conv1d"
)
SUMS = "prod softmax log_softmax cumprod cumsum linalg_vector_norm linalg_matrix_norm sum"
WIDEST = "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add"


def _autocast() -> None:
    """Autocast as on CUDA. Builds of torch without CUDA have CUDA's list of operations, too."""
    keep.extend((torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")))
    keep[1].fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for full in torch._C._dispatch_get_all_op_names():
        if full.startswith("aten::") and torch._C._dispatch_has_kernel_for_dispatch_key(full, "AutocastCUDA"):
            name, _, overload = full.removeprefix("aten::").partition(".")
            op = getattr(getattr(aten, name), overload or "default")
            keep[2].impl(full.removeprefix("aten::"), _cast_for(op, name), "AutocastPrivateUse1")


def _cast_for(op: Any, name: str) -> Callable[..., Any]:
    own = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def called(*args: Any, **kwargs: Any) -> Any:
        given = [x for x in tensors_in((args, kwargs)) if isinstance(x, OnGpu) and x.is_floating_point()]
        dtype = torch.get_autocast_dtype("gpu") if name in HALF.split() else torch.float32
        if name in WIDEST.split():
            dtype = max((x.dtype for x in given), key=lambda d: torch.finfo(d).bits)
        with torch._C._ExcludeDispatchKeyGuard(own):
            if name in SUMS.split():
                half = given and given[0].dtype != torch.float32 and kwargs.get("dtype") is None
                return op(*args, **(kwargs | {"dtype": torch.float32} if half else kwargs))
            args, kwargs = tree_map(lambda x: x.to(dtype) if isinstance(x, OnGpu) and x.is_floating_point() else x, (args, kwargs))
            return op(*args, **kwargs)

    return called


def _copied_later() -> None:
    """torch makes tensors of Python numbers below the dispatcher, which does not see the device: make them on the CPU and copy them."""
    tensor, as_tensor, to_list = torch.tensor, torch.as_tensor, torch.Tensor.tolist
    get, put = torch.Tensor.__getitem__, torch.Tensor.__setitem__

    def made(data: Any, *, device: Any = None, **how: Any) -> Tensor:
        found = tensor(data, **how)
        return found if device is None else found.to(device)

    def as_made(data: Any, dtype: Any = None, device: Any = None) -> Tensor:
        found = data if isinstance(data, Tensor) else as_tensor(data, dtype=dtype)
        return found.to(device=device, dtype=dtype)

    def index(self: Tensor, i: Any) -> Any:
        each = tuple(made(x, device=self.device) if isinstance(x, (list, range)) else x for x in (i if isinstance(i, tuple) else (i,)))
        return each if isinstance(i, tuple) else each[0]

    replaced: dict[str, Callable[..., Any]] = {
        "tolist": lambda self: to_list(self.cpu()),
        "pin_memory": lambda self, *_: self,
        "new_tensor": lambda self, data, dtype=None, device=None: made(data, dtype=dtype or self.dtype, device=device or self.device),
        "__getitem__": lambda self, i: get(self, index(self, i)),
        "__setitem__": lambda self, i, value: put(self, index(self, i), value),
    }
    for name, method in replaced.items():
        setattr(torch.Tensor, name, method)
    torch.tensor, torch.as_tensor = made, as_made  # type: ignore[assignment]


if __name__ == "__main__":
    pretend()
    code = pytest.main(["-q", "-o", "addopts=", "-p", "no:cacheprovider", *sys.argv[1:]])
    sys.stdout.flush()
    os._exit(code)  # torch's threads of a device that is not there cannot be joined
