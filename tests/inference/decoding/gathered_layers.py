"""Run by torchrun, two processes: what a target of target.device=fsdp holds as it reads. ``... -m tests.inference.decoding.gathered_layers
TARGET OUT``. Each process writes OUT/RANK.json.

next        for each layer but the last: whether the next layer's weights were already being gathered when it began to compute
layers      the most bytes held during a pass, beyond those held before, in bytes of one layer's weights
whole       which of the model's embedding and output head are whole after a pass: the target has copies of them (``ends``)
same        whether the states are those of a whole target
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from headstart.inference.decoding.target import Target


def group(module: Any) -> Any:
    """torch's record of the weights that are gathered together with those of ``module``."""
    (found,) = module._get_fsdp_state()._fsdp_param_groups
    return found


def most_held(target: Target, tokens: torch.Tensor) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        target.read(tokens, tokens, ())
    with tempfile.TemporaryDirectory() as place:
        seen.export_chrome_trace(str(Path(place) / "trace.json"))
        events = json.loads((Path(place) / "trace.json").read_text())["traceEvents"]
    changes = sorted((e["ts"], e["args"]["Bytes"]) for e in events if e["name"] == "[memory]")
    return max(accumulate(change for _, change in changes))


def main(folder: str, out: Path) -> None:
    torch.set_num_threads(1)
    whole, target = Target.load(folder, device="cpu"), Target.load(folder, device="fsdp").read_apart()
    tokens = torch.arange(8)[None]
    found = target.read(tokens, tokens, (1,))
    same = torch.allclose(found[1], whole.read(tokens, tokens, (1,))[1], rtol=1e-4, atol=1e-4)
    held = min(most_held(target, tokens) for _ in range(3))  # another thread's buffers may be counted in the wrong order
    layer = sum(p.numel() * p.element_size() for p in whole.layers[0].parameters())
    under_way: list[bool] = []
    layers: list[Any] = list(target.layers)
    for here, following in pairwise(layers):
        here.self_attn.register_forward_pre_hook(lambda *_, other=following: under_way.append(group(other)._all_gather_result is not None))
    target.read(tokens, tokens, ())
    ends = {"embedding": target.model.get_input_embeddings(), "head": target.model.get_output_embeddings()}
    kept = [name for name, module in ends.items() if not hasattr(module.weight, "full_tensor")]
    (out / f"{os.environ['RANK']}.json").write_text(json.dumps({"next": under_way, "layers": held / layer, "same": same, "whole": kept}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
