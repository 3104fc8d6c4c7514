"""What it saves to train several drafters from one pass of the target, where that pass costs some eight times as much as a drafter's step.

    python benchmarks/one_pass.py        # a few minutes; adds to benchmarks/results/drafters.json

The four drafters of conf/experiment/compare_quick.yaml train for a random target, with the steps of the training loop, on one CPU thread.
The target has as many layers as that takes by a short measurement. All measurements take turns, in both directions; the fastest of
``--turns`` counts, in CPU seconds.

- ``one_pass_over_sum``: a step of all four, over the target's pass plus the four's own steps (each timed alone, less the pass)
- ``separate_over_one_pass``: the four steps of separate runs, over the step of all four
- ``one_pass``: the seconds, and ``target_over_drafter``: of the target's pass over a drafter's own step, on average
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.alternatives import fastest, settings
from benchmarks.frame import RESULTS, keep, origin, parser
from benchmarks.plan_memory import Arm, arm_of, random_target, step
from headstart.inference.decoding.target import Target

EXPERIMENT, RATIO = "compare_quick", 8
ROWS, LENGTH = 4, 256
CONFIG = dict(model_type="llama", hidden_size=128, intermediate_size=384, num_attention_heads=4, num_key_value_heads=2, vocab_size=1024,
              max_position_embeddings=LENGTH)  # fmt: skip
PASS, TOGETHER = "the target's pass", "together"


def arms_for(target: Target) -> dict[str, Arm]:
    """The experiment's drafters, with their losses and optimizers."""
    found = {}
    for name, words in settings("config", f"experiment={EXPERIMENT}")["arms"].items():
        made = settings("config", f"experiment={EXPERIMENT}", *words.split())
        head, loss = ({key: value for key, value in made[group].items() if value is not None} for group in ("head", "loss"))
        found[name] = arm_of(target, head, loss, made["trainer"])
    return found


def calls(target: Target) -> dict[str, Callable[[], None]]:
    """What is timed: the target's pass, a step of all arms, and a step of each."""
    arms, tokens = arms_for(target), torch.randint(target.shape.vocab_size, (1, ROWS, LENGTH))
    alone = {name: partial(step, target, [arm], tokens) for name, arm in arms.items()}
    return {PASS: partial(step, target, [], tokens), TOGETHER: partial(step, target, [*arms.values()], tokens), **alone}


def figures(seconds: Mapping[str, float]) -> dict[str, Any]:
    """The figures from the seconds of ``calls``."""
    alone = {name: s for name, s in seconds.items() if name not in (PASS, TOGETHER)}
    own = [s - seconds[PASS] for s in alone.values()]
    return {
        "one_pass_over_sum": seconds[TOGETHER] / (seconds[PASS] + sum(own)),
        "separate_over_one_pass": sum(alone.values()) / seconds[TOGETHER],
        "one_pass": {"seconds": dict(seconds), "target_over_drafter": seconds[PASS] * len(own) / sum(own)},
    }


def main() -> None:
    cli = parser(__doc__)
    cli.add_argument("--out", type=Path, default=RESULTS / "drafters.json")
    cli.add_argument("--turns", type=int, default=4)
    args = cli.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    few = figures(fastest(calls(random_target(CONFIG | {"num_hidden_layers": RATIO})), 2, time.process_time))
    layers = round(RATIO * RATIO / few["one_pass"]["target_over_drafter"])
    made = figures(fastest(calls(random_target(CONFIG | {"num_hidden_layers": max(RATIO, layers)})), args.turns, time.process_time))
    made["one_pass"] |= {"target_layers": layers, **origin(" ".join(["python", *sys.argv]))}
    before = json.loads(args.out.read_text()) if args.out.is_file() else {}
    keep(args.out, before | made)
    print(*(f"{key}: {made[key]:.3f}" for key in ("one_pass_over_sum", "separate_over_one_pass")), sep="\n")


if __name__ == "__main__":
    main()
