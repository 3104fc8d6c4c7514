"""How long what is accepted gets when EAGLE-3 is trained here, and by another library: the same batches, steps and sizes, one decoder.

    python benchmarks/accepted.py --peer PYTHON     # adds ``accepted...`` to benchmarks/results/train_step.json

PYTHON: that of an environment with speculators 0.9.0 (as for train_step.py). Target, data and steps are those of `python train.py`:
``tiny``, its first 350 batches of 2,048 tokens of the standard library, fp32 on both sides, from captured states on theirs. Every drafter
has the same layer (sizes, taps), starts with the target's output head, and is decoded with by our decoder: dynamic tree, the prompts of
the report.

- ``headstart``: the default recipe (conf/trainer/default.yaml), its rate halved and doubled
- ``speculators``: its own model, loss and trainer as its command sets them by default: Muon and AdamW at one rate (default 1e-3) that falls
  linearly, weight decay, an output head that stays the target's, all depths of equal weight; at higher rates, too. ``norms``: "theirs" is
  what it takes by default (one norm of all tapped states, the residual behind a norm), "ours" are the switches of EAGLE-3.1, which it
  has as well; only the latter can be loaded from a folder here, the former are read by ``Theirs`` below
- ``speculators, our optimiser``: the same, with our rates, schedule, betas and no weight decay; model, loss and the frozen head stay its own

Of every row: the accepted lengths at temperature 0 and 1, ``error_T0`` (what chance there is in the prompts: the standard error of the
jackknife), ``held_out_text`` (what a chain of as many guesses expects of 8,192 tokens that the target did not write: the sober number),
and ``largest_difference``, relative, of a trained peer's losses by depth as it says them and as we compute them from what is loaded.

- ``accepted_over_peer``: at temperature 0, our best row over the best of ``speculators``, whatever its rate and norms
- ``accepted_over_peer_equal_rate``: our row at the default rate over the best of ``speculators, our optimiser``

Goes on where it was stopped, in the folder ``--work``. What is by design different: the peer trains the last token of a row, too, and
some guesses across the border of two documents; its random first weights are its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.alternatives import RESULTS, ROOT, accepted_length, console, dynamic, settings
from benchmarks.tiny import held_out, open_tiny
from benchmarks.train_step import put
from headstart.data.batch import TargetBatch
from headstart.data.source import HELD_OUT_ROWS, Source, open_source
from headstart.heads import hub
from headstart.heads.base import Drafter, Roots
from headstart.heads.eagle import Eagle, default_taps
from headstart.heads.files import put_text
from headstart.heads.formats import eagle3
from headstart.heads.layers import RMSNorm
from headstart.inference.decoding.policy import fit_depth
from headstart.inference.decoding.propose import Drafting
from headstart.inference.decoding.target import Target
from headstart.inference.provenance import machine, provenance
from headstart.inference.settings import open_decode
from headstart.trainers.learner import Learner, evaluate
from headstart.trainers.optimizer import learning_rate

NORMS: dict[str, dict[str, bool]] = {
    "theirs": {},
    "ours": {"norm_before_residual": False, "norm_before_fc": False, "fc_norm": True, "norm_output": True},
}


class Theirs(Eagle):
    """With the norms that speculators takes by default."""

    def __init__(self, shape: Any, **more: Any) -> None:
        super().__init__(shape, fc_norm=False, norm_output=True, **more)
        self.input_norm = RMSNorm(len(self.taps) * shape.hidden_size, shape.norm_eps)
        self.hidden_norm, self.midlayer.hidden_norm = self.midlayer.hidden_norm, nn.Identity()  # type: ignore[assignment]

    def _feature(self, states: Any) -> Tensor:
        return self.fc(self.input_norm(torch.cat(list(states), dim=-1)))

    def _through(self, token: Tensor, feature: Tensor, *where: Any) -> Any:
        return super()._through(token, self.hidden_norm(feature), *where)


def arms(trainer: dict[str, Any], rates: list[float], peer_rates: list[float]) -> dict[str, dict[str, Any]]:
    """Name -> side, rate, norms, and what the library is told beside its defaults."""
    found: dict[str, dict[str, Any]] = {f"headstart-{lr:g}": dict(side="headstart", rate=lr, norms="ours") for lr in rates}
    for norms in NORMS:
        for lr in peer_rates:
            found[f"speculators-{norms}-{lr:g}"] = dict(side="speculators", rate=lr, norms=norms, told={"lr": lr})
    lr, steps = trainer["lr"], trainer["steps"]
    ours = {
        "optimizer": "muon", "lr": 0.3 * lr, "muon_lr": lr, "weight_decay": 0.0, "muon_weight_decay": 0.0, "scheduler_type": "none",
        "betas": trainer["betas"], "shares": [learning_rate(t, steps, trainer["warmup"], trainer["schedule"]) for t in range(steps)],
    }  # fmt: skip
    assert (trainer["optimizer"], trainer["muon_lr"], trainer["weight_decay"], trainer["clip"]) == ("muon", None, 0.0, 1.0)
    for norms in NORMS:
        found[f"equal-{norms}"] = dict(side="speculators, our optimiser", rate=lr, norms=norms, told=ours)
    return found


def capture(source: Source, taps: list[int], trainer: dict[str, Any], folder: Path) -> None:
    """What the target says of the batches that `python train.py` begins with, a file each."""
    folder.mkdir(parents=True, exist_ok=True)
    start = max(0, len(list(folder.glob("*.safetensors"))) - 1)  # the last one may be cut off
    stream = source.stream(taps, trainer["batch_size"], trainer["seed"], start, 0, 1)
    for step in range(start, trainer["steps"]):
        batch = source.observe(next(stream), taps)
        given = {"tokens": batch.tokens_BT, "documents": batch.documents_BT, "mask": batch.loss_mask_BT, "final": batch.final_BTD}
        given["states"] = torch.cat([batch.states[tap] for tap in taps], dim=-1)
        save_file({name: x.contiguous() for name, x in given.items()}, folder / f"{step:05}.safetensors")


def train(arm: dict[str, Any], trainer: dict[str, Any], python: str, work: Path, out: Path, sizes: dict[str, int]) -> Path:
    """The folder of what was trained."""
    if arm["side"] == "headstart":
        said = [f"trainer.lr={arm['rate']}", f"trainer.steps={trainer['steps']}", "trainer.precision=fp32", "trainer.decode_every=0"]
        command = [sys.executable, "train.py", "head=eagle", *said, "report=none", f"out={out}"]
        env, made = os.environ.copy(), out / "speculator"
    else:
        told = {"verifier_name_or_path": str(ROOT / "assets" / "tiny"), "draft": sizes, **NORMS[arm["norms"]], **arm["told"]}
        command = [python, str(Path(__file__).with_name("accepted_side.py")), str(work / "batches"), str(out), json.dumps(told)]
        env, made = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}, out
    if not (made / "config.json").is_file():
        console.print("$", *command[:4], "...", f"out={out}")
        subprocess.run(command, cwd=ROOT, check=True, env=env | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
    return made


def opened(folder: Path, norms: str, target: Target, sizes: dict[str, int]) -> Drafter:
    if norms == "ours":
        return hub.load(folder, target.shape, target.card)
    drafter = Theirs(target.shape, heads=sizes["num_attention_heads"], kv_heads=sizes["num_key_value_heads"])
    given = {eagle3.canonical(name): x for name, x in load_file(folder / "model.safetensors").items()}
    drafter.load_state_dict({name.replace("midlayer.hidden_norm", "hidden_norm"): x for name, x in given.items()})
    return drafter


def difference(folder: Path, drafter: Drafter, batch: TargetBatch, loss: dict[str, Any]) -> float | None:
    """Of the losses by depth that the peer says of its first document to ours of what is loaded."""
    if not (folder / "losses.json").is_file():
        return None
    out = Learner(drafter, **loss)(batch)
    ours = [float(x) / loss["decay"] ** k / int(out.count_K[k]) for k, x in enumerate(out.loss_K)]
    return max(abs(a / b - 1) for a, b in zip(json.loads((folder / "losses.json").read_text()), ours, strict=True))


def decoded(drafter: Drafter, target: Target, prompts: list[list[int]]) -> dict[str, float]:
    """By the tree of decode=dynamic."""
    decode = open_decode(settings("inference", "decode=dynamic")["decode"])
    guesser, policy = Drafting(drafter), fit_depth(decode.policy, drafter)
    found = {}
    for T in (0, 1):
        how = [replace(decode.sampling, temperature=float(T), seed=decode.sampling.seed + i) for i in range(len(prompts))]
        made = [dynamic(target, guesser, policy, decode.new_tokens, each)(p) for p, each in zip(prompts, how, strict=True)]
        found[f"accepted_T{T}"] = accepted_length(made)
        without = [accepted_length(made[:i] + made[i + 1 :]) for i in range(len(made))]
        found[f"error_T{T}"] = (sum((x - fmean(without)) ** 2 for x in without) * (len(made) - 1) / len(made)) ** 0.5
    return found


def row(
    arm: dict[str, Any], folder: Path, target: Target, source: Source, batches: Path, loss: dict[str, Any], sizes: Any
) -> dict[str, Any]:
    drafter = opened(folder, arm["norms"], target, sizes).to(torch.float32)
    drafter.attach(target.ends)
    drafter.eval()
    taps, rows = list(drafter.taps), source.held_out
    assert rows is not None
    with torch.no_grad():
        given = load_file(min(batches.glob("*.safetensors")))
        T = int((given["documents"][0] == given["documents"][0, 0]).sum())  # the first document
        first = {name: x[:1, :T] for name, x in given.items()}
        about = first["tokens"], first["mask"], torch.arange(T)[None], first["documents"]
        states = dict(zip(taps, first["states"].chunk(len(taps), dim=-1), strict=True))
        apart = difference(folder, drafter, TargetBatch(*about, states, first["final"]), loss)
        text = [source.observe(rows.batch(slice(i, i + 4)), taps) for i in range(0, min(HELD_OUT_ROWS, len(rows)), 4)]  # type: ignore[arg-type]
        depth = fit_depth(open_decode(settings("inference", "decode=dynamic")["decode"]).policy, drafter).depth
        expected = evaluate(Learner(drafter, **loss | {"depth": depth}), text, depth)["heldout_expected_length"]
    prompts = held_out(target, settings("inference")["decode"]["prompts"])
    found = {k: v for k, v in arm.items() if k != "told"} | decoded(drafter.prepack(), target, prompts)
    return found | {"held_out_text": expected, "prompts": len(prompts), "largest_difference": apart}


def figures(rows: list[dict[str, Any]], default: float) -> dict[str, Any]:
    """The ratios of what there is."""
    best = {side: max((r["accepted_T0"] for r in rows if r["side"] == side), default=None) for side in {r["side"] for r in rows}}
    here = next((r["accepted_T0"] for r in rows if r["side"] == "headstart" and r["rate"] == default), None)
    ratios = {"accepted_over_peer": (best.get("headstart"), best.get("speculators"))}
    ratios["accepted_over_peer_equal_rate"] = (here, best.get("speculators, our optimiser"))
    return {key: a / b for key, (a, b) in ratios.items() if a and b}


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--peer", required=True, metavar="PYTHON")
    cli.add_argument("--steps", type=int, default=None, help="of training; the default recipe's if not given")
    cli.add_argument("--rates", type=float, nargs="+", default=[4e-3, 8e-3, 16e-3], help="of headstart")
    cli.add_argument("--peer-rates", type=float, nargs="+", default=[1e-3, 4e-3, 16e-3])
    cli.add_argument("--arms", default="*", metavar="PATTERN", help="only these, as headstart-*, speculators-ours-0.001, equal-theirs")
    cli.add_argument("--work", type=Path, default=None, help="keep what is trained here (a second call goes on in it)")
    cli.add_argument("--out", type=Path, default=RESULTS / "train_step.json")
    args = cli.parse_args()
    torch.set_num_threads(1)
    conf = settings("config", *([] if args.steps is None else [f"trainer.steps={args.steps}"]))
    trainer, target = conf["trainer"], open_tiny(False)
    work = args.work or Path(tempfile.mkdtemp(prefix="accepted-"))
    source = open_source(conf["data"], target, length=trainer["length"], seed=trainer["seed"])
    capture(source, default_taps(target.shape.layers), trainer, work / "batches")
    sizes = {"num_attention_heads": conf["head"]["heads"], "num_key_value_heads": conf["head"]["kv_heads"]}
    for name, arm in arms(trainer, args.rates, args.peer_rates).items():
        out = work / f"{name}-{trainer['steps']}"
        if fnmatch(name, args.arms) and not (done := out.with_suffix(out.suffix + ".json")).is_file():
            made = train(arm, trainer, args.peer, work, out, sizes)
            found = row(arm, made, target, source, work / "batches", conf["loss"], sizes) | {"steps": trainer["steps"], **provenance()}
            put_text(done, json.dumps(found, indent=1) + "\n")
            console.print(name, found)
        rows = [json.loads(path.read_text()) for path in sorted(work.glob(f"*-{trainer['steps']}.json"))]
        about = {"command": "python benchmarks/accepted.py --peer PYTHON", "machine": machine(torch.device("cpu"))}
        put(args.out, figures(rows, trainer["lr"]) | {"accepted": rows, "accepted_of": about})


if __name__ == "__main__":
    main()
