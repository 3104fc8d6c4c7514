"""The loss with its products by either library, and the memory they take."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from headstart.heads import products
from tests.trainers.test_chunks import Calls
from tests.trainers.test_losses import MIX, Case, D, H


@pytest.fixture(params=[False, True], ids=["mkl", "onednn"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param and not torch.backends.mkldnn.is_available():
        pytest.skip("oneDNN is not there")
    monkeypatch.setattr(products, "slow_mkl", lambda: request.param)
    monkeypatch.setattr(products, "BLOCK", 14)  # a few rows of the matrix at a time
    return bool(request.param)


@pytest.mark.parametrize("chunk", [1, 20])  # 1: at some positions a depth with a matrix of its own has no guess
@pytest.mark.parametrize("heads", ["shared", "own", "frozen"])
def test_a_loss_in_fp32(library: bool, heads: str, chunk: int) -> None:
    """And its gradients, beside the same numbers in float64."""
    case, exact = Case(dtype=torch.float32, heads=heads), Case(heads=heads)
    found, right = case.fused(MIX, chunk), exact.fused(MIX, chunk)
    torch.testing.assert_close(found.loss_sum.double(), right.loss_sum, rtol=1e-5, atol=1e-5)
    for a, b in zip(case.grads(found.loss_sum), exact.grads(right.loss_sum), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)


def test_what_the_teacher_says_is_multiplied_by_it_too(library: bool) -> None:
    widths = list[int]()

    def each(name: str, args: Any, out: Any) -> None:
        if name == "mkldnn::_linear_pointwise":
            widths.append(args[0].shape[-1])

    with Calls(each):
        Case(dtype=torch.float32).fused(MIX, 20)
    assert {H, D} <= {*widths} if library else not widths  # the drafter's products, and the target's


STEP = """
import resource, torch
from headstart.heads.base import TargetEnds
from headstart.heads.unembedding import Unembedding
from headstart.trainers.losses import fused_loss

tokens, depth, vocab, width, chunk = 400, 3, 128_000, 16, 512

def drawn(rows, scale=1.0):
    made = torch.empty(rows, width, dtype=torch.bfloat16)
    for block in made.split(1024):  # without a larger tensor on the way, whose memory the step would find
        block.normal_(std=scale)
    return made

head, ends = Unembedding(drawn(vocab, width**-0.5)), TargetEnds(torch.nn.Identity(), drawn(vocab, width**-0.5))
final, x = drawn(tokens)[None], torch.randint(vocab, (1, tokens))
hidden = [drawn(tokens)[None].requires_grad_() for _ in range(depth)]
supervised = [torch.arange(tokens)[None] < tokens - d - 1 for d in range(1, depth + 1)]
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
loss = fused_loss(hidden, [head] * depth, final, ends, x, supervised, {"kl": 1.0}, 0.8, chunk, figures=False).loss_sum
loss.backward()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="pages are glibc's to keep")
@pytest.mark.slow
def test_strips_find_their_memory_again() -> None:
    """In a fresh process: what a step maps is one buffer for logits and what the teacher says, not the strips of every depth anew."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC_")}
    done = subprocess.run([sys.executable, "-c", STEP], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2], env=env)
    strip = 4 << 20  # bytes of one in fp32
    assert int(done.stdout) * os.sysconf("SC_PAGE_SIZE") < 2 * 128_000 * (512 + 400) + 30 * strip
