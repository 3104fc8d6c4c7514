"""Products of few rows on a CPU, in C++ (heads/native.cpp), which is compiled for this processor when first needed.

Compiling takes a C++ compiler (g++) and some seconds, once: the library is kept in the cache folder. Where there is no compiler, or it
fails, torch's operations are used, and the log says so once. (The library also has whole decoder layers:
heads/native_layers.py, and training's attention: heads/native_flash.py.)

Shape suffixes: B batch, N rows of any kind, V rows of a matrix, H its columns (the width of an input), d head size.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headstart.heads.errors import UserError
from headstart.heads.files import cache_folder

log = logging.getLogger(__name__)
SOURCE = Path(__file__).with_name("native.cpp")
FLAGS = ["-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fopenmp", "-fPIC", "-c"]
SECONDS = 120  # time limit of the compiler
PANEL, PAIRS = 16, 4  # V must be a multiple of the first, H of the second
DTYPES, HALF = {torch.float32: "fp32", torch.bfloat16: "bf16"}, "half"
POINTER, LONG, DOUBLE = ctypes.c_void_p, ctypes.c_long, ctypes.c_double


class Unavailable(Exception):
    """Why there is no library."""


# The library ---------------------------------------------------------------------------------------------------------


def library() -> ctypes.CDLL | None:
    """The compiled functions. None where they are not available: the log then says why, once."""
    return found if isinstance(found := searched(), ctypes.CDLL) else None


@functools.cache
def searched() -> ctypes.CDLL | Unavailable:
    """The compiled functions, or why there are none."""
    try:
        return apart(lambda: _right(_open(_compiled())))
    except (Unavailable, UserError, OSError) as e:
        log.warning("this CPU goes on with torch's operations, which are slower than our own (heads/native.cpp): %s", e)
        return Unavailable(str(e))


def _open(path: Path) -> ctypes.CDLL:
    """Load the library. Its OpenMP is the one that torch has loaded, so that both share their threads."""
    found = ctypes.CDLL(str(path))
    linear, norm = [POINTER] * 4 + [LONG] * 3 + [ctypes.c_int], [POINTER] * 3 + [LONG] * 2 + [DOUBLE]
    for what, taken in (("linear", linear), ("stack", [POINTER] * 2), ("norm", norm)):
        for name in (*DTYPES.values(), *([HALF] if what != "norm" else [])):
            function = getattr(found, f"{what}_{name}")
            function.argtypes, function.restype = taken, None
    return found


def _right(found: ctypes.CDLL) -> ctypes.CDLL:
    """The library, after a test: products whose sums are exact in fp32, with 1 to 13 rows, must be right. Raises Unavailable where one of
    them is wrong.
    """
    x_NH, weight_VH = torch.arange(-26.0, 26.0).view(13, 4), torch.arange(-8.0, 56.0).view(16, 4)
    for weight in (weight_VH, weight_VH + 2**-9, weight_VH.bfloat16()):
        packed, x, right = pack(weight), x_NH.to(weight.dtype), x_NH.to(weight.dtype) @ weight.T
        if any(not torch.equal(_multiply(found, x[:rows], packed, None), right[:rows]) for rows in range(1, len(x) + 1)):
            raise Unavailable(f"what the compiler made of it multiplies wrongly in {weight.dtype}")
    return found


def apart(check: Callable[[], Any]) -> Any:
    """The result of ``check`` on a thread of its own, which the caller's modes (inference, autocast, counting) do not reach."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(check).result()


def _compiled() -> Path:
    """The library's path, from the cache if it is there. Raises Unavailable saying what is missing."""
    if platform.system() != "Linux":
        raise Unavailable("it is made for Linux")
    compiler = (os.environ.get("CXX") or "g++").split()  # may have several words: "ccache g++", "g++ -m64"
    if not compiler or shutil.which(compiler[0]) is None:
        raise Unavailable("there is no C++ compiler: install g++ (Debian: apt install g++)")
    sources = [SOURCE, *sorted(SOURCE.parent.glob("native*.h"))]
    about = [*map(Path.read_bytes, sources), " ".join([*compiler, *FLAGS]).encode(), _run([*compiler, "--version"]).encode(), _processor()]
    key = hashlib.sha256(b"\0".join(about)).hexdigest()[:32]
    folder = _own(cache_folder() / "native")
    path = folder / f"{key}.so"
    if not _is_there(path):
        with _one_at_a_time(folder / f"{key}.lock"):
            if not _is_there(path):
                _compile(compiler, path)
    return path


def _is_there(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0  # empty if the machine crashed before the file was on disk


def _compile(compiler: Sequence[str], path: Path) -> None:
    log.info("compiling %s for this processor, once", SOURCE.name)
    with tempfile.TemporaryDirectory(dir=path.parent) as beside:
        made = [str(Path(beside, name)) for name in ("native.o", "native.so")]
        _run([*compiler, *FLAGS, str(SOURCE), "-o", made[0]])
        _run([*compiler, "-shared", made[0], "-o", made[1]])  # without -fopenmp: that would add a second OpenMP
        os.sync()
        Path(made[1]).replace(path)


@contextmanager
def _one_at_a_time(lock: Path) -> Iterator[None]:
    """Lets the processes of a run in one after the other. On a file system without locks they all enter, which costs time alone."""
    import fcntl  # Windows has no such module, but imports this file

    with lock.open("w") as file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


def _own(folder: Path) -> Path:
    """Make ``folder`` if needed. Raises Unavailable where others may write to it, because the library in it is executed."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as e:
        raise Unavailable(f"the cache {folder} cannot be written ({e.strerror}): set HEADSTART_CACHE to another folder") from e
    about = folder.stat()
    if about.st_uid != os.getuid() or about.st_mode & 0o022:
        raise Unavailable(f"others can write {folder}: chmod 700 {folder}, or set HEADSTART_CACHE to a folder of your own")
    return folder


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as e:
        raise Unavailable(f"{command[0]}: {e if isinstance(e, OSError) else f'took over {SECONDS} s: try again when idle'}") from e
    if done.returncode:
        raise Unavailable(f"{' '.join(command)}: {' '.join(done.stderr.split())[:300]}")
    return done.stdout


def _processor() -> bytes:
    """The processor's features, on which -march=native depends: machines of several kinds may share a home folder."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return platform.machine().encode()
    return b"\n".join(sorted({line for line in lines if line.startswith((b"flags", b"Features", b"model name", b"CPU part"))}))


# Products ------------------------------------------------------------------------------------------------------------


def packable(weight_VH: Tensor) -> bool:
    """Whether ``linear`` supports such a matrix on this machine."""
    V, H = weight_VH.shape
    return weight_VH.dtype in DTYPES and V % PANEL == 0 and H % PAIRS == 0 and library() is not None


def pack(weight_VH: Tensor) -> Tensor:
    """The matrix as ``linear`` reads it, [V / 16, H, 16]: sixteen outputs of one input side by side (in bfloat16: of two inputs in turn).
    An fp32 matrix that bfloat16 holds exactly, as in a model that was saved in bfloat16, takes half the memory: [V / 16, H, 8] of fp32.
    """
    V, H = weight_VH.shape
    if weight_VH.dtype == torch.float32:
        half = weight_VH.bfloat16()
        if torch.equal(half.float(), weight_VH):
            return pack(half).view(torch.float32)
        return weight_VH.reshape(V // PANEL, PANEL, H).transpose(1, 2).contiguous()
    return weight_VH.reshape(V // PANEL, PANEL, H // 2, 2).transpose(1, 2).contiguous().view(V // PANEL, H, PANEL)


def name_of(packed: Tensor) -> str:
    """The last part of the names of the C++ functions for this matrix."""
    return DTYPES[packed.dtype] if packed.shape[2] == PANEL else HALF


def linear(x: Tensor, packed: Tensor, bias_V: Tensor | None = None) -> Tensor:
    """``x`` [.., H] times a packed matrix plus the bias: [.., V]. Raises RuntimeError for an ``x`` of another width."""
    if x.shape[-1] != packed.shape[1]:
        raise RuntimeError(f"a product of {tuple(x.shape)} and a matrix of {packed.shape[1]} columns")
    return _multiply(library(), x.to(packed.dtype).contiguous(), packed, bias_V)


def _multiply(found: Any, x: Tensor, packed: Tensor, bias_V: Tensor | None) -> Tensor:
    V, H = packed.shape[0] * PANEL, packed.shape[1]
    out = x.new_empty(*x.shape[:-1], V)
    multiply = getattr(found, f"linear_{name_of(packed)}")
    bias = None if bias_V is None else bias_V.data_ptr()
    multiply(x.data_ptr(), packed.data_ptr(), bias, out.data_ptr(), x.numel() // H, V, H, torch.get_num_threads())
    return out


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of ``x`` [.., H] over the last dimension, for few rows: it runs on one thread."""
    x = x.contiguous()
    out, size = torch.empty_like(x), weight.numel()
    getattr(library(), f"norm_{DTYPES[x.dtype]}")(x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // size, size, eps)
    return out
