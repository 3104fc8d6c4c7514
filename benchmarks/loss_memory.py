"""Peak memory and time of one training step: the fused loss against full [depths, tokens, vocabulary] logits.

    python benchmarks/loss_memory.py            # writes benchmarks/results/loss_memory.json

Each variant runs in its own process. Its peak is the largest resident size (getrusage) minus the resident size before the step, when
weights and inputs already exist. So it counts everything that a step allocates, including gradients and buffers of kernels. Large CPU
tensors are mapped and unmapped one by one, so no freed memory is counted. The naive loss is the usual one: autograd keeps the log-softmax
of every depth; the teacher's probabilities are shared.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.frame import ROOT, alone, keep, origin, parser, resident
from headstart.data.batch import TargetBatch
from headstart.heads import hub
from headstart.heads.base import Drafter, TargetEnds, TargetShape
from headstart.heads.unroll import unroll
from headstart.trainers.losses import fused_loss

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def shape(hidden: int, vocab: int) -> TargetShape:
    """A narrow target with a large vocabulary. Head size 64."""
    heads = hidden // 64
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    return TargetShape("llama", hidden, 12, heads, heads, 64, 3 * hidden, vocab, 4096, 1e-6, rope, "float32")


def naive_loss(drafter: Drafter, batch: TargetBatch, depth: int, decay: float) -> Tensor:
    """Forward KL with all logits in memory, in fp32 as other trainers do it."""
    drafts = unroll(drafter, batch.roots(), batch.documents_BT, depth)
    with torch.no_grad():
        log_p_BTV = F.log_softmax(drafter.ends.logits(batch.final_BTD).float(), dim=-1)
        p_BTV = log_p_BTV.exp()
    total = torch.zeros(())
    for d, draft in enumerate(drafts, start=1):
        log_q_BTV = F.log_softmax(drafter.unembedding(d).logits(draft.hidden_BNH).float(), dim=-1)
        kl_BT = (p_BTV[:, d:] * (log_p_BTV[:, d:] - log_q_BTV[:, :-d])).sum(-1)
        total = total + decay ** (d - 1) * (kl_BT * batch.supervised(d)[:, :-d]).sum()
    return total


def ours(drafter: Drafter, batch: TargetBatch, depth: int, decay: float, chunk: int) -> Tensor:
    drafts = unroll(drafter, batch.roots(), batch.documents_BT, depth)
    depths = range(1, depth + 1)
    unembeddings, supervised = [drafter.unembedding(d) for d in depths], [batch.supervised(d) for d in depths]
    hidden = [draft.hidden_BNH for draft in drafts]
    return fused_loss(
        hidden, unembeddings, batch.final_BTD, drafter.ends, batch.tokens_BT, supervised, {"kl": 1.0}, decay, chunk
    ).loss_sum  # fmt: skip


def random_batch(drafter: Drafter, tokens: int, dtype: torch.dtype) -> TargetBatch:
    g, s = torch.Generator().manual_seed(0), drafter.shape
    x = torch.randint(s.vocab_size, (1, tokens), generator=g)
    states = {tap: torch.randn(1, tokens, s.hidden_size, generator=g).to(dtype) for tap in drafter.taps}
    final = torch.randn(1, tokens, s.hidden_size, generator=g).to(dtype)
    return TargetBatch(x, torch.ones_like(x, dtype=torch.bool), torch.arange(tokens)[None], torch.zeros_like(x), states, final)


def one(variant: str, args: argparse.Namespace, dtype: torch.dtype) -> dict[str, float]:
    """Measure in this process."""
    torch.manual_seed(0)
    s = shape(args.hidden, args.vocab)
    drafter = hub.build(args.head, s)
    embedding = nn.Embedding(s.vocab_size, s.hidden_size).to(dtype).requires_grad_(False)
    drafter.attach(TargetEnds(embedding, (torch.randn(s.vocab_size, s.hidden_size) / s.hidden_size**0.5).to(dtype)))
    drafter.to(dtype)

    def step(batch: TargetBatch) -> float:
        loss = (
            naive_loss(drafter, batch, args.depth, args.decay)
            if variant == "naive"
            else ours(drafter, batch, args.depth, args.decay, args.chunk)
        )
        loss.backward()
        drafter.zero_grad(set_to_none=True)
        return loss.item()

    step(random_batch(drafter, 2 * args.depth, dtype))  # loads what the first call loads
    batch = random_batch(drafter, args.tokens, dtype)
    before, start = resident("VmRSS"), time.perf_counter()
    loss = step(batch)
    seconds = time.perf_counter() - start
    return {"peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before, "step_seconds": seconds, "loss": loss}


def main() -> None:
    conf: Any = OmegaConf.load(ROOT / "conf" / "config.yaml")
    head = next(d["head"] for d in conf.defaults if "head" in d)
    cli = parser(__doc__, "loss_memory.json")
    cli.add_argument("--head", default=head, help="a name of conf/head")
    for name, value in dict(vocab=128_256, tokens=1024, depth=7, hidden=256, chunk=conf.loss.chunk).items():
        cli.add_argument(f"--{name}", type=int, default=value)
    cli.add_argument("--decay", type=float, default=conf.loss.decay)
    cli.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    cli.add_argument("--one", help=argparse.SUPPRESS)  # VARIANT:DTYPE, in a process of its own
    args = cli.parse_args()
    if args.one:
        variant, dtype = args.one.split(":")
        print(json.dumps(one(variant, args, DTYPES[dtype])))
        return
    settings = {k: getattr(args, k) for k in ("head", "vocab", "tokens", "depth", "hidden", "chunk", "decay")}
    results: dict[str, Any] = origin(" ".join(["python", "benchmarks/loss_memory.py", *sys.argv[1:]])) | {"settings": settings}
    for dtype in args.dtypes:
        figures = {variant: alone(__file__, f"{variant}:{dtype}") for variant in ("naive", "fused")}
        a, b = figures["naive"], figures["fused"]
        ratios = {"peak_ratio": b["peak_bytes"] / a["peak_bytes"], "seconds_ratio": b["step_seconds"] / a["step_seconds"]}
        results[dtype] = {**figures, **ratios}
        print(f"{dtype}: naive {a['peak_bytes'] / 1e9:.2f} GB, fused {b['peak_bytes'] / 1e9:.2f} GB: {ratios['peak_ratio']:.3f} of it; "
              f"step time {ratios['seconds_ratio']:.2f} of it; loss {a['loss']:.6g} and {b['loss']:.6g}")  # fmt: skip
    keep(args.out, results)


if __name__ == "__main__":
    main()
