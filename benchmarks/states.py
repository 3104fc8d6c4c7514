"""What storing a target's states in 8 bits costs: accepted length and bytes, compared with bf16.

    python benchmarks/states.py            # about 9 minutes on one thread; writes benchmarks/results/states.json

The shipped target's states over the same rows of the standard library are captured as bf16, fp8 and int8 (as `python -m data storage=...`
does). From each capture the same drafter is trained, with equal rows, order and initial weights. Its exported folder decodes held-out
prompts by chains of 6 guesses, at temperature 0, and at 1 by block verification. The same command (``--scratch``) continues an
interrupted run.

- ``rows``: per storage ``bytes_per_token`` (of the files, with headers and held-out rows), the mean error of the states, the accepted
  lengths ``accepted_t0`` and ``accepted_t1``, the expected length ``expected`` (the trainer's, teacher-forced, over far more held-out
  tokens than are decoded), and the ratio of each to bf16.
- ``another seed``: bf16 again with another seed (initial weights and order of rows): the difference that chance alone makes.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.alternatives import accepted_length, for_run, settings
from benchmarks.frame import keep, origin, parser
from benchmarks.tiny import held_out
from headstart.data.capture import capture, mean_errors
from headstart.data.packed import InMemory, Packed
from headstart.data.shards import Shards
from headstart.data.source import open_source
from headstart.data.storage import STORAGES
from headstart.heads import hub
from headstart.inference.decoding.decoder import generate_batch
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.sampling import SamplingParams
from headstart.inference.decoding.target import Target
from headstart.inference.settings import open_target
from headstart.inference.speculator import open_speculator
from headstart.trainers.metrics import read_metrics
from headstart.trainers.run import run

BATCH, LENGTH = 4, 512  # rows of a step, tokens of a row
POLICY = TreePolicy(kind="chain", depth=6)
CONTROL = "another seed"


def captured(scratch: Path, steps: int) -> dict[str, Shards]:
    """Storage -> the folder of the captured rows, the same rows for each."""
    folders = {name: scratch / f"shards-{name}" for name in STORAGES}
    target = open_target(settings("config")["target"])
    head = {k: v for k, v in settings("config")["head"].items() if k not in ("name", "draft_vocab")}
    taps = hub.build(settings("config")["head"]["name"], target.shape, **head).taps
    source = open_source(settings("config")["data"], target, length=LENGTH, seed=0)
    assert source.packed is not None and isinstance(source.held_out, Packed)
    few, made = InMemory(*source.packed.lay(np.arange(steps * BATCH))), dict[str, Shards]()
    for name, folder in folders.items():
        found = capture(few, target, taps, folder, storage=name, held_out=source.held_out)
        assert found is not None
        made[name] = found
    return made


def train(scratch: Path, name: str, shards: Shards, steps: int, seed: int) -> Path:
    """Train a drafter from a capture. Returns its exported folder."""
    out = scratch / f"run-{name.replace(' ', '-')}"
    how = ["data=shards", f"path={shards.folder}", f"trainer.steps={steps}", f"trainer.seed={seed}", "trainer.precision=fp32"]
    how += [
        f"trainer.batch_size={BATCH}",
        f"trainer.length={LENGTH}",
        f"trainer.eval_every={steps}",
        "trainer.save_every=20",
        "report=none",
    ]
    run(**for_run(*how, f"out={out}"))
    return out


def measured(target: Target, out: Path, prompts: list[list[int]], new_tokens: int) -> dict[str, float]:
    drafter = open_speculator(out / "speculator", target)
    found = {"expected": [line["heldout/expected_length"] for line in read_metrics(out) if "heldout/expected_length" in line][-1]}
    for temperature in (0.0, 1.0):
        how = [SamplingParams(temperature=temperature, rule="block" if temperature else "auto", seed=i) for i in range(len(prompts))]
        made = generate_batch(target, drafter, prompts, new_tokens=new_tokens, policy=POLICY, sampling=how, stop_ids=())
        found[f"accepted_t{temperature:.0f}"] = accepted_length(made)
    return found


def main() -> None:
    cli = parser(__doc__, "states.json")
    cli.add_argument("--scratch", type=Path, default=Path("runs/states"), help="where shards and runs are kept")
    cli.add_argument("--steps", type=int, default=100)
    cli.add_argument("--prompts", type=int, default=48)
    cli.add_argument("--new-tokens", type=int, default=64)
    args = cli.parse_args()
    shards = captured(args.scratch, args.steps)
    target = open_target(settings("config")["target"])
    prompts = held_out(target, args.prompts)
    about = {"steps": args.steps, "prompts": args.prompts, "new_tokens": args.new_tokens, "target": target.name, "policy": vars(POLICY)}
    about |= origin("python benchmarks/states.py")
    rows: dict[str, dict[str, Any]] = {}
    for name in (*shards, CONTROL):
        states = shards.get(name, shards["bf16"])
        out = train(args.scratch, name, states, args.steps, int(name == CONTROL))
        tokens = (len(states) + states.index["held_out"]["rows"]) * LENGTH
        found = {"bytes_per_token": sum(file["bytes"] for file in states.files) / tokens}
        found |= measured(target, out, prompts, args.new_tokens)
        rows[name] = {**found, "errors": mean_errors(states.index)}
        rows[name] |= {f"{key}_over_bf16": value / rows["bf16"][key] for key, value in found.items()}
        print(name, {key: value for key, value in rows[name].items() if key != "errors"}, flush=True)
        keep(args.out, {"rows": rows, **about})
    print(f"{args.out}")


if __name__ == "__main__":
    main()
