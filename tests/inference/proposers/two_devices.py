"""Run by test_pipelined.py in a process of its own: drafting chains on a second device leads to the same text as drafting on one."""

from __future__ import annotations

# ruff: noqa: E402  (the second device must exist before our modules are imported)
import os
import sys

import torch

from tests import pretended_gpu

pretended_gpu.pretend()

from headstart.inference.decoding.decode import generate
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.propose import Drafting
from headstart.inference.decoding.sampling import SamplingParams
from headstart.inference.proposers.pipelined import Pipelined
from tests.drafters import random_tokens
from tests.inference.proposers.common import lm_of
from tests.tiny_targets import tiny_target

if __name__ == "__main__":
    torch.set_num_threads(1)
    target, prompts = tiny_target(), [random_tokens(n, seed=n) for n in (9, 1)]
    drafter = lm_of(target, 0.02)
    for sampling in (SamplingParams(), SamplingParams(0.8, rule="block", top_k=20, seed=3)):
        how = {"new_tokens": 16, "policy": TreePolicy("chain", depth=2), "sampling": sampling}
        drafter.cpu().attach(target.ends)
        expected = [generate(target, Drafting(drafter), p, **how).tokens for p in prompts]
        device = torch.device("gpu:0")
        drafter.to(device).attach(target.ends_on(device, target.dtype))
        away = Pipelined(drafter)
        assert [generate(target, away, p, **how).tokens for p in prompts] == expected
        assert away.device == device and away.bets and (away.won or sampling.temperature)
    sys.stdout.flush()
    os._exit(0)  # torch's threads of a device that is not there cannot be joined
