"""Memory and time of EAGLE's training attention with grouped key-value heads, and memory of a long prompt.

    python benchmarks/step_memory.py            # writes benchmarks/results/step_memory.json

- ``attention_ratio``: peak memory of the attention in a training step (between the projections, all depths, forward and backward)
  relative to the former way, which repeated keys and values for all query heads at every depth. Each is measured in its own process.
  The peak is the largest resident size minus that before the step, when queries, keys and values already exist.
- ``step_seconds_ratio``: seconds of that attention, ours over the former way: the larger ratio of two, with these heads and with those of
  the drafter for ``tiny``. Both ways take turns, and the fastest of ``--turns`` counts.
- ``prompt_16k_mb``: peak memory while a drafter as wide as Llama-3-8B reads a prompt in bf16. Its memory of the prompt counts; weights
  and the target's states do not. ``whole``: in one pass, the former way.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.frame import alone, keep, parser, resident
from headstart.heads import hub
from headstart.heads.base import Drafter, Roots, TargetEnds, TargetShape
from headstart.heads.layers import Rope, rotate
from headstart.heads.memory import Memory, Slots
from headstart.heads.visibility import CausalSees, ChainSees
from headstart.inference.decoding.propose import begin
from headstart.inference.provenance import machine, provenance

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
HEADS, KV_HEADS, HEAD_DIM = GROUPED = 32, 4, 128
TINY = 8, 8, 32  # the drafter of assets/tiny
MAPPED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}  # frees at once: peaks are reproducible


class Repeated(torch.autograd.Function):
    """The former way: keys and values copied for every head and saved at every depth; the backward pass recomputes the scores."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, *kv: Tensor) -> Tensor:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, kv[0], kv[1], 0.0, True)
        if len(kv) > 2:
            scores = [(q * k).sum(-1, dtype=lse.dtype) * q.shape[-1] ** -0.5 for k in kv[2::2]]
            total = torch.logsumexp(torch.stack([lse, *scores]), 0)
            merged = out * (lse - total).exp()[..., None]
            for s, v in zip(scores, kv[3::2], strict=True):
                merged = merged + v * (s - total).exp()[..., None]
            out, lse = merged.to(q.dtype), total
        ctx.save_for_backward(q, out, lse, *kv)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, out, lse, *kv = ctx.saved_tensors
        scale = q.shape[-1] ** -0.5
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        dq, *grads = op(grad.contiguous(), q, kv[0], kv[1], out, lse, 0.0, True)
        if len(kv) > 2:
            delta = (grad * out).sum(-1, dtype=lse.dtype)
            for k, v in zip(kv[2::2], kv[3::2], strict=True):
                p = ((q * k).sum(-1, dtype=lse.dtype) * scale - lse).exp()
                ds = (p * ((grad * v).sum(-1, dtype=lse.dtype) - delta) * scale)[..., None].to(q.dtype)
                dq = dq + ds * k
                grads += [ds * q, p[..., None].to(q.dtype) * grad]
        return dq, *grads


@contextmanager
def as_before() -> Iterator[None]:
    def attend(self: ChainSees, q: Tensor, segments: Sequence[tuple[Tensor, Tensor]], scale: float | None = None) -> Tensor:
        group = q.shape[1] // segments[0][0].shape[1]
        return Repeated.apply(q, *(x.repeat_interleave(group, 1) if group > 1 else x for pair in segments for x in pair))

    own, ChainSees.attend = ChainSees.attend, attend  # type: ignore[method-assign]
    try:
        yield
    finally:
        ChainSees.attend = own  # type: ignore[method-assign]


def attention_part(
    tokens: int, depth: int, dtype: torch.dtype, shape: tuple[int, int, int] = GROUPED
) -> tuple[Callable[[], None], list[Tensor]]:
    """Returns the attention's forward and backward pass as a function, and its inputs: queries, keys and values of every depth. ``shape``:
    query heads, key-value heads, and the size of a head.
    """
    heads, kv_heads, size = shape
    g, rope = torch.Generator().manual_seed(0), Rope(ROPE, size, 2 * tokens)
    cos_sin = rope(torch.arange(tokens)[None])

    def leaf(heads: int) -> Tensor:
        return torch.randn(1, tokens, heads, size, generator=g).to(dtype).transpose(1, 2).requires_grad_()

    leaves = [leaf(count) for _ in range(depth) for count in (heads, kv_heads, kv_heads)]
    weight = torch.randn(1, heads, 1, size, generator=g).to(dtype)

    def step() -> None:
        memory, sees, loss = Memory(), ChainSees(), torch.zeros((), dtype=dtype)
        for q, k, v in zip(leaves[::3], leaves[1::3], leaves[2::3], strict=True):
            found = sees.attend(rotate(q, cos_sin), memory.write(0, rotate(k, cos_sin), v))
            loss, sees = loss + (found * weight).sum(), sees.deeper()
        loss.backward()

    return step, leaves


def peak(run: Callable[[], Any]) -> float:
    """The peak in MB above the resident size before the call (Linux)."""
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the largest resident size
    run()
    return (resident("VmHWM") - before) / 1e6


def attention_mb(variant: str, tokens: int, depth: int) -> float:
    attention_part(16, 2, torch.float32)[0]()  # loads what the first call loads
    step, leaves = attention_part(tokens, depth, torch.float32)
    for leaf in leaves:  # in a step the projections consume these gradients at once
        leaf.register_post_accumulate_grad_hook(lambda x: setattr(x, "grad", None))
    if variant == "ours":
        return peak(step)
    with as_before():
        return peak(step)


def seconds(tokens: int, depth: int, shape: tuple[int, int, int], turns: int) -> dict[str, float]:
    """The fastest attention of a step in each way, in seconds."""
    step, leaves = attention_part(tokens, depth, torch.float32, shape)
    found: dict[str, list[float]] = {"before": [], "ours": []}
    for turn in range(turns + 1):
        for way, times in found.items():
            for leaf in leaves:
                leaf.grad = None
            with as_before() if way == "before" else nullcontext():
                began = time.perf_counter()
                step()
            times += [time.perf_counter() - began] * (turn > 0)  # the first turn warms up
    return {way: min(times) for way, times in found.items()}


def drafter_of(hidden: int, ffn: int, vocab: int = 512) -> Drafter:
    torch.manual_seed(0)
    shape = TargetShape("llama", hidden, 32, HEADS, KV_HEADS, HEAD_DIM, ffn, vocab, 32768, 1e-6, ROPE, "float32")
    drafter = hub.build("eagle", shape)
    drafter.attach(TargetEnds(nn.Embedding(vocab, hidden).bfloat16(), (torch.randn(vocab, hidden) / hidden**0.5).bfloat16()))
    return drafter.bfloat16().eval()


@torch.inference_mode()
def prompt_mb(variant: str, tokens: int, hidden: int, ffn: int) -> float:
    drafter = drafter_of(hidden, ffn)

    def roots(n: int) -> Roots:
        x = torch.randint(512, (1, n))
        return Roots(x, x, {tap: torch.randn(1, n, hidden, dtype=torch.bfloat16) for tap in drafter.taps}, torch.arange(n)[None])

    def read(given: Roots, memory: Slots) -> None:
        n = given.read_BT.shape[1]
        if variant == "ours":
            begin(drafter, given, memory)
        else:
            drafter.begin(given, memory, CausalSees(n, n), torch.tensor([[n - 1]]))

    read(roots(16), Slots(16))
    given = roots(tokens)
    return peak(lambda: read(given, Slots(tokens)))


def main() -> None:
    cli = parser(__doc__, "step_memory.json")
    cli.add_argument("--turns", type=int, default=3)
    sizes = dict(tokens=2048, depth=7, prompt=16384, hidden=4096, ffn=14336)
    for name, value in sizes.items():
        cli.add_argument(f"--{name}", type=int, default=value)
    cli.add_argument("--one", help=argparse.SUPPRESS)  # PART:VARIANT, in a process of its own
    args = cli.parse_args()
    if args.one:
        part, variant = args.one.split(":")
        own = (args.tokens, args.depth) if part == "attention" else (args.prompt, args.hidden, args.ffn)
        print(json.dumps((attention_mb if part == "attention" else prompt_mb)(variant, *own)))
        return

    def both(part: str) -> dict[str, float]:
        return {variant: alone(__file__, f"{part}:{variant}", **MAPPED) for variant in ("before", "ours")}

    attention, prompt = both("attention"), both("prompt")
    timed = {name: seconds(args.tokens, args.depth, shape, args.turns) for name, shape in (("grouped", GROUPED), ("tiny", TINY))}
    ratios = {name: found["ours"] / found["before"] for name, found in timed.items()}
    print(f"attention: {attention['before']:.0f} MB before, {attention['ours']:.0f} MB; prompt: {prompt['before']:.0f} MB in one pass, "
          f"{prompt['ours']:.0f} MB; seconds over those before: " + ", ".join(f"{name} {x:.2f}" for name, x in ratios.items()))  # fmt: skip
    results = {
        "command": " ".join(["python", "benchmarks/step_memory.py", *sys.argv[1:]]),
        "settings": {**{name: getattr(args, name) for name in sizes}, "heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM},
        "attention_ratio": attention["ours"] / attention["before"],
        "prompt_16k_mb": prompt["ours"],
        "step_seconds_ratio": max(ratios.values()),
        "attention_mb": attention,
        "step_seconds": timed,
        "prompt_mb": {"whole": prompt["before"], "ours": prompt["ours"]},
        "machine": machine(torch.device("cpu")),
        "provenance": provenance(),
    }
    keep(args.out, results)


if __name__ == "__main__":
    main()
