"""Run by test_placement.py, once per process: a target whose layers two processes share generates what a whole one generates. Where it
measures shapes, both processes run the same passes, though their clocks differ.
"""

from __future__ import annotations

import sys
from itertools import count
from types import SimpleNamespace
from typing import Any

import torch

from headstart.inference.decoding import auto
from headstart.inference.decoding.decode import generate
from headstart.inference.decoding.decoder import generate_batch
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.propose import Drafting
from headstart.inference.decoding.target import Target
from headstart.inference.reports import timing
from headstart.inference.reports.timing import time_rounds
from tests.drafters import learn_by_heart, make, random_tokens

SMALL = TreePolicy("auto", depth=2, nodes=3, branch=2)
LONGER = auto.WORTH + 1  # the first token comes with the prompt
NEW, PROMPTS = 8, [random_tokens(n, seed=n) for n in (9, 4)]

if __name__ == "__main__":
    torch.set_num_threads(1)
    waited, barrier = list[bool](), torch.distributed.barrier
    torch.distributed.barrier = lambda: (waited.append(True), barrier())[1]  # type: ignore[assignment]
    whole, shared = (Target.load(sys.argv[1], device=device) for device in ("cpu", "tp"))
    assert len(waited) == 1, "transformers' groups have a timeout, which may be shorter than it takes the slowest process to load"
    assert shared.spread and not whole.spread
    assert type(shared.layers[0].self_attn.q_proj.weight).__name__ == "DTensor"  # type: ignore[union-attr]
    assert torch.equal(shared.ends.head_VD, whole.ends.head_VD)
    said = [generate(whole, None, p, new_tokens=NEW).tokens for p in PROMPTS]
    assert [generate(shared, None, p, new_tokens=NEW).tokens for p in PROMPTS] == said
    texts = [(p + s)[-NEW:] for p, s in zip(PROMPTS, said, strict=True)]
    drafter, tree = learn_by_heart(make("mtp", whole), whole, texts, depth=2, steps=12), TreePolicy(depth=2, nodes=6, branch=3)
    drafter.attach(shared.ends)
    found = [generate(shared, Drafting(drafter), p, new_tokens=NEW, policy=tree) for p in PROMPTS]
    assert [g.tokens for g in found] == said
    assert any(max(g.emitted) > 1 for g in found), "nothing was accepted: this tested nothing"
    assert [g.tokens for g in generate_batch(shared, drafter, PROMPTS, new_tokens=NEW, policy=tree)] == said

    # one clock stands almost still, so that turns end after ROUNDS rounds, and by the other one three rounds are long
    ticks, step = count(), (0.001, 0.3)[torch.distributed.get_rank()]
    clock: Any = SimpleNamespace(perf_counter=lambda: next(ticks) * step)
    auto.time, auto.ROUNDS, timing.now = clock, 6, clock.perf_counter
    more = [generate(whole, None, p, new_tokens=LONGER).tokens for p in PROMPTS]
    assert [generate(shared, Drafting(drafter), p, new_tokens=LONGER, policy=SMALL).tokens for p in PROMPTS] == more
    assert [g.tokens for g in generate_batch(shared, drafter, PROMPTS, new_tokens=LONGER, policy=SMALL)] == more
    costs, both = [known.costs for known in auto.known_of(shared, drafter).values()], list[Any]([None, None])
    torch.distributed.all_gather_object(both, costs)
    assert both[0] == both[1] and len(costs) == 2, "measured for one sequence, and for two"
    torch.distributed.all_gather_object(both, time_rounds(shared, drafter, [tree], PROMPTS, 2, NEW))
    assert both[0] == both[1]
