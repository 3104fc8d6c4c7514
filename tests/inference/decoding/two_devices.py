"""Run by test_placement.py in a process of its own: targets and drafters on two devices generate what they generate on one."""

from __future__ import annotations

# ruff: noqa: E402  (the second device must exist before our modules are imported)
import os
import sys

import pytest
import torch

from tests import pretended_gpu

pretended_gpu.pretend()
from accelerate import dispatch_model

from headstart.inference import hf
from headstart.inference.decoding.decode import generate
from headstart.inference.decoding.decoder import generate_batch
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.probe import check_driven
from headstart.inference.decoding.propose import Drafting
from headstart.inference.decoding.sampling import SamplingParams
from headstart.inference.decoding.target import Target
from headstart.inference.proposers.elsewhere import Elsewhere
from tests.drafters import learn_by_heart, make, random_tokens
from tests.tiny_targets import tiny_target

DEVICE = "gpu:0"
NEW, PROMPTS = 10, [random_tokens(n, seed=n) for n in (9, 21)]  # past a window of 16
TREE = TreePolicy(depth=2, nodes=5, branch=3)


def spread(architecture: str) -> Target:
    """The first half on the CPU, the second half with the output head on the other device, by accelerate's own hooks."""
    model = tiny_target(architecture).model
    places = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": DEVICE, "lm_head": DEVICE}
    places |= {f"model.layers.{i}": "cpu" if i < 3 else DEVICE for i in range(6)}
    return Target(dispatch_model(model, places, main_device="cpu", force_hooks=True))


def check(architecture: str, heads: list[str], samplings: list[SamplingParams]) -> None:
    whole, halves = tiny_target(architecture), spread(architecture)
    assert halves.spread and not whole.spread
    check_driven(halves)
    said = [generate(whole, None, p, new_tokens=NEW).tokens for p in PROMPTS]
    assert [generate(halves, None, p, new_tokens=NEW).tokens for p in PROMPTS] == said
    for head in heads:
        drafter = learn_by_heart(make(head, whole), whole, [(p + s)[-NEW:] for p, s in zip(PROMPTS, said, strict=True)], depth=2, steps=15)
        tree = TREE.at_most(drafter.max_depth or TREE.depth)
        for sampling in samplings:

            def rounds(target: Target, guesser: Drafting, how: SamplingParams = sampling, tree: TreePolicy = tree) -> list[object]:
                made = [generate(target, guesser, p, new_tokens=NEW, policy=tree, sampling=how) for p in PROMPTS]
                return [(g.tokens, g.emitted) for g in made]

            drafter.cpu().attach(whole.ends)
            expected = rounds(whole, Drafting(drafter))
            batch = generate_batch(halves, drafter, PROMPTS, new_tokens=NEW, policy=tree, sampling=sampling)
            drafter.attach(halves.ends)
            assert rounds(halves, Drafting(drafter)) == expected
            drafter.to(DEVICE)  # the drafter is on another device than the target
            assert rounds(whole, Elsewhere(drafter, whole)) == expected
            if sampling.temperature == 0:
                assert [g.tokens for g in batch] == said
                assert any(max(emitted) > 1 for _, emitted in expected), "nothing was accepted: this tested nothing"  # type: ignore[misc]
        found = hf.generate(halves.model, drafter, torch.tensor(PROMPTS[:1]), max_new_tokens=NEW, policy=tree)
        assert found[0, len(PROMPTS[0]) :].tolist() == said[0]


if __name__ == "__main__":
    torch.set_num_threads(1)
    with pytest.raises(RuntimeError, match="over tensors of two devices"):
        torch.ones(2, device=DEVICE) + torch.ones(2)
    check("llama", ["eagle"], [SamplingParams(), SamplingParams(0.8, top_k=20, seed=3, repetition_penalty=1.1)])
    check("gemma3_text", ["draft_lm"], [SamplingParams()])
    sys.stdout.flush()
    os._exit(0)  # torch's threads of a device that is not there cannot be joined
