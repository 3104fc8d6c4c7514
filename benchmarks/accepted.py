"""Accepted lengths of EAGLE-3 trained here and by another library, on the same batches and steps, with one decoder for both.

    python benchmarks/accepted.py --peer PYTHON     # adds ``accepted...`` to benchmarks/results/train_step.json; some minutes a row
    python benchmarks/accepted.py --peer PYTHON --steps 3000 --prompts 64 --out benchmarks/results/accepted_3000.json
        # with --device cuda --train it only trains; the same call with --work, on another machine, then judges the folders

PYTHON: the Python of an environment with speculators 0.9.0 (as for train_step.py). Target, data and steps are those of
`python train.py`: ``tiny`` and its first 350 batches of 2,048 tokens, fp32; speculators reads captured states. Every drafter has one
layer of the same sizes and the same taps, and starts with the target's output head. Our decoder decodes with all of them:
decode=dynamic, the prompts of the report.

- ``headstart``: the default recipe (conf/trainer/default.yaml), at its learning rate, half and twice that rate
- ``speculators``: its own model, loss and trainer with the settings of its command: Muon and AdamW at one rate (1e-3 by default) that
  falls linearly from the third step on, weight decay, equal weights for all depths, a frozen output head; also at higher rates.
  ``norms``: "theirs" is its default, one norm over all tapped states and the residual after a norm (``head.norm_before_fc``,
  ``head.norm_before_residual``); "ours" are the switches of EAGLE-3.1, which it also has
- ``speculators, our optimiser``: the same with our rates, schedule and betas, and without weight decay

Every row has the accepted lengths at temperature 0 and 1; ``error_T0``, the standard error over the prompts (jackknife); and
``held_out_text``, the expected length of a chain of six over 8,192 tokens that the target did not write. Rows of the peer have
``largest_difference``: the largest relative difference between its own losses by depth and those that we compute from its folder.

- ``accepted``: the rows; ``accepted_of``: their origin, and the rows that were not measured (``not_measured``)
- ``accepted_over_peer``: at temperature 0, our best row over the best row of ``speculators``, at any rate and norms
- ``accepted_over_peer_equal_rate``: ours at the default rate over the best row of ``speculators, our optimiser``

Two more differences are by design: each library initialises the weights in its own way, and the peer also trains on the last token of a
row, and on some guesses across the border of two documents.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.alternatives import accepted_length, console, dynamic, jackknife, settings
from benchmarks.frame import ROOT, keep, parser
from benchmarks.tiny import held_out, open_tiny
from benchmarks.train_step import put
from headstart.data.batch import TargetBatch
from headstart.data.source import HELD_OUT_ROWS, Source, open_source
from headstart.heads import hub
from headstart.heads.base import Drafter
from headstart.heads.eagle import default_taps
from headstart.heads.files import put_text
from headstart.inference.decoding.policy import fit_depth
from headstart.inference.decoding.propose import Drafting
from headstart.inference.decoding.target import Target
from headstart.inference.provenance import machine, provenance
from headstart.inference.settings import open_decode
from headstart.trainers.learner import Learner, evaluate
from headstart.trainers.optimizer import learning_rate

TRAINED_ON = "trained_on.txt"  # a file next to the weights that says cpu or cuda
OURS, PEER, EQUAL = "headstart", "speculators", "speculators, our optimiser"
NORMS: dict[str, dict[str, bool]] = {
    "theirs": {},
    "ours": {"norm_before_residual": False, "norm_before_fc": False, "fc_norm": True, "norm_output": True},
}


def arms(trainer: dict[str, Any], rates: list[float], peer_rates: list[float]) -> dict[str, dict[str, Any]]:
    """The arms by name. ``told``: settings of the library that differ from its defaults."""
    assert (trainer["optimizer"], trainer["muon_lr"], trainer["weight_decay"], trainer["clip"]) == ("muon", None, 0.0, 1.0)
    steps, lr = trainer["steps"], trainer["lr"]
    equal = {"optimizer": "muon", "lr": 0.3 * lr, "muon_lr": lr, "weight_decay": 0.0, "muon_weight_decay": 0.0, "betas": trainer["betas"]}
    equal |= {"scheduler_type": "none"}
    equal["shares"] = [learning_rate(t, steps, trainer["warmup"], trainer["schedule"]) for t in range(steps + 1)]
    found = {f"{OURS}-{rate:g}": {"side": OURS, "rate": rate, "norms": "ours"} for rate in rates}
    for norms in NORMS:
        found |= {f"{PEER}-{norms}-{r:g}": {"side": PEER, "rate": r, "norms": norms, "told": {"lr": r}} for r in peer_rates}
        found[f"equal-{norms}"] = {"side": EQUAL, "rate": lr, "norms": norms, "told": equal}
    return found


def capture(source: Source, taps: list[int], trainer: dict[str, Any], count: int, folder: Path) -> None:
    """Store the target's states over the first ``count`` batches of `python train.py`, one file per batch."""
    folder.mkdir(parents=True, exist_ok=True)
    start = len(list(folder.glob("*.safetensors")))
    stream = source.stream(taps, trainer["batch_size"], trainer["seed"], start, 0, 1)
    for step in range(start, count):
        batch = source.observe(next(stream), taps)
        given = {"tokens": batch.tokens_BT, "documents": batch.documents_BT, "mask": batch.loss_mask_BT, "final": batch.final_BTD}
        given["states"] = torch.cat([batch.states[tap] for tap in taps], dim=-1)
        save_file({name: x.cpu().contiguous() for name, x in given.items()}, folder / "part")
        (folder / "part").rename(folder / f"{step:05}.safetensors")


def first_document(folder: Path, taps: list[int]) -> TargetBatch:
    given = load_file(folder / "00000.safetensors")
    T = int((given["documents"][0] == given["documents"][0, 0]).sum())
    of = {name: x[:1, :T] for name, x in given.items()}
    states = dict(zip(taps, of["states"].chunk(len(taps), dim=-1), strict=True))
    return TargetBatch(of["tokens"], of["mask"], torch.arange(T)[None], of["documents"], states, of["final"])


def made_in(arm: dict[str, Any], out: Path) -> Path:
    """The speculator folder of a run in ``out``."""
    return out / "speculator" if arm["side"] == OURS else out


def train(
    arm: dict[str, Any], trainer: dict[str, Any], python: str, batches: Path, out: Path, sizes: dict[str, int], device: str
) -> subprocess.Popen[bytes]:
    """Start the process that trains an arm."""
    if arm["side"] == OURS:
        said = [f"trainer.lr={arm['rate']}", f"trainer.steps={trainer['steps']}", "trainer.precision=fp32", "trainer.decode_every=0"]
        said += [f"target.device={device}", "report=none", f"out={out}"]
        command = [sys.executable, "train.py", "head=eagle", *said]
        path = {name: value for name, value in os.environ.items() if name == "PYTHONPATH"}
    else:
        verifier = str(ROOT / "assets" / "tiny")
        told = {"verifier_name_or_path": verifier, "draft": sizes, "device": device, **NORMS[arm["norms"]], **arm["told"]}
        command = [python, str(Path(__file__).with_name("accepted_side.py")), str(batches), str(out), json.dumps(told)]
        path = {}
    console.print(f"training {out.name}")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | path
    return subprocess.Popen(command, cwd=ROOT, env=env | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})


def trained(process: subprocess.Popen[bytes], folder: Path, device: str) -> None:
    """Wait for a training, and note in ``folder`` on which device it ran. Raises CalledProcessError if it failed."""
    if status := process.wait():
        raise subprocess.CalledProcessError(status, process.args)
    put_text(folder / TRAINED_ON, device)


def opened(folder: Path, target: Target) -> Drafter:
    drafter = hub.load(folder, target.shape, target.card)
    drafter.attach(target.ends)
    return drafter.to(torch.float32).eval()


def decoded(drafter: Drafter, target: Target, count: int | None) -> dict[str, float]:
    """Decode with the tree of decode=dynamic. ``count``: number of prompts; None: as many as the report."""
    decode = open_decode(settings("inference", "decode=dynamic")["decode"])
    guesser, policy, prompts = Drafting(drafter), fit_depth(decode.policy, drafter), held_out(target, count or decode.prompts)
    found: dict[str, float] = {"prompts": len(prompts)}
    for T in (0, 1):
        how = [replace(decode.sampling, temperature=float(T), seed=decode.sampling.seed + i) for i in range(len(prompts))]
        made = [dynamic(target, guesser, policy, decode.new_tokens, each)(p) for p, each in zip(prompts, how, strict=True)]
        found |= {f"accepted_T{T}": accepted_length(made), f"error_T{T}": jackknife(made)}
    return found


@torch.no_grad()
def judged(drafter: Drafter, source: Source, loss: dict[str, Any], batches: Path, said: Path) -> dict[str, Any]:
    """Figures of the drafter, teacher-forced. ``said``: the file with a peer's losses."""
    taps, rows = list(drafter.taps), source.held_out
    assert rows is not None
    depth = fit_depth(open_decode(settings("inference", "decode=dynamic")["decode"]).policy, drafter).depth
    text = [source.observe(rows.batch(slice(i, i + 4)), taps) for i in range(0, min(HELD_OUT_ROWS, len(rows)), 4)]
    expected = evaluate(Learner(drafter, **loss | {"depth": depth}), text, depth)["heldout_expected_length"]
    if not said.is_file():
        return {"held_out_text": expected, "largest_difference": None}
    out = Learner(drafter, **loss)(first_document(batches, taps))
    ours = [float(x) / loss["decay"] ** k / int(out.count_K[k]) for k, x in enumerate(out.loss_K)]
    gaps = [abs(a / b - 1) for a, b in zip(json.loads(said.read_text()), ours, strict=True)]
    return {"held_out_text": expected, "largest_difference": max(gaps)}


def figures(rows: list[dict[str, Any]], default: float) -> dict[str, Any]:
    """The ratios for the rows that exist."""

    def best(side: str, *rate: float) -> float:
        return max((row["accepted_T0"] for row in rows if row["side"] == side and row["rate"] in (rate or [row["rate"]])), default=0.0)

    pairs = {"accepted_over_peer": (best(OURS), best(PEER)), "accepted_over_peer_equal_rate": (best(OURS, default), best(EQUAL))}
    return {key: ours / theirs for key, (ours, theirs) in pairs.items() if ours and theirs}


def main() -> None:
    cli = parser(__doc__, "train_step.json")
    cli.add_argument("--peer", required=True, metavar="PYTHON")
    cli.add_argument("--steps", type=int, default=None, help="of training; the default recipe's if not given")
    cli.add_argument("--rates", type=float, nargs="+", default=[4e-3, 8e-3, 16e-3], help="of headstart")
    cli.add_argument("--peer-rates", type=float, nargs="+", default=[1e-3, 4e-3, 16e-3, 32e-3])
    cli.add_argument(
        "--arms", nargs="+", default=["*"], metavar="PATTERN", help="only these: headstart-*, speculators-ours-0.001, equal-theirs, ..."
    )
    cli.add_argument("--work", type=Path, default=None, help="keep here what is trained (a second call goes on in it)")
    cli.add_argument("--prompts", type=int, default=None, help="to decode; those of the report if not given")
    cli.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="that trains; decoding is on the CPU")
    cli.add_argument("--train", action="store_true", help="train only, all at once")
    args = cli.parse_args()
    torch.set_num_threads(1)
    conf = settings("config", *([] if args.steps is None else [f"trainer.steps={args.steps}"]))
    trainer, work = conf["trainer"], args.work or Path(tempfile.mkdtemp(prefix="accepted-"))
    target = open_tiny(False, f"target.device={args.device if args.train else 'cpu'}")
    source, batches = open_source(conf["data"], target, length=trainer["length"], seed=trainer["seed"]), work / "batches"
    sizes = {"num_attention_heads": conf["head"]["heads"], "num_key_value_heads": conf["head"]["kv_heads"]}
    wanted = arms(trainer, args.rates, args.peer_rates)
    more = [f" --{key} {n}" for key, n in (("steps", args.steps), ("prompts", args.prompts)) if n is not None]
    about = {"command": "python benchmarks/accepted.py --peer PYTHON" + "".join(more), "machine": machine(torch.device("cpu"))}
    of = {name: (work / f"{name}-{trainer['steps']}", work / f"{name}-{trainer['steps']}.json") for name in wanted}
    folders = {name: made_in(arm, of[name][0]) for name, arm in wanted.items()}
    asked = [name for name in wanted if any(fnmatch(name, p) for p in args.arms) and not of[name][1].is_file()]
    untrained = [name for name in asked if not (folders[name] / "config.json").is_file()]
    peers = [name for name in untrained if wanted[name]["side"] != OURS]

    def begin(name: str) -> subprocess.Popen[bytes]:
        return train(wanted[name], trainer, args.peer, batches, of[name][0], sizes, args.device)

    def capture_first(count: int) -> None:
        capture(source, default_taps(target.shape.layers), trainer, count, batches)

    def write() -> None:
        made = [name for name in wanted if of[name][1].is_file()]
        rows = [json.loads(of[name][1].read_text()) for name in made]
        left = {"not_measured": [name for name in wanted if name not in made]}
        put(args.out, figures(rows, trainer["lr"]) | {"accepted": rows, "accepted_of": about | left})

    if args.train:
        running = {name: begin(name) for name in untrained if name not in peers}
        capture_first(trainer["steps"])
        running |= {name: begin(name) for name in peers}
        for name in sorted(running, key=lambda name: running[name].wait() != 0):  # failed trainings last
            trained(running[name], folders[name], args.device)
        return
    capture_first(trainer["steps"] if peers else 1)
    for name in asked:
        if name in untrained:
            trained(begin(name), folders[name], args.device)
        folder, (out, done), arm = folders[name], of[name], wanted[name]
        drafter = opened(folder, target)
        found = {key: arm[key] for key in ("side", "rate", "norms")} | {"steps": trainer["steps"]}
        found["trained_on"] = (folder / TRAINED_ON).read_text()
        found |= judged(drafter, source, conf["loss"], batches, out / "losses.json")
        found |= decoded(drafter.prepack(), target, args.prompts) | provenance()
        keep(done, found)
        console.print(found)
        write()
    write()


if __name__ == "__main__":
    main()
