"""Every kind of drafter, trained on the same data for the same steps, from one pass of the target.

    python benchmarks/drafters.py            # about an hour and a half on two cores: conf/experiment/compare.yaml
    python benchmarks/drafters.py --quick    # four drafters in ten minutes: conf/experiment/compare_quick.yaml
    python benchmarks/drafters.py --speedups RUN --prompts 5    # the table and new `speedups` of a finished run; 3 minutes

Writes benchmarks/results/drafters.json (drafters_quick.json), and the comparison's table and picture next to it.

- ``drafters``: per arm the accepted lengths of its exported folder (a dynamic tree and a chain, at temperature 0 and 1), the expected
  length from one teacher-forced pass, parameters, ``c`` (cost of a drafting level relative to a plain step), the speed-up of the tree
  and of decode=auto over plain decoding in the same run, and the training time in seconds. That time includes the target's passes as
  if the arm had been trained alone. ``drafters_of``: the commit that decoded them, if it was another one.
- ``speedups``: the speed-ups measured again: each arm's folder alternates with plain decoding on every prompt; the median of several
  rounds. ``worst_speedup_t0``, ``worst_speedup_t1``: of the arms that gain least (``worst_arms``). ``speedups_of``: the commit and
  machine that measured them, if they were measured separately.
- ``self_distilled``: the best arm trained again on raw text, and on the target's own continuations of 256 prefixes of that text at
  temperature 1, with equal steps and tokens. (Raw text is more varied: hardly any row is seen twice.) Not in --quick.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.alternatives import Run, console, dynamic, over, settings, turns
from benchmarks.frame import RESULTS, ROOT, keep, origin, parser
from benchmarks.tiny import held_out, open_tiny
from headstart.heads.files import put_text
from headstart.inference.decoding.policy import fit_depth
from headstart.inference.decoding.propose import Drafting
from headstart.inference.settings import open_decode
from headstart.inference.speculator import open_speculator

TREE = "decode=dynamic"  # accepted lengths are compared with the same tree for all drafters, whatever it costs on this machine
TOLD = ("prompts", "tree", "train_steps", "dtype", "device", "commit")  # tree: if it is the same for all drafters
LENGTHS = ("t0_chain", "t0_tree", "t1_chain", "t1_tree", "off_policy_expected_length")


def train(out: Path, *overrides: str) -> dict[str, Any]:
    """Run `python train.py`. Returns its comparison."""
    command = [sys.executable, "train.py", *overrides, f"out={out}"]
    console.print("$ python", *command[1:])
    subprocess.run(command, cwd=ROOT, check=True)
    found: dict[str, Any] = json.loads((out / "comparison.json").read_text())
    return found


def self_distilled(folder: Path, arm: str, steps: int) -> dict[str, Any]:
    """The same drafter trained on raw text and on the target's own continuations of it, with equal tokens and steps."""
    answers = folder / "answers.jsonl"
    settings = ("target=tiny", "data=stdlib", f"out={answers}", "sequences=16", "limit=256", "new_tokens=448")
    command = [sys.executable, "-m", "data", "regenerate", *settings]
    console.print("$ python", *command[1:])
    start = time.perf_counter()
    subprocess.run(command, cwd=ROOT, check=True)
    took = time.perf_counter() - start
    # both must be reported with the same prompts: those of the held-out standard library
    common = (f"trainer.steps={steps}", TREE)
    raw = train(folder / "raw", *common, f"arms={{raw:'head={arm}'}}")["arms"][0]
    own = train(folder / "own", *common, f"arms={{own:'head={arm}'}}", "data=regenerated", f"path={answers}")["arms"][0]
    return {"steps": steps, "regenerate_seconds": took, "raw": {k: raw[k] for k in LENGTHS}, "own_answers": {k: own[k] for k in LENGTHS}}


def speedups(run: Path, names: Sequence[str], prompts: int, rounds: int) -> dict[str, dict[str, float]]:
    """The speed-up of every arm of a finished run with the default decoding, over plain decoding in the same run."""
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
    """Put the table and the speed-ups of a finished run into the existing results."""
    kept: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    kept = {k: v for k, v in kept.items() if k == "commit" or k not in TOLD}  # facts about the drafters that are replaced here
    names = sorted(folder.name for folder in run.iterdir() if (folder / "speculator").is_dir())
    compared: dict[str, Any] = json.loads((run / "comparison.json").read_text())
    kept |= {"drafters": compared["arms"], "failed": compared["failed"], "drafters_of": {k: compared[k] for k in TOLD if k in compared}}
    about = origin(f"python benchmarks/drafters.py --speedups RUN --prompts {prompts}")
    keep(path, kept | worst(speedups(run, names, prompts, 3)) | {"speedups_of": about})
    show(run, path.with_suffix(""))
    console.print(f"{path}: speed-ups of {', '.join(names)}")


def show(run: Path, to: Path) -> None:
    """Copy the table and the picture of a run to the results."""
    shutil.copy(run / "comparison.png", to.with_suffix(".png"))
    put_text(to.with_suffix(".md"), (run / "comparison.md").read_text().replace("comparison.png", f"{to.name}.png"))


def main() -> None:
    cli = parser(__doc__)
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
    result: dict[str, Any] = {"quick": args.quick, "drafters": []}
    result |= origin("python benchmarks/drafters.py" + (" --quick" if args.quick else ""))

    def done(part: dict[str, Any]) -> None:
        result.update(part)
        result["seconds"] = time.perf_counter() - began
        keep(results / f"{name}.json", result)

    prompts = [] if args.prompts is None else [f"decode.prompts={args.prompts}"]
    made = train(runs / experiment, f"experiment={experiment}", "decode=auto", *prompts)
    done({"drafters": made["arms"], "failed": made["failed"], **{key: made[key] for key in TOLD if key in made}})
    done(worst(speedups(runs / experiment, [arm["name"] for arm in made["arms"]], *((3, 2) if args.quick else (8, 3)))))
    show(runs / experiment, results / name)
    if not args.quick:
        done({"self_distilled": self_distilled(runs, made["arms"][0]["head"], made["train_steps"])})
    if args.runs is None:
        shutil.rmtree(runs)
    console.print(f"{results / name}.json: {result['seconds']:.0f} seconds")


if __name__ == "__main__":
    main()
