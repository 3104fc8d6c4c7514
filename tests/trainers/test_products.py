"""Products of the loss, by either library, and the memory they take."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from headstart.trainers import products
from tests.trainers.test_losses import MIX, Case

R, W, V = 7, 5, 33


@pytest.fixture(params=[False, True], ids=["mkl", "onednn"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param and not torch.backends.mkldnn.is_available():
        pytest.skip("oneDNN is not there")
    monkeypatch.setattr(products, "slow_mkl", lambda: request.param)
    monkeypatch.setattr(products, "BLOCK", 2 * R)  # two rows of the matrix at a time
    return bool(request.param)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_products(library: bool, dtype: torch.dtype, turned: bool) -> None:
    """Beside float64. ``turned``: factors that lie in memory the other way round, as those of a matrix's gradient do."""
    g = torch.Generator().manual_seed(0)
    x, weight, before = (torch.randn(n, m, generator=g).to(dtype) for n, m in ((R, W), (V, W), (R, V)))
    if turned:
        x, weight = x.T.contiguous().T, weight.T.contiguous().T
    exact, near = x.double() @ weight.double().T, 2e-2 if dtype == torch.bfloat16 else 1e-6
    room = torch.empty(R + 1, V, dtype=dtype)  # one row too many
    room[R] = 0
    products.fill(room[:R], x, weight)
    sums = before.to(torch.promote_types(dtype, torch.float32))
    wanted = sums.double() + exact
    products.add(sums, x, weight, 2 * V)
    for found, right in ((products.times(x, weight), exact), (room[:R], exact), (sums, wanted)):
        torch.testing.assert_close(found.double(), right, rtol=near, atol=near)
    assert not room[R].any()


@pytest.mark.parametrize("chunk", [1, 20])  # 1: at some positions a depth with a matrix of its own has no guess
@pytest.mark.parametrize("heads", ["shared", "own", "frozen"])
def test_a_loss_in_fp32(library: bool, heads: str, chunk: int) -> None:
    """And its gradients, beside the same numbers in float64."""
    case, exact = Case(dtype=torch.float32, heads=heads), Case(heads=heads)
    found, right = case.fused(MIX, chunk), exact.fused(MIX, chunk)
    torch.testing.assert_close(found.loss_sum.double(), right.loss_sum, rtol=1e-5, atol=1e-5)
    for a, b in zip(case.grads(found.loss_sum), exact.grads(right.loss_sum), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="pages are glibc's to keep")
@pytest.mark.slow
def test_strips_find_their_memory_again() -> None:
    """In a fresh process: what a step maps is one buffer for logits and what the teacher says, not the strips of every depth anew."""
    vocab, tokens, depth = 128_000, 400, 3
    case = dict(vocab=vocab, depth=depth, dtype="bf16", trained=False, tokens=tokens, hidden=16, chunk=512)
    command = [sys.executable, "benchmarks/loss_step.py", "--one", json.dumps(case), "--steps", "1"]
    env = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC_")}
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2], env=env)
    strip = 4 << 20  # bytes of one in fp32
    assert json.loads(done.stdout)["faults"] * os.sysconf("SC_PAGE_SIZE") < 2 * vocab * (512 + tokens) + 30 * strip
