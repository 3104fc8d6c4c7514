"""Every kind of drafter on equal data and steps, from one pass of the target; and what that one pass saves.

    python benchmarks/drafters.py            # about an hour and a half on two cores: conf/experiment/compare.yaml
    python benchmarks/drafters.py --quick    # four drafters in ten minutes: conf/experiment/compare_quick.yaml
    python benchmarks/drafters.py --speedups RUN --prompts 5    # of a finished run: its table, and `speedups` once more: three minutes

Writes benchmarks/results/drafters.json (drafters_quick.json), the comparison's table and picture beside it.

- ``drafters``: per arm the accepted lengths of its exported folder (of the tree of decode=auto and of a chain, temperature 0 and 1), the
  estimate of one teacher-forced pass, parameters, ``c`` (a level of drafting over a plain step), the speed-up of the tree and of
  decode=auto over plain decoding in the same run, and its seconds of training, the target's passes counted as if it had been alone.
  ``drafters_of``: which commit they were decoded with, where that was by a run of its own.
- ``one_pass_over_sum``: four drafters side by side, over the target's passes plus each drafter's own steps (timed alone, the target's
  passes taken off); ``separate_over_one_pass``: four runs of one drafter each over the one run of four. Both with a random target
  whose pass costs about ``target_over_drafter`` = 8 of a drafter's steps. Every time is the shortest of repeats in turn.
- ``speedups``: the same once more, each arm's folder in turn with plain decoding, prompt by prompt, of several rounds the middle one;
  ``worst_speedup_t0``, ``worst_speedup_t1``: of the arms that gain least (``worst_arms``). ``speedups_of``: where they were made
  again by themselves, by what.
- ``losses``: the trained EAGLE of ``drafters`` gone on with (``trainer.start``), one arm per loss, steps and tokens equal; not in --quick.
- ``self_distilled``: the best arm again on raw text, and on the target's own continuations of 256 prefixes of it at temperature 1, steps
  and tokens equal (so raw text is more varied: its rows are hardly ever seen twice); not in --quick.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from accelerate import Accelerator

from benchmarks.alternatives import RESULTS, ROOT, Run, console, dynamic, over, settings, turns
from benchmarks.tiny import held_out, open_tiny
from headstart.data.batch import TargetBatch, TokenBatch
from headstart.data.live import look
from headstart.heads import hub
from headstart.heads.base import Drafter
from headstart.heads.files import put_text
from headstart.inference.decoding.policy import fit_depth
from headstart.inference.decoding.propose import Drafting
from headstart.inference.decoding.target import Target
from headstart.inference.provenance import machine, provenance
from headstart.inference.settings import open_decode
from headstart.inference.speculator import open_speculator
from headstart.trainers.arm import Arm
from headstart.trainers.prepare import SHARED
from headstart.trainers.tracker import Tracker
from headstart.trainers.trainer import fit

ROWS, LENGTH, RATIO = 4, 256, 8  # of a batch; how many times a drafter's step the target's pass shall cost
TREE = "decode=dynamic"  # where accepted lengths are compared: the same for all, whatever it costs on this machine
TOLD = ("prompts", "tree", "train_steps", "dtype", "device", "commit")  # tree: where it is the same for all drafters
LENGTHS = ("t0_chain", "t0_tree", "t1_chain", "t1_tree", "off_policy_expected_length")


def train(out: Path, *overrides: str) -> dict[str, Any]:
    """`python train.py`; its comparison."""
    command = [sys.executable, "train.py", *overrides, f"out={out}"]
    console.print("$ python", *command[1:])
    subprocess.run(command, cwd=ROOT, check=True)
    found: dict[str, Any] = json.loads((out / "comparison.json").read_text())
    return found


# What one pass saves ---------------------------------------------------------------------------------------------------


def random_target(layers: int) -> Target:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = dict(hidden_size=128, intermediate_size=384, num_attention_heads=4, num_key_value_heads=2, vocab_size=1024)
    return Target(AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", num_hidden_layers=layers, **sizes)))


def batches(vocab_size: int) -> Iterator[TokenBatch]:
    positions_BT = torch.arange(LENGTH).expand(ROWS, -1)
    while True:
        tokens_BT = torch.randint(vocab_size, (ROWS, LENGTH))
        yield TokenBatch(tokens_BT, torch.ones_like(tokens_BT, dtype=torch.bool), positions_BT, torch.zeros_like(tokens_BT))


def seconds_of(target: Target, arms: dict[str, Any], steps: int) -> tuple[float, float]:
    """Of training these arms together: in the target's passes, and in everything else."""
    inside = 0.0

    def observe(batch: TokenBatch, taps: Collection[int]) -> TargetBatch:
        nonlocal inside
        start = time.perf_counter()
        seen = look(batch, target, taps)
        inside += time.perf_counter() - start
        return seen

    opened = []
    folder = Path(tempfile.mkdtemp())
    try:
        for name, arm in arms.items():
            (folder / name).mkdir()
            arguments = {k: v for k, v in arm["head"].items() if k != "name"}
            drafter: Drafter = hub.build(arm["head"]["name"], target.shape, **arguments)
            drafter.attach(target.ends)
            drafter.start_from(target.ends)
            loop = {k: v for k, v in arm["trainer"].items() if k not in (*SHARED, "start")}
            opened.append(Arm(name, drafter, folder / name, Tracker(folder / name, {}), {}, {}, loss=arm["loss"], **loop))
        never: dict[str, Any] = {"accumulate": 1, "save_every": 10**9, "keep": 1, "eval_every": 10**9, "resume": False}
        start = time.perf_counter()
        fit(opened, lambda *_: batches(target.shape.vocab_size), observe, [], Accelerator(cpu=True), steps=steps, **never)
        return inside, time.perf_counter() - start - inside
    finally:
        shutil.rmtree(folder)


def passes(arms: dict[str, Any], steps: int, repeats: int) -> dict[str, Any]:
    few = random_target(8)
    each = [[seconds_of(few, {name: arm}, steps) for _ in range(2)][1] for name, arm in arms.items()]  # the first one warms up
    layer = sum(inside for inside, _ in each) / len(each) / 8
    target = random_target(max(8, round(RATIO * sum(own for _, own in each) / len(each) / layer)))
    together, alone = [], dict[str, list[tuple[float, float]]]()
    for _ in range(repeats):
        together.append(seconds_of(target, arms, steps))
        for name, arm in arms.items():
            alone.setdefault(name, []).append(seconds_of(target, {name: arm}, steps))
    inside, rest = (min(part) for part in zip(*together, strict=True))
    own = {name: min(own for _, own in runs) for name, runs in alone.items()}
    whole = {name: min(map(sum, runs)) for name, runs in alone.items()}
    return {
        "one_pass_over_sum": (inside + rest) / (inside + sum(own.values())),
        "separate_over_one_pass": sum(whole.values()) / min(map(sum, together)),
        "target_over_drafter": inside / (sum(own.values()) / len(own)),
        "passes": {"steps": steps, "repeats": repeats, "target_layers": target.shape.layers, "target_seconds": inside,
                   "others_seconds_together": rest, "own_seconds": own, "seconds_alone": whole},
    }  # fmt: skip


# The arms ------------------------------------------------------------------------------------------------------------


def arms_of(experiment: str) -> dict[str, Any]:
    """What `python train.py experiment=...` would train."""
    found = {}
    for name, words in settings("config", f"experiment={experiment}")["arms"].items():
        composed = settings("config", f"experiment={experiment}", *words.split())
        found[name] = {group: composed[group] for group in ("head", "loss", "trainer")}
    return found


def self_distilled(folder: Path, arm: str, steps: int) -> dict[str, Any]:
    """The same drafter, data of the same kind: raw text against the target's own continuations of it, tokens and steps equal."""
    answers = folder / "answers.jsonl"
    settings = ("target=tiny", "data=stdlib", f"out={answers}", "sequences=16", "limit=256", "new_tokens=448")
    command = [sys.executable, "-m", "data", "regenerate", *settings]
    console.print("$ python", *command[1:])
    start = time.perf_counter()
    subprocess.run(command, cwd=ROOT, check=True)
    took = time.perf_counter() - start
    # the prompts of the report must be the same: those of the held-out standard library
    common = (f"trainer.steps={steps}", TREE)
    raw = train(folder / "raw", *common, f"arms={{raw:'head={arm}'}}")["arms"][0]
    own = train(folder / "own", *common, f"arms={{own:'head={arm}'}}", "data=regenerated", f"path={answers}")["arms"][0]
    return {"steps": steps, "regenerate_seconds": took, "raw": {k: raw[k] for k in LENGTHS}, "own_answers": {k: own[k] for k in LENGTHS}}


def losses(folder: Path, trained: Path) -> dict[str, Any]:
    """What each loss makes of a drafter that KL has trained."""
    names = ("kl", "lk_hybrid", "lk_alpha", "tv", "chain_tv")
    arms = "arms={" + ",".join(f"{name}:'loss={name}'" for name in names) + "}"
    settings = ("trainer.steps=150", "trainer.lr=4e-3", "trainer.seed=1", "decode.prompts=12", TREE)
    made = train(folder / "losses", "head=eagle", arms, f"trainer.start={trained}", *settings)
    return {"steps": made["train_steps"], "prompts": made["prompts"]} | {a["name"]: {k: a[k] for k in LENGTHS} for a in made["arms"]}


def speedups(run: Path, names: Sequence[str], prompts: int, rounds: int) -> dict[str, dict[str, float]]:
    """Of every arm of a finished run, decoded as every door does it by default, over plain decoding beside it."""
    target, found = open_tiny(True), dict[str, dict[str, float]]()
    decode, asked = open_decode(settings("inference", "decode=auto")["decode"]), held_out(target, prompts)
    for name in names:
        drafter = open_speculator(run / name / "speculator", target)
        guesser, policy = Drafting(drafter), fit_depth(decode.policy, drafter)
        sides: dict[str, Run] = {}
        for T in (0.0, 1.0):
            how = replace(decode.sampling, temperature=T)
            sides[f"t{T:.0f}"] = dynamic(target, guesser, policy, decode.new_tokens, how)
            sides[f"t{T:.0f} plain"] = dynamic(target, None, None, decode.new_tokens, how)
        turns(sides, asked[:1], f"{name}: first calls are slow")
        made = turns(sides, asked, f"{name}: speed-up", rounds)
        found[name] = {key: over(made[key], made[f"{key} plain"]) for key in ("t0", "t1")}
        console.print(f"{name}: {found[name]['t0']:.2f} of plain decoding at temperature 0, {found[name]['t1']:.2f} at 1")
    return found


def worst(found: dict[str, dict[str, float]]) -> dict[str, Any]:
    least = {key: min((each[key], name) for name, each in found.items()) for key in ("t0", "t1")}
    names = {key: name for key, (_, name) in least.items()}
    return {"speedups": found, "worst_speedup_t0": least["t0"][0], "worst_speedup_t1": least["t1"][0], "worst_arms": names}


def again(run: Path, path: Path, prompts: int) -> None:
    """The table and the speed-ups of a finished run into the results that there are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kept: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    kept = {k: v for k, v in kept.items() if k == "commit" or k not in TOLD}  # what was said of drafters that are replaced here
    names = sorted(folder.name for folder in run.iterdir() if (folder / "speculator").is_dir())
    compared: dict[str, Any] = json.loads((run / "comparison.json").read_text())
    kept |= {"drafters": compared["arms"], "failed": compared["failed"], "drafters_of": {k: compared[k] for k in TOLD if k in compared}}
    command = f"python benchmarks/drafters.py --speedups RUN --prompts {prompts}"
    about = {"command": command, "machine": machine(torch.device("cpu")), **provenance()}
    put_text(path, json.dumps(kept | worst(speedups(run, names, prompts, 3)) | {"speedups_of": about}, indent=1) + "\n")
    show(run, path.with_suffix(""))
    console.print(f"{path}: speed-ups of {', '.join(names)}")


def show(run: Path, to: Path) -> None:
    """Table and picture of a run beside the results."""
    shutil.copy(run / "comparison.png", to.with_suffix(".png"))
    put_text(to.with_suffix(".md"), (run / "comparison.md").read_text().replace("comparison.png", f"{to.name}.png"))


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--quick", action="store_true", help="four drafters in ten minutes on two cores")
    cli.add_argument("--runs", type=Path, default=None, help="keep the run folders here (a second call goes on in them)")
    cli.add_argument("--speedups", type=Path, metavar="RUN", help="of this finished run the speed-ups alone; what the results hold stays")
    cli.add_argument("--threads", type=int, default=2)
    cli.add_argument("--prompts", type=int, default=None, help="of the reports; the experiment's own if not given")
    cli.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    args = cli.parse_args()
    torch.set_num_threads(args.threads)
    experiment, name = ("compare_quick", "drafters_quick") if args.quick else ("compare", "drafters")
    results, runs = args.out, args.runs or Path(tempfile.mkdtemp(prefix="drafters-"))
    if args.speedups is not None:
        return again(args.speedups, results / f"{name}.json", args.prompts or 8)
    began = time.perf_counter()
    result: dict[str, Any] = {"quick": args.quick, "drafters": [], **provenance(), "machine": machine(torch.device("cpu"))}
    result["command"] = "python benchmarks/drafters.py" + (" --quick" if args.quick else "")

    def done(part: dict[str, Any]) -> None:
        result.update(part)
        result["seconds"] = time.perf_counter() - began
        results.mkdir(parents=True, exist_ok=True)
        put_text(results / f"{name}.json", json.dumps(result, indent=1) + "\n")

    prompts = [] if args.prompts is None else [f"decode.prompts={args.prompts}"]
    made = train(runs / experiment, f"experiment={experiment}", "decode=auto", *prompts)
    done({"drafters": made["arms"], "failed": made["failed"], **{key: made[key] for key in TOLD if key in made}})
    done(worst(speedups(runs / experiment, [arm["name"] for arm in made["arms"]], *((3, 2) if args.quick else (8, 3)))))
    show(runs / experiment, results / name)
    if not args.quick:
        done({"losses": losses(runs, runs / experiment / "eagle" / "speculator")})
        done({"self_distilled": self_distilled(runs, made["arms"][0]["head"], made["train_steps"])})
    four = arms_of("compare_quick")
    done(passes(four, steps=4 if args.quick else 6, repeats=2))
    console.print({k: result[k] for k in ("one_pass_over_sum", "separate_over_one_pass", "target_over_drafter")})
    if args.runs is None:
        shutil.rmtree(runs)
    console.print(f"{results / name}.json: {result['seconds']:.0f} seconds")


if __name__ == "__main__":
    main()
